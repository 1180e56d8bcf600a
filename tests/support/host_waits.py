"""Operations that make the host wait for a device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal, aten.masked_select}


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in WAITING
        return func(*args, **(kwargs or {}))
