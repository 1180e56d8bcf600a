"""Memory for large results on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 1 << 22  # where numpy begins to ask for huge pages
ALIGNMENT = 64  # bytes, that of torch


def result_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An uninitialized tensor of x's dtype and device.

    A large one on the CPU lies in numpy's memory, which Linux maps in huge pages if it may: to touch fresh memory in
    small pages for the first time takes several times as long as to fill it.
    """
    size = math.prod(shape) * x.element_size()
    if x.device.type != "cpu" or size < LARGE_BYTES:
        return x.new_empty(shape)
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(x.dtype).view(*shape)
