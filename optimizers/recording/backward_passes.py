"""Which recorded forward passes count at a step: those whose gradients were sent back, as in `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class Pass:
    """What a forward pass has shown; kept alive by the hooks on its outputs."""

    def __init__(self, parts: Sequence[Any], step: object) -> None:
        self.parts, self.step = parts, step


class Store(Protocol):
    """What a pass is recorded into."""

    def cut(self) -> Any: ...

    def join(self, found: Any) -> None: ...

    def discard(self) -> None: ...


Stores = Sequence[Store]


class Passes:
    """Recorded passes until a step takes them.

    A pass counts when a gradient arrives at one of its outputs: a look at the model between two steps is none of the
    batch. Where gradients never pass the outputs (a loss of hidden features), the last pass counts.
    """

    def __init__(self) -> None:
        self.step = object()  # which one is to come
        self.last: Pass | None = None
        self.arrived = False  # whether a pass has counted since the last step
        self.is_old = False  # whether what has counted belongs to gradients that were zeroed

    @contextmanager
    def recording(self, stores: Stores, outputs: Sequence[Tensor]) -> Iterator[None]:
        """What is recorded into the stores inside waits for a gradient of these outputs."""
        before = [store.cut() for store in stores]
        try:
            yield
        finally:
            found = Pass([store.cut() for store in stores], self.step)
            _join(stores, before)
        self.last = found
        arrive = self._arrival(stores, found)
        for x in outputs:
            x.register_hook(arrive)

    def _arrival(self, stores: Stores, found: Pass) -> Any:
        me = weakref.ref(self)

        def arrive(gradient: Tensor) -> None:
            passes = me()
            if passes is not None and found.step is passes.step:
                passes.begin(stores)
                _join(stores, found.parts)
                found.step = None

        return arrive

    def begin(self, stores: Stores) -> None:
        """A gradient arrives: what is of gradients that were zeroed is forgotten now."""
        if self.is_old:
            for store in stores:
                store.discard()
        self.is_old, self.arrived = False, True

    def zero(self) -> None:
        """Gradients are zeroed: what counted until now belongs to none, unless nothing follows before the step."""
        self.is_old = True

    def settle(self, stores: Stores) -> None:
        """A step takes what counts. Gradients that come after it are too late: its basis is another."""
        if not self.arrived and self.last is not None:
            _join(stores, self.last.parts)
        self.forget()

    def forget(self) -> None:
        self.step, self.last, self.arrived, self.is_old = object(), None, False, False


def _join(stores: Stores, parts: Sequence[Any]) -> None:
    for store, part in zip(stores, parts, strict=True):
        store.join(part)


def is_checkpointed(outputs: Sequence[Tensor]) -> bool:
    """Whether parts of a graph come about only in ``.backward()``: those of ``checkpoint(..., use_reentrant=True)``."""
    todo, seen = [x.grad_fn for x in outputs], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            if type(node).__name__ == "CheckpointFunctionBackward":
                return True
            seen.add(node)
            todo += [other for other, _ in node.next_functions]
    return False
