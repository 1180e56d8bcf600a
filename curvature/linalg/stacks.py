"""Tensors of one shape as one."""

from __future__ import annotations

from collections.abc import Sequence

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
