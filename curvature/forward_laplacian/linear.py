"""Rules for functions that are linear in each argument, and for those without derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from curvature.forward_laplacian import function_kinds
from curvature.forward_laplacian.jet import (
    Args,
    Function,
    Jet,
    Kwargs,
    NoRule,
    QuadraticForm,
    Recorded,
    call_on_values,
    call_with,
    in_order,
    jets_in,
    map_arguments,
    name_of,
    register,
)


@register(function_kinds.METADATA | function_kinds.VALUES)
def without_derivative(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    return call_on_values(func, jets, args, kwargs)


@register([Tensor._is_view])
def recorded(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> bool:
    """A recorder calls this on every layer's result, and nothing else does."""
    raise Recorded("a model that is being recorded")


@register(function_kinds.properties("requires_grad"))
def requires_grad(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> bool:
    return True


def _jets(value: Any, first: Any, second: Any) -> Any:
    """Jets for one result or several."""
    if isinstance(value, Tensor):
        return Jet(value, first, second)
    seconds = [None] * len(value) if second is None else second
    return tuple(Jet(*parts) for parts in zip(value, first, seconds, strict=True))


def _derivatives(func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """First and second derivatives of a function that is jointly linear in all jets."""
    run = lambda *parts: call_with(func, parts, args, kwargs)
    first = vmap(run)(*(jet.first for jet in jets))
    if all(jet.second is None for jet in jets):
        return first, None
    return first, run(*(torch.zeros_like(jet.value) if jet.second is None else jet.second for jet in jets))


@register(function_kinds.LINEAR)
def linear(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    if len(jets) > 1 or not any(x is jets[0] for x in (*args[:1], kwargs.get("input"))):
        raise NoRule(f"{name_of(func)} of such arguments")
    value = call_on_values(func, jets, args, kwargs)
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return value  # integers have no derivative
    return _jets(value, *_derivatives(func, jets, args, kwargs))


@register(function_kinds.AFFINE)
def affine(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    """A convolution: linear, but its derivatives leave the bias out."""
    made = linear(form, func, jets, args, kwargs)
    args = (*args[:2], None, *args[3:])
    return _jets(made.value, *_derivatives(func, jets, args, {k: x for k, x in kwargs.items() if k != "bias"}))


@register(function_kinds.SHAPED)
def shaped(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    take = lambda x: x.value if isinstance(x, Jet) else x
    rest, kwargs = map_arguments(args[1:], take), map_arguments(kwargs, take)
    if not isinstance(args[0], Jet):
        return func(args[0], *rest, **kwargs)
    return linear(form, func, [args[0]], (args[0], *rest), kwargs)


@register(function_kinds.JOINED)
def joined(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    value = call_on_values(func, jets, args, kwargs)
    constant = lambda x: x if isinstance(x, Jet) else torch.zeros_like(x)
    return _jets(value, *_derivatives(func, jets, map_arguments(args, constant), map_arguments(kwargs, constant)))


@register({torch.where})
def where(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    condition, *both = in_order(args, kwargs, "condition", "input", "other")
    like = jets[0].value
    tensors = tuple(x if isinstance(x, Tensor) else like.new_tensor(x) for x in both)
    return joined(form, lambda *parts: torch.where(condition, *parts), list(jets_in(tensors)), tensors, {})


@register(function_kinds.BILINEAR)
def bilinear(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    run = lambda *parts: call_with(func, parts, args, kwargs)
    value = call_on_values(func, jets, args, kwargs)
    if len(jets) == 1:
        return _jets(value, *_derivatives(func, jets, args, kwargs))
    if len(jets) > 2:
        raise NoRule(f"{name_of(func)} of {len(jets)} tensors that depend on x")
    a, b = jets
    first = vmap(run, (0, None))(a.first, b.value) + vmap(run, (None, 0))(a.value, b.first)
    second = 2 * vmap(run)(a.first, form.times(b.first)).sum(0)
    second = second if a.second is None else second + run(a.second, b.value)
    return Jet(value, first, second if b.second is None else second + run(a.value, b.second))


def _as_one_product(value: Tensor, jet: Jet, product: Callable[[Tensor], Tensor]) -> Jet:
    """All derivatives by one matrix product; the value has its own, which is the layer's node in the graph."""
    if jet.second is None:
        return Jet(value, product(jet.first))
    first, second = product(torch.cat([jet.first, jet.second[None]])).split([len(jet.first), 1])
    return Jet(value, first, second.squeeze(0))


@register({F.linear})
def linear_layer(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    x, weight, bias, *_ = *in_order(args, kwargs, "input", "weight", "bias"), None
    if len(jets) == 1 and x is jets[0]:
        return _as_one_product(F.linear(x.value, weight, bias), x, lambda t: F.linear(t, weight))
    raise NoRule("linear with a weight or bias that depends on x")


@register(function_kinds.MATMUL)
def matmul(form: QuadraticForm, func: Function, jets: list[Jet], args: Args, kwargs: Kwargs) -> Any:
    a, b = in_order(args, kwargs, "input", "other", "mat2")
    if len(jets) == 1 and isinstance(a, Jet) and b.ndim <= 2 and a.value.ndim >= b.ndim:
        return _as_one_product(a.value @ b, a, lambda t: t @ b)
    if len(jets) == 1 and isinstance(b, Jet) and a.ndim == 2 and b.value.ndim >= 2:
        return _as_one_product(a @ b.value, b, lambda t: (t.mT @ a.mT).mT)
    return bilinear(form, torch.matmul, list(jets_in((a, b))), (a, b), {})
