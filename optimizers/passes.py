"""Which recorded forward passes count at a step: those whose gradients were sent back, as in `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from curvature import Blocks


class Pass:
    """What a forward pass has shown; kept alive by the hooks on its outputs."""

    def __init__(self, parts: Any, facts: dict[str, Any], step: object) -> None:
        self.parts, self.facts, self.step = parts, facts, step


class Passes:
    """Recorded passes until a step takes them.

    A pass counts when a gradient arrives at one of its outputs: a look at the model between two steps is none of the
    batch. Where gradients never pass the outputs (a loss of hidden features), the last pass counts.
    """

    def __init__(self) -> None:
        self.step = object()  # which one is to come
        self.last: Pass | None = None
        self.arrived = False  # whether a pass has counted since the last step
        self.facts: dict[str, Any] = {}  # of the last one
        self.is_old = False  # whether what has counted belongs to gradients that were zeroed

    @contextmanager
    def recording(self, factors: Blocks, outputs: Sequence[Tensor], facts: dict[str, Any]) -> Iterator[None]:
        """What is recorded into the factors inside, and the facts, wait for a gradient of these outputs."""
        before = factors.cut()
        try:
            yield
        finally:
            found = Pass(factors.cut(), facts, self.step)
            factors.join(before)
        self.last = found
        arrive = self._arrival(factors, found)
        for x in outputs:
            x.register_hook(arrive)

    def _arrival(self, factors: Blocks, found: Pass) -> Any:
        me = weakref.ref(self)

        def arrive(gradient: Tensor) -> None:
            passes = me()
            if passes is not None and found.step is passes.step:
                passes.begin(factors)
                passes._take(factors, found)
                found.step = None

        return arrive

    def begin(self, factors: Blocks) -> None:
        """A gradient arrives: what is of gradients that were zeroed is forgotten now."""
        if self.is_old:
            factors.discard()
        self.is_old, self.arrived = False, True

    def zero(self) -> None:
        """Gradients are zeroed: what counted until now belongs to none, unless nothing follows before the step."""
        self.is_old = True

    def _take(self, factors: Blocks, found: Pass) -> None:
        factors.join(found.parts)
        self.facts = found.facts

    def settle(self, factors: Blocks) -> dict[str, Any]:
        """A step takes what counts, and the facts. Gradients that come after it are too late: its basis is another."""
        if not self.arrived and self.last is not None:
            self._take(factors, self.last)
        facts = self.facts
        self.forget()
        return facts

    def forget(self) -> None:
        self.step, self.last, self.arrived, self.is_old, self.facts = object(), None, False, False, {}


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
