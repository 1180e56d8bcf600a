"""Calls that start work on a device."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# that do nothing on the device, beside views
FREE = {f"aten::{name}" for name in ("_local_scalar_dense", "_unsafe_view", "empty", "empty_like", "empty_strided")}


class Launches(TorchDispatchMode):
    """Counts operators that start a kernel on a GPU, where a call for a list of tensors (`_foreach_add_`) is one.

    Attributes:
        by_name: how many, by operator.
        bytes: that these have read and written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.bytes = 0

    @property
    def count(self) -> int:
        return sum(self.by_name.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func._schema.name, func(*args, **(kwargs or {}))
        if name.startswith("aten::") and not func.is_view and name not in FREE:
            self.by_name[name] += 1
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        return out
