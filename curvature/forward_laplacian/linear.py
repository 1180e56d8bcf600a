"""Rules for functions that are linear in each argument, and for those without derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from curvature.forward_laplacian import function_kinds
from curvature.forward_laplacian.jet import Call, Jet, NoRule, Recorded, jets_in, map_arguments, register

register(function_kinds.METADATA | function_kinds.VALUES)(Call.of_values)
register(function_kinds.properties("requires_grad"))(lambda call: True)


@register([Tensor._is_view])
def recorded(call: Call) -> bool:
    """A recorder calls this on every layer's result, and nothing else does."""
    raise Recorded("a model that is being recorded")


def _jets(value: Any, first: Any, second: Any) -> Any:
    """Jets for one result or several."""
    if isinstance(value, Tensor):
        return Jet(value, first, second)
    seconds = [None] * len(value) if second is None else second
    return tuple(Jet(*parts) for parts in zip(value, first, seconds, strict=True))


def _derivatives(call: Call) -> tuple[Any, Any]:
    """First and second derivatives of a function that is jointly linear in all jets."""
    first = vmap(lambda *parts: call.of(parts))(*(jet.first for jet in call.jets))
    if all(jet.second is None for jet in call.jets):
        return first, None
    return first, call.of(torch.zeros_like(jet.value) if jet.second is None else jet.second for jet in call.jets)


@register(function_kinds.LINEAR)
def linear(call: Call) -> Any:
    if len(call.jets) > 1 or not any(x is call.jets[0] for x in (*call.args[:1], call.kwargs.get("input"))):
        raise NoRule(f"{call.name} of such arguments")
    value = call.of_values()
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return value  # integers have no derivative
    return _jets(value, *_derivatives(call))


@register(function_kinds.AFFINE)
def affine(call: Call) -> Any:
    """A convolution: linear, but its derivatives leave the bias out."""
    value = call.of_values()  # first, as autograd adds gradients up in the order of calls
    args, kwargs = (*call.args[:2], None, *call.args[3:]), {k: x for k, x in call.kwargs.items() if k != "bias"}
    without_bias = linear(replace(call, args=args, kwargs=kwargs))
    return Jet(value, without_bias.first, without_bias.second)


@register(function_kinds.SHAPED)
def shaped(call: Call) -> Any:
    take = lambda x: x.value if isinstance(x, Jet) else x
    first, (*rest,), kwargs = call.args[0], map_arguments(call.args[1:], take), map_arguments(call.kwargs, take)
    if not isinstance(first, Jet):
        return call.func(first, *rest, **kwargs)
    return linear(replace(call, jets=[first], args=(first, *rest), kwargs=kwargs))


@register(function_kinds.JOINED)
def joined(call: Call) -> Any:
    constant = lambda x: x if isinstance(x, Jet) else torch.zeros_like(x)
    args, kwargs = map_arguments(call.args, constant), map_arguments(call.kwargs, constant)
    return _jets(call.of_values(), *_derivatives(replace(call, args=args, kwargs=kwargs)))


@register({torch.where})
def where(call: Call) -> Any:
    condition, *both = call.arguments("condition", "input", "other")
    like = call.jets[0].value
    tensors = tuple(x if isinstance(x, Tensor) else like.new_tensor(x) for x in both)
    return joined(Call(call.form, lambda *parts: torch.where(condition, *parts), list(jets_in(tensors)), tensors, {}))


@register(function_kinds.BILINEAR)
def bilinear(call: Call) -> Any:
    run = lambda *parts: call.of(parts)
    value = call.of_values()
    if len(call.jets) == 1:
        return _jets(value, *_derivatives(call))
    if len(call.jets) > 2:
        raise NoRule(f"{call.name} of {len(call.jets)} tensors that depend on x")
    a, b = call.jets
    first = vmap(run, (0, None))(a.first, b.value) + vmap(run, (None, 0))(a.value, b.first)
    second = 2 * vmap(run)(a.first, call.form.times(b.first)).sum(0)
    second = second if a.second is None else second + run(a.second, b.value)
    return Jet(value, first, second if b.second is None else second + run(a.value, b.second))


def _as_one_product(value: Tensor, jet: Jet, product: Callable[[Tensor], Tensor]) -> Jet:
    """All derivatives by one matrix product; the value has its own, which is the layer's node in the graph."""
    if jet.second is None:
        return Jet(value, product(jet.first))
    first, second = product(torch.cat([jet.first, jet.second[None]])).split([len(jet.first), 1])
    return Jet(value, first, second.squeeze(0))


@register({F.linear})
def linear_layer(call: Call) -> Any:
    x, weight, bias, *_ = *call.arguments("input", "weight", "bias"), None
    if len(call.jets) == 1 and x is call.jets[0]:
        return _as_one_product(F.linear(x.value, weight, bias), x, lambda t: F.linear(t, weight))
    raise NoRule("linear with a weight or bias that depends on x")


@register(function_kinds.MATMUL)
def matmul(call: Call) -> Any:
    a, b = call.arguments("input", "other", "mat2")
    if len(call.jets) == 1 and isinstance(a, Jet) and b.ndim <= 2 and a.value.ndim >= b.ndim:
        return _as_one_product(a.value @ b, a, lambda t: t @ b)
    if len(call.jets) == 1 and isinstance(b, Jet) and a.ndim == 2 and b.value.ndim >= 2:
        return _as_one_product(a @ b.value, b, lambda t: (t.mT @ a.mT).mT)
    return bilinear(Call(call.form, torch.matmul, list(jets_in((a, b))), (a, b), {}))
