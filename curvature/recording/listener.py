"""Hooks on a model that record its forward passes."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from curvature.arguments import check_module
from curvature.recording.model_call import OURS, force_eager, trained_parameters, unwrap_compiled
from curvature.recording.tape import RecordingMode, Tape, tensors_in

NO_CONTEXTS = ExitStack()
# the function in which torch runs what it has compiled, also where it is forced to run as it was written
COMPILED_FRAME = "compile_wrapper"


@dataclass
class Call:
    """A forward pass that goes on: its frame, what records it, if anything does, and the contexts that it runs in.

    `exception_before` is one that was being handled when the pass began.
    """

    frame: FrameType
    recorder: RecordingMode | None = None
    contexts: ExitStack = NO_CONTEXTS
    exception_before: BaseException | None = None


def running_frames() -> list[FrameType]:
    """Those on the stack, the innermost first."""
    return [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]


class Listener:
    """Hooks on a root module that record its forward passes, while such passes are expected.

    A recorded pass runs uncompiled. A wrapper that ``torch.compile`` returned sees to that when it is called; code that
    was compiled of any other root may know of no hooks, so everything runs uncompiled until the expected pass. A copy
    or a pickle of the module gets inert hooks. `start` is called before every forward pass and returns the tape to
    record on, or None; `done` with the tape and the output after a recorded pass, not after an exception. A
    LightningModule calls submodules: those with parameters are listened to `inside`, until the root itself is called.
    """

    def __init__(
        self,
        model: nn.Module,
        start: Callable[[], Tape | None],
        done: Callable[[Tape, Any], None],
        inside: bool = False,
    ) -> None:
        self.model = weakref.ref(model)
        others = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
        with_parameters = [m for m in others if next(m.parameters(), None) is not None] if inside else []
        self.submodules = WeakSet(with_parameters)
        self.last_called = ""  # the submodule, since the last step
        self.problem = ""  # why the calls since then do not show the model's output
        self.start, self.done = start, done
        self.running: list[Call] = []
        self.is_wrapper = unwrap_compiled(model) is not model
        self.may_be_compiled = True
        self.missed = False  # whether a compiled pass went by since `expect`
        self.is_called = False  # whether an uncompiled one did
        # until the expected pass everything runs uncompiled: models call themselves, or compiled functions call them
        self.eager, self.is_eager = ExitStack(), False
        self.handles: list[Any] = []
        self.submodule_handles: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Listener,)

    @property
    def is_expecting(self) -> bool:
        return bool(self.handles)

    def expect(self, wanted: bool) -> None:
        """Put hooks on the model, if the next forward passes with gradients are to be recorded; else take them off."""
        # a pass that was expected and did not come may have run as compiled code that knows of no hooks
        self.may_be_compiled |= self.missed or (self.is_expecting and not self.is_called)
        self.missed = self.is_called = False
        self.last_called = self.problem = ""
        if wanted and not self.is_expecting and (model := self.model()) is not None:
            self.handles = self._hooks_on([model])
            self.submodule_handles = self._hooks_on(self.submodules)
        elif not wanted:
            self._take_off(self.handles, self.submodule_handles)
        wanted = wanted and self.may_be_compiled and not self.is_wrapper
        if wanted and not self.is_eager:
            self.eager.enter_context(force_eager())
        elif not wanted:
            self.eager.close()
        self.is_eager = wanted

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.missed = True
            return
        if not self._listens_to(module):
            return
        self.is_called = True
        if self.running and self.running[-1].frame not in running_frames():
            self.reset()  # an interrupt ended that call
        is_submodule = module in self.submodules
        # a root that calls itself records once
        is_nested = bool(self.running) and (is_submodule or any(call.recorder for call in self.running))
        tape = None if is_nested else self.start()
        if tape is None:
            self.running.append(Call(sys._getframe(1)))
            return
        recorder, contexts = RecordingMode(tape, unwrap_compiled(self.model()), (args, kwargs)), ExitStack()
        self.running.append(Call(sys._getframe(1), recorder, contexts, sys.exc_info()[1]))
        if is_submodule:
            self._note_call(self._name_of(module), tensors_in(args, kwargs))
        else:
            self._leave_submodules()
        self.may_be_compiled = any(frame.f_code.co_name == COMPILED_FRAME for frame in running_frames())
        contexts.enter_context(force_eager(nonreentrant=True))
        tape.samples = next((len(x) for x in tensors_in(args, kwargs) if x.ndim), None)
        contexts.enter_context(recorder)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._listens_to(module) or not self.running:
            return
        call = self.running.pop()
        if (recorder := call.recorder) is None:
            return
        call.contexts.close()
        # after an exception, always_call passes None as the output
        if output is not None or sys.exc_info()[1] is call.exception_before:
            self.done(recorder.tape, output)

    def _listens_to(self, module: nn.Module) -> bool:
        return not OURS.get() and hasattr(self, "model") and (module is self.model() or module in self.submodules)

    def _note_call(self, name: str, inputs: list[Tensor]) -> None:
        """If a submodule continues with what another has returned, neither output is the model's."""
        if self.last_called and not self.problem and any(x.grad_fn is not None for x in inputs):
            self.problem = (
                f"{name}: called with the result of {self.last_called}, both outside a forward pass "
                "of the model that the optimizer was given, so its output is not known; call them in its forward and "
                "call that, or give the optimizer a module whose forward calls the method of the model that calls them"
            )
        self.last_called = name

    def _name_of(self, submodule: nn.Module) -> str:
        model = self.model()
        modules = () if model is None else model.named_modules()
        return next((name for name, module in modules if module is submodule), type(submodule).__name__)

    def _hooks_on(self, modules: Iterable[nn.Module]) -> list[Any]:
        options: Any = {"prepend": True, "with_kwargs": True}
        before = [module.register_forward_pre_hook(self.enter, **options) for module in modules]
        return before + [module.register_forward_hook(self.leave, always_call=True) for module in modules]

    @staticmethod
    def _take_off(*handles: list[Any]) -> None:
        for each in handles:
            while each:
                each.pop().remove()

    def _leave_submodules(self) -> None:
        self._take_off(self.submodule_handles)
        self.submodules = WeakSet()
        self.last_called = self.problem = ""

    def reset(self) -> None:
        """Leave the contexts of a forward pass that was interrupted: torch calls no hook after an interrupt."""
        while self.running:
            self.running.pop().contexts.close()

    def remove(self) -> None:
        self.reset()
        self.expect(False)


@contextmanager
def capture(model: nn.Module, parameters: Iterable[str] | None = None) -> Iterator[Tape]:
    """Record activations and backprops of every layer, for all forward passes inside the context.

    ``tape.uses`` has one entry for each read of a parameter, with the activation that it met. ``tape.backprops`` sends
    ``vectors`` (k, *output.shape) back from the output and returns what arrives at each use, (k, *use's output):

        with capture(model) as tape:
            output = model(x)
        backprops = tape.backprops(output, vectors)

    Only parameters that require a gradient are recorded; `parameters`, a list of names of parameters or modules,
    restricts this further. Activations are views of what the layers received, not copies. All hooks are removed when
    the context ends, even by an exception. Models compiled by ``torch.compile`` run uncompiled inside the context.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no parameter is called by one of the names.
    """
    check_module(model)
    chosen = None if parameters is None else trained_parameters(model, parameters)
    tape = Tape(unwrap_compiled(model), chosen)
    listener = Listener(unwrap_compiled(model), lambda: tape, lambda tape, output: None)
    listener.expect(True)
    try:
        yield tape
    finally:
        listener.remove()
