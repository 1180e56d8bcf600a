"""How far to go along a curve through parameter space, by looking at the loss there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

HALVINGS = 30  # of the way, at most


@dataclass(frozen=True)
class Point:
    """A place relative to the origin: the loss there, the residuals that it is of (if any), and the part of the way."""

    displacement: Tensor
    loss: float
    residuals: Tensor | None = None
    part: float = 0.0


class Curves:
    """Moves parameters about their origin; displacements (P,) are flat, in the order of `parameters`.

    Args:
        look: loss and residuals with the parameters as they are now.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], loss: float, look: Callable[[], tuple[float, Tensor | None]]
    ) -> None:
        self.parameters, self.look = parameters, look
        self.starts = [p.detach().clone() for p in parameters.values()]
        self.origin = Point(torch.cat([torch.zeros_like(x).flatten() for x in self.starts]), loss)

    def at(self, displacement: Tensor, part: float = 0.0) -> Point:
        """What is seen after a move."""
        self.put(displacement)
        loss, residuals = self.look()
        return Point(displacement, loss if math.isfinite(loss) else math.inf, residuals, part)

    def put(self, displacement: Tensor) -> None:
        pieces = displacement.split([x.numel() for x in self.starts])
        with torch.no_grad():
            for p, start, piece in zip(self.parameters.values(), self.starts, pieces, strict=True):
                p.copy_(start).add_(piece.reshape(p.shape))

    def lowest(self, curve: Callable[[float], Tensor], start: Point) -> Point:
        """Halve the way until the loss is below that of the start and falls no more; the start where it never is."""
        best = start
        for k in range(HALVINGS + 1):
            seen = self.at(curve(0.5**k), 0.5**k)
            if seen.loss < best.loss:
                best = seen
            elif best is not start:
                break
        return best

    def straight(self, step: Tensor) -> Point:
        """The lowest along a step from the origin."""
        return self.lowest(lambda t: t * step, self.origin)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """After an exception the parameters are at the origin."""
        try:
            yield
        except BaseException:
            self.put(self.origin.displacement)
            raise
