"""Parts of a model that are called in its place: by the `training_step` of a LightningModule, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn


class SubmoduleHooks:
    """Hooks on the modules inside a model that hold parameters, until the model itself is called.

    `enter` and `leave` are those of the model's own hooks.
    """

    def __init__(self, model: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        others = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
        inside = [m for m in others if next(m.parameters(), None) is not None]
        self.modules = WeakSet(inside)
        self.seen = ""  # the part that was called last, since the last step
        self.problem = ""  # with the parts that were called
        self.handles = [
            handle
            for module in inside
            for handle in (
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            )
        ]

    def begin(self, module: nn.Module, inputs: list[Tensor]) -> None:
        """A pass of one of the parts that is recorded.

        Where it goes on with what another part returned, neither's output is the model's: that is a problem for whoever
        needs this output.
        """
        if self.seen and any(x.grad_fn is not None for x in inputs):
            self.problem = (
                f"{type(module).__name__}: called with the result of {self.seen}, both outside a forward pass of the "
                "model that the optimizer was given, so its output is not known; call them in its forward and call that"
            )
        self.seen = type(module).__name__

    def forget(self) -> None:
        """A step is over."""
        self.seen = self.problem = ""

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.modules = [], WeakSet()
        self.forget()
