"""Rules for functions that act on each entry alone, and for arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.forward_laplacian import function_kinds
from curvature.forward_laplacian.jet import Call, Function, Jet, NoRule, QuadraticForm, register

Second = Callable[[Tensor | None, Tensor], Tensor]  # (L, q) to f' L + f'' q; L = None is zero
Derivatives = tuple[Tensor, Tensor, Second]  # f, f', and the second derivatives


def _second(slope: Tensor, curvature: Tensor | float) -> Second:
    """From f' and f''."""
    return lambda L, q: curvature * q if L is None else slope * L + curvature * q


def _tanh(x: Tensor) -> Derivatives:
    f = torch.tanh(x)
    slope = 1 - f * f
    return f, slope, lambda L, q: slope * (-2 * (f * q) if L is None else torch.addcmul(L, f, q, value=-2))


def _wave(f: Tensor, slope: Tensor) -> Derivatives:
    """Of a function with ``f'' = -f``."""
    return f, slope, lambda L, q: -f * q if L is None else torch.addcmul(slope * L, f, q, value=-1)


def _exp(x: Tensor) -> Derivatives:
    f = torch.exp(x)
    return f, f, lambda L, q: f * (q if L is None else L + q)


def _sigmoid(x: Tensor) -> Derivatives:
    f = torch.sigmoid(x)
    slope = f * (1 - f)
    return f, slope, lambda L, q: slope * ((1 - 2 * f) * q if L is None else L + (1 - 2 * f) * q)


def _silu(x: Tensor) -> Derivatives:
    s = torch.sigmoid(x)
    f = x * s
    slope = torch.addcmul(s + f, f, s, value=-1)
    return f, slope, _second(slope, (s - s * s) * (2 + x - 2 * f))


def _square(x: Tensor) -> Derivatives:
    slope = 2 * x
    return x * x, slope, _second(slope, 2.0)


def _reciprocal(x: Tensor) -> Derivatives:
    f = 1 / x
    slope = -f * f
    return f, slope, _second(slope, -2 * f * slope)


FORMULAS: dict[Function, Callable[[Tensor], Derivatives]] = {
    function: derivatives
    for names, derivatives in (
        ("sin", lambda x: _wave(torch.sin(x), torch.cos(x))), ("cos", lambda x: _wave(torch.cos(x), -torch.sin(x))),
        ("tanh", _tanh), ("exp", _exp), ("sigmoid expit", _sigmoid), ("silu", _silu), ("square", _square),
        ("reciprocal", _reciprocal),
    )
    for function in function_kinds.functions_named(names)
}  # fmt: skip


def compose(form: QuadraticForm, jet: Jet, derivatives: Callable[[Tensor], Derivatives]) -> Jet:
    """f(h), with ``f' h_i`` and ``f' L + f'' sum_ij C_ij h_i h_j``."""
    value, slope, second = derivatives(jet.value)
    return Jet(value, slope * jet.first, second(jet.second, form.of(jet.first, jet.first)))


@register(FORMULAS)
def by_formula(call: Call) -> Any:
    return compose(call.form, call.jets[0], FORMULAS[call.func])


@register(function_kinds.POINTWISE - FORMULAS.keys())
def pointwise(call: Call) -> Any:
    """Any number of tensors, by autograd: the gradient of the sum of the results has the derivative of every entry."""
    tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    leaves = [_leaf(jet.value).expand(shape) for jet in call.jets]
    value = call.of(leaves)
    both = list(zip(_derivatives(value, leaves), (jet.aligned(len(shape)) for jet in call.jets), strict=True))
    first = _sum([slope * h for slope, h in both if slope is not None])
    if first is None:
        return value.detach()
    seconds = [
        slope * jet.second
        for (slope, _), jet in zip(both, call.jets, strict=True)
        if slope is not None and jet.second is not None
    ]
    for slope, h in both:
        curved = zip(_derivatives(slope, leaves), both, strict=True)
        seconds += [entry * call.form.of(h, other) for entry, (_, other) in curved if entry is not None]
    second = _sum(seconds)
    if any(_value(x).requires_grad for x in tensors):
        return Jet(value, first, second)
    return Jet(value.detach(), first.detach(), None if second is None else second.detach())


def _leaf(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _sum(terms: Sequence[Tensor]) -> Tensor | None:
    return sum(terms[1:], start=terms[0]) if terms else None


def _derivatives(y: Tensor | None, leaves: list[Tensor]) -> Sequence[Tensor | None]:
    if y is None or not y.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(y.sum(), leaves, create_graph=True, allow_unused=True)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Jet) else x


def _broadcast_jet(value: Tensor, first: Tensor, second: Tensor | None) -> Jet:
    """A jet whose derivatives are expanded to the shape and dtype of the value."""
    shape, dtype = value.shape, value.dtype
    if first.shape[1:] != shape or first.dtype != dtype:
        first = first.to(dtype).expand(-1, *shape)
    if second is not None and (second.shape != shape or second.dtype != dtype):
        second = second.to(dtype).expand(shape)
    return Jet(value, first, second)


def _scaled(x: Any, alpha: float) -> Any:
    """``alpha x`` for a jet, tensor or number."""
    if alpha == 1:
        return x
    if not isinstance(x, Jet):
        return alpha * x
    return Jet(alpha * x.value, alpha * x.first, None if x.second is None else alpha * x.second)


def _added(a: Any, b: Any, alpha: float = 1) -> Jet:
    """``a + alpha b``."""
    operation: Callable[[Any, Any], Any] = operator.sub if alpha == -1 else operator.add
    b = b if alpha == -1 else _scaled(b, alpha)
    value = operation(_value(a), _value(b))
    if not isinstance(a, Jet):
        b = _scaled(b, alpha) if alpha == -1 else b
        return _broadcast_jet(value, b.aligned(value.ndim), b.second)
    first, second = a.aligned(value.ndim), a.second
    if isinstance(b, Jet):
        first = operation(first, b.aligned(value.ndim))
        if b.second is not None:
            second = operation(0 if second is None else second, b.second)
    return _broadcast_jet(value, first, second)


def product(form: QuadraticForm, a: Any, b: Any) -> Jet:
    """``a * b``."""
    if a is b:
        return compose(form, a, _square)
    if not isinstance(a, Jet):
        a, b = b, a
    value, other = a.value * _value(b), _value(b)
    first = a.aligned(value.ndim) * other
    second = None if a.second is None else a.second * other
    if isinstance(b, Jet):
        h = b.aligned(value.ndim)
        first = first + a.value * h
        mixed = 2 * form.of(a.aligned(value.ndim), h)
        second = mixed if second is None else second + mixed
        if b.second is not None:
            second = second + a.value * b.second
    return _broadcast_jet(value, first, second)


def quotient(form: QuadraticForm, a: Any, b: Any) -> Jet:
    """``a / b``."""
    if not isinstance(b, Jet):
        value = a.value / b
        return _broadcast_jet(value, a.aligned(value.ndim) / b, None if a.second is None else a.second / b)
    return product(form, a, compose(form, b, _reciprocal))


Binary = Callable[[QuadraticForm, Any, Any, float], Jet]  # of the two arguments, and of `alpha`
ARITHMETIC: dict[Function, Binary] = {
    function: binary
    for names, binary in (
        ("add __add__ __radd__", lambda form, a, b, alpha: _added(a, b, alpha)),
        ("sub subtract __sub__", lambda form, a, b, alpha: _added(a, b, -alpha)),
        ("rsub __rsub__", lambda form, a, b, alpha: _added(b, a, -alpha)),
        ("mul multiply __mul__ __rmul__", lambda form, a, b, alpha: product(form, a, b)),
        ("div divide true_divide __truediv__ __div__", lambda form, a, b, alpha: quotient(form, a, b)),
        ("__rtruediv__ __rdiv__", lambda form, a, b, alpha: quotient(form, b, a)),
    )
    for function in function_kinds.functions_named(names)
}


@register(ARITHMETIC)
def arithmetic(call: Call) -> Any:
    if call.kwargs.get("rounding_mode") is not None:
        raise NoRule("a rounded quotient")
    a, b = call.arguments("input", "other")
    return ARITHMETIC[call.func](call.form, a, b, call.kwargs.get("alpha", 1))


@register(function_kinds.functions_named("pow __pow__"))
def _power(call: Call) -> Any:
    a, b = call.arguments("input", "self", "exponent")
    if not isinstance(b, Tensor) and b == 2:
        return compose(call.form, a, _square)
    return pointwise(call)
