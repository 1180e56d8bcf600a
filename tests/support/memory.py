"""The peak of what tensors take, and the largest of them."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes in tensors of the CPU that a call adds to what there was: each allocation and release counts."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes), default=0)


class Largest(TorchDispatchMode):
    """The number of entries in the memory of the largest tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.entries = max([self.entries, *(x.untyped_storage().nbytes() // x.itemsize for x in tensors)])
        return found
