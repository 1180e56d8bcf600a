"""Kronecker factors and diagonals against their definitions, and what is solved with them against dense matrices."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature.preconditioners.block_diagonal
from curvature.preconditioners import Block, BlockDiagonalCurvature, CurvatureStatistics, invert
from curvature.preconditioners.kronecker import KroneckerBlock
from curvature.preconditioners.structure_block import DiagonalBlock
from support.cases.case import seeded
from support.running_blocks import (
    MODELS,
    N,
    batches,
    block_of,
    close,
    columns_of,
    full,
    jacobians,
    measure,
    normal_vectors,
    recorded,
    rows_of,
    unit_vectors,
)

pytestmark = pytest.mark.fast

each_model = pytest.mark.parametrize("name", MODELS)


def built(name: str, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    make, inputs = MODELS[name]
    with seeded(0):
        model, x = make().to(device, torch.float64), inputs()
    return model, x.to(device, torch.float64 if x.is_floating_point() else x.dtype)


def dense(block: KroneckerBlock, looked_up: int | None = None) -> Tensor:
    """Over the groups, block-diagonal, of the flattened (g, o, i); each of 5 words counts once more if any are."""
    rows, columns = full(rows_of(block)), full(columns_of(block))
    if looked_up:
        rows, columns = (
            x + (len(x[0]) == 5) * x.diagonal(0, 1, 2).sum() / looked_up * full(torch.ones_like(x[:, 0]))
            for x in (rows, columns)
        )
    return torch.block_diag(*[torch.kron(r, c) for r, c in zip(rows, columns, strict=True)])


@each_model
@pytest.mark.parametrize("limit", [2048, 3])
def test_solve_is_dense(name: str, limit: int, device, monkeypatch):
    """(kron(B, A) + damping I)^-1; a side beyond the limit is a diagonal."""
    monkeypatch.setattr(curvature.preconditioners.block_diagonal, "MAX_SIDE", limit)
    model, x = built(name, device)
    block = block_of(recorded(model, x), model)
    assert isinstance(block, KroneckerBlock) and block.reason == ""
    parameters = dict(model.named_parameters())
    gradients = [torch.sin(7 * parameters[k].detach()) for k in block.names]
    matrix, inverted = dense(block), dense(block, None if x.is_floating_point() else x.numel())
    eye = torch.eye(len(matrix), device=device, dtype=matrix.dtype)
    assert block.dimension == len(matrix) == sum(g.numel() for g in gradients)
    close(block.mean_eigenvalue, matrix.trace() / len(matrix))
    for damping in (0.03, 2.0):
        invert([block], 0.0, damping)
        found = block.solve(gradients)
        right = block.scheme.arrangement.to_matrices(gradients).flatten()
        u = torch.linalg.solve(inverted + damping * eye, right)
        close(block.scheme.arrangement.to_matrices(found).flatten(), u)
        assert [f.shape for f in found] == [g.shape for g in gradients]


@pytest.mark.parametrize("name", ["linear", "places", "conv", "grouped_conv", "conv_transpose", "transformers_conv1d"])
def test_a_block_is_a_layer(name: str):
    """Weight and bias together."""
    model, x = built(name)
    assert block_of(recorded(model, x), model).names == ("0.weight", "0.bias")


NAMES = ["norm.weight", "norm.bias", "place", "scale"]


def test_diagonal_is_exact_with_all_vectors(device):
    model, (x,) = batches(1, device=device)
    factors = recorded(model, x)
    for name, j in zip(NAMES, jacobians(model, x, NAMES), strict=True):
        block = block_of(factors, model, name)
        assert isinstance(block, DiagonalBlock) and block.reason and block.values is not None
        close(block.values, j.square().sum(1).mean(0))
        invert([block], 0.0, 0.1)
        close(block.solve([j[0, 0]])[0], j[0, 0] / (block.values + 0.1))
        close(block.mean_eigenvalue, block.values.mean())


def moments(block: Block) -> list[Tensor]:
    state = block.state()
    return [state[name] for name in ("row_side", "column_side", "values") if state.get(name) is not None]


def averaged(model: nn.Module, xs: Sequence[Tensor], decay: float = 0.9) -> BlockDiagonalCurvature:
    factors = BlockDiagonalCurvature()
    for x in xs:
        factors.update_average(measure(factors, model, x, normal_vectors(1)), decay)
    return factors


def test_averages_are_debiased():
    model, xs = batches(1, 2, 3)
    each = [averaged(model, [x]).blocks for x in xs]
    weights = torch.tensor([0.9**2, 0.9, 1.0], dtype=torch.float64)
    weights /= weights.sum()
    for k, block in enumerate(averaged(model, xs).blocks):
        for found, *parts in zip(moments(block), *(moments(other[k]) for other in each), strict=True):
            close(found, sum(w * part for w, part in zip(weights, parts, strict=True)))


@pytest.mark.parametrize("numbers", [(0,), (-1,), (0, -1)])
@pytest.mark.parametrize("first", [0, 1])
def test_sums_of_one_layer_that_are_not_finite_leave_out_that_layer(first: int, numbers: tuple[int, ...]):
    model, xs = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double(), torch.randn(2, 6, 3).double()
    factors = averaged(model, [xs[0]])
    statistics = measure(factors, model, xs[1], normal_vectors(1))
    bad, good = factors.blocks[first], factors.blocks[1 - first]
    own: Any = statistics.blocks[bad.names[0]]
    for number in numbers:
        own.tensors[("nna", "nnb")[number]][0, 0, 0] = math.nan
    before = [x.clone() for x in moments(bad)]
    factors.update_average(statistics, 0.9)
    assert all(map(torch.equal, moments(bad), before)) and bad.updates == 1 and good.updates == 2
    for found, wanted in zip(moments(good), moments(averaged(model, list(xs)).blocks[1 - first]), strict=True):
        close(found, wanted)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (2, 2, 2)])
def test_batches_that_are_added_up_are_one_batch(sizes: tuple[int, ...]):
    """Equal or not: each sample counts the same."""
    model, (x,) = batches(1)
    v = normal_vectors(1)(model(x))
    whole, cut = BlockDiagonalCurvature(), BlockDiagonalCurvature()
    whole.update_average(measure(whole, model, x, lambda output: v), 0.95)
    total = CurvatureStatistics()
    for part, w in zip(x.split(sizes), v.split(sizes, 1), strict=True):
        total.add_(measure(cut, model, part, lambda output, w=w: w))
    cut.update_average(total, 0.95)
    for block, right in zip(cut.blocks, whole.blocks, strict=True):
        for found, wanted in zip(moments(block), moments(right), strict=True):
            close(found, wanted)


@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
def test_statistics_add_up_over_processes(kind: str):
    """As plain tensors by name, also squares in an eigenbasis; longer vectors are a larger curvature."""
    model, (x, y) = batches(1, 2)
    factors = BlockDiagonalCurvature(kind=kind)
    factors.update_average(measure(factors, model, x, unit_vectors), 0.9)
    invert(factors.blocks, 0.1)
    start = factors.state_dict()
    found = []
    for parts, times in (((N,), 1.0), ((2, N - 2), 1.0), ((N,), 3.0)):
        factors.load_state_dict(copy.deepcopy(start), dict.fromkeys(start, y.device))
        total: dict[tuple[str, str], Tensor] = {}
        for rank, part in enumerate(y.split(parts)):
            own = measure(factors, model, part, unit_vectors)
            own.scale_vectors_(times)
            for name, block in own.blocks.items():
                for key, value in block.sums(rank, len(parts)).items():
                    total[name, key] = total.get((name, key), 0) + value
        factors.update_average(CurvatureStatistics(factors.statistics_from(total)), 0.0)
        assert all(block.updates == 2 for block in factors.blocks)
        found.append([torch.stack([block.mean_eigenvalue for block in factors.blocks])])
        found[-1] += [m for block in factors.blocks for m in moments(block)]
    for one, several in zip(*found[:2], strict=True):
        close(several, one)
    close(found[2][0], 9 * found[0][0])
