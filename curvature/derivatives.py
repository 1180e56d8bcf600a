"""Functions that differentiate the model: per-sample gradients of Laplacians and other residuals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from curvature import contractions
from curvature.batch import preserved
from curvature.graph import Plain, tape_of
from curvature.structure import PLANS, Plan, explained, sent_back, signature_of
from curvature.study import studied
from curvature.terms import Dense, Term

CHUNK = 1 << 26  # elements of the rows that go back together


def residual_jacobian(model: nn.Module, residual: Callable[..., Tensor], *batch: Tensor) -> dict[str, Tensor]:
    """Gradient of each sample's residual with respect to every parameter, also where the residual differentiates.

    ``residual(model, *batch)`` may call ``torch.autograd.grad(..., create_graph=True)`` on the model, to any order: a
    Laplacian, a divergence, a force. Row n is what it gives for sample n alone, where samples do not mix.

    Args:
        model: any module; its parameters that do not require a gradient are left out.
        residual: a function of the model and the batch, with one value (N,) for each sample.
        batch: tensors whose axis 0 holds the samples. The residual gets them requiring a gradient, detached from the
            caller's, where they are floating point.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of residual / parameter.

    Raises:
        TypeError: `model` is no module, or the residual no tensor.
        ValueError: the residual is not (N,), or nothing requires a gradient.
    """
    parameters = _checked(model, batch)
    with preserved(model):
        own = [x.detach().requires_grad_(x.is_floating_point()) for x in batch]
        with Plain():
            values = residual(model, *own)
        if not isinstance(values, Tensor):
            raise TypeError(f"residual: expected a tensor (N,), found {type(values).__name__}")
        if values.shape != (len(batch[0]),):
            raise ValueError(
                f"residual: expected shape ({len(batch[0])},), one value a sample, found {tuple(values.shape)}"
            )
        terms = rows_of(values, parameters, model)
        return {name: contractions.gradients(parts) for name, parts in terms.items()}


def _checked(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, nn.Parameter]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("model: no parameter requires a gradient")
    if not batch or not all(isinstance(x, Tensor) and x.ndim for x in batch):
        raise TypeError("batch: expected tensors whose axis 0 holds the samples")
    if len({len(x) for x in batch}) > 1 or not len(batch[0]):
        raise ValueError(f"batch: expected as many samples in each tensor, found {[len(x) for x in batch]}")
    return parameters


def rows_of(values: Tensor, parameters: dict[str, nn.Parameter], model: nn.Module) -> dict[str, list[Term]]:
    """The gradient of each of `values` (N,) as terms; the graph is kept, and the only thing that is looked at."""
    tape, nodes = tape_of(values, parameters)
    alone = lambda n: _gradients(values[n], parameters)
    plans = PLANS.setdefault(model, {})
    key = (len(values), nodes, *signature_of(tape))
    plan = plans.get(key) if tape.uses else Plan([], [], set())
    if plan is None:
        terms, plan, certain = studied(tape, values, alone)
        if certain:
            plans[key] = plan
    else:
        backprops = tape.gradients([values], [torch.ones_like(values)]) if tape.uses else []
        terms, _ = explained(tape, backprops, plan.layouts, plan.general)
    if plan.general:
        terms |= _one_by_one(values, {name: parameters[name] for name in parameters if name in plan.general})
    return {
        name: terms.get(name) or [Dense(p.detach().new_zeros(len(values), *p.shape))] for name, p in parameters.items()
    }


def _gradients(value: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _one_by_one(values: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, list[Term]]:
    """The rows by one backward pass each."""
    leaves = list(parameters.values())
    step = max(1, CHUNK // (len(values) * max(p.numel() for p in leaves)))
    eye = torch.eye(len(values), dtype=values.dtype, device=values.device)
    rows = [sent_back(values, part, leaves) for part in eye.split(step)]
    return {name: [Dense(torch.cat(parts))] for name, parts in zip(parameters, zip(*rows, strict=True), strict=True)}
