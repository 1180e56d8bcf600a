"""Plans: how the parameters of a model are explained at one shape of its inputs; kept, confirmed, or learnt.

Which axis of a use's output holds the samples is found by experiment. Of two backward passes, one has unit weights on
the samples' losses and one random weights w: in the backprop of a use, the entries of sample n differ between them by
the factor w[n]. A candidate axis either reproduces the second backprop from the first, or is wrong. Where samples are
mixed no candidate fits. So flattened tokens, windows and sequence-first models come out right without being told.

Terms are then checked against autograd in two ways: by their weighted sum, and by one sample run alone. A parameter
that fails a check takes the general path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import Node as GraphNode

from curvature.attempts import attempt
from curvature.functional import is_of_the_user
from curvature.gradients.batch import Batch
from curvature.gradients.parameter_terms import Backprops, Terms, candidate_axes, terms_by_parameter
from curvature.layers import Layout
from curvature.linalg import full_precision, noise_floor, read, rounding_tolerance, to_device, to_host, widen, widest
from curvature.recording import ModelState, RecordingMode, Tape, Use, call_model, facts_of, map_tensors, warn_once
from curvature.terms import Term, contractions

# the plain gradients of sample n, an index (1,), or None where there are none
Reference = Callable[[Tensor], dict[str, Tensor] | None]


@dataclass
class Plan:
    """How the parameters of a model are explained at one shape of its inputs."""

    layouts: list[list[Layout]]  # of each use: one, or none where its output has no axis of samples
    general: set[str]  # parameters that take the general path
    loop: bool = False  # whether that path is the loop over samples


MOST_KINDS = 16  # of passes at one shape, whose plans are kept
ENTRIES = 512  # of a backprop, that are looked at first for the axis of samples
Signature = tuple[Any, ...]

# Functions that move entries to where a tensor among their arguments says, by the names of their nodes.
DATA_DEPENDENT = {
    "Index", "IndexPut", "IndexSelect", "IndexAdd", "IndexCopy", "IndexReduce", "UnsafeIndex", "UnsafeIndexPut",
    "UnsafeMaskedIndex", "Gather", "Scatter", "ScatterAdd", "ScatterReduce", "SegmentReduce", "Take", "TakeAlongDim",
    "Put", "Sort", "Topk", "MaskedSelect", "MaskedScatter", "Embedding", "RepeatInterleave", "PackPaddedSequence",
}  # fmt: skip
TENSOR = "a tensor"
SETTINGS: dict[type, list[str]] = {}  # by kind of torch's nodes, what they save beside tensors: axes, shifts, sizes


def graph_signature(result: GradientEdge, parameters: Iterable[Tensor]) -> tuple[Any, ...] | None:
    """What Python has decided of how samples move; None where data may: an index, a mask, a function of the user's."""
    leaves, signature = set(map(id, parameters)), []
    nodes, numbers = [result.node], {result.node: 0}
    for node in nodes:  # which grows
        kind, steps = type(node), [step for step, _ in node.next_functions if step is not None]
        if kind.__name__.partition("Backward")[0] in DATA_DEPENDENT:
            may_move = any(id(getattr(step, "variable", None)) not in leaves for step in steps)
        else:
            may_move = kind not in SETTINGS and is_of_the_user(node)
        if may_move:
            return None
        if kind not in SETTINGS:
            # saved tensors have a raw form, too; to look at them would make activation checkpoints compute them anew
            names = [name for name in dir(kind) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
            SETTINGS[kind] = [name for name in names if _setting(node, name) != TENSOR]
        for step in steps:
            if step not in numbers:
                numbers[step] = len(nodes)
                nodes.append(step)
        edges = tuple((numbers[step], output) for step, output in node.next_functions if step is not None)
        signature.append((kind, edges, *(_setting(node, name) for name in SETTINGS[kind])))
    return tuple(signature)


def _setting(node: GraphNode, name: str) -> str:
    try:
        value = getattr(node, name)
    except RuntimeError:  # a tensor that was overwritten in place
        return TENSOR
    if isinstance(value, float):
        return ""  # it moves nothing, and may be another for every batch
    held = value if isinstance(value, tuple) else (value,)  # a tuple: the indices of an index function
    return TENSOR if any(isinstance(x, Tensor) for x in held) else str(value)


def signature_of(tape: Tape) -> Signature:
    """The graph, and functions, shapes and parameters of the uses in order; tapes of equal signature share a plan.

    If data may say where samples go, the graph is None, and where they are is open: the plan is confirmed each time.
    """
    return (tape.graph, *((use.function, use.shape, use.names) for use in tape.uses))


def kept_plan(model: nn.Module, key: Any, tape: Tape) -> Plan | None:
    """The plan that was learnt from such a pass; None without one, and where it has to be confirmed."""
    return None if tape.graph is None else _learnt(model, key, tape)


def _learnt(model: nn.Module, key: Any, tape: Tape) -> Plan | None:
    plan: Plan | None = facts_of(model, key).plans.get(signature_of(tape))
    return plan


def keep_plan(model: nn.Module, key: Any, tape: Tape, plan: Plan) -> None:
    """Keep it, and the last ones of other signatures: several kinds of passes may alternate."""
    plans, signature = facts_of(model, key).plans, signature_of(tape)
    plans.pop(signature, None)
    plans[signature] = plan
    for oldest in list(plans)[:-MOST_KINDS]:
        del plans[oldest]


def record(batch: Batch, start: ModelState) -> tuple[Tape, Any, Plan | None]:
    """The tape and the output of a forward pass from `start`, and its plan; in full precision if that is to be learnt.

    What is learnt compares passes that round differently in TF32. With a known plan, the settings in force hold.
    ValueError where a module makes samples depend on each other.
    """
    is_expected = any(graph is not None for graph, *_ in facts_of(batch.model, batch.key).plans)
    while True:  # again where no plan fits after all: what is learnt then is in full precision
        with nullcontext() if is_expected else full_precision():
            tape = Tape(batch.model, batch.parameters)
            with RecordingMode(tape, batch.model, batch.x):
                output = call_model(batch.model, batch.x)
            output = batch.for_loss(output)
        if isinstance(output, Tensor) and output.requires_grad:
            tape.graph = graph_signature(get_gradient_edge(output), batch.parameters.values())
        plan = kept_plan(batch.model, batch.key, tape)
        if plan is not None or not is_expected:
            break
        is_expected = False
        start.restore()
    tape.start = start
    if isinstance(output, Tensor) and not output.requires_grad:
        names = list(batch.parameters)
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(f"model: its output depends on none of the parameters {few}, as far as autograd knows")
    if tape.mixing:
        raise ValueError(
            f"{', '.join(dict.fromkeys(tape.mixing))}: BatchNorm in training mode makes each sample's output depend "
            "on the others, so no sample has a gradient of its own; call model.eval() or use GroupNorm"
        )
    return tape, output, plan


@full_precision()
def learn(
    model: nn.Module, key: Any, tape: Tape, losses: Tensor, reference: Reference, edge: GradientEdge | None = None
) -> tuple[Plan, list[Tensor | None]]:
    """The plan for a tape, and the backprops of the losses: a kept plan that these confirm, or a new one.

    A new plan is kept unless its batch left a doubt (a sample without gradient does). The host waits once to confirm;
    to learn, once for the axes and once for the checks. The `edge` is where the backward pass of the losses (N,)
    begins, if their own graph does not say it.
    """
    generator = torch.Generator().manual_seed(0)
    weights = 0.5 + torch.rand(len(losses), generator=generator, dtype=torch.float64, device="cpu")
    weights = to_device(weights.to(losses.dtype), losses.device)
    outputs = [losses if edge is None else edge]
    send = lambda weights: tape.gradients(outputs, [to_device(weights.to(losses.dtype), losses.device)])
    backprops = [b if b is None or b.numel() else None for b in tape.gradients(outputs, [torch.ones_like(losses)])]
    is_coarse = coarsest(backprops) > torch.finfo(torch.float32).eps  # as large as what random weights may differ by
    in_order = lambda layouts: follow(layouts, backprops, len(losses), send)
    plan = _learnt(model, key, tape)
    if plan is not None and is_coarse:
        if all(in_order(plan.layouts)):
            return plan, backprops
    elif plan is not None:
        again, _ = find_layouts(backprops, send(weights), weights, plan.layouts)
        if all(b is None or old == new for old, new, b in zip(plan.layouts, again, backprops, strict=True)):
            return plan, backprops
    parameters = [node.tensor for node in tape.parameters.values()]
    both = tape.gradients(outputs, [weights], also=parameters)
    weighted, sums = both[: len(tape.uses)], both[len(tape.uses) :]
    layouts, are_certain = find_layouts(backprops, weighted, weights)
    if is_coarse:
        layouts = [of_use if good else [] for of_use, good in zip(layouts, in_order(layouts), strict=True)]
    terms, failed = terms_by_parameter(tape, backprops, layouts, set(), is_precise=True)
    failed |= failures(tape, terms, losses, weights, sums, backprops, reference)
    _log_general(tape, failed)
    plan = Plan(layouts, failed)
    if all(are_certain):
        keep_plan(model, key, tape, plan)
    return plan, backprops


def single_sample_reference(batch: Batch, one_pass: bool) -> Reference:
    """The plain gradients of sample n run alone; None where that fails, or would be of another function."""

    def reference(n: Tensor) -> dict[str, Tensor] | None:
        alone = lambda: batch.sample(int(n)).gradients()
        return None if one_pass else attempt(alone, f"not compared with sample {int(n)} alone")

    return reference


def failures(
    tape: Tape, terms: Terms, losses: Tensor, weights: Tensor, sums: Sequence[Tensor | None],
    backprops: Backprops, reference: Reference,
) -> set[str]:  # fmt: skip
    """Names of the parameters whose terms are wrong; the host waits once, unless one is."""
    low = coarsest(backprops) ** 0.5
    uneven = {n for u in tape.uses if u.rule and u.call and u.rule.counts_over_batch(u.call) for n in u.names}
    floor = noise_floor(sums)
    both = [(name, g) for name, g in zip(tape.parameters, sums, strict=True) if name in terms and name not in uneven]
    summed = {name: torch.zeros_like(tape.parameters[name].tensor) if g is None else g for name, g in both}

    def sums_to(name: str, norms_squared: Callable[[list[Term]], Tensor]) -> Tensor:
        """Whether the weighted sum of samples' gradients is what autograd gives for that of losses."""
        of_parameter, expected = terms[name], summed[name]
        if not of_parameter:  # what no function reads that torch shows
            return expected.norm() == 0
        noise = floor.to(expected.norm())
        scale = (norms_squared(of_parameter) * weights.to(noise).square()).sum().sqrt()
        difference = (contractions.weighted_sum(of_parameter, weights.to(noise)) - expected).norm()
        return difference <= max(rounding_tolerance(expected), low) * scale + noise

    flags = [sums_to(name, contractions.least_norms_squared) for name in summed]
    n = losses.detach().abs().nan_to_num(0.0, 0.0, 0.0).argmax()[None]  # a sample that counts
    alone = reference(n)
    rows: dict[str, Tensor] = {}
    if alone is not None:
        one = {name: [t.samples(n.to(t.device)) for t in some] for name, some in terms.items() if some}
        rows = {name: contractions.gradients(of_parameter)[0] for name, of_parameter in one.items()}
        flags += agreements(rows, alone, low)
    good = to_host(flags)
    failed = {name for name, flag in zip(rows, good[len(summed) :], strict=True) if not flag}
    doubtful = [name for name, flag in zip(summed, good, strict=False) if not flag]
    failed |= {name for name in doubtful if not sums_to(name, contractions.norms_squared)}
    if low > torch.finfo(torch.float32).eps ** 0.5:  # half precision hides that an axis is wrong for the others, too
        failed |= {name for use in tape.uses if failed.intersection(use.names) for name in use.names}
    return failed


def differences(rows: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose gradients differ by more than rounding; kernels for one sample and for many round differently."""
    return [name for name, same in zip(rows, to_host(agreements(rows, expected)), strict=True) if not same]


def agreements(rows: dict[str, Tensor], expected: dict[str, Tensor], low: float = 0.0) -> list[Tensor]:
    """For each name a flag (): whether rounding, at least `low` (its root), explains what the gradients differ by."""
    floor = noise_floor(expected.values())
    return [
        (g - expected[name]).norm()
        <= 10 * max(torch.finfo(g.dtype).eps ** 0.5, low) * expected[name].norm() + floor.to(g.real)
        for name, g in rows.items()
    ]


def _log_general(tape: Tape, failed: set[str]) -> None:
    """Log which parameters take the general path, and what reads them; once for the same parameters."""
    readers = {
        name: sorted({getattr(u.function, "__name__", str(u.function)) for u in tape.uses if name in u.names})
        for name in sorted(failed)
    }
    unseen = "an autograd.Function or the like"  # what torch does not let a mode see
    names = ", ".join(f"{name} (used in {', '.join(functions) or unseen})" for name, functions in readers.items())
    if names:
        warn_once("no layer rule gives per-sample gradients of %s: computed exactly, but more slowly", names)


@full_precision()
def plan_beside_copy(batch: Batch, tape: Tape) -> Plan | None:
    """The plan of a batch of one sample; None where none is found, as for a model that runs on one sample alone.

    All entries are that sample's there, so nothing shows where a batch has samples. Terms would be right all the same,
    but Kronecker factors need to know: a table of positions that all samples read has none. It shows in a batch of the
    sample and its copy.
    """
    known = _learnt(batch.model, batch.key, tape)
    if known is not None or batch.is_uneven or tape.start is None:
        return known
    dim, key = batch.dims[0], (batch.key, "beside its copy")  # of samples that never meet, so for no other batch
    twice = lambda t: torch.cat([t, t], dim) if t.ndim > dim and t.shape[dim] == 1 else t
    two = replace(batch, x=map_tensors(twice, batch.x), count=2)

    def learn_beside() -> Tape:
        beside, output, _ = record(two, ModelState(two.model))
        probed = two.probe(output)
        learn(batch.model, key, beside, probed.losses(output), single_sample_reference(probed, False))
        return beside

    with tape.start.again():
        beside = attempt(learn_beside, "not compared with the sample beside its copy")
    if beside is None:
        return None
    plan = _learnt(batch.model, key, beside)
    if plan is None or [use.function for use in tape.uses] != [use.function for use in beside.uses]:
        return None
    uses = zip(tape.uses, beside.uses, plan.layouts, strict=True)
    if not all(_is_twice(layouts, use, other) for use, other, layouts in uses):
        return None
    of_one = Plan([[layout._replace(samples=1) for layout in layouts] for layouts in plan.layouts], plan.general)
    keep_plan(batch.model, batch.key, tape, of_one)
    return of_one


def _is_twice(layouts: Sequence[Layout], use: Use, other: Use) -> bool:
    """Whether the outputs of two uses differ by the number of samples at most."""
    expected = list(use.shape)
    for layout in layouts:
        expected[layout.dim] *= 2
    return expected == list(other.shape)


def sample_layouts(tape: Tape, output: Tensor, sample_dim: int = 0) -> list[Layout | None]:
    """The axis of samples in the output of each of `tape.uses`, found by two backward passes.

    Args:
        tape: of a capture that recorded the pass which gave `output`; the graph is kept.
        output: what the model returned, its samples along axis `sample_dim`.

    Returns:
        For each use ``Layout(dim, outer, samples, inner)``: axis `dim` of the use's output has size ``outer * samples *
        inner`` (outer = inner = 1 unless samples are folded with something else). None where no axis holds the samples:
        the output is shared between them, mixes them, or was not reached.
    """
    return _experiment(tape, output, sample_dim)[0]


def certain_layouts(tape: Tape, output: Tensor, asked: Sequence[bool]) -> dict[int, Layout | None]:
    """`sample_layouts` by index of the uses asked for, save those that several axes fit, as below a layer of zeros."""
    layouts, are_certain = _experiment(tape, output, 0, asked)
    return {k: layouts[k] for k, is_asked in enumerate(asked) if is_asked and are_certain[k]}


@full_precision()
def _experiment(
    tape: Tape, output: Tensor, sample_dim: int, asked: Sequence[bool] | None = None
) -> tuple[list[Layout | None], list[bool]]:
    """`find_layouts` of two backward passes; of all uses, or of those that are asked for."""
    count = output.shape[sample_dim]
    generator = torch.Generator(output.device).manual_seed(0)
    wide = widest(output.device.type)
    vector = torch.randn(output.shape, generator=generator, dtype=wide, device=output.device).to(output.dtype)
    weights = (0.5 + torch.rand(count, generator=generator, device=output.device)).to(output.dtype)
    weighted = vector * weights.reshape([-1 if k == sample_dim % output.ndim else 1 for k in range(output.ndim)])
    backprops, weighted_backprops = (tape.gradients([output], [v]) for v in (vector, weighted))
    if asked is not None:
        backprops = [b if is_asked else None for b, is_asked in zip(backprops, asked, strict=True)]
    layouts, are_certain = find_layouts(backprops, weighted_backprops, weights)
    return [next(iter(at_use), None) for at_use in layouts], are_certain


def find_layouts(
    backprops: Sequence[Tensor | None], weighted: Sequence[Tensor | None], weights: Tensor,
    known: Sequence[Sequence[Layout]] | None = None,
) -> tuple[list[list[Layout]], list[bool]]:  # fmt: skip
    """For every use the first candidate that reproduces its weighted backprop up to rounding; the host waits once.

    With a single sample, whose entries they all are, all axes do, those of size one first. All are returned: the rule
    of the layer takes the first that holds none of its features, as it would with many samples. `known` are the
    candidates of each use, if not all `candidate_axes`. Also returns for every use whether no other candidates do (of a
    single sample, whether there are gradients).
    """
    count, floor = len(weights), noise_floor(weighted)
    tried: list[list[Layout]] = []
    flags: dict[int, Tensor] = {}  # of a single sample, whether a use has gradients
    misfits: dict[int, Misfits] = {}
    for k, (b, bw) in enumerate(zip(backprops, weighted, strict=True)):
        if b is None or bw is None:
            tried.append([])
            continue
        size = bw.norm()
        allowed = _tolerance(size, b, floor)
        if known is not None:
            candidates = list(known[k])
        elif count == 1:
            axes = sorted(enumerate(b.shape), key=lambda axis: axis[1] != 1)
            candidates = [Layout(dim, 1, 1, entries) for dim, entries in axes]
        else:
            candidates = list(candidate_axes(tuple(b.shape), count))
            if b.device.type == "cpu":  # elsewhere the host would wait
                candidates = _plausible(candidates, b, bw, weights, allowed)
        tried.append(candidates)
        if count == 1:
            flags[k] = size > allowed
        elif candidates:
            limits = allowed, _tolerance(size, b, torch.zeros_like(floor)), torch.finfo(b.dtype).eps * size
            misfits[k] = Misfits(*limits, [_error(layout, b, bw, weights) for layout in candidates])
    has_gradients, known_misfits = read((flags, misfits))
    if count == 1:
        return tried, [bool(has_gradients.get(k, True)) for k in range(len(tried))]
    fits = [_fitting(layouts, known_misfits[k]) if layouts else [] for k, layouts in enumerate(tried)]
    return [layouts[:1] for layouts in fits], [len(layouts) <= 1 for layouts in fits]


class Misfits(NamedTuple):
    """How far the backprops of a use are from what its candidates say, and what explains it: tensors, then numbers."""

    within_noise: Any
    clear: Any
    rounding: Any
    errors: list[Any]


def _fitting(layouts: list[Layout], misfits: Misfits) -> list[Layout]:
    """Those of a use's candidates that rounding allows: a sample that outweighs all others lets wrong ones pass."""
    for limit in misfits.clear, misfits.within_noise:  # vanishing gradients in a deep network have digits of their own
        good = [(error, layout) for error, layout in zip(misfits.errors, layouts, strict=True) if error <= limit]
        if good:
            near = 10 * min(error for error, _ in good) + misfits.rounding
            return [layout for error, layout in sorted(good, key=lambda pair: pair[0] > near)]
    return []


def follow(
    layouts: Sequence[Sequence[Layout]], backprops: Sequence[Tensor | None], count: int,
    send: Callable[[Tensor], Sequence[Tensor | None]],
) -> list[bool]:  # fmt: skip
    """For each use, whether its layout, one or none, holds the samples in order; the host waits once.

    The weights are 0, 1, 2 and 4: products with them do not round in any precision, so that backprops follow them bit
    by bit, but for sums in an order that changes. Each pass takes one digit of the samples' numbers; `send` gives the
    backprops of losses with weights (N,).
    """
    numbers, flags = torch.arange(count, device="cpu"), []
    rounding = coarsest(backprops)
    while numbers.any():
        weights = numbers % 4
        weights[weights == 3] = 4
        for layout, b, bw in zip(layouts, backprops, send(weights), strict=True):
            if b is None or bw is None or not layout:
                flags.append(torch.ones((), dtype=torch.bool, device="cpu"))
                continue
            kind = torch.finfo(b.dtype)
            underflow = 4 * kind.smallest_normal * kind.eps * b.numel() ** 0.5
            flags.append(_error(layout[0], b, bw, weights) <= 2 * rounding * widen(bw.norm()) + underflow)
        numbers = numbers // 4
    told = to_host(flags)
    return [all(told[k :: len(layouts)]) for k in range(len(layouts))]


def coarsest(backprops: Sequence[Tensor | None]) -> float:
    """The largest rounding of their precisions."""
    return max((float(torch.finfo(b.dtype).eps) for b in backprops if b is not None), default=0.0)


def _tolerance(size: Tensor, b: Tensor, floor: Tensor) -> Tensor:
    return rounding_tolerance(b) * size + floor.to(size)


def _error(layout: Layout, b: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    front = layout.front(b)
    expected = front * weights.to(b).reshape(-1, *[1] * (front.ndim - 1))
    return (expected - layout.front(weighted)).norm()


def _plausible(layouts: list[Layout], b: Tensor, weighted: Tensor, weights: Tensor, allowed: Tensor) -> list[Layout]:
    """Those that some entries of a backprop on the CPU allow, which refute most wrong ones without a copy of it."""
    drawn = torch.randint(max(1, b.numel()), (ENTRIES,), generator=torch.Generator().manual_seed(0), device="cpu")
    places = drawn.unique() if b.numel() else drawn[:0]
    some, expected, weights = b.take(places), weighted.take(places), weights.to(b)

    def seems_right(layout: Layout) -> bool:
        axis = places // math.prod(b.shape[layout.dim + 1 :]) % layout.size
        return bool((some * weights[axis // layout.inner % layout.samples] - expected).norm() <= allowed)

    return list(filter(seems_right, layouts))
