"""Running curvature in the eigenbasis of Kronecker factors, against dense matrices of samples one by one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature.linalg
import curvature.preconditioners.block_diagonal
import curvature.preconditioners.kronecker
import curvature.structures.eigen
from curvature.kronecker.eigenbasis import Basis
from curvature.preconditioners import BlockDiagonalCurvature, CurvatureStatistics
from curvature.preconditioners.block import invert
from curvature.preconditioners.kronecker import EigenBlock, KroneckerBlock
from curvature.terms import IndexedRows, OuterProduct, contractions, squared_gradients
from support import running_blocks
from support.cases.case import Raw, seeded
from support.oracles.eigen import carried, diagonals, products, solution
from support.running_blocks import (
    N,
    block_of,
    close,
    columns_of,
    floats,
    full,
    indices,
    jacobians,
    measure,
    normal_vectors,
    rows_of,
    shrinkage,
    unit_vectors,
)

DECAY = 0.9


def twice(layer: nn.Module) -> nn.Module:
    return Raw(lambda m, x: m.layer(m.layer(x).tanh()).tanh(), layer=layer)


# Beside those with many places some with few, which are turned in another way.
MODELS = running_blocks.MODELS | {
    "few_places": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), floats(2, 4)),
    "few_pixels": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh()), floats(2, 2, 3)),
    "few_grouped_pixels": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh()), floats(4, 4)),
    "few_words": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh()), indices(5, 3)),
    "decoder": (lambda: Raw(lambda m, x: F.linear(F.embedding(x, m.w).tanh(), m.w), w=(5, 3)), indices(5, 3)),
    "matrix": (lambda: Raw(lambda m, x: (x @ m.weight).tanh(), weight=(4, 3)), floats(4)),
    "linear_twice": (lambda: twice(nn.Linear(4, 4)), floats(4)),
    "conv_twice": (lambda: twice(nn.Conv1d(2, 2, 3, padding=1)), floats(2, 3)),
}
ROWS = running_blocks.ROWS | {"few_places": 2, "few_pixels": 1, "few_grouped_pixels": 1, "few_words": 3}
ROWS |= {"decoder": 3, "matrix": 1, "linear_twice": 2, "conv_twice": 2}
TIED = running_blocks.TIED | {"decoder"}
each_model = pytest.mark.parametrize("name", MODELS)
some_models = pytest.mark.parametrize("name", ["linear", "few_places", "grouped_conv", "embedding", "tied_words"])


def built(name: str, batches: int = 1, device: str = "cpu") -> tuple[nn.Module, list[Tensor]]:
    make, inputs = MODELS[name]
    with seeded(0):
        model, xs = make().to(device, torch.float64), [inputs() for _ in range(batches)]
    return model, [x.to(device, torch.float64) if x.is_floating_point() else x.to(device) for x in xs]


def empty(model: nn.Module, x: Tensor, sharing: str = "expand", kind: type[KroneckerBlock] = EigenBlock) -> Any:
    """Blocks that have seen nothing yet."""
    factors = running_blocks.recorded(model, x, sharing=sharing)
    factors.blocks = [kind(b.names, b.scheme) if isinstance(b, KroneckerBlock) else b for b in factors.blocks]
    return factors


def update(factors: BlockDiagonalCurvature, model: nn.Module, *xs: Tensor, vectors: Any = unit_vectors) -> None:
    for x in xs:
        factors.update_average(measure(factors, model, x, vectors), DECAY)


def started(model: nn.Module, x: Tensor, sharing: str = "expand") -> tuple[BlockDiagonalCurvature, Any]:
    """With a basis from one batch; and the block of the first parameter."""
    factors = empty(model, x, sharing)
    update(factors, model, x)
    invert(factors.blocks, 0.1)
    return factors, block_of(factors, model)


def going(name: str, batches: int = 2, device: str = "cpu", sharing: str = "expand") -> tuple[Any, ...]:
    """The model, its factors with a basis from one batch and a second batch in it, the block, all batches."""
    model, xs = built(name, batches, device)
    factors, block = started(model, xs[0], sharing)
    update(factors, model, xs[1])
    return model, factors, block, xs


def basis_of(block: Any) -> list[Tensor]:
    return products(*(matrix.entries for matrix in (block.inverse.rows, block.inverse.columns)))


def exact(block: Any, model: nn.Module, x: Tensor) -> Tensor:
    j = [j.flatten(0, 1) for j in jacobians(model, x, block.names)]
    found = diagonals(block.scheme.arrangement.to_matrices(j), len(x), basis_of(block))
    return running_blocks.evened(found, block)


def gradients(block: Any, model: nn.Module) -> list[Tensor]:
    return [torch.sin(7 * dict(model.named_parameters())[k].detach()) for k in block.names]


def solved(block: Any, model: nn.Module) -> Tensor:
    return block.scheme.arrangement.to_matrices(block.solve(gradients(block, model)))


def densely(block: Any, model: nn.Module, values: Tensor) -> Tensor:
    return solution(values, basis_of(block), block.scheme.arrangement.to_matrices(gradients(block, model)))


@each_model
@pytest.mark.parametrize(
    ("sharing", "limit", "chunk"),
    [("expand", 2048, 1 << 24), ("expand", 3, 1 << 24), ("reduce", 2048, 1 << 24), ("expand", 2048, 40)],
    ids=["whole", "large_sides", "reduce", "few_at_a_time"],
)
def test_values_are_exact(name: str, sharing: str, limit: int, chunk: int, device: str, monkeypatch):
    """Those of samples one by one, however the factors sum over places, in whichever basis."""
    monkeypatch.setattr(curvature.preconditioners.block_diagonal, "MAX_SIDE", limit)
    monkeypatch.setattr(contractions, "CHUNK_ELEMENTS", chunk)
    model, _, block, (_, y) = going(name, 2, device, sharing)
    close(block.values, exact(block, model, y))
    close(block.mean_eigenvalue * block.dimension, exact(block, model, y).sum())


@pytest.mark.parametrize("name", ["linear", "no_bias", "few_words"])
def test_gradients_of_samples_are_not_built_where_squares_will_do(name: str, monkeypatch):
    model, (x, y) = built(name, 2)
    factors, block = started(model, x)
    for owner in (squared_gradients, Basis):
        monkeypatch.setattr(owner, "_from_gradients", None)
    update(factors, model, y)
    close(block.values, exact(block, model, y))


@pytest.mark.parametrize("name", ["linear", "places", "grouped_conv", "conv_twice"])
def test_some_samples_stand_for_many_that_have_places(name: str, monkeypatch):
    monkeypatch.setattr(curvature.structures.eigen, "MIN_SAMPLES", 2)
    model, _, block, (_, y) = going(name)
    close(block.values, exact(block, model, y if name == "linear" else y[:: N // 2]))


@pytest.mark.parametrize("size", [1, 2])
@some_models
def test_a_smaller_batch_at_the_end(name: str, size: int):
    """Samples count the same: all that are added up are one batch."""
    model, (x, y) = built(name, 2)
    factors, block = started(model, x)
    total = measure(factors, model, y[:size], unit_vectors)
    total.add_(measure(factors, model, y[size:], unit_vectors))
    factors.update_average(total, DECAY)
    close(block.values, exact(block, model, y))


def test_terms_of_different_numbers_of_samples():
    """Where no axis of samples is found, all is one sample."""
    model, (x,) = built("linear")
    factors, block = started(model, x)
    with seeded(1):
        draw = lambda n, t, d: torch.randn(n, t, 1, d).double()
        parts = [OuterProduct(draw(n, t, 4), draw(n, t, 3), (3, 4)) for n, t in ((6, 1), (1, 6), (6, 2))]
    factors.update_average(CurvatureStatistics({block.names[0]: block.measure({block.names[0]: parts}, 6)}), DECAY)
    (q,) = basis_of(block)
    each = [torch.cat([p.gradients(), p.b.sum(1)[:, 0, :, None]], 2).flatten(1) @ q for p in parts]
    expected = ((each[0] + each[2]).square().sum(0) + each[1].square().sum(0)) / 6
    close(block.values.flatten(), expected)


@pytest.mark.parametrize("name", ["decoder", "tied_autoencoder_square", "matrix"])
@pytest.mark.parametrize("limit", [2048, 2])
def test_a_batch_that_reads_the_weight_in_another_way_alone(name: str, limit: int, monkeypatch):
    monkeypatch.setattr(curvature.preconditioners.block_diagonal, "MAX_SIDE", limit)
    model, (x,) = built(name)
    factors, block = started(model, x)
    (shape,) = block.scheme.arrangement.shapes
    with seeded(1):
        values, index = torch.randn(N, 2, shape[1]).double(), torch.randint(shape[0], (N, 2))
        swapped = OuterProduct(torch.randn(N, 2, 1, shape[0]).double(), values[:, :, None], shape[::-1]).transpose()
    for term in (IndexedRows(index, values, shape), swapped):
        factors.update_average(CurvatureStatistics({block.names[0]: block.measure({block.names[0]: [term]}, N)}), 0.0)
        close(block.values, diagonals(block.scheme.arrangement.to_matrices([term.gradients()]), N, basis_of(block)))


@each_model
def test_values_are_carried_over_to_the_next_basis(name: str):
    """Those of the matrix that is diagonal in the old basis; its trace is the same in any."""
    model, factors, block, (_, _, z) = going(name, 3)
    old = basis_of(block)
    update(factors, model, z, vectors=normal_vectors(1))
    middle = block.values
    invert([block], 0.0, 0.1)
    new = basis_of(block)
    close(block.values, carried(middle, old, new))
    close(block.values.sum((1, 2)), middle.sum((1, 2)))
    moved = max(float((p.T @ q).square().amax(0).min()) for p, q in zip(old, new, strict=True))
    diagonal = block.basis.rows is None and block.basis.columns is None
    assert diagonal or moved < 0.999, "the basis should turn"


@each_model
def test_solve_is_dense(name: str):
    """Damped by a number; or as Kronecker factors are that are damped by a share of their own mean eigenvalues.

    The share of a side is larger the fewer rows its two batches had: of backprops that is one for each vector.
    """
    model, factors, block, (x, _) = going(name)
    unseen = torch.zeros(2) if block.unseen is None else block.unseen
    more = lambda x, k: x + unseen[k] * x.sum(1 + k, keepdim=True)
    for damping in (0.03, 2.0):
        invert([block], 0.0, damping)
        close(solved(block, model), densely(block, model, more(more(block.values, 0), 1) + damping))
    pairs = zip(block.inverse.tensors(), (rows_of(block), columns_of(block)), strict=False)
    b, a = ((full(u).mT @ full(side) @ full(u)).diagonal(dim1=1, dim2=2) for u, side in pairs)
    b, a = more(b[:, :, None], 0), more(a[:, None, :], 1)
    seen, sent = N * ROWS[name], N * ROWS[name] * model(x)[0].numel()
    counts = (sent + seen, seen + sent) if name in TIED else (sent, seen)
    more_b, more_a = (
        0.0 if side.ndim == 2 else shrinkage(side.shape[1], [count] * 2, DECAY)
        for side, count in zip((rows_of(block), columns_of(block)), counts, strict=True)
    )
    for share in (0.03, 1.0):
        invert(factors.blocks, share)
        damped = (b + (share + more_b) * b.mean(1, True)) * (a + (share + more_a) * a.mean(2, True))
        close(solved(block, model), densely(block, model, more(more(block.values, 0), 1) + damped - b * a))


@pytest.mark.parametrize("kind", [KroneckerBlock, EigenBlock])
@pytest.mark.parametrize(("sharing", "share"), [("expand", 1 / 12), ("reduce", 1 / 4**2 / 3)])
def test_rows_count_as_looked_up_once_more_in_all_batches(kind: Any, sharing: str, share: float):
    """Three samples look the same row up four times; what one more look-up would add to the mean, in two batches."""
    with seeded(0):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh()).double()
    factors = empty(model, torch.zeros(3, 4, dtype=torch.long), sharing, kind)
    block = block_of(factors, model)
    for k in range(2):
        update(factors, model, torch.full((3, 4), k))
        weight = 1 / (1 + DECAY * k)
        expected = share if not k else (1 - weight) * share + weight * weight * share
        assert block.unseen is not None
        close(block.unseen.sort().values, torch.tensor([0, expected], dtype=torch.float64))


@some_models
def test_averages_are_debiased_and_count_batches_in_a_basis(name: str):
    model, (x, *xs) = built(name, 5)
    factors = empty(model, x)
    update(factors, model, x, xs[0])  # two batches without a basis
    invert(factors.blocks, 0.1)
    block = block_of(factors, model)
    for k, y in enumerate(xs[1:], 1):
        update(factors, model, y)
        weights = [DECAY ** (k - j) / sum(DECAY**i for i in range(k)) for j in range(1, k + 1)]
        close(block.values, sum(w * exact(block, model, y) for w, y in zip(weights, xs[1:], strict=False)))
        assert (block.updates, block.seen) == (k + 2, k)


@some_models
def test_samples_before_the_basis_do_not_count_in_it(name: str):
    model, (x, y, z) = built(name, 3)
    factors = empty(model, x)
    update(factors, model, x)
    total = measure(factors, model, y, unit_vectors)
    invert(factors.blocks, 0.1)
    total.add_(measure(factors, model, z, unit_vectors))
    factors.update_average(total, DECAY)
    block = block_of(factors, model)
    close(block.values, exact(block, model, z))
