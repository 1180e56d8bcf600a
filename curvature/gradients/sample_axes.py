"""Find by experiment which axis of every use's output holds the samples.

Two backward passes, one with unit weights on the samples' losses and one with random weights w: in the backprop of a
use, the entries of sample n differ between them by the factor w[n]. A candidate axis either reproduces the second
backprop from the first, or is wrong. Where samples are mixed no candidate fits, and the general path takes over. So
flattened tokens, windows and sequence-first models come out right without being told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvature.layers import Layout
from curvature.linalg import full_precision, noise_floor, rounding_tolerance, widest
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


def find_layout(b: Tensor, weighted: Tensor, weights: Tensor, floor: float = 0.0) -> tuple[list[Layout], bool]:
    """The first candidate that reproduces the weighted backprop up to rounding, and whether no other does.

    With a single sample, whose entries they all are, all candidates do, and the first is certain.
    """
    size = weighted.norm()
    allowed = rounding_tolerance(b) * size + floor
    seem = _Entries(b, weighted).consistent
    fits = []
    for layout in candidate_axes(tuple(b.shape), len(weights)):
        if seem(layout, weights, allowed) and _reproduces(layout, b, weighted, weights, allowed):
            fits.append(layout)
            if len(weights) == 1:
                return fits, bool(size > allowed)
    return fits[:1], len(fits) <= 1


def _reproduces(layout: Layout, b: Tensor, weighted: Tensor, weights: Tensor, allowed: Tensor) -> bool:
    front = layout.front(b)
    expected = front * weights.to(b).reshape(-1, *[1] * (front.ndim - 1))
    return bool(expected.sub_(layout.front(weighted)).norm() <= allowed)


class _Entries:
    """Some entries of a backprop, which show most wrong candidates without a copy of it."""

    def __init__(self, b: Tensor, weighted: Tensor) -> None:
        drawn = torch.randint(max(1, b.numel()), (ENTRIES,), generator=torch.Generator().manual_seed(0), device="cpu")
        self.shape, self.places = b.shape, drawn.unique().to(b.device) if b.numel() else drawn[:0].to(b.device)
        self.b, self.weighted = b.take(self.places), weighted.take(self.places)

    def consistent(self, layout: Layout, weights: Tensor, allowed: Tensor) -> bool:
        """Whether what these entries differ by is within what all of them may."""
        axis = self.places // math.prod(self.shape[layout.dim + 1 :]) % layout.size
        sample = axis // layout.inner % layout.samples
        return bool((self.b * weights.to(self.b)[sample] - self.weighted).norm() <= allowed)


@full_precision()
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
    count = output.shape[sample_dim]
    generator = torch.Generator(output.device).manual_seed(0)
    wide = widest(output.device.type)
    vector = torch.randn(output.shape, generator=generator, dtype=wide, device=output.device).to(output.dtype)
    weights = (0.5 + torch.rand(count, generator=generator, device=output.device)).to(output.dtype)
    weighted = vector * weights.reshape([-1 if k == sample_dim % output.ndim else 1 for k in range(output.ndim)])
    pairs = list(zip(*(tape.gradients([output], [v]) for v in (vector, weighted)), strict=True))
    floor = noise_floor(b for _, b in pairs)
    return [
        None if b is None or bw is None else next(iter(find_layout(b, bw, weights, floor)[0]), None) for b, bw in pairs
    ]
