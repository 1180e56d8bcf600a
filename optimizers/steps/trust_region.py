"""The step of a plain training loop: the slope along the last step sets the size of the next one, within bounds.

`TrustRegionStep.step` is the algorithm. All decisions are plain Python on numbers of the host. They come by one read of
one vector (`Facts`), which is queued with the direction; a gradient that is clipped takes a second one, and a renewal
asks first whether gradients are finite.

Along the last step the loss falls with one slope at its start and with another at its end. Their ratio says, at no
extra cost, whether the step was too short or too long: 1 where the loss still falls as steeply as at the start, 0 at
the minimum along the line, negative beyond. Bounds on the predicted change of the outputs, and on the change of each
layer's parameters, cut the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.linalg import by_device, widen
from optimizers.distributed.sharding import any_sharded, sum_over_shards, to_local
from optimizers.steps.directions import Direction, Momentum, Spring
from optimizers.steps.layer_vector import (
    Layer,
    LayerVector,
    Layout,
    at_least_single,
    joined,
    norms,
    of_states,
    to_states,
)
from optimizers.steps.rule import (
    Evaluation,
    Named,
    Outcome,
    Renewal,
    StepContext,
    StepRule,
    kept_by_decay,
    layout_of_step,
)


@dataclass(frozen=True)
class TrustRegionConstants:
    """The numbers of the algorithm. None is derived: they come from experiments, see docs/lab_book.md."""

    first_output_change: float = 0.3  # rms change of an output entry that the first step aims at, before bounds
    # how the step size follows the slopes
    rate: float = 0.3  # of growth per step in the first steps, where the loss falls as steeply as before
    late_rate: float = 0.1  # later: where other networks change the loss (GANs), slopes are positive at any step size
    shrink: float = 1.0  # limit per step, over their number: without replacement, slopes are negative at any step size
    slope_decay: float = 0.9  # of the running means of slopes
    straight: float = 0.9  # a larger ratio of slopes says that the loss falls as steeply as before
    start: float = 40.0  # steps after which `rate` has halved
    flat: float = 1e-5  # of the steepest slope: smaller ones are rounding, or the loss is zero, and are ignored
    lr_growth: float = 1.1  # per step, of the learning rate that is taken for the usual one
    lowered: float = 1.5  # an lr smaller than the usual one by this factor was lowered: the step size does not grow
    # overshoots
    overshoot: float = 2.0  # a ratio of slopes this far below min(mean, 0), with a long gradient: the step is undone
    least_shrink: float = 0.2  # of the step size after an overshoot
    # bounds
    first_trust: float = 0.15  # first and least bound on a layer, as a share of its norm, over the root of their number
    largest_trust: float = 0.2  # that bound grows no further
    wider: float = 1.1  # the bound on layers at each step after which the loss falls as steeply as before ...
    narrower: float = 0.8  # ... and at each other step
    slack: float = 2.0  # how far the step size may stay above the steps that the bounds on the layers allow
    change_factor: float = 1.5  # longest change of the outputs for step size one, as a multiple of its running mean
    change_decay: float = 0.95  # of that running mean
    largest_output_change: float = 0.2  # of one plus the outputs' root mean square, for the gradient of the step
    least_output_change: float = 0.06  # floor of the step size, in the same units, for the largest gradient ...
    less: float = 0.9  # ... times this at each sign of instability, for good ...
    quiet: float = 1 / 3  # ... times this power of how far gradients have shrunk: so has their noise
    largest_quiet: float = 4.0  # of that factor
    memory: float = 0.999  # decay of the steepest slope, the largest change and the longest gradient
    longest_gradient: float = 2.0  # gradients are clipped to this multiple of the running mean of their norms
    long_gradient: float = 1.5  # a longer one is taken for a sign of instability ...
    spreads: float = 2.5  # ... if it is longer than the mean by this many standard deviations, too
    norm_decay: float = 0.97  # of that mean, which must not follow an instability that builds up over some steps
    far_gradient: float = 100.0  # times that mean: such gradients are no sign of instability ...
    most_far: float = 2.0  # ... after this many in a row the loss has another scale: the next one begins anew
    # how many gradients the running mean remembers
    ratio_decay: float = 0.99  # of the mean ratio of slopes: where it is above one, others change the loss ...
    ratio_start: float = 30.0  # ... which begins as the mean of so many zeros
    largest_ratio: float = 3.0  # that counts
    forget: float = 0.94  # of the memory, at each step while that mean is above one: what is remembered is out of date
    recover: float = 1.001  # of the memory, at each other step
    least_recall: float = 0.01  # of the memory
    # curvature that is measured along steps
    energy_decay: float = 0.3  # of sums of energies, per renewal: where steps go changes fast
    largest_scale: float = 4.0  # by how much the direction of a layer is made longer or shorter


class TrustState(NamedTuple):
    """What is known of how far to go."""

    size: float  # multiplies the direction
    trust: float  # longest step of a layer, relative to the norm of its parameters
    change: float  # running root mean square of the outputs' predicted change for step size one
    largest_change: float  # its largest value, slowly forgotten
    least_output_change: float  # of 1 + the outputs' rms, for the largest change: the step size shrinks no further
    norm: float  # running mean of the gradients' norms, each clipped
    slope: float = 0.0  # predicted, of the loss along the last step at its start: negative; zero if there is none
    uncut: float = 0.0  # what the slope would be without the bounds on the layers
    starts: float = 0.0  # running means of the slopes at the start ...
    ends: float = 0.0  # ... and at the end of steps
    steepest: float = 0.0  # the largest absolute slope, slowly forgotten
    spread: float = 0.0  # running standard deviation of the gradients' norms
    lr: float = 0.0  # the largest so far, which rises by a tenth per step: one that is large for a few does not count
    overshoots: float = 0.0  # how many steps were undone
    largest_norm: float = 0.0  # the largest value of `norm`, slowly forgotten
    ratio: float = 0.0  # running mean of the ratio of slopes; above one where the loss steepens along the steps
    recall: float = 1.0  # share of the usual number of gradients that the running mean remembers
    measured: float = 0.0  # decayed sums of the energies of steps, of all layers together
    predicted: float = 0.0
    far: float = 0.0  # how many gradients in a row were far longer than the mean

    @property
    def made(self) -> float:
        """The step size of the last step, as far as the bounds on the layers have left its slope."""
        return self.size * (self.slope / self.uncut if self.uncut else 1.0)

    @property
    def underestimate(self) -> float:
        """Measured over predicted squared change of the outputs, along recent steps; 1 where nothing was measured."""
        return self.measured / self.predicted if self.predicted else 1.0


@dataclass
class LayerEnergies:
    """Energies ``u^T M u`` of the steps of a layer."""

    last: float = 0.0  # predicted for the last step
    measured: float = 0.0  # decayed sum over renewals of ``(v^T J u)^2``, and of what was predicted of these
    predicted: float = 0.0


class Facts(NamedTuple):
    """What the host learns of a step, by one read."""

    norm: float  # of the gradient; not finite if an entry is not, or squares overflow
    along_last: float  # inner product of gradient and last step
    products: list[float]  # ``u^T right`` of each layer: its energy and what damping adds
    slopes: list[float]  # along u, positive for descent
    lengths: list[float]  # of u
    sizes: list[float]  # norm of each parameter

    def scaled(
        self, scales: Sequence[float], dampings: Sequence[float]
    ) -> tuple[list[float], list[float], list[float]]:
        """Slopes, energies ``u^T M u`` and lengths of the layers' directions, multiplied by these scales."""
        slopes = [_or_zero(scale * slope) for scale, slope in zip(scales, self.slopes, strict=True)]
        each = zip(scales, self.products, dampings, self.lengths, strict=True)
        energies = [scale**2 * _energy(product, damping, length) for scale, product, damping, length in each]
        return slopes, energies, [scale * length for scale, length in zip(scales, self.lengths, strict=True)]


class TrustRegionStep(StepRule):
    """Adapts the step size by the slope along the last step; needs no closure."""

    def __init__(self, direction: Momentum | Spring, constants: TrustRegionConstants = TrustRegionConstants()) -> None:
        self.direction, self.constants = direction, constants
        self.first_step = 0  # number of the first step that it makes
        self.state: TrustState | None = None  # None before the first step
        self.energies: dict[str, LayerEnergies] = {}  # by their first parameters
        self.last: LayerVector | None = None  # step, as the states of parameters have it

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        c, loss, preconditioner, renewal = self.constants, evaluation.value, context.preconditioner, Renewal()
        if not (gradients := context.gradients()):
            return Outcome(loss)

        # 1. where it is due, renew the curvature's running average, and the inverses of blocks
        if preconditioner.has_nothing_due():
            preconditioner.recorder.scaling.unscale(gradients)
        elif preconditioner.has_seen_empty_batches_only() or not context.unscale_and_check_finite(gradients):
            return self._left_out(context, loss, gradients)
        else:
            renewal = context.renew(gradients)
            self._compare_energies(context)

        # 2. the direction u = (M + damping)^-1 m, m the running mean of clipped gradients and a share of this one
        with preconditioner.monitor.timed("direction"):
            g = LayerVector.of(layout_of_step(context, gradients), gradients)
            last, state, ratio = self._last(context, g.layout), self.state, 0.0
            direction, facts = self._directed(context, g, last)
        if not math.isfinite(facts.norm):
            return self._left_out(context, loss, gradients)

        # 3. the last step, seen from its end; one that went far too far is undone
        if state is not None:
            ratio = slope_ratio(facts.along_last, state.slope)
            if is_overshoot(state, ratio, facts.norm, c):
                self.state = undone(state, ratio, c)
                return Outcome(loss, self._undo(context, last), self._entry(renewal), renewal)

        # 4. each layer's direction on the scale of its measured curvature; the outputs' change for step size one
        layout, scales = g.layout, self._scales(g.layout)
        slopes, energies, lengths = facts.scaled(scales, direction.dampings)
        change = math.sqrt(sum(energies) * self._output_gain(context))

        # 5. the step size follows the slopes, within bounds on the change of the outputs; lr multiplies it afterwards
        steps, lr = preconditioner.monitor.steps - self.first_step, max([own["lr"] for own in context.options.values()])
        least_trust = c.first_trust / math.sqrt(max(preconditioner.layer_count, 1))
        if state is None:
            state = started(change, facts.norm, least_trust, c)
        elif has_new_scale(state, facts.norm, c):
            state = restarted(state, started(change, facts.norm, least_trust, c))
        else:
            state = adapted(remembered(state, facts.along_last, steps, c), ratio, facts.norm, steps, lr, least_trust, c)
        state, size = bounded(state, change, context.outputs.rms, c)

        # 6. no layer moves by more than lr times a share of its norm
        lrs = [context.options[first]["lr"] for first, *_ in layout.layers]
        rates = within_trust(layout, size, state.trust, lengths, facts.sizes, lrs)

        # 7. the step, and what is to be known of it at the next one
        direction.keep()
        direction.u.multiply_layers_([-rate * scale for rate, scale in zip(rates, scales, strict=True)])
        # energies and slope are those before rows are cut
        _bound_rows(context, direction.u, state.trust, facts.sizes)
        decay_weights(context, layout)  # in place, before the optimizer adds the step
        self._keep(context, direction.u, [rate**2 * energy for rate, energy in zip(rates, energies, strict=True)])
        slope = -sum([rate * own for rate, own in zip(rates, slopes, strict=True)])
        uncut = -size * sum([own_lr * own for own_lr, own in zip(lrs, slopes, strict=True)])
        self.state = state._replace(slope=slope, uncut=uncut)
        return Outcome(loss, direction.u.views, self._entry(renewal), renewal)

    def _entry(self, renewal: Renewal) -> dict[str, Any]:
        assert self.state is not None
        own = {"step_size": self.state.size, "overshoots": int(self.state.overshoots)}
        return {"renewed": renewal.renewed, "inverted": renewal.inverted, "accepted": True} | own

    # -- methods that read or write what is kept

    def _directed(self, context: StepContext, g: LayerVector, last: LayerVector) -> tuple[Direction, Facts]:
        """The direction and the facts of the step; one batch far out of scale must not dominate the running mean."""
        state, most = self.state, self.constants.longest_gradient
        found = self.direction(context, g, state.recall if state else 1.0)
        facts = _read(context, g, last, found)
        if state is None or not 0 < most * state.norm < facts.norm < math.inf:  # after zeros alone none is too long
            return found, facts
        if has_new_scale(state, facts.norm, self.constants):
            return found, facts
        g.multiply_(most * state.norm / facts.norm)
        found = self.direction(context, g, state.recall)
        # the last step is judged by the gradient as it came
        return found, _read(context, g, last, found)._replace(norm=facts.norm, along_last=facts.along_last)

    def _left_out(self, context: StepContext, loss: Any, gradients: Named) -> Outcome:
        """A batch that is not finite is left out; the second in a row undoes the last step and shortens the next."""
        preconditioner = context.preconditioner
        # without a slope there is no last step: an undone one must not shrink the step size at each batch that follows
        is_first = self.state is None or not self.state.slope or preconditioner.monitor.was_accepted
        if is_first or preconditioner.has_seen_empty_batches_only():
            return Outcome(loss, is_skipped=True)
        # a GradScaler has bad batches until it has found its scale, whatever the last step was
        if not preconditioner.recorder.scaling.has_worked(preconditioner.team.processes):
            return Outcome(loss, is_skipped=True)
        assert self.state is not None
        last = self._last(context, layout_of_step(context, gradients))
        self.state = undone(self.state, -math.inf, self.constants)
        return Outcome(loss, self._undo(context, last), is_skipped=True)

    def _last(self, context: StepContext, layout: Layout) -> LayerVector:
        """The last step, zeros where there was none; parameters that do not move now have none any more."""
        moving = set(layout.names)
        for name in context.trained.keys() - moving:
            context.states[name].pop("displacement", None)
        return of_states(layout, "displacement", context.states, context.trained, self.last)

    def _keep(self, context: StepContext, d: LayerVector, energies: Sequence[float]) -> None:
        """Keep the step, and what was predicted of it for each layer."""
        self.last = d
        to_states(d, "displacement", context.states, context.trained)
        for (first, *_), energy in zip(d.layout.layers, energies, strict=True):
            self.energies.setdefault(first, LayerEnergies()).last = energy

    def _undo(self, context: StepContext, last: LayerVector) -> dict[str, Tensor]:
        """The displacement that undoes the last step, of which nothing is kept."""
        back = {name: x.neg() for name, x in last.items()}
        for x in last.vectors:
            x.zero_()
        self._keep(context, last, [0.0] * len(last.layout.layers))  # it may be a copy of what the states have
        return back

    def _compare_energies(self, context: StepContext) -> None:
        """Note what a renewal has measured along the last step beside what was predicted."""
        # A block knows its layer alone, and as a product of two factors. Its ``u^T M u`` may be a hundredth of the
        # squared change that u causes, where the positions of a sample, or several layers, pull in one direction.
        state, along, whole = self.state, context.outputs.along, 0.0
        if state is None:
            return
        for block in context.preconditioner.blocks:
            own = [self.energies[name] for name in block.names if name in self.energies]
            if block.names[0] in along and own:
                predicted = sum(layer.last for layer in own)
                sums = _noted(own[0].measured, own[0].predicted, along[block.names[0]], predicted, self.constants)
                for layer in own:
                    layer.measured, layer.predicted = sums
                whole += predicted
        if whole and along[""]:
            context.preconditioner.schedule.note_energies(along[""], whole * state.underestimate)
            sums = _noted(state.measured, state.predicted, along[""], whole, self.constants)
            self.state = state._replace(measured=sums[0], predicted=sums[1])

    def _scales(self, layout: Layout) -> list[float]:
        """The factor of each direction: less in layers whose curvature is underestimated more than elsewhere."""
        nothing = LayerEnergies()
        own = [self.energies.get(first, nothing) for first, *_ in layout.layers]
        measured, predicted = sum([layer.measured for layer in own]), sum([layer.predicted for layer in own])
        most = self.constants.largest_scale
        return [
            min(max(measured / predicted * layer.predicted / layer.measured, 1 / most), most) if layer.measured else 1.0
            for layer in own
        ]

    def _output_gain(self, context: StepContext) -> float:
        """Mean square change of an output entry that is predicted for a step of energy one."""
        return (1.0 if self.state is None else self.state.underestimate) / context.outputs.entries_per_sample

    def last_displacement(self, states: Mapping[str, dict[str, Any]]) -> Named:
        found = {name: state.get("displacement") for name, state in states.items()} if self.energies else {}
        return {name: d for name, d in found.items() if d is not None}

    # -- checkpoints

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.direction.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        own = dict.fromkeys(TrustState._fields) if self.state is None else self.state._asdict()
        return own | {"energies": {name: asdict(layer) for name, layer in self.energies.items()}}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        own = {name: float(state[name]) for name in TrustState._fields if state.get(name) is not None}
        self.state = TrustState(**own) if own else None
        self.energies = {name: LayerEnergies(**layer) for name, layer in state["energies"].items()}
        self.last = None


# -- one read


def _read(context: StepContext, g: LayerVector, last: LayerVector, found: Direction) -> Facts:
    """Ask for all numbers at once; all processes go by those of the first."""
    layout, trained, home = g.layout, context.trained, g.layout.home
    parameters, is_spread = [trained[name] for name in layout.names], any_sharded(trained.values())
    runs, layers = len(layout.runs), len(layout.layers)
    products = found.u.layer_dots(found.right)
    slopes = [] if found.slope_of is found.right else found.u.layer_dots(found.slope_of)
    local = list(map(to_local, parameters)) if is_spread else parameters
    # g·last by run; u·right, and u·slope_of if it is another, by layer; |g| by run; |u| by layer; |p|
    numbers = joined([*g.dot(last), *products, *slopes, *norms([*g.vectors, *found.u.layers, *local])], home)
    if is_spread:
        of_runs, of_layers = ([trained[first] for first, *_ in some] for some in (layout.names_by_run, layout.layers))
        count, numbers = runs + layers * (2 if slopes else 1), widen(numbers)
        sums = torch.cat([numbers[:count], numbers[count:].square()])  # of norms the squares add up over shards
        owners = [*of_runs, *of_layers, *(of_layers if slopes else ()), *of_runs, *of_layers, *parameters]
        numbers = sum_over_shards(sums, owners)
        numbers[count:].sqrt_()
    if (found_inf := context.preconditioner.recorder.scaling.found_inf) is not None:
        numbers = torch.cat([numbers, joined([found_inf], home)])
    values = iter(context.preconditioner.team.processes.agreed(numbers).tolist())
    take = lambda count: list(itertools.islice(values, count))
    along, along_right = sum(take(runs)), take(layers)
    along_slope = take(layers) if slopes else along_right
    norm = math.hypot(*take(runs))
    facts = Facts(norm, along, along_right, along_slope, take(layers), take(len(parameters)))
    is_bad = any(values)  # as a GradScaler has found
    return facts._replace(norm=math.nan) if is_bad else facts


def _or_zero(number: float) -> float:
    return number if math.isfinite(number) else 0.0


def _energy(product: float, damping: float, length: float) -> float:
    """``u^T M u`` of ``u^T (M + damping) u``; rounding may leave less than nothing."""
    return _or_zero(max(product - damping * length * length, 1e-6 * product, 0.0))


# -- how far to go


def started(change: float, norm: float, least_trust: float, c: TrustRegionConstants) -> TrustState:
    """The state before the first step; the change of an output entry is that for step size one."""
    size = c.first_output_change / max(change, torch.finfo(torch.float32).tiny)
    return TrustState(size, least_trust, change, change, c.least_output_change, norm, largest_norm=norm)


def has_new_scale(state: TrustState, norm: float, c: TrustRegionConstants) -> bool:
    """Whether the loss has another scale, as after a long time without rewards, where gradients were zero."""
    return state.far >= c.most_far and norm > c.far_gradient * state.norm


def restarted(state: TrustState, first: TrustState) -> TrustState:
    """The state of a first step, except for what does not depend on the scale of the loss."""
    kept = "lr", "overshoots", "ratio", "recall", "measured", "predicted"
    return first._replace(**{name: getattr(state, name) for name in kept})


def slope_ratio(slope: float, predicted: float) -> float:
    """What is left of the slope along the last step at its end, at most 1; 0 where nothing was predicted."""
    if not predicted or math.isnan(slope):
        return 0.0
    return min(slope / predicted, 1.0)


def is_overshoot(state: TrustState, ratio: float, norm: float, c: TrustRegionConstants) -> bool:
    """Whether the last step went far too far; without replacement, the usual ratio may be negative."""
    usual = max(min(slope_ratio(state.ends, state.starts), 0.0), -c.overshoot)
    # in a game the spread is that of the game, and long gradients are the first sign that it gets out of hand
    plays = state.recall < 1
    return ratio < usual - c.overshoot and (norm > c.long_gradient * state.norm if plays else is_long(state, norm, c))


def is_long(state: TrustState, norm: float, c: TrustRegionConstants) -> bool:
    """Whether a gradient is much longer than the running mean, and than single batches are."""
    return norm > max(c.long_gradient * state.norm, state.norm + c.spreads * state.spread)


def adapted(
    state: TrustState, ratio: float, norm: float, steps: int, lr: float, least_trust: float, c: TrustRegionConstants
) -> TrustState:
    """The step size and the bound on layers after a look at the last step, given its ratio of slopes.

    `lr` is the largest of all groups. Below one the step size adapts proportionally slower; where a scheduler has
    lowered it, short steps say nothing about long ones, and the step size does not grow.
    """
    starts = c.slope_decay * state.starts + (1 - c.slope_decay) * state.slope
    seen = max(ratio, -c.overshoot)  # clipped where a step would be undone
    ends = c.slope_decay * state.ends + (1 - c.slope_decay) * seen * state.slope
    mean, steepness = slope_ratio(ends, starts), abs(state.slope)
    is_unstable, is_straight = ratio < 0 and is_long(state, norm, c), ratio > c.straight

    rate = max(c.rate * c.start / (c.start + steps), c.late_rate)
    # growth slows down to `late_rate`. The limit on shrinking goes to zero: later, bounds and instability shorten steps
    growth = max((rate if mean > 0 else c.rate) * mean, -c.shrink / (1 + steps))
    if is_unstable:
        growth = c.rate * max(ratio, -1.0)
    if state.lr > c.lowered * lr:
        growth = min(growth, 0.0)
    growth *= min(lr, 1.0)
    if steepness < c.flat * state.steepest:
        growth = 0.0
    # far above the steps that the bounds on the layers allow, the step size would shrink without effect
    size = min(state.size, c.slack * state.made) if growth < 0 else state.size

    usual = state.norm or norm  # after zeros alone the first gradient is the usual one
    weight = max(1 / (1 + steps), 1 - c.norm_decay)
    off = min(norm, c.longest_gradient * usual) - usual
    trust = state.trust * (c.wider if is_straight else c.narrower)
    is_far = 0 < c.far_gradient * state.norm < norm
    return state._replace(
        size=size * math.exp(growth),
        trust=min(max(trust, least_trust), c.largest_trust),
        starts=starts,
        ends=ends,
        steepest=max(steepness, c.memory * state.steepest),
        norm=usual + weight * off,
        spread=math.sqrt((1 - weight) * state.spread**2 + weight * off * off),
        least_output_change=state.least_output_change * (c.less if is_unstable else 1.0),
        lr=max(state.lr, min(lr, c.lr_growth * state.lr or lr)),
        far=state.far + 1 if is_far else 0.0,
    )


def remembered(state: TrustState, slope: float, steps: int, c: TrustRegionConstants) -> TrustState:
    """How many gradients to remember: less and less while the loss steepens along the steps, as that of a GAN may."""
    if not state.slope or math.isnan(slope):
        return state
    seen = min(max(slope / state.slope, -c.overshoot), c.largest_ratio)
    weight = max(1 / (c.ratio_start + steps), 1 - c.ratio_decay)
    ratio = state.ratio + weight * (seen - state.ratio)
    recall = c.forget * state.recall if ratio > 1 else min(c.recover * state.recall, 1.0)
    return state._replace(ratio=ratio, recall=max(recall, c.least_recall))


def undone(state: TrustState, ratio: float, c: TrustRegionConstants) -> TrustState:
    """The state after the last step was undone: the secant's step size for its ratio of slopes, at least a fifth."""
    size = state.made * min(max(1 / (1 - ratio), c.least_shrink), 1.0)
    least = c.less * state.least_output_change
    overshoots = state.overshoots + 1
    return state._replace(size=size, slope=0.0, uncut=0.0, least_output_change=least, overshoots=overshoots)


def bounded(state: TrustState, change: float, output_rms: float, c: TrustRegionConstants) -> tuple[TrustState, float]:
    """The step size within bounds, and that of this step, which is shorter where its change is far above the mean.

    `change` is the predicted rms change of an output entry for step size one, `output_rms` the rms of the entries.
    """
    tiny, reach = torch.finfo(torch.float32).tiny, 1 + output_rms
    counted = min(change, c.change_factor * state.change) if state.change else change
    mean = math.sqrt(c.change_decay * state.change**2 + (1 - c.change_decay) * counted**2)
    largest = max(mean, c.memory * state.largest_change)
    longest = max(state.norm, c.memory * state.largest_norm)
    quiet = min((longest / max(state.norm, tiny)) ** c.quiet, c.largest_quiet)
    least = quiet * state.least_output_change * reach / max(largest, tiny)
    most = c.largest_output_change * reach / max(counted, tiny)
    size = min(max(state.size, least), most)
    state = state._replace(size=size, change=mean, largest_change=largest, largest_norm=longest)
    return state, size * (counted / change if change else 1.0)


def within_trust(
    layout: Layout, size: float, trust: float, lengths: Sequence[float], sizes: Sequence[float], lrs: Sequence[float]
) -> list[float]:
    """The rate of each layer, whose direction has that length: lr times at most `trust` of its norm."""
    # at least 1, so that tensors that start at zero can move
    norms = iter([max(x, 1.0) for x in sizes])
    whole = [math.hypot(*itertools.islice(norms, len(layer))) for layer in layout.layers]
    if layout.owners:  # parts of one block have options of their own, and are cut together
        lengths, whole = (_together(x, layout.owners) for x in (lengths, whole))
    return [
        lr * (min(size, trust * norm / length) if length else size) if math.isfinite(length) else 0.0
        for length, norm, lr in zip(lengths, whole, lrs, strict=True)
    ]


def _together(norms: Sequence[float], owners: Sequence[Layer]) -> list[float]:
    """For each of the norms that of all with the same owner."""
    squares: dict[Layer, float] = {}
    for x, owner in zip(norms, owners, strict=True):
        squares[owner] = squares.get(owner, 0.0) + x * x
    return [math.sqrt(squares[owner]) for owner in owners]


# -- the step


def _bound_rows(context: StepContext, d: LayerVector, trust: float, sizes: Sequence[float]) -> None:
    """Bound the rows of tables (embeddings), which are layers of their own; short ones by the mean of all."""
    tables = {name for block in context.preconditioner.blocks if block.has_separate_rows for name in block.names}
    for name, size in zip(d.layout.names, sizes, strict=True) if tables else ():
        if name in tables:
            table, own = to_local(context.trained[name]), d[name]
            norm = lambda x: torch.linalg.vector_norm(x, dim=1, dtype=at_least_single([x]))
            longest = trust * norm(table).clamp(min=max(size, 1.0) / max(len(context.trained[name]), 1) ** 0.5)
            own.mul_((longest / norm(own).clamp(min=torch.finfo(longest.dtype).tiny)).clamp(max=1)[:, None])


def decay_weights(context: StepContext, layout: Layout) -> None:
    """Decoupled weight decay, before the step, in one call for each device."""
    decayed = [name for name in layout.names if context.options[name]["weight_decay"]]
    if not decayed:
        return
    kept = iter([kept_by_decay(context.options[name]) for name in decayed])
    for own in by_device([to_local(context.trained[name]) for name in decayed]):
        torch._foreach_mul_(own, [next(kept) for _ in own])


def _noted(
    measured: float, predicted: float, new: float, expected: float, c: TrustRegionConstants
) -> tuple[float, float]:
    """Decayed sums of energies measured and predicted, with new ones that are finite and not zero."""
    if not (0 < new < math.inf and 0 < expected < math.inf):
        return measured, predicted
    return c.energy_decay * measured + new, c.energy_decay * predicted + expected
