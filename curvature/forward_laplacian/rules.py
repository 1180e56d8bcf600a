"""How torch functions carry a jet forward: which are linear, bilinear or act entry by entry, and the rule of each kind.

The mode `Taylor` sends every function of jets to its rule in `RULES`, or runs its formula.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from curvature.forward_laplacian.jet import Call, Function, Jet, NoRule, QuadraticForm, Recorded, jets_in, map_arguments
from curvature.functional import FORMULAS, traceable_body

Functions = frozenset[Callable[..., Any]]
Rule = Callable[[Call], Any]
Second = Callable[[Tensor | None, Tensor], Tensor]  # (L, q) to f' L + f'' q; L = None is zero
Derivatives = tuple[Tensor, Tensor, Second]  # f, f', and the second derivatives

RULES: dict[Function, Rule] = {}


class Taylor(TorchFunctionMode):
    """Functions of jets run by their rule, or as their formula; all others run as they are.

    Raises:
        NoRule: a function of jets has neither.
    """

    def __init__(self, form: QuadraticForm) -> None:
        super().__init__()
        self.form = form

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        jets = list(jets_in(args))
        if kwargs:
            jets += jets_in(tuple(kwargs.values()))
        if not jets:
            return func(*args, **kwargs)
        call = Call(self.form, func, jets, args, kwargs)
        if not torch.is_grad_enabled() and func not in METADATA:
            raise NoRule(f"{call.name} with gradients off, as in a custom autograd function")
        if kwargs.get("out") is not None:
            raise NoRule(f"{call.name} with out=")
        rule = RULES.get(func)
        if rule is not None:
            return rule(call)
        formula = FORMULAS.get(func) or traceable_body(func)
        if formula is None:
            raise NoRule(call.name)
        with self:
            return formula(*args, **kwargs)


def register(functions: Iterable[Function]) -> Callable[[Rule], Rule]:
    """Decorator: enter a rule into the table for each of these functions."""

    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return enter


def functions_named(text: str) -> Functions:
    """The functions of these names in all of torch's namespaces."""
    members = (getattr(space, name, None) for name in text.split() for space in SPACES)
    return frozenset(f for f in members if callable(f) and not isinstance(f, type))


def properties(text: str) -> Functions:
    return frozenset(getattr(Tensor, name).__get__ for name in text.split())


SPACES = (torch, Tensor, torch.special, torch._C._nn)

# Known without looking at the values.
METADATA = properties(
    "shape dtype device ndim layout is_cuda is_cpu is_sparse is_quantized is_nested is_meta"
) | functions_named(
    "size dim numel nelement stride is_floating_point is_complex __len__ ndimension element_size is_contiguous "
    "get_device is_pinned is_shared is_same_size is_inference is_conj is_neg result_type is_tensor storage_offset "
    "new_empty new_zeros new_ones new_full new_tensor zeros_like ones_like empty_like "
    "full_like rand_like randn_like randint_like"
)
# Without derivative: the result is that of the value.
VALUES = properties("data") | functions_named(
    "detach eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ not_equal less less_equal greater "
    "greater_equal isnan isinf isfinite isclose allclose equal argmax argmin argsort sign signbit floor ceil round "
    "trunc fix heaviside floor_divide __floordiv__ logical_and logical_or logical_not logical_xor any all "
    "count_nonzero nonzero argwhere searchsorted bucketize __bool__ __float__ __int__ __index__ item tolist "
    "__contains__ bincount long int bool short histc"
)
# Linear in the first argument, with the others fixed.
LINEAR = properties("T mT H mH real") | functions_named(
    "reshape view flatten unflatten squeeze unsqueeze ravel transpose t permute movedim moveaxis swapaxes swapdims "
    "adjoint expand broadcast_to repeat tile repeat_interleave __getitem__ select narrow index_select gather "
    "take_along_dim take masked_select diagonal diag_embed diag tril triu flip fliplr flipud rot90 unfold "
    "split split_with_sizes tensor_split chunk unbind hsplit vsplit dsplit unsafe_chunk unsafe_split "
    "sum mean cumsum trace contiguous clone alias double float half bfloat16 cpu cuda positive __pos__ neg "
    "negative __neg__ pixel_shuffle pixel_unshuffle channel_shuffle view_as_real im2col col2im avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
)
# The same with a bias as third argument.
AFFINE = functions_named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
# The same; only shape and dtype of the other arguments matter.
SHAPED = functions_named("expand_as view_as reshape_as type_as to type")
# Jointly linear in all tensors; those that do not depend on the inputs have zero derivatives.
JOINED = functions_named("cat concat concatenate stack hstack vstack dstack column_stack row_stack")
BILINEAR = functions_named("bmm einsum outer ger inner dot vdot tensordot kron cross linalg_cross vecdot mv") | {
    torch.linalg.cross,
    torch.linalg.vecdot,
    torch.functional.einsum,
}
MATMUL = functions_named("matmul __matmul__ mm") | {torch.linalg.matmul}
# Entry by entry, in any number of tensors that are broadcast.
POINTWISE = functions_named(
    "tanh sin cos exp sigmoid square expit sgn "
    "tan sinh cosh asin acos atan asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh exp2 expm1 log log1p "
    "log2 log10 sqrt rsqrt reciprocal abs absolute __abs__ erf erfc erfinv lgamma digamma sinc logit log_sigmoid "
    "entr ndtr softplus elu selu celu gelu silu mish hardtanh relu relu6 leaky_relu softshrink hardshrink threshold "
    "hardswish clamp clip clamp_min clamp_max deg2rad rad2deg frac nan_to_num "
    "pow __pow__ float_power __rpow__ atan2 arctan2 hypot maximum minimum fmax fmin lerp addcmul addcdiv xlogy xlog1py "
    "logaddexp logaddexp2 fmod remainder __mod__ copysign i0 i0e i1 i1e bessel_j0 bessel_j1"
)

register(METADATA | VALUES)(Call.of_values)
register(properties("requires_grad"))(lambda call: True)


@register([Tensor._is_view])
def refuse_recording(call: Call) -> bool:
    """A recorder calls this on every layer's result, and nothing else does."""
    raise Recorded("a model that is being recorded")


def _jets(value: Any, first: Any, second: Any) -> Any:
    """Jets for one result or several."""
    if isinstance(value, Tensor):
        return Jet(value, first, second)
    seconds = [None] * len(value) if second is None else second
    return tuple(Jet(*parts) for parts in zip(value, first, seconds, strict=True))


def _linear_derivatives(call: Call) -> tuple[Any, Any]:
    """First and second derivatives of a function that is jointly linear in all jets."""
    first = vmap(lambda *parts: call.of(parts))(*(jet.first for jet in call.jets))
    if all(jet.second is None for jet in call.jets):
        return first, None
    return first, call.of(torch.zeros_like(jet.value) if jet.second is None else jet.second for jet in call.jets)


@register(LINEAR)
def linear(call: Call) -> Any:
    if len(call.jets) > 1 or not any(x is call.jets[0] for x in (*call.args[:1], call.kwargs.get("input"))):
        raise NoRule(f"{call.name} of such arguments")
    value = call.of_values()
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return value  # integers have no derivative
    return _jets(value, *_linear_derivatives(call))


@register(functions_named("roll"))
def roll(call: Call) -> Any:
    if call.jets[0].value.ndim:
        return linear(call)
    return call.jets[0]  # there is nothing to roll, where vmap rolls the derivatives


@register(AFFINE)
def affine(call: Call) -> Any:
    """A convolution: linear, but its derivatives leave the bias out."""
    value = call.of_values()  # first, as autograd adds gradients up in the order of calls
    args, kwargs = (*call.args[:2], None, *call.args[3:]), {k: x for k, x in call.kwargs.items() if k != "bias"}
    without_bias = linear(replace(call, args=args, kwargs=kwargs))
    return Jet(value, without_bias.first, without_bias.second)


@register(SHAPED)
def take_form_of(call: Call) -> Any:
    take = lambda x: x.value if isinstance(x, Jet) else x
    first, (*rest,), kwargs = call.args[0], map_arguments(call.args[1:], take), map_arguments(call.kwargs, take)
    if not isinstance(first, Jet):
        return call.func(first, *rest, **kwargs)
    return linear(replace(call, jets=[first], args=(first, *rest), kwargs=kwargs))


@register(JOINED)
def join(call: Call) -> Any:
    constant = lambda x: x if isinstance(x, Jet) else torch.zeros_like(x)
    args, kwargs = map_arguments(call.args, constant), map_arguments(call.kwargs, constant)
    return _jets(call.of_values(), *_linear_derivatives(replace(call, args=args, kwargs=kwargs)))


@register({torch.where})
def where(call: Call) -> Any:
    condition, *both = call.arguments("condition", "input", "other")
    like = call.jets[0].value
    tensors = tuple(x if isinstance(x, Tensor) else like.new_tensor(x) for x in both)
    return join(Call(call.form, lambda *parts: torch.where(condition, *parts), list(jets_in(tensors)), tensors, {}))


@register(BILINEAR)
def bilinear(call: Call) -> Any:
    run = lambda *parts: call.of(parts)
    value = call.of_values()
    if len(call.jets) == 1:
        return _jets(value, *_linear_derivatives(call))
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


@register(MATMUL)
def matmul(call: Call) -> Any:
    a, b = call.arguments("input", "other", "mat2")
    if len(call.jets) == 1 and isinstance(a, Jet) and b.ndim <= 2 and a.value.ndim >= b.ndim:
        return _as_one_product(a.value @ b, a, lambda t: t @ b)
    if len(call.jets) == 1 and isinstance(b, Jet) and a.ndim == 2 and b.value.ndim >= 2:
        return _as_one_product(a @ b.value, b, lambda t: (t.mT @ a.mT).mT)
    return bilinear(Call(call.form, torch.matmul, list(jets_in((a, b))), (a, b), {}))


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


BY_FORMULA: dict[Function, Callable[[Tensor], Derivatives]] = {
    function: derivatives
    for names, derivatives in (
        ("sin", lambda x: _wave(torch.sin(x), torch.cos(x))), ("cos", lambda x: _wave(torch.cos(x), -torch.sin(x))),
        ("tanh", _tanh), ("exp", _exp), ("sigmoid expit", _sigmoid), ("silu", _silu), ("square", _square),
        ("reciprocal", _reciprocal),
    )
    for function in functions_named(names)
}  # fmt: skip


def compose(form: QuadraticForm, jet: Jet, derivatives: Callable[[Tensor], Derivatives]) -> Jet:
    """f(h), with ``f' h_i`` and ``f' L + f'' sum_ij C_ij h_i h_j``."""
    value, slope, second = derivatives(jet.value)
    return Jet(value, slope * jet.first, second(jet.second, form.of(jet.first, jet.first)))


@register(BY_FORMULA)
def by_formula(call: Call) -> Any:
    return compose(call.form, call.jets[0], BY_FORMULA[call.func])


@register(POINTWISE - BY_FORMULA.keys())
def pointwise(call: Call) -> Any:
    """Any number of tensors, by autograd: the gradient of the sum of the results has the derivative of every entry."""
    tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    leaves = [_leaf(jet.value).expand(shape) for jet in call.jets]
    value = call.of(leaves)
    both = list(zip(_gradients(value, leaves), (jet.aligned(len(shape)) for jet in call.jets), strict=True))
    first = _sum([slope * h for slope, h in both if slope is not None])
    if first is None:
        return value.detach()
    seconds = [
        slope * jet.second
        for (slope, _), jet in zip(both, call.jets, strict=True)
        if slope is not None and jet.second is not None
    ]
    for slope, h in both:
        curved = zip(_gradients(slope, leaves), both, strict=True)
        seconds += [entry * call.form.of(h, other) for entry, (_, other) in curved if entry is not None]
    second = _sum(seconds)
    if any(_value(x).requires_grad for x in tensors):
        return Jet(value, first, second)
    return Jet(value.detach(), first.detach(), None if second is None else second.detach())


def _leaf(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


def _sum(terms: Sequence[Tensor]) -> Tensor | None:
    return sum(terms[1:], start=terms[0]) if terms else None


def _gradients(y: Tensor | None, leaves: list[Tensor]) -> Sequence[Tensor | None]:
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


def _scale(x: Any, alpha: float) -> Any:
    """``alpha x`` for a jet, tensor or number."""
    if alpha == 1:
        return x
    if not isinstance(x, Jet):
        return alpha * x
    return Jet(alpha * x.value, alpha * x.first, None if x.second is None else alpha * x.second)


def _add(a: Any, b: Any, alpha: float = 1) -> Jet:
    """``a + alpha b``."""
    operation: Callable[[Any, Any], Any] = operator.sub if alpha == -1 else operator.add
    b = b if alpha == -1 else _scale(b, alpha)
    value = operation(_value(a), _value(b))
    if not isinstance(a, Jet):
        b = _scale(b, alpha) if alpha == -1 else b
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
        ("add __add__ __radd__", lambda form, a, b, alpha: _add(a, b, alpha)),
        ("sub subtract __sub__", lambda form, a, b, alpha: _add(a, b, -alpha)),
        ("rsub __rsub__", lambda form, a, b, alpha: _add(b, a, -alpha)),
        ("mul multiply __mul__ __rmul__", lambda form, a, b, alpha: product(form, a, b)),
        ("div divide true_divide __truediv__ __div__", lambda form, a, b, alpha: quotient(form, a, b)),
        ("__rtruediv__ __rdiv__", lambda form, a, b, alpha: quotient(form, b, a)),
    )
    for function in functions_named(names)
}


@register(ARITHMETIC)
def arithmetic(call: Call) -> Any:
    if call.kwargs.get("rounding_mode") is not None:
        raise NoRule("a rounded quotient")
    a, b = call.arguments("input", "other")
    return ARITHMETIC[call.func](call.form, a, b, call.kwargs.get("alpha", 1))


@register(functions_named("pow __pow__"))
def _power(call: Call) -> Any:
    a, b = call.arguments("input", "self", "exponent")
    if not isinstance(b, Tensor) and b == 2:
        return compose(call.form, a, _square)
    return pointwise(call)
