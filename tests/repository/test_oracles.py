"""The references against closed forms, and every case of the catalogue against plain backward passes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from support.cases.case import Case
from support.cases.catalogue import CASES, CATALOGUE, EXACT_OR_REFUSED, REFUSED
from support.oracles import brute_force as oracle
from support.oracles.kronecker import Layer
from support.snapshots import unchanged

EVERY = [*CASES, *EXACT_OR_REFUSED]
name_of = lambda case: case.id
small = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


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


def test_matrices_of_a_linear_layer_in_closed_form():
    """Squares over 3 x 2 entries: 2/6 for each output, times the second moment of (x, 1); classes by enumeration."""
    layer, x = nn.Linear(2, 2).double(), small(3, 2)
    moment = torch.einsum("ni,nj->nij", *2 * [torch.cat([x, x.new_ones(3, 1)], 1)])
    permuted = [0, 1, 4, 2, 3, 5]  # weight row by row, its bias last
    of = oracle.Matrices(layer, nn.MSELoss(), (x, small(3, 2) + 1))
    expected = torch.kron(torch.eye(2, dtype=x.dtype), moment.mean(0))
    for matrix in (of.gauss_newton, of.fisher, of.hessian, 2 * of.isotropic):
        torch.testing.assert_close(matrix[permuted][:, permuted], expected)

    of = oracle.Matrices(layer, nn.CrossEntropyLoss(reduction="sum"), (x, torch.tensor([0, 1, 1])))
    p = layer(x).detach().softmax(1)
    errors = p[:, None] - torch.eye(2, dtype=x.dtype)  # for either label
    expected = torch.einsum("ny,nyo,nyp,nij->oipj", p, errors, errors, moment).reshape(6, 6)
    for matrix in (of.gauss_newton, of.fisher, of.hessian):
        torch.testing.assert_close(matrix[permuted][:, permuted], expected)
    drawn = torch.einsum("no,np,nij->oipj", *2 * [errors[range(3), [0, 1, 1]]], moment).reshape(6, 6)
    torch.testing.assert_close(of.empirical_fisher[permuted][:, permuted], drawn)


def test_weights_of_samples_are_their_masses():
    weight = small(4).abs()
    target = torch.tensor([[0, 1, -100], [2, 3, 3], [-100, -100, -100]])
    of = lambda loss, y: oracle.sample_weights(loss, list(small(3, 4, 3).split(1)), list(y.split(1)))
    mass = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(of(nn.CrossEntropyLoss(), target), mass / 5)
    mass = torch.stack([weight[0] + weight[1], weight[2] + 2 * weight[3], 0 * weight[0]])
    torch.testing.assert_close(of(nn.CrossEntropyLoss(weight), target), mass / mass.sum())
    torch.testing.assert_close(of(nn.CrossEntropyLoss(weight, reduction="sum"), target), mass.new_tensor([1, 1, 0]))
    torch.testing.assert_close(of(nn.MSELoss(), small(3, 4, 3) + 1), mass.new_full((3,), 1 / 3))
    with pytest.raises(AssertionError, match="no weighted sum"):
        of(lambda o, t: (o.mean(0) - t.mean(0)).square().sum(), small(3, 4, 3) + 1)


@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.BCELoss, nn.NLLLoss])
def test_fisher_at_the_output_is_that_of_drawn_labels(kind):
    """A mean over two terms: each counts 1/2, and its labels are enumerated."""
    raw = small(1, 2) if kind is not nn.NLLLoss else small(1, 3, 2)
    output = {nn.BCELoss: raw.sigmoid(), nn.NLLLoss: raw.log_softmax(1)}.get(kind, raw)
    alone = lambda o, label: oracle.loss_gradient(kind(reduction="sum"), o, torch.full(o.shape, label, dtype=o.dtype))
    rates = {
        nn.BCEWithLogitsLoss: lambda o, y: o.sigmoid() if y else 1 - o.sigmoid(),
        nn.BCELoss: lambda o, y: o if y else 1 - o,
        nn.PoissonNLLLoss: lambda o, y: (y * o - o.exp() - torch.lgamma(torch.tensor(y + 1.0))).exp(),
    }
    if kind is nn.NLLLoss:
        expected = output.exp() / 2  # -1 at the label
    else:
        labels = range(80 if kind is nn.PoissonNLLLoss else 2)
        expected = sum(rates[kind](output, y) * alone(output, float(y)).square() for y in labels) / 2
    target = torch.tensor([[0, 2]]) if kind is nn.NLLLoss else torch.ones_like(output)
    torch.testing.assert_close(oracle.output_fisher(kind(), output, target), expected.flatten().diag())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_of_a_convolution_by_unfolding(sharing: str):
    conv = nn.Conv2d(2, 3, 2, stride=2, padding=1).double()
    x, y = small(4, 2, 5, 4), small(4, 3, 3, 3) + 1
    layer = Layer(oracle.Matrices(conv, nn.MSELoss(), (x, y)), "")
    a = torch.nn.functional.unfold(x, 2, stride=2, padding=1).mT
    a = torch.cat([a, a.new_ones(4, 9, 1)], 2)
    A, B = layer.factors(sharing)
    a = a.flatten(0, 1) if sharing == "expand" else a.mean(1)
    torch.testing.assert_close(A[0], a.T @ a / len(a))
    # 2/27 for each entry of one sample's output, and every entry is a place
    torch.testing.assert_close(B[0], 2 / 27 * 9 * torch.eye(3, dtype=x.dtype))


def test_one_place_of_one_sample_is_exact():
    model = nn.Sequential(nn.ConvTranspose1d(2, 4, 3, groups=2), nn.Flatten(), nn.Tanh(), nn.Linear(12, 3)).double()
    of = oracle.Matrices(model, nn.CrossEntropyLoss(), (small(1, 2, 1), torch.tensor([1])))
    last = oracle.blocks(model, of.fisher, [["3.weight", "3.bias"]])
    torch.testing.assert_close(Layer(of, "3").dense(), last)
    torch.testing.assert_close(Layer(of, "3").rescaled(of.fisher), last)
    first, inside = Layer(of, "0"), oracle.blocks(model, of.fisher, [["0.weight", "0.bias"]])
    group = first.where[0].flatten()  # the groups are blocks of their own, with three places
    assert first.dense()[group][:, first.where[1].flatten()].eq(0).all()
    torch.testing.assert_close(first.rescaled(of.fisher).trace(), inside.trace())


def test_ids_are_unique():
    ids = [case.id for case in itertools.chain(EVERY, (case for case, _ in REFUSED))]
    assert len(set(ids)) == len(ids)


# One of each way to make up the gradient of the batch, in each part of the catalogue.
WAYS = {
    (part, case.combination, case.sample_dim): case for part, cases in CATALOGUE.items() for case in reversed(cases)
}


@pytest.mark.parametrize("case", WAYS.values(), ids=name_of)
def test_rows_make_up_the_gradient_of_the_batch(case: Case, device):
    model, loss = case.build(device)
    x, y = case.batch(model)
    with unchanged(model, x, y):
        rows = oracle.per_sample_gradients(model, loss, x, y, case.sample_dim)
    assert {name: row.shape for name, row in rows.items()} == {
        name: (case.n, *parameter.shape) for name, parameter in oracle.trainable(model).items()
    }
    if case.combination == "neither":
        return
    model.zero_grad()
    loss(oracle.forward(model, x), y).backward()
    for name, parameter in oracle.trainable(model).items():
        total = rows[name].sum(0) if case.combination == "sum" else rows[name].mean(0)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part", CATALOGUE)
def test_cases_are_deterministic_and_resizable(part: str, device):
    for case in CATALOGUE[part]:
        one, two = case.build(device)[0], case.build(device)[0]
        assert not set(map(id, one.parameters())) & set(map(id, two.parameters())), f"{case.id}: built once, not anew"
        torch.testing.assert_close(
            (one.state_dict(), case.batch(one)), (two.state_dict(), case.batch(two)), rtol=0, atol=0
        )
        dim = case.sample_dim if isinstance(case.sample_dim, int) else case.sample_dim[2]
        sizes = [case.batch(one, n)[1].shape[dim] for n in (case.n, case.n + 2, 1)]
        assert sizes == [case.n, case.n + 2, 1], case.id


@pytest.mark.parametrize("part", CATALOGUE)
def test_every_part_has_cases(part: str):
    assert len(CATALOGUE[part]) > 20
