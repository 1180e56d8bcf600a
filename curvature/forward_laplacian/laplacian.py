"""Value, gradient and Laplacian of a model with respect to its inputs, in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvature import recording
from curvature.attempts import attempt
from curvature.forward_laplacian.jet import Jet, NoRule, QuadraticForm, Recorded
from curvature.forward_laplacian.rules import Taylor
from curvature.functional import NORMS, ExactNorms, MixesSamples, require_second_derivatives
from curvature.linalg import full_precision, noise_floor, rounding_tolerance
from curvature.recording import preserve_state

Result = tuple[Tensor, Tensor, Tensor]


def laplacian(model: Callable[[Tensor], Any], x: Tensor, weights: Tensor | None = None) -> Result:
    """Value, first derivatives and Laplacian of a model with respect to its inputs, differentiable.

    A forward Laplacian (`arXiv:2307.08214 <https://arxiv.org/abs/2307.08214>`_): one forward pass carries d gradients
    and one sum of second derivatives along, through nearly every function of torch. A model with a function that has no
    rule goes through nested ``torch.autograd.grad`` as a whole, which is exact and slower; the log names it once.

    Args:
        model: a module or function of x that treats samples independently.
        x: (N, *in), floating point; d is the product of `in`. The results can be differentiated by x if it requires
            a gradient.
        weights: C of ``sum_ij C_ij d_i d_j u`` in place of the Laplacian: (d, d) symmetric, or its diagonal (d,). A
            zero leaves the second derivatives by an input out, such as time.

    Returns:
        ``u`` (N, *out), ``grad`` (N, *out, *in) in units of u / x, and ``laplacian`` (N, *out) in units of u / x^2
        (times those of the weights). Of a model with dropout, all three have the same mask. Buffers and random state
        are left as they were, so the next call draws the same mask unless something else is drawn. An empty x (N = 0)
        gives empty results; their shapes come from the model at a row of ones.

    Raises:
        TypeError: the model is not callable, x or weights no floating point tensor, or the model returns none.
        ValueError: a shape does not fit, `weights` is not symmetric, or samples are not apart: a BatchNorm in training
            mode, or what the first call at a shape finds by running two samples alone.
        RuntimeError: an ``autograd.Function`` of the model does not say ``twice_differentiable = True``.
    """
    if isinstance(x, Tensor) and x.ndim and not len(x):
        u, grad, second = laplacian(model, x.new_ones(1, *x.shape[1:]), weights)
        return u[:0], grad[:0], second[:0]
    form, model = QuadraticForm(_check_weights(model, x, weights)), recording.unwrap_compiled(model)
    module = model if isinstance(model, nn.Module) else nn.Module()
    record = torch.is_grad_enabled()
    facts = recording.facts_of(model, ("laplacian", x.shape, x.dtype, tuple(m.training for m in module.modules())))
    is_new = len(x) > 1 and not facts.is_compared
    exactly = full_precision() if is_new else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), exactly:
        given = x.clone() if x.is_inference() else x
        try:
            try:
                with preserve_state(module, is_heard=True):
                    result = _by_rules(model, given, form)
            except MixesSamples:
                raise
            except Exception as error:  # if the model itself is wrong, the plain pass raises its own error
                is_at_fault = not isinstance(error, Recorded)  # a recorder sees all passes
                with preserve_state(module, is_heard=True):
                    result = _by_autograd(model, given, form)
                if is_at_fault:
                    reason = str(error) if isinstance(error, NoRule) else f"what raised {error!r:.200}"
                    recording.warn_once("laplacian: no rule for %s: computed exactly, but more slowly", reason)
        except MixesSamples as error:
            raise ValueError(_mixing_message(module, error)) from None
        if is_new:
            _compare(model, module, given, result[0])
            facts.is_compared = True
    return result if record else (result[0].detach(), result[1].detach(), result[2].detach())


class IndependentNorms(ExactNorms):
    """Every norm runs as its formula; a batch norm in training mode raises `MixesSamples`."""

    formulas = NORMS


def _check_weights(model: Any, x: Any, weights: Any) -> Tensor | None:
    if not callable(model):
        raise TypeError(f"model: expected a module or a function, found {type(model).__name__}")
    for name, t in (("x", x), ("weights", weights)):
        if not (isinstance(t, Tensor) and t.is_floating_point()) and not (name == "weights" and t is None):
            kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name}: expected a floating point tensor, found {kind}")
    if x.ndim == 0 or x.numel() == 0:
        raise ValueError(f"x: expected shape (N, ...) with at least one input, found {tuple(x.shape)}")
    d = math.prod(x.shape[1:])
    if weights is None:
        return None
    if weights.shape not in ((d,), (d, d)):
        raise ValueError(f"weights: expected shape ({d},) or ({d}, {d}), found {tuple(weights.shape)}")
    weights = weights.to(x)
    if weights.ndim == 2:
        difference = (weights - weights.mT).detach().abs().max()
        if not difference <= 10 * torch.finfo(x.dtype).eps * weights.detach().abs().max():
            raise ValueError(f"weights: expected a symmetric matrix, found entries that differ by {difference:.3g}")
    return weights


def _by_rules(model: Callable[[Tensor], Any], x: Tensor, form: QuadraticForm) -> Result:
    d = math.prod(x.shape[1:])
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    first = eye.reshape(d, 1, *x.shape[1:]).expand(d, *x.shape)
    with Taylor(form):
        out = recording.logits(model(Jet(x, first)))
    if not isinstance(out, Jet):
        u = _output(out, x)
        return u, u.new_zeros(*u.shape, *x.shape[1:]), torch.zeros_like(u)
    u = _output(out.value, x)
    grad = out.first.movedim(0, -1).reshape(*u.shape, *x.shape[1:])
    return u, grad, torch.zeros_like(u) if out.second is None else out.second


def _output(u: Any, x: Tensor) -> Tensor:
    if not (isinstance(u, Tensor) and u.is_floating_point()):
        kind = u.dtype if isinstance(u, Tensor) else type(u).__name__
        raise TypeError(f"model: expected it to return a floating point tensor, found {kind}")
    if u.ndim == 0 or len(u) != len(x):
        raise ValueError(f"model: expected an output (N, ...) for the {len(x)} samples of x, found {tuple(u.shape)}")
    return u


def _by_autograd(model: Callable[[Tensor], Any], x: Tensor, form: QuadraticForm) -> Result:
    """By gradients of gradients, one output and one input at a time; the model runs once."""
    y = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
    with IndependentNorms(), sdpa_kernel(SDPBackend.MATH):
        u = _output(recording.logits(model(y)), x)
    require_second_derivatives([u], "laplacian")
    grads, sums = [], []
    for column in u.reshape(len(u), -1).unbind(1):
        grad = _gradient(column, y)
        grads.append(grad)
        weighted = form.times(grad.reshape(len(y), -1).mT)
        seconds = [_gradient(part, y).reshape(len(y), -1)[:, k] for k, part in enumerate(weighted)]
        sums.append(torch.stack(seconds).sum(0))
    result = u, torch.stack(grads, 1).reshape(*u.shape, *x.shape[1:]), torch.stack(sums, 1).reshape(u.shape)
    if x.requires_grad or any(leaf is not y for t in result for leaf in recording.graph_leaves(t)):
        return result
    return result[0].detach(), result[1].detach(), result[2].detach()


def _gradient(values: Tensor, y: Tensor) -> Tensor:
    if not values.requires_grad:
        return torch.zeros_like(y)
    (gradient,) = torch.autograd.grad(values.sum(), y, create_graph=True, materialize_grads=True)
    return gradient


def _compare(model: Callable[[Tensor], Any], module: nn.Module, x: Tensor, u: Tensor) -> None:
    """Raise ValueError where the first or the last sample run alone differs, and the model draws no random numbers."""
    for n in (0, len(x) - 1):
        with preserve_state(module) as state, torch.no_grad():
            call = lambda n=n: recording.logits(model(x[n : n + 1]))[0]
            alone = attempt(call, f"laplacian: not compared with sample {n} alone")
            if alone is None:
                return
            allowed = 10 * rounding_tolerance(u) * u[n].norm() + noise_floor([u])
            if not state.random.differs() and (alone - u[n]).norm() > allowed:
                raise ValueError(
                    f"model: its output for sample {n} of x depends on the other samples, so no sample has a Laplacian "
                    "of its own"
                )


def _mixing_message(module: nn.Module, error: MixesSamples) -> str:
    mixing = {id(x) for x in error.tensors}
    names = [
        name or type(m).__name__
        for name, m in module.named_modules()
        if mixing & {id(x) for x in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    ]
    return (
        f"{names[0] if names else 'a batch norm'}: BatchNorm in training mode makes each sample's output depend on the "
        "others, so no sample has a Laplacian of its own; call model.eval() or use GroupNorm"
    )
