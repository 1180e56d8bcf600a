"""Several tensors that are never in memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from torch import Tensor


class Lazily(Sequence[Tensor]):
    """Tensors that are made whenever they are asked for, so that one at a time is in memory."""

    def __init__(self, make: Sequence[Callable[[], Tensor]]) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(self.make)

    @overload
    def __getitem__(self, k: int) -> Tensor: ...
    @overload
    def __getitem__(self, k: slice) -> Lazily: ...
    def __getitem__(self, k: int | slice) -> Tensor | Lazily:
        return Lazily(self.make[k]) if isinstance(k, slice) else self.make[k]()

    def __iter__(self) -> Iterator[Tensor]:
        return (make() for make in self.make)
