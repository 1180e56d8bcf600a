"""Sides that rest on few rows are damped more, as their small eigenvalues come out too small."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature import capture
from curvature.preconditioners import BatchFacts, BlockDiagonalCurvature, CurvatureStatistics, invert
from support.cases.case import Raw, seeded
from support.running_blocks import (
    MODELS,
    block_of,
    close,
    columns_of,
    full,
    measure,
    normal_vectors,
    rows_of,
    shrinkage,
)

pytestmark = pytest.mark.fast

KINDS, SHARE, DECAY = ["kronecker", "eigen"], 0.05, 0.9
each_kind = pytest.mark.parametrize("kind", KINDS)


def built(name: str, *sizes: int) -> tuple[nn.Module, list[Tensor]]:
    """A model, and batches of so many samples."""
    make, inputs = MODELS[name]
    with seeded(0):
        model, whole = make().double(), torch.cat([inputs() for _ in range(-(-sum(sizes) // 6))])
    whole = whole.double() if whole.is_floating_point() else whole
    return model, list(whole[: sum(sizes)].split(sizes))


def trained(kind: str, model: nn.Module, xs: list[Tensor], vectors: int = 1, **options: Any) -> Any:
    """The block of the first parameter after these batches, inverted at the end alone."""
    factors = BlockDiagonalCurvature(kind=kind, **options)
    for x in xs:
        factors.update_average(measure(factors, model, x, normal_vectors(vectors)), DECAY)
    invert(factors.blocks, SHARE)
    return block_of(factors, model)


def right_of(block: Any) -> Tensor:
    """(g, o, i)."""
    sides = rows_of(block), columns_of(block)
    count = len(sides[0]), sides[0].shape[1], sides[1].shape[1]
    return torch.sin(torch.arange(float(torch.Size(count).numel())).double()).reshape(count)


def expected(block: Any, outputs: float, inputs: float) -> Tensor:
    """``(B + outputs mean(B) I)^-1 right (A + inputs mean(A) I)^-1``."""
    b, a = (
        torch.stack([m + share * m.trace() / len(m) * torch.eye(len(m)).double() for m in full(side)])
        for side, share in ((rows_of(block), outputs), (columns_of(block), inputs))
    )
    return torch.linalg.solve(b, torch.linalg.solve(a, right_of(block).mT).mT)


@each_kind
@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize(("name", "sharing", "places"), [("places", "expand", 5), ("places", "reduce", 1)])
def test_batches_count_by_their_rows_and_their_weights(kind: str, vectors: int, name: str, sharing: str, places: int):
    """Of different sizes; further vectors send more backprops, and bring no other activations."""
    model, xs = built(name, 6, 2, 9)
    block = trained(kind, model, xs, vectors, sharing=sharing)
    sent, seen = ([rows * places * count for rows in (6, 2, 9)] for count in (vectors, 1))
    b, a = rows_of(block).shape[1], columns_of(block).shape[1]
    found = block.inverse(right_of(block))
    close(found, expected(block, SHARE + shrinkage(b, sent, DECAY), SHARE + shrinkage(a, seen, DECAY)), 1e-7)


def windows_of_an_input(layer: nn.Module, x: Tensor) -> float:
    """Of the outputs a stride apart, how many read an input, away from the edges."""
    nn.init.ones_(layer.weight)
    x = x.clone().requires_grad_()
    outputs = layer(x)
    if isinstance(layer, nn.ConvTranspose1d):
        outputs = outputs[..., :: layer.stride[0]]
    (counts,) = torch.autograd.grad(outputs.sum(), x)
    inner = slice(8, 16)  # as many as strides of 1, 2 and 4 divide
    counts = counts[(0, 0, *[inner] * (x.ndim - 2))]
    return float(counts[counts > 0].mean()) / outputs.shape[1]


@each_kind
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(2, 3, 5, padding=2), [24]),
        (nn.Conv1d(2, 3, 4, stride=2, dilation=2), [40]),
        (nn.Conv1d(2, 3, 2, stride=4), [24]),
        (nn.Conv2d(1, 2, 3, stride=2), [24, 24]),
        (nn.ConvTranspose1d(2, 3, 6, stride=2), [24]),
        (nn.Conv1d(1, 2, 20), [24]),
        (nn.Conv1d(2, 3, 4, stride=2, dilation=3), [40]),
        (nn.Conv2d(1, 2, (3, 16)), [24, 16]),
        (nn.Conv2d(1, 2, (2, 5), stride=(4, 1)), [24, 24]),
    ],
    ids=["windows of 5", "dilated", "windows apart", "two axes", "transposed", "hardly two windows",
         "dilated by another factor", "as wide as the input", "apart on one axis"],
)  # fmt: skip
def test_windows_that_overlap_count_as_if_side_by_side(kind: str, layer: nn.Module, size: list[int]):
    """Both sides: neighbours see nearly the same inputs, and go into nearly the same of what follows."""
    with seeded(0):
        model, x = nn.Sequential(layer, nn.Tanh()).double(), torch.randn(6, layer.in_channels, *size).double()
    windows = windows_of_an_input(layer, x)
    block = trained(kind, model, [x])
    rows = 6 * layer(x)[0, 0].numel() / windows
    sides = len(full(rows_of(block))[0]), len(full(columns_of(block))[0])
    assert block.shares(SHARE) == pytest.approx([SHARE + 3 * side / rows for side in sides])


@each_kind
def test_windows_of_several_images_of_a_sample_do_not_overlap(kind: str):
    """Four frames a sample, each of two windows that share nearly all: four rows."""
    with seeded(0):
        run = lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        model, x = Raw(run, layer=nn.Conv1d(1, 2, 8)).double(), torch.randn(6, 4, 1, 9).double()
    block = trained(kind, model, [x])
    assert block.shares(SHARE) == pytest.approx([SHARE + 3 * side / 24 for side in (2, 9)])


@each_kind
def test_it_goes_to_zero_as_rows_grow(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Tenfold rows are a tenth of it, and so are many batches less than one, up to those that the average remembers."""
    monkeypatch.setattr("curvature.kronecker.factors.MIN_SUBSAMPLE", 10**9)  # all samples are looked at
    model, (x,) = built("linear", 6)
    more = []
    for times in (1, 10, 100, 10_000):
        block = trained(kind, model, [x.repeat(times, 1)])
        more.append([own - SHARE for own in block.shares(SHARE)])
    assert more[0] == pytest.approx([3 * 3 / 6, 3 * 5 / 6])
    for own, times in zip(more[1:], (10, 100, 10_000), strict=True):
        assert own == pytest.approx([first / times for first in more[0]])
    close(block.inverse(right_of(block)), expected(block, SHARE, SHARE), 1e-2)
    many = [own - SHARE for own in trained(kind, model, [x] * 100).shares(SHARE)]
    remembered = (1 + DECAY) / (1 - DECAY)
    assert many == pytest.approx([first / remembered for first in more[0]], rel=1e-3)


@each_kind
@pytest.mark.parametrize("limit", [2048, 2])
def test_of_noise_a_head_keeps_the_diagonal(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch):
    """It is damped as the whole matrix would be, and its rows are no table; however wide it is, it is no sketch."""
    monkeypatch.setattr("curvature.preconditioners.block_diagonal.MAX_SIDE", limit)
    with seeded(0):
        model, x, noise = nn.Linear(4, 3).double(), torch.randn(6, 4).double(), torch.randn(1, 6, 3).double()
    factors = BlockDiagonalCurvature(kind=kind)
    for is_noise in (True, False):  # a later vector of another kind does not change what is kept
        with capture(model) as tape:
            output = model(x)
        facts = BatchFacts(len(x), independent=is_noise)
        factors.update_average(factors.measure(tape, [output], [noise.clone()], facts), DECAY)
    invert(factors.blocks, SHARE)
    (block,) = factors.blocks
    close(rows_of(block), noise[0].square().mean(0)[None])
    assert not block.has_separate_rows and "B 3x3 diagonal" in block.describe()
    if kind == "kronecker" and limit > 4:
        outputs, inputs = (SHARE + shrinkage(size, [6, 6], DECAY) for size in (3, 5))
        close(block.inverse(right_of(block)), expected(block, outputs, inputs), 1e-7)


def of_processes(kind: str, parts: int, places: int, sharing: str) -> list[tuple[float, float]]:
    """What is added after two batches of 64 samples, shared among processes."""
    with seeded(0):
        model, xs = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Tanh()), torch.randn(2, 64, 2, places)
    factors = BlockDiagonalCurvature(sharing=sharing, kind=kind)
    for x in xs:
        total: dict[tuple[str, str], Tensor] = {}
        for rank, part in enumerate(x.chunk(parts)):
            with capture(model) as tape:
                output = model(part)
            vectors = [normal_vectors(1)(output.detach())]
            own = factors.measure(tape, [output], vectors, BatchFacts(len(part), rank, parts))
            for name, block in own.blocks.items():
                for key, value in block.sums(rank, parts).items():
                    total[name, key] = total.get((name, key), torch.zeros(())) + value
        factors.update_average(CurvatureStatistics(factors.statistics_from(total)), DECAY)
    return [block.shares(SHARE) for block in factors.blocks]  # type: ignore[attr-defined]


@each_kind
@pytest.mark.parametrize("places", [3, 400])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_it_is_the_same_in_one_process_and_in_several(kind: str, places: int, sharing: str):
    """Activations of one sample in four are looked at, 16 of 64, and the others do not count."""
    one, *others = (of_processes(kind, parts, places, sharing) for parts in (1, 2, 4))
    assert all(own == one for own in others)
    (found,) = one
    rows = 64 if sharing == "reduce" else 64 * places
    outputs, inputs = shrinkage(4, [rows] * 2, DECAY), shrinkage(3, [rows // 4] * 2, DECAY)
    assert found == pytest.approx((SHARE + outputs, SHARE + inputs))
