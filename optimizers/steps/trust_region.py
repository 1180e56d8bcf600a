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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.linalg import by_device, widen
from optimizers.distributed.sharding import any_sharded, sum_over_shards, to_local
from optimizers.steps.directions import HORIZON, Direction, Momentum, Spring, horizon
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

DECAY_SHARE = 0.2  # of the length of a step is that of the decay of weights
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class TrustRegionConstants:
    """The numbers of the algorithm. None is derived: docs/lab_book.md has what happens without each."""

    # how the step size follows the slopes
    growth: float = 3.0  # per step while the loss falls as steeply as before, over the horizon of the running mean
    slope_decay: float = 0.9  # of the running means of slopes
    overshoot: float = 2.0  # a ratio of slopes this far below min(mean, 0), with a long gradient: the step is undone
    # bounds
    trust: float = 0.15  # longest step of a layer, as a share of its norm, over the root of the number of layers
    even: float = 0.5  # power of a layer's movement that is divided out: shares of norms come nearer to each other
    least: float = 0.03  # least movement of a layer, as a share of its norm, at first; ...
    early: float = 50.0  # ... over the roots of one plus the steps over this, all and those since lr moved, ...
    quiet: float = 2 / 3  # ... or times this power of how far gradients have shrunk, whichever is less
    top: float = 0.5  # largest change of the outputs, as a share of their size
    # gradients
    most: float = 2.0  # longest gradient, and longest change of the outputs, as a multiple of the running mean
    turn: float = 0.25  # ratio so far below zero, after a mean so far above, of gradients not shorter: other data
    long: float = 1.5  # times the mean and a standard deviation: a longer gradient is a sign of instability
    far: float = 100.0  # times the mean: longer ones tell nothing of it, unless all over a horizon are
    decay: float = 0.97  # of these means, which must not follow an instability that builds up over some steps
    # curvature that is measured along steps
    energy_decay: float = 0.3  # of sums of energies, per renewal: where steps go changes fast


class TrustState(NamedTuple):
    """What is known of how far to go. Lengths of gradients and slopes are in units of `norm`."""

    size: float  # multiplies the direction
    change: float  # running root mean square of the outputs' predicted change for step size one; zero at a new scale
    norm: float  # running mean of the gradients' norms, each clipped
    longest: float  # its largest value
    lr: float  # of the last step
    unmoved: float = 0.0  # number of steps since it has moved, or the loss has another scale
    far: float = 0.0  # number of gradients in a row that were far too long
    spread: float = 0.0  # running standard deviation of the gradients' norms
    slope: float = 0.0  # predicted, of the loss along the last step at its start: negative; zero if there is none
    kept: float = 1.0  # share of it that the bounds on the layers have left
    starts: float = 0.0  # running means of the slopes at the start ...
    ends: float = 0.0  # ... and at the end of steps
    measured: float = 0.0  # decayed sums of the energies of steps, measured at renewals as ``(v^T J d)^2`` ...
    predicted: float = 0.0  # ... and what was predicted of these

    @property
    def underestimate(self) -> float:
        """Measured over predicted squared change of the outputs, along recent steps; 1 where nothing was measured."""
        return self.measured / self.predicted if self.predicted else 1.0


class Facts(NamedTuple):
    """What the host learns of a step, by one read."""

    norm: float  # of the gradient; not finite if an entry is not, or squares overflow
    along_last: float  # inner product of gradient and last step
    products: list[float]  # ``u^T right`` of each layer: its energy and what damping adds
    slopes: list[float]  # along u, positive for descent
    lengths: list[float]  # of u
    sizes: list[float]  # norm of each parameter

    def scaled(self, scales: Sequence[float], dampings: Sequence[float]) -> tuple[list[float], list[float]]:
        """Slopes and energies ``u^T M u`` of the layers' directions, multiplied by these scales."""
        slopes = [_or_zero(scale * slope) for scale, slope in zip(scales, self.slopes, strict=True)]
        each = zip(scales, self.products, dampings, self.lengths, strict=True)
        return slopes, [scale**2 * _energy(product, damping, length) for scale, product, damping, length in each]


class TrustRegionStep(StepRule):
    """Adapts the step size by the slope along the last step; needs no closure."""

    def __init__(self, direction: Momentum | Spring, constants: TrustRegionConstants = TrustRegionConstants()) -> None:
        self.direction, self.constants = direction, constants
        self.first_step = 0  # number of the first step that it makes
        self.state: TrustState | None = None  # None before the first step
        self.energies: dict[str, float] = {}  # predicted of the last step, ``d^T M d``, by a layer's first parameter
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
            renewal = self._renew(context, gradients)

        # 2. the direction u = (M + damping)^-1 m, m the running mean of clipped gradients in units of their usual norm
        with preconditioner.monitor.timed("direction"):
            g = LayerVector.of(layout_of_step(context, gradients), gradients)
            last, state, ratio = self._last(context, g.layout), self.state, 0.0
            direction, facts = self._directed(context, g, last)
        if not math.isfinite(facts.norm):
            return self._left_out(context, loss, gradients)
        if not facts.norm:  # it says nothing, not even of its scale
            return self._without_gradient(context, loss, g.layout, renewal)

        # 3. the last step, seen from its end; one that went far too far is undone
        steps, lr = preconditioner.monitor.steps - self.first_step, max([x["lr"] for x in context.options.values()])
        if state is not None:
            state = begun_again(counted(state, facts.norm, c), ratio := slope_ratio(facts.along_last, state.slope), c)
            if is_overshoot(state, ratio, facts.norm, c):
                self.state, back = undone(state, ratio, c), self._undo(context, last)
                moves = evened(relative_lengths(g.layout, facts.lengths, facts.sizes), c.even)[1]
                entry = self._entry(context, renewal, least_size(state, moves, steps, c))
                return Outcome(loss, back, entry, renewal)

        # 4. layers by more alike shares of their norms; the outputs' change, and their size
        layout, trust = g.layout, c.trust / math.sqrt(max(preconditioner.layer_count, 1))
        scales, moves = evened(relative_lengths(layout, facts.lengths, facts.sizes), c.even)
        slopes, energies = facts.scaled(scales, direction.dampings)
        change = self._change(context, [1.0] * len(energies), energies)
        bounds = within_trust(trust, moves)
        reach = context.outputs.rms or self._change(context, bounds, energies)  # of zeros their change at the bounds

        # 5. the step size follows the slopes, within bounds on the change of the outputs; lr multiplies it afterwards
        first, remembered = TrustState(0.0, change, facts.norm, facts.norm, lr), horizon(preconditioner.monitor.steps)
        state = first if state is None else adapted(state, ratio, facts.norm, steps, lr, remembered, c)
        state, size = bounded(state, change, reach, least_size(state, moves, steps, c), c)

        # 6. no layer moves by more than lr times a share of its norm; weights decay as far as a share of that
        lrs = [context.options[first]["lr"] for first, *_ in layout.layers]
        rates = [lr * min(size, bound) for lr, bound in zip(lrs, bounds, strict=True)]

        # 7. the step, and what is to be known of it at the next one
        direction.keep()
        direction.u.multiply_layers_([-rate * scale for rate, scale in zip(rates, scales, strict=True)])
        _bound_rows(context, direction.u, trust, facts.sizes)
        moved = [trust * rate / bound if bound else 0.0 for rate, bound in zip(rates, bounds, strict=True)]
        decay_weights(context, layout, moved)  # in place, before the optimizer adds the step
        self._keep(context, direction.u, [rate**2 * energy for rate, energy in zip(rates, energies, strict=True)])
        self.state = with_slopes(state, rates, [lr * size for lr in lrs], slopes, self.state)
        return Outcome(loss, direction.u.views, self._entry(context, renewal), renewal)

    def _entry(self, context: StepContext, renewal: Renewal, least: float = 0.0) -> dict[str, Any]:
        size = max(self.state.size, least) if self.state else 0.0  # it may be zero, which stands for the least
        made = {"step_size": size, "overshoots": context.preconditioner.monitor.counts["overshoots"]}
        return {"renewed": renewal.renewed, "inverted": renewal.inverted, "accepted": True} | made

    # -- methods that read or write what is kept

    def _directed(self, context: StepContext, g: LayerVector, last: LayerVector) -> tuple[Direction, Facts]:
        """The direction and the facts of the step; one batch far out of scale must not dominate the running mean."""
        state, most, unit = self.state, self.constants.most, self.state.norm if self.state else 1.0
        if unit != 1:
            g.multiply_(1 / unit)
        direction = self.direction(context, g, unit)
        facts = _read(context, g, last, direction)
        if not 0 < facts.norm < math.inf or (state is not None and facts.norm <= most):
            return direction, facts
        if state is None:  # the first gradient is the unit
            most, unit = 1.0, facts.norm
        g.multiply_(most / facts.norm)
        direction = self.direction(context, g, unit)
        # the last step is judged by the gradient as it came
        return direction, _read(context, g, last, direction)._replace(norm=facts.norm, along_last=facts.along_last)

    def _will_be_undone(self, context: StepContext, gradients: Named) -> bool:
        """Whether the last step went far too far."""
        if (state := self.state) is None or not state.slope:
            return False
        g = LayerVector.of(layout_of_step(context, gradients), gradients)
        facts = _read(context, g, self._last(context, g.layout))
        ratio, norm = slope_ratio(facts.along_last / state.norm, state.slope), facts.norm / state.norm
        return is_overshoot(begun_again(state, ratio, self.constants), ratio, norm, self.constants)

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

    def _without_gradient(self, context: StepContext, loss: Any, layout: Layout, renewal: Renewal) -> Outcome:
        """Where it is zero, parameters decay at most."""
        decay_weights(context, layout, [0.0] * len(layout.layers))
        return Outcome(loss, {}, self._entry(context, renewal), renewal)

    def _last(self, context: StepContext, layout: Layout) -> LayerVector:
        """The last step, zeros where there was none; parameters that do not move now have none any more."""
        moving = set(layout.names)
        for name in context.trained.keys() - moving:
            context.states[name].pop("displacement", None)
        return of_states(layout, "displacement", context.states, context.trained, self.last)

    def _keep(self, context: StepContext, d: LayerVector, energies: Sequence[float]) -> None:
        """Keep the step, and what was predicted of it for each layer."""
        self.last, self.energies = d, {first: x for (first, *_), x in zip(d.layout.layers, energies, strict=True)}
        to_states(d, "displacement", context.states, context.trained)

    def _undo(self, context: StepContext, last: LayerVector) -> dict[str, Tensor]:
        """The displacement that undoes the last step, of which nothing is kept."""
        context.preconditioner.monitor.counts["overshoots"] += 1
        back = {name: x.neg() for name, x in last.items()}
        for x in last.vectors:
            x.zero_()
        self._keep(context, last, [0.0] * len(last.layout.layers))  # it may be a copy of what the states have
        return back

    def _renew(self, context: StepContext, gradients: Named) -> Renewal:
        """Renew the curvature, unless the last step will be undone: what was measured is of a place that is left again.

        Then the next step renews.
        """
        if self._will_be_undone(context, gradients):
            context.preconditioner.recorder.discard()
            return Renewal()
        renewal = context.renew(gradients)
        self._compare_energies(context)
        return renewal

    def _compare_energies(self, context: StepContext) -> None:
        """Note what a renewal has measured along the last step beside what was predicted."""
        # A block knows its layer alone, and as a product of two factors. Its ``u^T M u`` may be a hundredth of the
        # squared change that u causes, where the positions of a sample, or several layers, pull in one direction.
        # What is measured is of the blocks that this batch has reached: so is what was predicted.
        state, measured, reached = self.state, context.outputs.squared_change, context.outputs.reached
        names = [name for block in context.preconditioner.blocks if block.names[0] in reached for name in block.names]
        predicted = sum([self.energies.get(name, 0.0) for name in names])
        if state is not None and 0 < predicted < math.inf and 0 < measured < math.inf:
            decay = self.constants.energy_decay
            sums = decay * state.measured + measured, decay * state.predicted + predicted
            self.state = state._replace(measured=sums[0], predicted=sums[1])

    def _change(self, context: StepContext, rates: Sequence[float], energies: Sequence[float]) -> float:
        """Root mean square change of an output entry that is predicted for steps of layers at these rates."""
        gain = (1.0 if self.state is None else self.state.underestimate) / context.outputs.entries_per_sample
        return math.sqrt(sum([rate**2 * energy for rate, energy in zip(rates, energies, strict=True) if energy]) * gain)

    def last_displacement(self, states: Mapping[str, dict[str, Any]]) -> Named:
        steps = {name: state.get("displacement") for name, state in states.items()} if self.state else {}
        return {name: d for name, d in steps.items() if d is not None}

    # -- checkpoints

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.direction.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        numbers = dict.fromkeys(TrustState._fields) if self.state is None else self.state._asdict()
        return numbers | {"energies": self.energies}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        numbers = {name: float(state[name]) for name in TrustState._fields if state.get(name) is not None}
        self.state = TrustState(**numbers) if numbers else None
        self.energies, self.last = dict(state["energies"]), None


# -- one read


def _read(context: StepContext, g: LayerVector, last: LayerVector, direction: Direction | None = None) -> Facts:
    """Ask for all numbers at once, without a direction for what needs none; all processes go by those of the first."""
    layout, trained, home = g.layout, context.trained, g.layout.home
    names, layers = (layout.names, layout.layers) if direction else ([], [])
    parameters, is_spread = [trained[name] for name in names], any_sharded(trained.values())
    runs, products, slopes, directions = len(layout.runs), [], [], []
    if direction:
        u, right, slope_of = direction.u, direction.right, direction.slope_of
        products, directions = u.layer_dots(right), u.layers
        slopes = [] if slope_of is right else u.layer_dots(slope_of)
    local = list(map(to_local, parameters)) if is_spread else parameters
    # g·last by run; u·right, and u·slope_of if it is another, by layer; |g| by run; |u| by layer; |p|
    lengths = norms([*g.vectors, *directions, *local])
    numbers = joined([*g.dot(last), *products, *slopes, *lengths], home)
    if is_spread:
        of_runs, of_layers = ([trained[first] for first, *_ in some] for some in (layout.names_by_run, layers))
        count, numbers = runs + len(layers) * (2 if slopes else 1), widen(numbers)
        sums = torch.cat([numbers[:count], numbers[count:].square()])  # of norms the squares add up over shards
        of_sums = [*of_runs, *of_layers, *(of_layers if slopes else ())]
        numbers = sum_over_shards(sums, [*of_sums, *of_runs, *of_layers, *parameters])
        numbers[count:].sqrt_()
    if (found_inf := context.preconditioner.recorder.scaling.found_inf) is not None:
        numbers = torch.cat([numbers, joined([found_inf], home)])
    values = iter(context.preconditioner.team.processes.agreed(numbers).tolist())
    take = lambda count: list(itertools.islice(values, count))
    along, along_right = sum(take(runs)), take(len(layers))
    along_slope = take(len(layers)) if slopes else along_right
    norm = math.hypot(*take(runs))
    facts = Facts(norm, along, along_right, along_slope, take(len(layers)), take(len(parameters)))
    is_bad = any(values)  # as a GradScaler has found
    return facts._replace(norm=math.nan) if is_bad else facts


def _or_zero(number: float) -> float:
    return number if math.isfinite(number) else 0.0


def _energy(product: float, damping: float, length: float) -> float:
    """``u^T M u`` of ``u^T (M + damping) u``; rounding may leave less than nothing."""
    return _or_zero(max(product - damping * length * length, 1e-6 * product, 0.0))


# -- how far to go


def slope_ratio(slope: float, predicted: float) -> float:
    """What is left of the slope along the last step at its end, at most 1; 0 where nothing was predicted."""
    if not predicted or math.isnan(slope):
        return 0.0
    return min(slope / predicted, 1.0)


def is_overshoot(state: TrustState, ratio: float, norm: float, c: TrustRegionConstants) -> bool:
    """Whether the last step went far too far; without replacement, the usual ratio may be negative."""
    usual = max(min(slope_ratio(state.ends, state.starts), 0.0), -c.overshoot)
    return ratio < usual - c.overshoot and is_long(state, norm, c)


def counted(state: TrustState, norm: float, c: TrustRegionConstants) -> TrustState:
    """The state with the number of gradients in a row that are far too long, given the norm of the next."""
    return state._replace(far=state.far + 1 if norm > c.far else 0.0)


def begun_again(state: TrustState, ratio: float, c: TrustRegionConstants) -> TrustState:
    """The state where a batch turns against steps on which those before it agreed: data come in blocks.

    What has grown within a block is not to be trusted in the next one: the step size is the least. Where gradients have
    become short, steps converge, and may well turn.
    """
    is_turn = ratio < -c.turn and slope_ratio(state.ends, state.starts) > c.turn and state.norm > c.turn * state.longest
    return state._replace(size=0.0) if is_turn else state


def is_long(state: TrustState, norm: float, c: TrustRegionConstants) -> bool:
    """Whether a gradient, in units of the running mean, is much longer than that, and than single batches are."""
    return norm > c.long * (1 + state.spread)


def adapted(
    state: TrustState, ratio: float, norm: float, steps: int, lr: float, remembered: float, c: TrustRegionConstants
) -> TrustState:
    """The state after a look at the last step, given its ratio of slopes and the gradient's norm in the usual units.

    `lr` is the largest of all groups. Below one, the step size adapts proportionally slower; where a schedule lowers
    it, over the shortest horizon: the loss may still fall as steeply as before.
    """
    starts = c.slope_decay * state.starts + (1 - c.slope_decay) * state.slope
    seen = max(ratio, -c.overshoot)  # clipped where a step would be undone
    ends = c.slope_decay * state.ends + (1 - c.slope_decay) * seen * state.slope
    is_falling = lr < state.lr
    growth = c.growth * slope_ratio(ends, starts) * (1 / HORIZON if is_falling else min(lr, 1.0) / remembered)
    # far above the steps that the bounds on the layers allow, the step size would shrink without effect
    size = state.size * (state.kept if growth < 0 else 1.0)

    weight = max(1 / (1 + steps), 1 - c.decay)
    off = min(norm, c.most) - 1
    # the new norm in units of the old; single gradients that are far too long are of samples that are not fitted yet
    is_new_scale = state.far > HORIZON
    unit = norm if is_new_scale else 1.0 if state.far else 1 + weight * off
    return state._replace(
        size=size * math.exp(growth) * unit,
        starts=starts / unit,
        ends=ends / unit,
        change=0.0 if is_new_scale else state.change,
        norm=state.norm * unit,
        longest=max(state.norm * unit, state.longest),
        spread=math.sqrt((1 - weight) * state.spread**2 + weight * off * off),
        lr=lr,
        unmoved=0.0 if is_new_scale or lr != state.lr else state.unmoved + 1,
        far=0.0 if is_new_scale else state.far,
    )


def clipped(length: float, usual: float, c: TrustRegionConstants) -> float:
    """At most a multiple of the usual one; of those that are far longer more counts, since the scale may be another."""
    return min(length, (c.far if length > c.far * usual else c.most) * usual)


def undone(state: TrustState, ratio: float, c: TrustRegionConstants) -> TrustState:
    """The state after the last step was undone: the secant's step size for its ratio of slopes."""
    size = state.size * state.kept / (1 - ratio)
    return state._replace(size=size, slope=0.0, kept=1.0)


def least_size(state: TrustState, moves: Sequence[float], steps: int, c: TrustRegionConstants) -> float:
    """The step size of the least movement: of the geometric mean over layers, given their movements for size one.

    Noise has to be annealed where gradients stay as long as they are. Where they shrink, so does their noise; where
    next to nothing is left of them steps converge, and the movement must not shrink slower than they do.
    """
    annealed, left = math.sqrt((1 + steps / c.early) * (1 + state.unmoved / c.early)), state.norm / state.longest
    movement = min(c.least * min(1 / annealed, left**c.quiet), left / 2)
    return movement / max(geometric_mean(moves), TINY)


def bounded(
    state: TrustState, change: float, reach: float, least: float, c: TrustRegionConstants
) -> tuple[TrustState, float]:
    """The step size within bounds, and that of this step, which is shorter where its change is far above the mean.

    `change` is the predicted rms change of an output entry for step size one, `reach` the size of the outputs, `least`
    the step size of the least movement.
    """
    usual = state.change or change
    counted = clipped(change, usual, c)
    mean = math.sqrt(c.decay * usual**2 + (1 - c.decay) * counted**2)
    state = state._replace(size=min(max(state.size, least), c.top * reach / max(counted, TINY)), change=mean)
    return state, state.size * (counted / change if change else 1.0)


def with_slopes(
    state: TrustState,
    rates: Sequence[float],
    uncut: Sequence[float],
    slopes: Sequence[float],
    before: TrustState | None,
) -> TrustState:
    """With the slope along a step at these rates of layers, before rows are cut, in the units of the next gradient."""
    made, whole = (-sum([rate * slope for rate, slope in zip(some, slopes, strict=True)]) for some in (rates, uncut))
    unit = before.norm / state.norm if before else 1.0
    return state._replace(slope=made * unit, kept=made / whole if whole else 1.0)


def relative_lengths(layout: Layout, lengths: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """The length of each layer's direction as a share of its norm, given the norm of each parameter."""
    # at least 1, so that tensors that start at zero can move
    norms = iter([max(x, 1.0) for x in sizes])
    whole = [math.hypot(*itertools.islice(norms, len(layer))) for layer in layout.layers]
    if layout.owners:  # parts of one block have options of their own, and move together
        lengths, whole = _together(lengths, layout.owners), _together(whole, layout.owners)
    return [length / norm for length, norm in zip(lengths, whole, strict=True)]


def evened(moves: Sequence[float], power: float) -> tuple[list[float], list[float]]:
    """Factors of layers, and their movements then, each nearer to the geometric mean; what is not finite stays."""
    mean = geometric_mean(moves)
    scales = [(mean / move) ** power if 0 < move < math.inf else 1.0 for move in moves]
    return scales, [scale * move for scale, move in zip(scales, moves, strict=True)]


def geometric_mean(moves: Sequence[float]) -> float:
    """That of those that are finite and not zero; zero if there are none."""
    logs = [math.log(move) for move in moves if 0 < move < math.inf]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def within_trust(trust: float, moves: Sequence[float]) -> list[float]:
    """The largest rate of each layer, whose direction has that share of its norm: it moves by at most `trust` of it."""
    return [(trust / move if move else math.inf) if math.isfinite(move) else 0.0 for move in moves]


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
            table, rows = to_local(context.trained[name]), d[name]
            norm = lambda x: torch.linalg.vector_norm(x, dim=1, dtype=at_least_single([x]))
            longest = trust * norm(table).clamp(min=max(size, 1.0) / max(len(context.trained[name]), 1) ** 0.5)
            rows.mul_((longest / norm(rows).clamp(min=torch.finfo(longest.dtype).tiny)).clamp(max=1)[:, None])


def decay_weights(context: StepContext, layout: Layout, moved: Sequence[float]) -> None:
    """Decoupled weight decay, before the step, in one call for each device.

    Where the decay is None, matrices shrink by a share of how far their layer has `moved`, relative to its norm.
    """
    kept = {}
    for layer, movement in zip(layout.layers, moved, strict=True):
        for name in layer:
            if context.options[name]["weight_decay"] is not None:
                kept[name] = kept_by_decay(context.options[name])
            elif context.trained[name].ndim > 1:
                kept[name] = 1 - DECAY_SHARE * movement
    kept = {name: share for name, share in kept.items() if share != 1}
    factors = iter(kept.values())
    for tensors in by_device([to_local(context.trained[name]) for name in kept]):
        torch._foreach_mul_(tensors, [next(factors) for _ in tensors])
