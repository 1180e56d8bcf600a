"""A stand-in for `torch.cuda.CUDAGraph`: what was captured runs again on the same memory, and Python does not.

It refuses what a capture on a GPU refuses: numbers that the host reads, copies from the host, fresh generators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
READS = ATEN._local_scalar_dense.default, ATEN.item.default, ATEN.is_pinned.default, ATEN._pin_memory.default


class Graph(TorchDispatchMode):
    """Records the operators of a context; `replay` writes what they make into the tensors that they made then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func in READS or isinstance(kwargs.get("generator"), torch.Generator):
            raise RuntimeError(f"{func} inside a captured region")
        found = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
        if any(x.device != y.device and x.ndim + y.ndim for x in given for y in made):
            raise RuntimeError(f"{func} copies between devices inside a captured region")
        self.calls.append((func, args, kwargs, made))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(made, again, strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)
