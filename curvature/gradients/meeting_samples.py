"""Whether the samples of a batch meet inside the model: attention along the batch, features centred over it, graphs.

One sample's output is compared in two batches: the given one, and one in which all other samples are copies of it. Both
passes draw the same random numbers. The parameters are moved a little, since a gate that is zero lets nothing through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from curvature.gradients.batch import Batch
from curvature.linalg import full_precision
from curvature.recording import ModelState, RandomState, Tape, map_tensors, tensors_in

log = logging.getLogger("curvature")
MEETING: WeakKeyDictionary[nn.Module, dict[Any, str]] = WeakKeyDictionary()
STEP = 0.05  # by how much parameters move, beside their own size


class SamplesMeet(ValueError):
    """The output of a sample depends on the other samples of its batch."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: the output of a sample changes with the other samples of its batch, so no sample has a gradient "
            "of its own. curvature.gauss_newton() and curvature.hessian() give the matrices of the batch as it is; "
            "for those of samples, make the model treat each alone (normalise over features, attend within a sample)"
        )


def require_apart(batch: Batch, tape: Tape) -> None:
    """Raise `SamplesMeet` where a sample's output changes with the others."""
    where = where_samples_meet(batch, tape)
    if where:
        raise SamplesMeet(where)


def where_samples_meet(batch: Batch, tape: Tape) -> str:
    """The first module whose output for a sample changes with the others; empty if none does.

    Found by two forward passes for each shape of the input, from where the recorded one began, and remembered.
    """
    modules = MEETING.setdefault(batch.model, {})
    if batch.key not in modules:
        modules[batch.key] = _found(batch, tape.start) if batch.count > 1 else ""
    return modules[batch.key]


@full_precision()
def _found(batch: Batch, start: ModelState | None) -> str:
    n, start = batch.count // 2, start or ModelState(batch.model)
    others = _copies(batch, n)
    ends: list[RandomState] = []

    def rows(part: Batch) -> list[Tensor]:
        with start.again(), torch.no_grad():
            output = part.output()
            ends.append(RandomState(batch.model.modules()))
        return _rows(output, n if part.count > 1 else 0, part)

    try:
        with _moved(batch.model):
            in_batch = rows(batch)
            if not _differ(in_batch, rows(others)):
                return ""
            if ends[0].differs(ends[1].states):  # how many numbers it draws depends on the data: other draws
                return "model" if _depends_on_others(batch, n, start) else ""
            return _first_module(batch.model, n, batch.count, lambda: rows(batch), lambda: rows(others)) or "model"
    except Exception as error:  # whatever a model raises that does not run on such a batch
        log.info("not tried whether samples depend on one another: %s", str(error).split("\n")[0])
        return ""


def _depends_on_others(batch: Batch, n: int, start: ModelState) -> bool:
    """Whether the output of sample n has a gradient at another one's input, in one and the same pass."""
    dim, inputs = batch.dims[0], list[Tensor]()

    def leaf(t: Tensor) -> Tensor:
        if batch.is_uneven or not t.is_floating_point() or t.ndim <= dim or t.shape[dim] != batch.count:
            return t
        inputs.append(t.detach().clone().requires_grad_())
        return inputs[-1]

    tracked = replace(batch, x=map_tensors(leaf, batch.x))
    with start.again(), torch.enable_grad():
        value = sum(row.square().sum() for row in _rows(tracked.output(), n, batch))
    if not inputs or not isinstance(value, Tensor) or not value.requires_grad:
        log.info("not tried whether samples depend on one another: the pass draws as many numbers as the data say")
        return False
    slopes = torch.autograd.grad(value, inputs, materialize_grads=True)
    alone = [torch.zeros_like(g) for g in slopes]
    for g, own in zip(slopes, alone, strict=True):
        own.narrow(dim, n, 1).copy_(g.narrow(dim, n, 1))
    return _differ(list(slopes), alone)


def _copies(batch: Batch, n: int) -> Batch:
    """The batch with sample n in place of every other; bags and packed sequences: of sample n alone."""
    if batch.is_uneven:
        return batch.sample(n)
    dim, count = batch.dims[0], batch.count

    def copied(t: Tensor) -> Tensor:
        if t.ndim <= dim or t.shape[dim] != count:
            return t
        return t.index_select(dim, torch.full((count,), n, device=t.device))

    return replace(batch, x=map_tensors(copied, batch.x))


def _rows(output: Any, n: int, batch: Batch) -> list[Tensor]:
    return [_row(t, n, batch.count, batch.dims[1]) for t in tensors_in(output)]


def _row(t: Tensor, n: int, count: int, dim: int) -> Tensor:
    """The rows of sample n; nothing where they cannot be told."""
    if t.ndim <= dim or not t.is_floating_point() or t.shape[dim] % count:
        return t.new_zeros(0)
    each = t.shape[dim] // count
    return t.narrow(dim, n * each, each)


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether rows of equal shapes differ by more than rounding; those that are not finite say nothing."""
    for a, b in zip(first, second, strict=False):
        eps = max(torch.finfo(torch.promote_types(a.dtype, b.dtype)).eps, torch.finfo(torch.float32).eps)
        comparable = a.shape == b.shape and a.numel() and a.isfinite().all() and b.isfinite().all()
        if comparable and (a - b).norm() > 4 * eps**0.75 * a.norm():
            return True
    return False


@contextmanager
def _moved(model: nn.Module) -> Iterator[None]:
    """Parameters other than they are; what they were comes back bit by bit, and autograd does not see it."""
    generator = torch.Generator().manual_seed(0)
    kept = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
    try:
        for p, value in kept:
            noise = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)
            size = value.square().mean().sqrt() if p.numel() else 0.0
            p.data.add_(noise * (size + 0.1) * STEP)
        yield
    finally:
        for p, value in kept:
            p.data.copy_(value)


def _first_module(model: nn.Module, n: int, count: int, run: Callable[[], Any], other: Callable[[], Any]) -> str:
    """The name of the module that first gives another output for the sample; empty if none is seen to."""
    seen: list[list[tuple[str, list[Tensor]]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[-1].append((name, [_row(t.detach(), n, count, 0) for t in tensors_in(output)]))

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        for each in (run, other):
            seen.append([])
            each()
    finally:
        for hook in hooks:
            hook.remove()
    calls = zip(*seen, strict=False)
    return next((name for (name, a), (again, b) in calls if name == again and _differ(a, b)), "")
