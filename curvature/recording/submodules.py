"""Submodules that are called in place of the model: by the `training_step` of a LightningModule, for example."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


class SubmoduleHooks:
    """Hooks on the submodules that hold parameters, until the model itself is called.

    Args:
        modules: all of the model but itself.
        enter, leave: the model's own hooks.
    """

    def __init__(self, modules: Iterable[nn.Module], enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        others = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        with_parameters = [m for m in others if next(m.parameters(), None) is not None]
        self.modules = WeakSet(with_parameters)
        self.last_called = ""  # since the last step
        self.problem = ""  # why the calls do not show the model's output
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
