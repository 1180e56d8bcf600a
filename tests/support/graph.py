"""A stand-in for `torch.cuda.CUDAGraph`: what was captured runs again on the same memory, and Python does not.

As on a GPU a capture changes nothing, and numbers of the host are in a replay what they were then. It refuses what a
capture on a GPU refuses: numbers that the host reads or sends, copies between devices, pinned memory, fresh generators.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
READS = ATEN._local_scalar_dense.default, ATEN.item.default, ATEN.is_pinned.default, ATEN._pin_memory.default
COPIES = ATEN._to_copy.default, ATEN.copy_.default
SENDS = (ATEN.lift_fresh.default,)  # torch.tensor(number)


class Graph(TorchDispatchMode):
    """Records the operators of a context; `replay` writes what they make into the tensors that they made then."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors that an operator changes, and what they were
        self.capturing = mock.patch("optimizers.second_order.is_capturing", lambda: True)

    def __enter__(self) -> Any:
        self.capturing.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.capturing.stop()
        with torch.no_grad():
            for x, old in reversed(self.before):
                x.copy_(old)
        self.before.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func in (*READS, *SENDS) or isinstance(kwargs.get("generator"), torch.Generator) or kwargs.get("pin_memory"):
            raise RuntimeError(f"{func} inside a captured region")
        named = dict(zip((own.name for own in func._schema.arguments), args, strict=False)) | kwargs
        written = [named.get(own.name) for own in func._schema.arguments if own.is_write]
        self.before += [(x.detach(), x.detach().clone()) for x in pytree.tree_leaves(written) if isinstance(x, Tensor)]
        found = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
        if any(x.device != y.device and (x.ndim + y.ndim or func in COPIES) for x in given for y in made):
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
