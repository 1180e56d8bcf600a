"""Rounded parameters against the surgeon's updates on the dense matrix, one weight at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import curvature
from curvature.operators import Diagonal
from curvature.operators.kronecker import Kronecker
from support.cases.case import seeded
from support.comparisons import matches
from support.oracles import compression as oracle
from support.snapshots import unchanged
from support.structures import ARRANGEMENTS, Source, kronecker, places, structures

LOSS = nn.CrossEntropyLoss()


def grids_of(space, w, bits):
    """For each entry of the flat vector its levels, or None."""
    found = []
    for tensor in space.split(w).values():
        for row in tensor if tensor.ndim > 1 else ():
            found += [oracle.levels(row.flatten(), bits)] * row.numel()
        found += [None] * (tensor.numel() if tensor.ndim < 2 else 0)
    return found


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("diagonal", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", [name for name in ARRANGEMENTS if name != "scale"])
def test_kronecker_factors(name, diagonal, bits):
    op, _ = kronecker(ARRANGEMENTS[name], *diagonal)(Source())
    assert isinstance(op, Kronecker)
    w = Source(seed=1).normal(op.space.size)
    w[3] = 0
    damped = op.factored_damping(0.1)
    H, (*_, i), grids = damped.to_dense(), op.sides, grids_of(op.space, w, bits)
    inner = i - len(op.space.names) + 1
    mean = lambda side: (side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)).mean(0)
    rows, columns = mean(damped.B).argsort(descending=True), mean(damped.A)[:inner].argsort(descending=True)
    where = places(op.arrangement, "cpu")
    order = [int(where[g, r, c]) for g in range(len(where)) for c in columns for r in rows]
    found = curvature.quantize(op, op.space.split(w), bits, 0.1)
    matches(op.space.flatten(found), oracle.rounded(H, w, order, grids), 1e-8)
    assert list(found) == list(op.space.names) and op.space.flatten(found)[3] == 0
    assert all(len(row.unique()) <= 2**bits for row in found["weight"])


@pytest.mark.parametrize("structure", ["dense", "matrix_free", "scaled", "total", "eigen bias", "diagonal", "blocks"])
def test_other_structures(structure):
    op, matrix = structures()[structure](Source())
    w = Source(seed=1).normal(op.space.size)
    H, grids = matrix + 0.1 * torch.eye(len(w)).to(matrix), grids_of(op.space, w, 2)
    found = op.space.flatten(curvature.quantize(op, op.space.split(w), 2, 0.1))
    if structure == "blocks":
        return matches(found[:12], curvature.quantize(op["w"], op.space.split(w), 2, 0.1)["w"].flatten())
    matches(found, oracle.rounded(H, w, H.diagonal().argsort(descending=True).tolist(), grids), 1e-8)


def network() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        return model, (torch.randn(40, 6).double(), torch.arange(40) % 3)


def test_models_bits_by_name_and_fewer_errors_than_the_nearest_levels():
    model, data = network()
    K = curvature.kfac(model, LOSS, data)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    ones = Diagonal(K.space, torch.ones_like(theta))
    costs = []
    for op in (K, ones):
        with unchanged(model):
            d = K.space.flatten(curvature.quantize(op, model, 2)) - theta
        costs.append(float(d @ (K @ d)))
    assert costs[0] < 0.5 * costs[1]
    one = curvature.quantize(K, model, {"2.weight": 2})
    named = dict(model.named_parameters())
    matches(one["0.weight"], named["0.weight"].detach())
    assert all(len(row.unique()) <= 4 for row in one["2.weight"]) and len(one["0.weight"].unique()) > 40
    pruned, masks = curvature.prune(K, model, 0.5)
    both = curvature.quantize(K, pruned, 3)
    assert all(not (both[name] * ~mask).any() for name, mask in masks.items())


def test_rows_that_are_read_apart():
    with seeded(0):
        attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
        x, y = (torch.randn(6, 3, 4).double(), torch.randn(6, 5, 4).double()), torch.randn(6, 3, 4).double()

    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention

        def forward(self, a, b):
            return self.inner(a, b, b, need_weights=False)[0]

    K = curvature.kfac(Crossed(), nn.MSELoss(), (x, y))
    assert any(type(block).__name__ == "RowBlocks" for block in K.blocks.values())
    found = curvature.quantize(K, Crossed(), 2)
    weight, bias = attention.in_proj_weight.detach(), attention.in_proj_bias.detach()
    part = K.blocks["inner.in_proj_weight"].inner.blocks["inner.in_proj_weight[0:4]"]
    mean = 0.01 * float(K.trace()) / K.space.size
    named = {"inner.in_proj_weight[0:4]": weight[:4], "inner.in_proj_bias[0:4]": bias[:4]}
    matches(found["inner.in_proj_weight"][:4], curvature.quantize(part, named, 2, mean)["inner.in_proj_weight[0:4]"])


def test_what_cannot_be_rounded_is_refused():
    model, data = network()
    K = curvature.kfac(model, LOSS, data)
    for bits in (0, 17, 2.5, True):
        with pytest.raises(ValueError, match="whole number from 1 to 16"):
            curvature.quantize(K, model, bits)
    for name in ("0.bias", "1.weight"):
        with pytest.raises(ValueError, match=f"no weight {name} with two dimensions"):
            curvature.quantize(K, model, {name: 4})
    with pytest.raises(ValueError, match="Use a damping above"):
        curvature.quantize(K, model, 4, damping=0.0)
