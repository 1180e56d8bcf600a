"""Whether the samples of a batch meet inside the model: attention along the batch, features centred over it, graphs.

The batch is cut in two. The outputs of each part are compared in two batches: the given one, and one in which copies of
one of its samples stand in for all samples of the other part. So are those of the last sample, beside copies of itself:
they are routed where it is routed, which shows limits on how many are let in there. Run alone, it shows what depends on
its place in the batch or on the number of samples. All passes draw the same random numbers. The parameters are moved a
little, since a gate that is zero lets nothing through. Where samples do not meet, they are drawn together, all near the
last one: if they meet then, the data may open a gate, and every later batch is asked about.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from curvature.attempts import attempt
from curvature.gradients.batch import Batch
from curvature.linalg import full_precision, to_host
from curvature.recording import ModelState, RandomState, Tape, facts_of, map_tensors, moved, tensors_in

log = logging.getLogger("curvature")
Rows = Callable[[Any, Tensor, Batch], list[Tensor]]
SPREAD = 0.1  # of samples close to another one, beside their own size
STEP = 0.05  # by how much parameters move, beside their own size
MOST_STEPS = 1 << 14  # of passes at one shape, that are remembered


@dataclass
class Verdicts:
    """What was found at one shape of the input."""

    # steps (pairs of functions called one after the other) of passes in which samples do not meet: where data choose
    # branches, soon all that there are
    apart: set[Any] = field(default_factory=set)
    meeting: dict[frozenset[Any], str] = field(default_factory=dict)  # by the steps of a pass, the module where they do
    is_gated: bool = False  # whether samples meet at some data, if not at these
    versions: list[tuple[int, int]] = field(default_factory=list)  # of the model's buffers, when last looked at
    filled: tuple[int, ...] = ()  # how many entries of each were not zero: a gate or a mask opens there


UNSTEADY = (
    "model: two passes over the same batch differ, from the same buffers and random numbers of torch: its forward pass "
    "depends on something else, such as a counter or random numbers of NumPy. Keep that in a buffer, with which every "
    "pass begins as it was, or let it rest (in model.eval(), for example)"
)


class SamplesMeet(ValueError):
    """The output of a sample depends on the other samples of its batch."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: the output of a sample changes with the other samples of its batch, so no sample has a gradient "
            "of its own. curvature.gauss_newton() and curvature.hessian() give the matrices of the batch as it is; "
            "for those of samples, make the model treat each alone (normalise over features, attend within a sample)"
        )


def where_samples_meet(batch: Batch, tape: Tape) -> str:
    """The first module whose output for a sample changes with the others; empty if none does.

    Found by six forward passes (eight of 4 or 6 samples) from where the recorded one began and one of a single sample,
    and remembered. It is asked again at another shape of the input; where a pass calls functions in an order or with
    numbers that are new, or entries of buffers have become zero or are zero no more: a flag, a hook or a gate may mix
    samples now; and of every pass in which data may say which samples meet: by three passes and the single sample, at
    the parameters as they are.
    """
    facts = facts_of(batch.model, batch.key)
    known = facts.verdicts = facts.verdicts or Verdicts()
    if tape.meeting is not None:
        return tape.meeting
    flags = (t for m in batch.model.modules() for t in vars(m).values() if isinstance(t, Tensor) and t.numel() == 1)
    both = itertools.chain(batch.model.buffers(), flags)
    buffers = [b for b in both if b.layout is torch.strided and not b.is_inference()]
    versions = [(id(b), b._version) for b in buffers]
    if versions != known.versions:
        known.versions, counts = versions, [torch.count_nonzero(b).float() for b in buffers]
        known.filled = tuple(int(n) for n in to_host(counts)) if counts else ()
    steps = frozenset[Any](itertools.pairwise([None, *tape.functions]))
    if known.filled:
        steps |= {("filled", known.filled)}
    is_new = not steps <= known.apart
    # where data say where samples go, or which of them (as an adjacency matrix does), they say who meets in this pass
    inputs, by_pair = tensors_in(batch.x), (batch.count, batch.count)
    is_open = tape.graph is None or tape.counts or (len(inputs) > 1 and any(t.shape == by_pair for t in inputs))
    is_open |= known.is_gated
    if not is_open and not is_new:
        return ""
    if not is_open and steps in known.meeting:
        return known.meeting[steps]
    assert tape.start is not None
    where = _search(batch, tape.start, is_new) if batch.count > 1 else ""
    if where == UNSTEADY:
        raise ValueError(UNSTEADY)
    if is_new and not where and not is_open:
        known.is_gated = _is_gated(batch, tape.start)
    if len(known.apart) + len(known.meeting) > MOST_STEPS:  # numbers that are others in every pass
        known.apart.clear()
        known.meeting.clear()
    tape.meeting = where
    if where:
        known.meeting[steps] = where
    else:
        known.apart |= steps
    return where


@full_precision()
def _search(batch: Batch, start: ModelState, is_new: bool) -> str:
    moves = _noise(batch.model) if is_new else []
    # a model that raises on copies, of which a covariance has no inverse, may run on samples that are merely close
    attempts = [(_parts(batch.count, is_scattered=False), 0.0), ([], 0.0)]
    if not batch.is_uneven:
        scattered = _parts(batch.count, is_scattered=True)
        attempts = [(scattered, 0.0), attempts[0], (scattered, SPREAD), attempts[1]]
    for parts, spread in attempts:
        with moved(moves):
            compare = partial(_compare, batch, start, parts if is_new else parts[:-1], spread)
            where = attempt(compare, "not tried whether samples depend on one another")
        if where is not None:
            return where
    return ""


@full_precision()
def _is_gated(batch: Batch, start: ModelState) -> bool:
    """Whether samples meet that are near the last one: in its group, within a radius, through a gate that was zero."""
    if batch.count == 1 or batch.is_uneven:
        return False
    together, last = replace(batch, x=_draw_together(batch)), torch.tensor([batch.count - 1], device="cpu")
    compare = partial(_compare, together, start, [last], 0.0)
    with moved(_noise(batch.model)):
        return bool(attempt(compare, "not tried whether samples near each other meet"))


def _draw_together(batch: Batch) -> Any:
    """The input with all samples near the last one, in between and not beyond: what is an index stays in its range."""
    dim, count, inputs = batch.dims[0], batch.count, tensors_in(batch.x)
    generator, away = torch.Generator().manual_seed(0), torch.logspace(-1, -3, count, device="cpu")
    largest = max(inputs, key=torch.numel, default=None)  # tokens, say, beside marks of groups

    def near(t: Tensor) -> Tensor:
        last = t.narrow(dim, count - 1, 1).expand_as(t) if batch.has_samples(t) else t
        if not t.is_floating_point():
            return t if t is largest else last.contiguous()
        drawn = torch.rand(t.shape, generator=generator, device="cpu").to(t)
        each = away.to(t).reshape(-1, *[1] * (t.ndim - dim - 1)) if batch.has_samples(t) else 0.0
        between = (last + each * (t - last)) * (1 - 0.003 * drawn)
        return torch.where(between == 0, 0.1 * drawn, between)

    return map_tensors(near, batch.x)


def _compare(batch: Batch, start: ModelState, parts: list[Tensor], spread: float) -> str:
    def run(one: Batch) -> tuple[Any, RandomState]:
        with start.again(), torch.no_grad():
            return one.output(), RandomState(batch.model.modules())

    everything = torch.arange(batch.count, device="cpu")
    cases = [(kept, *_without_others(batch, kept, spread)) for kept in parts]
    cases.append((everything[-1:], batch.sample(batch.count - 1), everything[:1]))
    output, end = run(batch)
    rows = _rows_of_entries if batch.is_by_entry(output) else _rows
    whole = rows(output, everything, batch)
    # an accelerator may go as far on in its random numbers for fewer samples, and yet draw others for them
    draws_away = any(not torch.equal(a, b) for a, b in zip(start.random.states[1:], end.states[1:], strict=True))
    for kept, other, places in cases:
        call = partial(run, other)
        result = call() if other.count > 1 else attempt(call, "not tried whether a sample alone has the same output")
        if result is None:
            continue
        other_output, other_end = result
        unit = whole if other.count == 1 else None
        if not _differ(rows(output, kept, batch), rows(other_output, places, other), unit):
            continue
        are_redrawn = end.differs(other_end.states) or draws_away and other.count != batch.count
        if other.count == 1 and are_redrawn:  # nor would a gradient show what goes by place
            continue
        if _differ(whole, rows(run(batch)[0], everything, batch)):
            return UNSTEADY
        if not are_redrawn:
            both = zip(_outputs_of_modules(batch, kept, run), _outputs_of_modules(other, places, run), strict=False)
            return next((name for (name, a), (again, b) in both if name == again and _differ(a, b)), "model")
        if _depends_on_others(batch, kept, start, rows):  # other draws: how many they are depends on the data
            return "model"
    return ""


def _parts(count: int, is_scattered: bool) -> list[Tensor]:
    """The samples in two parts, drawn or one after the other, each in order; halves, too, of few; the last sample."""
    order = torch.arange(count, device="cpu")
    if is_scattered:  # the first and the last sample are apart, for models that turn the batch round
        drawn = torch.Generator().manual_seed(0)
        order[1:-1] = 1 + torch.randperm(count - 2, generator=drawn, device="cpu")
    # no divisor in common with the size of the batch: wherever groups of one size meet, one of them is divided
    size = next(k for k in range(count // 2, 0, -1) if math.gcd(k, count) == 1)
    # of 4 and 6 samples that is one, which changes places with no other: halves do
    sizes = [size, count // 2] if size == 1 and count > 3 else [size]
    return [*(part.sort().values for k in sizes for part in (order[:k], order[k:])), order[-1:]]


def _without_others(batch: Batch, kept: Tensor, spread: float = 0.0) -> tuple[Batch, Tensor]:
    """The batch with copies of one kept sample in place of the others, or what is close to it; where kept ones are."""
    if batch.is_uneven:  # the kept ones alone
        return batch.part(slice(int(kept[0]), int(kept[-1]) + 1)), torch.arange(len(kept), device="cpu")
    dim, count = batch.dims[0], batch.count
    source = torch.full((count,), int(kept[0] if kept[0] else kept[-1]), device="cpu")
    source[kept] = kept
    generator = torch.Generator().manual_seed(0)

    def copied(t: Tensor) -> Tensor:
        if not batch.has_samples(t):
            return t
        copies = t.index_select(dim, source.to(t.device))
        if not spread or not t.is_floating_point():
            return copies
        drawn = torch.randn(t.shape, generator=generator, device="cpu").to(t)
        return copies * (1 + spread * drawn.index_fill(dim, kept.to(t.device), 0.0))

    return replace(batch, x=map_tensors(copied, batch.x)), kept


def _depends_on_others(batch: Batch, kept: Tensor, start: ModelState, rows: Rows) -> bool:
    """Whether outputs of kept samples have a gradient at another one's input, in one and the same pass."""
    dim, inputs = batch.dims[0], list[Tensor]()

    def leaf(t: Tensor) -> Tensor:
        if batch.is_uneven or not t.is_floating_point() or not batch.has_samples(t):
            return t
        inputs.append(t.detach().clone().requires_grad_())
        return inputs[-1]

    tracked = replace(batch, x=map_tensors(leaf, batch.x))
    with start.again(), torch.enable_grad():
        value = sum(t.square().sum() for t in rows(tracked.output(), kept, batch))
    if not inputs or not isinstance(value, Tensor) or not value.requires_grad:
        log.info("not tried whether samples depend on one another: the pass draws as many numbers as the data say")
        return False
    slopes = torch.autograd.grad(value, inputs, materialize_grads=True)
    of_kept = [g - g.index_fill(dim, kept.to(g.device), 0.0) for g in slopes]
    return _differ([g.reshape(1, -1) for g in slopes], [g.reshape(1, -1) for g in of_kept])


def _rows(output: Any, kept: Tensor, batch: Batch, axis: int | None = None) -> list[Tensor]:
    """The entries of these samples (len(kept), entries) of each tensor; nothing where they cannot be told."""
    dim, count = batch.dims[1] if axis is None else axis, batch.count
    is_told = lambda t: t.ndim > dim and t.is_floating_point() and t.numel() and t.shape[dim] % count == 0
    rows = lambda t: t.movedim(dim, 0).reshape(count, -1)[kept.to(t.device)]
    return [rows(t) if is_told(t) else t.new_zeros(0) for t in tensors_in(output)]


def _rows_of_entries(output: Any, kept: Tensor, batch: Batch) -> list[Tensor]:
    """The same of a list with an entry for each sample, all in one tensor, with zeros after those of short ones."""
    flat = lambda tree: [t.flatten() for t in tensors_in(tree) if t.is_floating_point()]
    parts = [flat(output[n]) for n in kept.tolist()]
    return [pad_sequence([torch.cat(tensors) for tensors in parts], batch_first=True)] if all(parts) else []


def _differ(first: list[Tensor], second: list[Tensor], unit: list[Tensor] | None = None) -> bool:
    """Whether samples' rows differ by more than rounding, relative to their own size; the root of the mean square."""
    for k, (a, b) in enumerate(zip(first, second, strict=False)):
        if a.shape != b.shape or not a.numel():
            continue
        kind = torch.promote_types(a.dtype, b.dtype)
        eps = max(torch.finfo(kind).eps, torch.finfo(torch.float32).eps)
        norms = partial(torch.linalg.vector_norm, dim=1, dtype=torch.promote_types(kind, torch.float32))
        size, off = norms(a), norms(a - b)
        finite = size.isfinite() & off.isfinite()
        size, off = size[finite], off[finite]
        if len(size) and unit is not None:  # passes over other numbers of samples: sums of a layer may cancel otherwise
            largest = norms(unit[k]).nan_to_num(0.0, 0.0).amax()
            if off.amax() > eps**0.5 * torch.maximum(size.amax(), largest):
                return True
        elif len(size):
            floor = (4 * eps * size.amax()).clamp(min=torch.finfo(size.dtype).tiny)
            if (off / (size + floor)).square().mean().sqrt() > 4 * eps**0.75:
                return True
    return False


def _noise(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """By how much to move each parameter."""
    generator = torch.Generator().manual_seed(0)
    moves = []
    for p in filter(torch.is_floating_point, model.parameters()):
        drawn = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)
        size = p.detach().square().mean().sqrt() if p.numel() else 0.0
        moves.append((p, drawn * (size + 0.1) * STEP))
    return moves


def _outputs_of_modules(batch: Batch, kept: Tensor, run: Callable[[Batch], Any]) -> list[tuple[str, list[Tensor]]]:
    """What modules give for these samples, in the order of their calls."""
    seen: list[tuple[str, list[Tensor]]] = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        seen.append((name, _rows(output, kept, batch, 0)))

    named = [(name, module) for name, module in batch.model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in named]
    try:
        run(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
