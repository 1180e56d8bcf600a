"""How large the outputs of a model are, in the metric of the curvature: sums of each forward pass in, a norm out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvature.linalg import stack
from optimizers.steps.layer_vector import at_least_single

Sums = Mapping[str, Tensor]


class OutputScale:
    """The size of the outputs of the last batch, in the same units as the energies ``v^T M v`` of the curvature.

    Isotropic curvature measures changes of the outputs, so their size is the root mean square of an entry. Fisher
    matrices measure changes in nats, which near zero loss are far smaller: their size is the root of the mean over
    samples of ``f^T H f``, with H the matrix at the output and f the output.
    """

    def __init__(self) -> None:
        self.rms = 0.0  # zero while no outputs are known
        self.entries_per_sample = 1.0  # that an energy is a sum over; 1 but for isotropic curvature
        self.along: Mapping[str, float] = {}  # `CurvatureStatistics.along` of the last renewal, means over samples

    @staticmethod
    @torch.no_grad()
    def of(outputs: Sequence[Tensor]) -> Sums:
        """The sums of one pass for isotropic curvature, given its outputs (N, ...). Only finite entries count."""
        each = [_sums(x.detach()) for x in outputs]
        squares, entries = each[0] if len(each) == 1 else (stack(column).sum() for column in zip(*each, strict=True))
        # to fill a tensor needs no wait, as a copy to the device does
        count = torch.full_like(squares, len(outputs[0]))
        return {"squares": squares, "numbers": torch.stack([count, entries])}

    @staticmethod
    def in_metric(squares: Tensor, count: int) -> Sums:
        """The sums of one pass over `count` samples for other curvature, given the sum of ``f^T H f`` over them."""
        return {"squares": squares, "numbers": torch.full_like(squares, count).expand(2)}

    def update(self, sums: Sums, along: Sums) -> None:
        """Replace all by those of a step's passes, if it had any. The host reads them at once."""
        self.along = {}
        if not sums:
            return
        first = sums["squares"]
        numbers = [x.reshape(-1).to(first.device) for x in (first, sums["numbers"], *along.values())]
        squares, count, entries, *found = torch.cat(numbers).tolist()
        if entries > 0 and math.isfinite(squares):
            self.rms = math.sqrt(squares / entries)
        if entries > 0:
            self.entries_per_sample = entries / count
        self.along = {name: square / count for name, square in zip(along, found, strict=True)}


def squares_along(output: Tensor, vectors: Tensor) -> Tensor:
    """Sum () over samples of ``f^T H f`` of an output f (N, ...); H is the sum of ``v v^T`` of vectors (k, N, ...)."""
    wide = at_least_single([output])
    flat = [x.detach().reshape(*x.shape[: -output.ndim], len(output), -1).to(wide) for x in (vectors, output)]
    return torch.linalg.vecdot(*flat).nan_to_num(0.0, 0.0, 0.0).square().sum()


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares, and the number of finite entries."""
    squares = x.to(at_least_single([x])).square()  # a copy, and the only one of the size of x
    entries = (squares < torch.inf).count_nonzero()  # isfinite, and a sum of its truths, would make copies
    return squares.nan_to_num_(0.0, 0.0, 0.0).sum(), entries
