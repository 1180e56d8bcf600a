"""Tensors of one shape as one, and several that are never in memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one (n, *shape): a view, if they lie in one tensor at equal distances, else a copy."""
    first, whole = tensors[0], tensors[0]._base
    if len(tensors) == 1:
        return first[None]
    starts = [x.storage_offset() for x in tensors]
    step = starts[1] - starts[0]
    is_even = step > 0 and starts == [starts[0] + k * step for k in range(len(tensors))]
    form = first.shape, first.stride()
    if whole is None or not is_even or any(x._base is not whole or (x.shape, x.stride()) != form for x in tensors):
        return torch.stack(list(tensors))
    return whole.as_strided((len(tensors), *first.shape), (step, *first.stride()), starts[0])


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
