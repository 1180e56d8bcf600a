"""Hooks on a model that record its forward passes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from curvature.recording.eager import EAGER_REQUESTS, force_eager_nonreentrant, is_within_compiled, unwrap_compiled
from curvature.recording.recorder import Recorder
from curvature.recording.submodules import SubmoduleHooks
from curvature.recording.tape import Tape, tensors_in


class Listener:
    """Hooks on a root module that record its forward passes; with `inside` also on what is inside, until it is called.

    `start` is asked before every forward pass for the tape to record on (None: do not record); `done` gets the tape and
    the output after it, not after an exception. A copy or a pickle of the module gets inert hooks.

    What is recorded runs uncompiled. A root that ``torch.compile`` returned sees to it when it is called; the hooks of
    others are compiled with them and do nothing, so `expect` has to say before the call that it will be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        start: Callable[[], Tape | None],
        done: Callable[[Tape, Any], None],
        inside: bool = False,
    ) -> None:
        self.model = weakref.ref(model)
        self.parts = SubmoduleHooks(model if inside else nn.Module(), self.enter, self.leave)
        self.start, self.done = start, done
        self.running: list[Recorder | None] = []
        self.plainly = force_eager_nonreentrant()
        self.is_wrapper = unwrap_compiled(model) is not model
        self.missed, self.is_compiled = False, True  # whether passes were compiled since `expect`; may be, henceforth
        self.frames: list[Any] = []  # of the calls that `running` belongs to
        self.handles = [
            model.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Listener,)

    def expect(self, wanted: bool) -> None:
        """Say whether the next forward passes, if with gradients, will be recorded."""
        self.is_compiled |= self.missed
        self.missed = False
        self.parts.forget()
        EAGER_REQUESTS.put(self, wanted and self.is_compiled and not self.is_wrapper)

    @property
    def problem(self) -> str:
        """Why the passes since `expect` do not tell what the model's output is; "" if they do."""
        return self.parts.problem

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.missed = True
            return
        if not self._hears(module):
            return
        if self.frames and self.frames[-1] not in _callers():
            self.reset()  # an interrupt ended that call
        is_part = module in self.parts.modules
        within = self.running if is_part else any(self.running)  # a root that calls itself records once
        tape = None if within else self.start()
        recorder = None if tape is None else Recorder(tape, unwrap_compiled(self.model()))
        if recorder is not None and is_part:
            self.parts.begin(module, list(tensors_in([args, kwargs])))
        elif recorder is not None:
            self.parts.remove()
        self.running.append(recorder)
        self.frames.append(sys._getframe(1))
        if recorder is not None:
            self.is_compiled = is_within_compiled()
            self.plainly.__enter__()
            recorder.mark([args, kwargs])
            recorder.tape.samples = next((len(x) for x in tensors_in([args, kwargs]) if x.ndim), None)
            recorder.__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._hears(module) or not self.running:
            return
        recorder, _ = self.running.pop(), self.frames.pop()
        if recorder is not None:
            self._left(recorder)
            if output is not None or sys.exc_info()[1] is recorder.handled:  # None is what always_call passes after one
                self.done(recorder.tape, output)

    def _hears(self, module: nn.Module) -> bool:
        return hasattr(self, "model") and (module is self.model() or module in self.parts.modules)

    def _left(self, recorder: Recorder) -> None:
        recorder.__exit__(None, None, None)
        self.plainly.__exit__()

    def reset(self) -> None:
        """Leave what an interrupt of the forward pass left entered: torch calls no hook after one."""
        self.frames.clear()
        while self.running:
            recorder = self.running.pop()
            if recorder is not None:
                self._left(recorder)

    def remove(self) -> None:
        self.reset()
        self.expect(False)
        self.parts.remove()
        for handle in self.handles:
            handle.remove()


def _callers() -> list[Any]:
    """The frames of all calls that are running."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


@contextmanager
def capture(model: nn.Module) -> Iterator[Tape]:
    """Record the uses of `model`'s parameters in every forward pass inside the context.

    Usage:
        with capture(model) as tape:
            output = model(x)
        backprops = tape.backprops(output, vectors)

    Parameters that do not require a gradient are not recorded. The hooks are gone when the context ends, also after
    an exception; the activations are views of the tensors that the layers received.

    A model that is compiled (``torch.compile``), as a whole or in parts, runs uncompiled inside the context, as does
    everything else.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: it was compiled inside the context.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    tape = Tape(unwrap_compiled(model))
    listener = Listener(unwrap_compiled(model), lambda: tape, lambda tape, output: None)
    listener.expect(True)
    try:
        yield tape
    finally:
        listener.remove()
    if listener.missed:
        raise RuntimeError("capture: the model ran compiled; call torch.compile before the context begins, not in it")
