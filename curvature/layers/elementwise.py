"""Functions that combine a parameter and data entry by entry, with broadcasting; expand, repeat, PReLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.layers.base import Layout, RecordedCall, Rule, Unsupported, register, sum_over_broadcast
from curvature.terms import DenseGradients, Term

_NAMES = [
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "pow", "addcmul",
    "addcdiv", "lerp", "where", "maximum", "minimum", "masked_fill", "atan2", "hypot", "logaddexp",
    "logaddexp2", "xlogy", "copysign", "fmax", "fmin", "remainder", "fmod", "clamp", "clip", "clamp_min",
    "clamp_max", "expand", "expand_as", "broadcast_to",
    "add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "pow_", "addcmul_",
    "addcdiv_", "lerp_",
    *(f"__{kind}{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow") for kind in ("", "r", "i")),
]  # fmt: skip


def _functions(names: Sequence[str]) -> set[Callable[..., Any]]:
    """Those of these names, and the methods of tensors."""
    return {getattr(space, name) for space in (torch, Tensor) for name in names if hasattr(space, name)}


SUMS, PRODUCTS = _functions(["add", "__add__", "__radd__"]), _functions(["mul", "multiply", "__mul__", "__rmul__"])


@register
class ElementwiseRule(Rule):
    """Any function that broadcasts its tensors and acts on each entry alone.

    Differentiating it with the parameter expanded to the output's shape gives the gradients at each place.
    """

    functions = tuple(_functions(_NAMES) | {torch.special.xlogy})
    parameters = tuple(f"arg{k}" for k in range(4)) + ("input", "other", "value", "tensor1", "tensor2", "weight", "end")

    def bind(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        bound: dict[str, Any] = {f"arg{k}": x for k, x in enumerate(args)} | dict(kwargs)
        name = func.__name__
        if name.endswith("_") and not name.endswith("__") or name.startswith("__i"):
            bound["arg0"] = bound["arg0"].detach().clone()  # overwritten by the call itself
        return bound | {"function": func}

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        args = dict(call.args)
        function = args.pop("function")
        shape = args[slot].shape
        if layout.dim >= len(call.shape):
            raise Unsupported("the output has no axis of samples")
        others = [x for name, x in args.items() if name != slot]
        if len(others) == 1 and not b.is_complex() and function in SUMS | PRODUCTS:  # written out, for speed
            per_place = b if function in SUMS else b * others[0]
            return sum_over_broadcast(layout.front(per_place.to(args[slot].dtype)), shape, layout)
        expanded = args[slot].detach().broadcast_to(call.shape).clone().requires_grad_()
        args[slot] = expanded
        with torch.enable_grad():
            rest = {k: v.clone() if k == "arg0" and isinstance(v, Tensor) else v for k, v in args.items()}
            positional = [rest.pop(f"arg{k}") for k in range(len(args)) if f"arg{k}" in args]
            out = function(*positional, **rest)
        if not out.requires_grad:
            raise Unsupported("only its shape counts, as that of the second argument of `expand_as`")
        (per_place,) = torch.autograd.grad(out, expanded, b.to(out.dtype))
        return sum_over_broadcast(layout.front(per_place), shape, layout)


@register
class RepeatRule(Rule):
    """``Tensor.repeat``: an axis of size ``r * s`` holds r copies of s entries."""

    functions = (Tensor.repeat, torch.tile, Tensor.tile)
    parameters = ("input",)

    def bind(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        return {"input": args[0]}

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        shape = call.args["input"].shape
        sizes = (1,) * (len(call.shape) - len(shape)) + tuple(shape)
        if sizes[layout.dim] != 1:
            raise Unsupported("the parameter varies along the axis of the samples")
        out = layout.front(b)
        for k, size in enumerate(sizes, 1):
            out = out.unflatten(k, (-1, size)).sum(k)
        return DenseGradients(out.reshape(len(out), *shape))


@register
class PReLURule(Rule):
    """``z = max(x, 0) + weight * min(x, 0)``, one weight or one per channel (axis 1)."""

    functions = (F.prelu, torch.prelu, Tensor.prelu)
    signature = ("input", "weight")
    parameters = ("weight",)

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        shape = call.args["weight"].shape
        offset = 1 if len(call.shape) > 1 else None
        return sum_over_broadcast(layout.front(b * call.args["input"].clamp(max=0)), shape, layout, offset)
