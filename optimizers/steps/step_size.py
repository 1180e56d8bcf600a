"""How far to go: from slopes and predicted changes of the outputs to the next step size.

All numbers are scalar tensors, so that no step waits for the device; what is done to several alike, lists do at once.

Along the last displacement the loss falls with one slope at its start and another at its end. Their ratio says, at no
extra cost, whether the displacement was too short or too long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FIRST_OUTPUT_CHANGE = 0.3  # root mean square change of the output entries that the first step aims at
# How the step size follows the slopes
RATE = 0.3  # per step, where the loss falls as steeply as before, in the first steps, or rises as steeply
LATE_RATE = 0.05  # of growth, later: the slopes of a loss that others change, too, are positive at any step size
SHRINK = 1.0  # over the number of steps: batches without replacement make slopes negative however short the steps are
SLOPE_DECAY = 0.9  # of the running means of slopes
LOWEST_RATIO = -20.0  # that enters them
STRAIGHT = 0.9  # a larger ratio of slopes says that the loss falls as steeply as before
START = 40  # steps in which the step size may grow faster, and after which it grows at half the rate, and slower
START_RATE = 0.4  # by how much faster at the first of them
FLAT = 1e-5  # of the steepest slope: below, the loss is zero or slopes are rounding, and say nothing
# Overshoots
OVERSHOOT = 2.0  # a ratio of slopes below minus this, with a long gradient: the displacement is undone
LEAST_SHRINK = 0.2  # of the step size after an overshoot
# Bounds. A layer's is a fraction of its parameters' norm: changes of many layers add up like random ones.
FIRST_TRUST = 0.15  # longest step of a layer, divided by the square root of the number of layers
LARGEST_TRUST = 0.2  # after many steps that could have been longer
WIDER, NARROWER = 1.1, 0.8  # at each step: where the loss falls as steeply as before, and where not
SLACK = 2.0  # how far the step size may stay above the steps that the bounds on the layers allow
CHANGE_FACTOR = 1.5  # longest change of the outputs for step size one, as a multiple of its running mean
CHANGE_DECAY = 0.95  # of that running mean
LARGEST_OUTPUT_CHANGE = 0.2  # of the outputs' size, for the gradient of the step
LEAST_OUTPUT_CHANGE = 0.06  # of the outputs' size, for the largest gradient: the step size shrinks no further ...
LESS = 0.9  # ... but for this factor at each sign of instability
MEMORY = 0.999  # decay of the steepest slope and of the largest change
LONGEST_GRADIENT = 2.0  # gradients are clipped to this multiple of the running mean of their norms
LONG_GRADIENT = 1.5  # a longer one is taken for a sign of instability ...
SPREADS = 2.5  # ... if it is longer than the mean by this many standard deviations, too
NORM_DECAY = 0.97  # of that running mean, which must not follow an instability that builds up over some steps


class StepSize(NamedTuple):
    """State of the step size; scalar tensors.

    Attributes:
        size: multiplies the direction.
        trust: longest step of a layer, relative to the norm of its parameters.
        slope: of the loss along the last displacement, at its start; zero if there is none.
        uncut: what the slope would be without the bounds on the layers.
        starts, ends: running means of the slopes at the start and at the end of displacements.
        steepest: the largest absolute slope, slowly forgotten.
        change: running root mean square of the outputs' predicted change for step size one.
        largest_change: its largest value, slowly forgotten.
        least_output_change: of the outputs' size, for the largest change: the step size shrinks no further.
        norm, spread: running mean and standard deviation of the gradients' norms, each clipped.
        lr: the largest learning rate so far.
        overshoots: how many displacements were undone.
        measured, predicted: decayed sums of the energies of steps, of all layers together.
        steps: number of steps so far; batches that were left out do not count.
        was_bad: one if the last batch was left out, else zero.
    """

    size: Tensor
    trust: Tensor
    slope: Tensor
    uncut: Tensor
    starts: Tensor
    ends: Tensor
    steepest: Tensor
    change: Tensor
    largest_change: Tensor
    least_output_change: Tensor
    norm: Tensor
    spread: Tensor
    lr: Tensor
    overshoots: Tensor
    measured: Tensor
    predicted: Tensor
    steps: Tensor
    was_bad: Tensor

    @property
    def made(self) -> Tensor:
        """The step size that the bounds on the layers have left of the last step."""
        return self.size * (self.slope / self.uncut).nan_to_num(1.0, 1.0, 1.0)


def started(change: Tensor, norm: Tensor, least_trust: float, steps: int) -> StepSize:
    """The state before the first step by this rule.

    Args:
        change: predicted root mean square change of the output entries for step size one.
        norm: of the gradient.
        least_trust: the first trust region.
        steps: number of steps before; of those without a gradient, or with empty batches.
    """
    zero = torch.zeros_like(change)
    known = {"change": change, "largest_change": change, "norm": norm, "trust": torch.full_like(change, least_trust)}
    known |= {"size": FIRST_OUTPUT_CHANGE / change.clamp(min=torch.finfo(change.dtype).tiny)}
    known |= {"least_output_change": torch.full_like(change, LEAST_OUTPUT_CHANGE)}
    return StepSize(**dict.fromkeys(StepSize._fields, zero) | known | {"steps": torch.full_like(change, steps)})


def slope_ratio(slope: Tensor, predicted: Tensor) -> Tensor:
    """A look at the last step from its end, at most 1; 0 where nothing was predicted or the slope is not a number.

    Along the last displacement the loss fell with slope `predicted` at the start; `slope` is what is left of it now.
    Their ratio is one where the step could have gone on for ever, zero at the minimum along the line, negative beyond.
    """
    return _ratio(slope, predicted).masked_fill(predicted == 0, 0.0)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    return (one / other).nan_to_num(0.0, 1.0, -1e30).clamp(-1e30, 1)


def is_overshoot(ratio: Tensor, norm: Tensor, mean: Tensor) -> Tensor:
    """Whether a displacement went far too far: the loss rises steeply, and the gradient is long."""
    return (ratio < -OVERSHOOT) & (norm > LONG_GRADIENT * mean)


def longest_gradient(norm: Tensor, mean: Tensor) -> Tensor:
    """The norm that a gradient of this norm is clipped to, given the running mean of norms."""
    return torch.where(mean > 0, torch.minimum(norm, LONGEST_GRADIENT * mean), norm)


class Pace(NamedTuple):
    """How fast things change at a step; scalar tensors.

    Attributes:
        rate: of growth.
        start: how much faster the step size may grow in the first steps.
        shrink: the least growth, negative.
        weight: of a norm in the running mean of norms.
    """

    rate: Tensor
    start: Tensor
    shrink: Tensor
    weight: Tensor


def pace(steps: Tensor) -> Pace:
    """The pace after a number of steps."""
    each, late = torch._foreach_reciprocal(torch._foreach_add([steps, steps], [1.0, START]))
    rate, shrink, start = torch._foreach_mul([late, each, START - steps], [RATE * START, -SHRINK, START_RATE / START])
    rate, start, weight = torch._foreach_clamp_min([rate, start, each], [LATE_RATE, 0.0, 1 - NORM_DECAY])
    return Pace(rate, start, shrink, weight)


def adapted(
    state: StepSize, made: Tensor, ratio: Tensor, norm: Tensor, counted: Tensor, lr: Tensor, least_trust: float
) -> StepSize:
    """The step size and the trust region after a look at the last displacement.

    Args:
        made: ``state.made``.
        ratio: of slopes.
        norm: of the gradient.
        counted: the norm that it is clipped to.
        lr: the largest of all groups. Below one the step size adapts proportionally slower; where a scheduler has
            lowered it, short steps say nothing about long ones, and the step size does not grow.
        least_trust: the trust region to fall back to.
    """
    lr, now = lr.to(ratio.dtype), pace(state.steps)
    long_norm, steepest, flat, less, wider, narrower, floor = torch._foreach_mul(
        [state.norm, state.steepest, state.steepest, made, state.trust, state.trust, state.least_output_change],
        [LONG_GRADIENT, MEMORY, FLAT * MEMORY, SLACK, WIDER, NARROWER, LESS],
    )
    bounded_ratio, fall = torch._foreach_clamp_min([ratio, ratio], [LOWEST_RATIO, -1.0])
    starts, ends = torch._foreach_lerp(
        [state.starts, state.ends], [state.slope, bounded_ratio * state.slope], 1 - SLOPE_DECAY
    )
    mean, steepness = _ratio(ends, starts), state.slope.abs()
    # in the late steps it grows slower, and it shrinks ever more slowly
    growth = torch.maximum(torch.minimum(now.rate * mean, RATE * mean), now.shrink)
    is_long = norm > torch.maximum(long_norm, torch.add(state.norm, state.spread, alpha=SPREADS))
    is_unstable, is_straight = (ratio < 0) & is_long, ratio > STRAIGHT
    growth = torch.where(is_unstable, RATE * fall, growth) + now.start * is_straight
    growth = torch.where(state.lr > lr, growth.clamp(max=0), growth) * lr.clamp(max=1)
    growth = growth.masked_fill(steepness < flat, 0.0)
    # far above the steps that the bounds on the layers allow, the step size would shrink without effect
    size = torch.where(growth < 0, torch.minimum(state.size, less), state.size) * growth.exp()
    off = counted - state.norm
    known, square = torch._foreach_lerp(
        [state.norm, state.spread.square()], [counted, off.square()], [now.weight, now.weight]
    )
    return state._replace(
        size=size, trust=torch.where(is_straight, wider, narrower).clamp(least_trust, LARGEST_TRUST), starts=starts,
        ends=ends, steepest=torch.maximum(steepness, steepest), norm=known, spread=square.sqrt(),
        least_output_change=torch.where(is_unstable, floor, state.least_output_change), lr=torch.maximum(state.lr, lr),
    )  # fmt: skip


def undone(state: StepSize, made: Tensor, ratio: Tensor) -> StepSize:
    """The state after the last displacement was undone: the secant's step size for its ratio of slopes."""
    zero = torch.zeros_like(state.slope)
    size = made * (1 / (1 - ratio)).clamp(LEAST_SHRINK, 1)
    least = LESS * state.least_output_change
    return state._replace(size=size, slope=zero, uncut=zero, least_output_change=least, overshoots=state.overshoots + 1)


def bounded(state: StepSize, change: Tensor, output_rms: Tensor) -> tuple[StepSize, Tensor]:
    """The step size within bounds, and that of this step, which a gradient out of scale does not make long.

    Args:
        change: predicted root mean square change of the output entries for step size one.
        output_rms: root mean square of the output entries.
    """
    tiny, reach = torch.finfo(change.dtype).tiny, 1 + output_rms
    most, largest = torch._foreach_mul([state.change, state.largest_change], [CHANGE_FACTOR, MEMORY])
    counted = torch.where(most > 0, torch.minimum(change, most), change)
    before, now = torch._foreach_mul([state.change, counted], [state.change, counted])
    mean = before.lerp(now, 1 - CHANGE_DECAY).sqrt()
    largest = torch.maximum(mean, largest)
    changes = torch._foreach_clamp_min([largest, counted], tiny)
    least, most = torch._foreach_div([state.least_output_change * reach, LARGEST_OUTPUT_CHANGE * reach], changes)
    size = torch.clamp(state.size, least, most)
    return state._replace(size=size, change=mean, largest_change=largest), size * (counted / change).nan_to_num(1.0)


class Look(NamedTuple):
    """What a step sees of itself before it is made; scalar tensors on one device.

    Attributes:
        values: the fields of the state (n,), to be overwritten.
        is_first: whether they are new.
        ratio: of slopes, `slope_ratio`.
        norm, counted: of the gradient, and what it is clipped to.
        is_far: a flag: the last displacement went far too far, `is_overshoot`.
        good: a flag: the batch is good. If not, nothing changes.
        undoes: whether the second bad batch in a row undoes the last displacement.
        change: predicted root mean square change of the output entries for step size one.
        output_rms: root mean square of the output entries.
        slope: inner product of the gradients' running mean and the direction, all layers with their learning rates.
        lr: the largest learning rate.
        least_trust: the trust region to fall back to.
    """

    values: Tensor
    is_first: bool
    ratio: Tensor
    norm: Tensor
    counted: Tensor
    is_far: Tensor
    good: Tensor
    undoes: bool
    change: Tensor
    output_rms: Tensor
    slope: Tensor
    lr: Tensor
    least_trust: float


class Decision(NamedTuple):
    """What becomes of a step.

    Attributes:
        step_size, trust: scalars; no layer moves by more than `trust` times its norm. The size is zero without a step.
        moves, undoes, stays: flags (), of which one is true: there is a step, the last displacements are undone, or
            nothing happens.
        after, before: the state after a step, its slope apart, and after the last displacements were undone.
    """

    step_size: Tensor
    trust: Tensor
    moves: Tensor
    undoes: Tensor
    stays: Tensor
    after: StepSize
    before: StepSize


def decided(look: Look) -> Decision:
    """How far to go, if at all."""
    state = StepSize(*look.values.unbind())
    known, made = state, state.made
    if not look.is_first:
        known = adapted(state, made, look.ratio, look.norm, look.counted, look.lr, look.least_trust)
    after, size = bounded(known, look.change, look.output_rms)
    after = after._replace(uncut=-size * look.slope)
    undo = look.good & look.is_far
    if look.undoes:
        undo = undo | (state.was_bad > look.good)  # a second one in a row
    before = undone(state, made, look.ratio.masked_fill(~look.good, -torch.inf))
    moves = look.good > undo  # good, and not undone
    size = size.masked_fill(~moves, 0.0)
    return Decision(size, after.trust, moves, undo, moves == undo, after, before)


def keep(look: Look, decision: Decision, slope: Tensor) -> None:
    """Update the state in ``look.values``, given the slope along the displacements."""
    values, after = StepSize(*look.values.unbind()), decision.after._replace(slope=slope)
    kept = torch.where(decision.moves, torch.stack(after), look.values)
    look.values.copy_(torch.where(decision.undoes, torch.stack(decision.before), kept))
    values.steps.add_(look.good)
    values.was_bad.copy_(~look.good)
