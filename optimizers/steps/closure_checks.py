"""What a closure may return: the loss, after a backward pass, or residuals. Everything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from curvature.recording import warn_once

BACKWARD = {Tensor.backward, torch.autograd.backward}
EXPECTED = "closure: expected it to return the loss, a tensor of one entry, or residuals (M,)"
DIFFERENTIATES = (
    "closure: its loss differentiates the model (torch.autograd.grad with create_graph=True), and the curvature of the "
    "outputs is not that of their derivatives; return the residuals r (M,), whose loss is 1/2 ||r||^2, and call no "
    "backward(). Penalties on gradients go in a loop without a closure"
)
CALLED_BEFORE = (
    "closure: it returned {} of outputs that the model computed before the closure was called. This step calls the "
    "closure again for other parameters, so the closure itself has to call the model"
)
WITHOUT_THE_MODEL = (
    "closure: it returned {} that depends on no parameter of the optimizer's model; call the very model that the "
    "optimizer was given in it, not a copy"
)


def check_computed(values: Iterable[Tensor], model: nn.Module, start: int, what: str) -> bool:
    """Whether values of a closure depend on parameters; raises if these were read before node `start`, its first."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    todo = [x.grad_fn for x in values]
    seen: set[Any] = set()
    has_read = any(id(x) in trained for x in values)  # a loss that is a parameter
    if has_read or not trained or not todo:
        return True
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for child, _ in node.next_functions:
            if id(getattr(child, "variable", None)) in trained:
                if node._sequence_nr() >= start:
                    return True
                has_read = True
            todo.append(child)
    if has_read:
        raise RuntimeError(CALLED_BEFORE.format(what))
    return False


def checked_value(value: Any) -> Tensor:
    """The value of a closure; refuses what is neither a loss nor residuals."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{EXPECTED}; found {_described(value)}")
    if value.ndim > 1:
        raise TypeError(f"{EXPECTED}; found shape {tuple(value.shape)}")
    return value


def _described(value: Any) -> str:
    if value is None:
        return "None: return the loss at its end"
    if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(x, Tensor) for x in value):
        return f"a {type(value).__name__} of {len(value)}: return the loss alone, or the residuals by torch.cat"
    return f"{value!r:.80} ({type(value).__name__}): return the loss itself"


class ClosureWatch(TorchFunctionMode):
    """Notes what a closure does while it is evaluated: backward passes, derivatives and calls of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.before: list[tuple[Tensor, Tensor | None, int]] = []  # gradients and their versions
        self.calls_backward = self.calls_model = self.differentiates = False
        self.sent_back: list[Tensor] = []  # what backward passes began at

    def __enter__(self) -> ClosureWatch:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.before = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in trained]
        self.start = torch.autograd._get_sequence_nr()
        self.hook = self.model.register_forward_pre_hook(self._note_call)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.hook.remove()
        super().__exit__(*exception)

    def _note_call(self, module: nn.Module, args: Any) -> None:
        self.calls_model = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:
            self.calls_backward = True
            self.sent_back += [x for x in pytree.tree_leaves((args[:1], kwargs)) if isinstance(x, Tensor)]
        self.differentiates |= func is torch.autograd.grad and bool(kwargs.get("create_graph"))
        return func(*args, **kwargs)

    @property
    def has_sent_back(self) -> bool:
        """Whether there was a backward pass, or gradients are new, which zeroed ones are not."""
        return self.calls_backward or any(_is_new(p.grad, g, version) for p, g, version in self.before)

    def loss_or_residuals(self, value: Any) -> Tensor:
        """The value of a closure, a loss () or residuals (M,); a loss of shape (1,) is told by its backward pass."""
        value = checked_value(value)
        return value[0] if value.shape == (1,) and self.has_sent_back else value

    def check_repeatable(self, value: Tensor) -> None:
        """Refuse a value of outputs from before the closure: other parameters do not change it; log one of none."""
        values = [x for x in (value, *self.sent_back) if x.requires_grad]
        what = "residuals" if value.ndim else "a loss"
        if not check_computed(values, self.model, self.start, what):
            warn_once(f"{WITHOUT_THE_MODEL.format(what)}. No step is made", logger="optimizers")

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that differentiates the model, or has a graph through which no backward pass has gone."""
        if self.differentiates:
            raise TypeError(DIFFERENTIATES)
        has_gradients = any(p.grad is not None for p, _, _ in self.before)
        # not if the loss comes from a backward pass before the step
        is_expected = self.calls_model or not has_gradients
        if self.before and loss.requires_grad and not self.has_sent_back and is_expected:
            found = f"a loss ({float(loss.detach()):.3g})"
            raise RuntimeError(
                f"closure: it returned {found} and has sent no gradient back; call loss.backward() in it"
            )


def _is_new(gradient: Tensor | None, before: Tensor | None, version: int) -> bool:
    if gradient is None:
        return False
    return gradient is not before or (gradient._version != version and bool(gradient.to_dense().any()))
