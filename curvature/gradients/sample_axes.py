"""Find by experiment which axis of every use's output holds the samples.

Two backward passes, one with unit weights on the samples' losses and one with random weights w: in the backprop of a
use, the entries of sample n differ between them by the factor w[n]. A candidate axis either reproduces the second
backprop from the first, or is wrong. Where samples are mixed no candidate fits, and the general path takes over. So
flattened tokens, windows and sequence-first models come out right without being told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from curvature.layers import Layout
from curvature.linalg import full_precision, noise_floor, rounding_tolerance, to_host, widen, widest
from curvature.recording import Tape

ENTRIES = 512  # of a backprop, that are looked at first


def candidate_axes(shape: tuple[int, ...], count: int) -> Iterator[Layout]:
    """Every axis that could hold the samples, the simplest first."""
    for dim, size in enumerate(shape):
        if size == count:
            yield Layout(dim, 1, count, 1)
    for dim, size in enumerate(shape):
        rest = size // count
        if size % count == 0 and rest > 1:
            yield Layout(dim, 1, count, rest)
            yield Layout(dim, rest, count, 1)
            for outer in range(2, rest):
                if rest % outer == 0:
                    yield Layout(dim, outer, count, rest // outer)


def find_layouts(
    backprops: Sequence[Tensor | None], weighted: Sequence[Tensor | None], weights: Tensor,
    known: Sequence[Sequence[Layout]] | None = None,
) -> tuple[list[list[Layout]], bool]:  # fmt: skip
    """For every use the first candidate that reproduces its weighted backprop up to rounding; the host waits once.

    With a single sample, whose entries they all are, all axes do, those of size one first. All are returned: the rule
    of the layer takes the first that holds none of its features, as it would with many samples. `known` are the
    candidates of each use, if not all `candidate_axes`. Also returns whether no other candidates do, of no use (of a
    single sample, whether there are gradients).
    """
    count, floor = len(weights), noise_floor(weighted)
    tried: list[list[Layout]] = []
    asked: list[Tensor] = []
    for k, (b, bw) in enumerate(zip(backprops, weighted, strict=True)):
        if b is None or bw is None:
            tried.append([])
            continue
        size = bw.norm()
        allowed = _allowed(size, b, floor)
        if known is not None:
            candidates = list(known[k])
        elif count == 1:
            axes = sorted(enumerate(b.shape), key=lambda axis: axis[1] != 1)
            candidates = [Layout(dim, 1, 1, entries) for dim, entries in axes]
        else:
            candidates = list(candidate_axes(tuple(b.shape), count))
            if b.device.type == "cpu":  # elsewhere the host would wait
                candidates = _plausible(candidates, b, bw, weights, allowed)
        tried.append(candidates)
        if count == 1:
            asked.append(size > allowed)
        elif candidates:
            limits = allowed, _allowed(size, b, torch.zeros_like(floor)), torch.finfo(b.dtype).eps * size
            asked += [*limits, *(_error(layout, b, bw, weights) for layout in candidates)]
    told = iter([float(x) for x in to_host(asked)])
    if count == 1:
        return tried, all(told)
    fits = [_fitting(layouts, [next(told) for _ in range(3 + len(layouts))]) if layouts else [] for layouts in tried]
    return [layouts[:1] for layouts in fits], all(len(layouts) <= 1 for layouts in fits)


def _fitting(layouts: list[Layout], told: Sequence[float]) -> list[Layout]:
    """Those of a use's candidates that rounding allows: a sample that outweighs all others lets wrong ones pass."""
    within_noise, clear, rounding, *errors = told
    for limit in clear, within_noise:  # gradients that vanish in a deep network have digits of their own
        good = [(error, layout) for error, layout in zip(errors, layouts, strict=True) if error <= limit]
        if good:
            near = 10 * min(error for error, _ in good) + rounding
            return [layout for error, layout in sorted(good, key=lambda pair: pair[0] > near)]
    return []


def follow(
    layouts: Sequence[Sequence[Layout]], backprops: Sequence[Tensor | None], count: int,
    send: Callable[[Tensor], Sequence[Tensor | None]],
) -> list[bool]:  # fmt: skip
    """For each use, whether its layout, one or none, holds the samples in order; the host waits once.

    The weights are 0, 1, 2 and 4: products with them do not round in any precision, so that backprops follow them bit
    by bit, but for sums in an order that changes. Each pass takes one digit of the samples' numbers; `send` gives the
    backprops of losses with weights (N,).
    """
    numbers, flags = torch.arange(count, device="cpu"), []
    rounding = coarsest(backprops)
    while numbers.any():
        weights = numbers % 4
        weights[weights == 3] = 4
        for layout, b, bw in zip(layouts, backprops, send(weights), strict=True):
            if b is None or bw is None or not layout:
                flags.append(torch.ones((), dtype=torch.bool, device="cpu"))
                continue
            kind = torch.finfo(b.dtype)
            underflow = 4 * kind.smallest_normal * kind.eps * b.numel() ** 0.5
            flags.append(_error(layout[0], b, bw, weights) <= 2 * rounding * widen(bw.norm()) + underflow)
        numbers = numbers // 4
    told = to_host(flags)
    return [all(told[k :: len(layouts)]) for k in range(len(layouts))]


def coarsest(backprops: Sequence[Tensor | None]) -> float:
    """The largest rounding of their precisions."""
    return max((float(torch.finfo(b.dtype).eps) for b in backprops if b is not None), default=0.0)


def _allowed(size: Tensor, b: Tensor, floor: Tensor) -> Tensor:
    return rounding_tolerance(b) * size + floor.to(size)


def _error(layout: Layout, b: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    front = layout.front(b)
    expected = front * weights.to(b).reshape(-1, *[1] * (front.ndim - 1))
    return (expected - layout.front(weighted)).norm()


def _plausible(layouts: list[Layout], b: Tensor, weighted: Tensor, weights: Tensor, allowed: Tensor) -> list[Layout]:
    """Those that some entries of a backprop on the CPU allow, which refute most wrong ones without a copy of it."""
    drawn = torch.randint(max(1, b.numel()), (ENTRIES,), generator=torch.Generator().manual_seed(0), device="cpu")
    places = drawn.unique() if b.numel() else drawn[:0]
    some, expected, weights = b.take(places), weighted.take(places), weights.to(b)

    def seems_right(layout: Layout) -> bool:
        axis = places // math.prod(b.shape[layout.dim + 1 :]) % layout.size
        return bool((some * weights[axis // layout.inner % layout.samples] - expected).norm() <= allowed)

    return list(filter(seems_right, layouts))


def sample_layouts(tape: Tape, output: Tensor, sample_dim: int = 0) -> list[Layout | None]:
    """The axis of samples in the output of each of `tape.uses`, found by two backward passes.

    Args:
        tape: of a capture that recorded the pass which gave `output`; the graph is kept.
        output: what the model returned, its samples along axis `sample_dim`.

    Returns:
        For each use ``Layout(dim, outer, samples, inner)``: axis `dim` of the use's output has size ``outer * samples *
        inner`` (outer = inner = 1 unless samples are folded with something else). None where no axis holds the samples:
        the output is shared between them, mixes them, or was not reached.
    """
    return _experiment(tape, output, sample_dim)[0]


def certain_layouts(tape: Tape, output: Tensor, asked: Sequence[bool]) -> list[Layout | None] | None:
    """`sample_layouts` of the uses asked for; None if more than one axis fits one, as below a last layer of zeros."""
    layouts, is_certain = _experiment(tape, output, 0, asked)
    return layouts if is_certain else None


@full_precision()
def _experiment(
    tape: Tape, output: Tensor, sample_dim: int, asked: Sequence[bool] | None = None
) -> tuple[list[Layout | None], bool]:
    """`find_layouts` of two backward passes; of all uses, or of those that are asked for."""
    count = output.shape[sample_dim]
    generator = torch.Generator(output.device).manual_seed(0)
    wide = widest(output.device.type)
    vector = torch.randn(output.shape, generator=generator, dtype=wide, device=output.device).to(output.dtype)
    weights = (0.5 + torch.rand(count, generator=generator, device=output.device)).to(output.dtype)
    weighted = vector * weights.reshape([-1 if k == sample_dim % output.ndim else 1 for k in range(output.ndim)])
    backprops, weighted_backprops = (tape.gradients([output], [v]) for v in (vector, weighted))
    if asked is not None:
        backprops = [b if is_asked else None for b, is_asked in zip(backprops, asked, strict=True)]
    layouts, is_certain = find_layouts(backprops, weighted_backprops, weights)
    return [next(iter(at_use), None) for at_use in layouts], is_certain
