"""Models that run otherwise than by a call of the module that the user wrote: compiled, or submodule by submodule.

A `TorchFunctionMode` records the forward pass, and compiled code does not enter it. Under
``torch.compiler.set_stance("force_eager")`` compiled modules and functions run as they were written, and stay compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

REENTRANT_CHECKPOINT = "CheckpointFunction"  # the autograd function behind a reentrant checkpoint
COMPILED_FRAME = "compile_wrapper"  # the function in which torch runs what it has compiled


def unwrap_compiled(model: Any) -> Any:
    """The module that ``torch.compile(module)`` was given; anything else as it is."""
    dynamo = sys.modules.get("torch._dynamo")
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = model._orig_mod
    return model


# What contexts here have set and not yet undone. They need not end in the reverse order of their start: the garbage
# collector may end one of them while another is active.
ACTIVE_STANCES: list[Any] = []
REPLACED_CHECKPOINTS: list[Any] = []  # the first is torch's own


@contextmanager
def force_eager() -> Iterator[None]:
    """Inside, compiled code runs as it was written. Does nothing as long as nothing was compiled in this process."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    stance = torch.compiler.set_stance("force_eager")
    ACTIVE_STANCES.append(stance)
    try:
        yield
    finally:
        ACTIVE_STANCES.remove(stance)
        if stance.stance is _current_stance():  # do not end somebody else's
            stance.__exit__(None, None, None)
        for later in ACTIVE_STANCES:
            if later.prev is stance.stance:
                later.prev = stance.prev


@contextmanager
def force_eager_nonreentrant() -> Iterator[None]:
    """`force_eager` with non-reentrant checkpointing: the reentrant form runs the forward pass without gradients."""
    with force_eager():
        REPLACED_CHECKPOINTS.append(getattr(checkpoint, REENTRANT_CHECKPOINT))
        setattr(checkpoint, REENTRANT_CHECKPOINT, NonReentrantCheckpoint)
        try:
            yield
        finally:
            function = REPLACED_CHECKPOINTS.pop()
            if not REPLACED_CHECKPOINTS:
                setattr(checkpoint, REENTRANT_CHECKPOINT, function)


class NonReentrantCheckpoint:
    """Stands in for ``torch.utils.checkpoint.CheckpointFunction``."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _current_stance() -> Any:
    """The stance that is set; torch tells it only to whoever sets another."""
    probe = torch.compiler.set_stance()
    probe.__exit__(None, None, None)
    return probe.prev


class EagerRequests:
    """Requests that the next forward pass run uncompiled. While there is one, everything runs uncompiled.

    The stance is global because no call can decide it: models call themselves, or functions that are compiled as a
    whole call them.
    """

    def __init__(self) -> None:
        self.owners: set[int] = set()
        self.contexts = ExitStack()

    def set(self, owner: object, wanted: bool) -> None:
        """Enter or withdraw the request of an owner."""
        was_forced = bool(self.owners)
        (self.owners.add if wanted else self.owners.discard)(id(owner))
        if self.owners and not was_forced:
            self.contexts.enter_context(force_eager())
        elif was_forced and not self.owners:
            self.contexts.close()


EAGER_REQUESTS = EagerRequests()


def running_frames() -> list[FrameType]:
    """Those on the stack, the innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def is_within_compiled() -> bool:
    """Whether a compiled function is on the stack, also one that is forced to run as it was written."""
    return any(frame.f_code.co_name == COMPILED_FRAME for frame in running_frames())


class SubmoduleHooks:
    """Hooks on submodules with parameters (a LightningModule calls these), until the model itself is called.

    Args:
        modules: all of the model but itself.
        enter, leave: the model's own hooks.
    """

    def __init__(self, modules: Iterable[nn.Module], enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        others = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        with_parameters = [m for m in others if next(m.parameters(), None) is not None]
        self.modules = WeakSet(with_parameters)
        self.last_called = ""  # since the last step
        self.problem = ""  # why the calls since then do not show the model's output
        self.handles = [
            handle
            for module in with_parameters
            for handle in (
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            )
        ]

    def begin(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """Note a recorded pass of a submodule.

        If it continues with what another submodule returned, neither output is the model's: a `problem` for whoever
        needs that output.
        """
        if self.last_called and any(x.grad_fn is not None for x in inputs):
            self.problem = (
                f"{type(module).__name__}: called with the result of {self.last_called}, both outside a forward pass "
                "of the model that the optimizer was given, so its output is not known; call them in its forward and "
                "call that"
            )
        self.last_called = type(module).__name__

    def forget(self) -> None:
        """Begin a new step."""
        self.last_called = self.problem = ""

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.modules = [], WeakSet()
        self.forget()
