"""The references against closed forms, and every case of the catalogue against plain backward passes."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from case import Case
from cases import CASES, CATALOGUE, EXACT_OR_REFUSED, REFUSED
from snapshots import unchanged
from torch import nn

EVERY = [*CASES, *EXACT_OR_REFUSED]
name_of = lambda case: case.id


def test_linear_layer_in_closed_form():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    residual = layer(x).detach() - y
    rows = oracle.per_sample_gradients(layer, nn.MSELoss(), x, y)
    assert list(rows) == ["weight", "bias"]
    torch.testing.assert_close(rows["weight"], torch.einsum("no,ni->noi", residual, x))
    torch.testing.assert_close(rows["bias"], residual)
    squares = residual.square().sum(1) * (x.square().sum(1) + 1)
    torch.testing.assert_close(oracle.per_sample_norms(layer, nn.MSELoss(), x, y), squares.sqrt())
    gram = (residual @ residual.T) * (x @ x.T + 1)
    torch.testing.assert_close(oracle.per_sample_gram(layer, nn.MSELoss(), x, y), gram)


def test_sample_dim_is_where_samples_are():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
    first = oracle.per_sample_gradients(layer, nn.MSELoss(), x, y)
    second = oracle.per_sample_gradients(layer, nn.MSELoss(), x.transpose(0, 1), y.transpose(0, 1), 1)
    swapped = lambda output, target: (output.transpose(0, 1) - target).square().mean()
    mixed = oracle.per_sample_gradients(layer, swapped, x.transpose(0, 1), y, (1, 1, 0))
    for rows in (second, mixed):
        torch.testing.assert_close(rows, first)


def test_unused_and_frozen_parameters():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    model[0].bias.requires_grad_(False)
    model.forward = lambda x: model[0](x)
    rows = oracle.per_sample_gradients(model, nn.MSELoss(), torch.ones(4, 3), torch.zeros(4, 2))
    assert list(rows) == ["0.weight", "1.weight", "1.bias"]
    assert not rows["1.weight"].any() and rows["1.bias"].shape == (4, 2)


def test_oracle_leaves_buffers():
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    x = torch.randn(4, 3, 5)
    oracle.per_sample_gradients(norm, nn.MSELoss(), x, x)
    assert not norm.running_mean.any() and norm.num_batches_tracked == 0


def test_ids_are_unique():
    ids = [case.id for case in itertools.chain(EVERY, (case for case, _ in REFUSED))]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_rows_make_up_the_gradient_of_the_batch(case: Case, device):
    model, loss = case.build(device)
    x, y = case.batch(model)
    with unchanged(model, x, y):
        rows = oracle.per_sample_gradients(model, loss, x, y, case.sample_dim)
    assert {name: row.shape for name, row in rows.items()} == {
        name: (case.n, *parameter.shape) for name, parameter in oracle.trainable(model).items()
    }
    assert all(row.isfinite().all() for row in rows.values()), "not finite"
    assert any(row.any() for row in rows.values()), "every gradient is zero"
    if case.combination == "neither":
        return
    model.zero_grad()
    loss(oracle.forward(model, x), y).backward()
    for name, parameter in oracle.trainable(model).items():
        total = rows[name].sum(0) if case.combination == "sum" else rows[name].mean(0)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_cases_are_deterministic_and_resizable(case: Case, device):
    one, two = case.build(device)[0], case.build(device)[0]
    assert not set(map(id, one.parameters())) & set(map(id, two.parameters())), "built once, not anew"
    torch.testing.assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(case.batch(one), case.batch(two), rtol=0, atol=0)
    dim = case.sample_dim if isinstance(case.sample_dim, int) else case.sample_dim[2]
    assert [case.batch(one, n)[1].shape[dim] for n in (case.n, case.n + 2, 1)] == [case.n, case.n + 2, 1]


@pytest.mark.parametrize("part", CATALOGUE)
def test_every_part_has_cases(part: str):
    assert len(CATALOGUE[part]) > 20
