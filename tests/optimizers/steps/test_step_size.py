"""The pure functions of the step size."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from optimizers.steps import step_size
from optimizers.steps.step_size import (
    START,
    Look,
    StepSize,
    adapted,
    bounded,
    decided,
    is_overshoot,
    longest_gradient,
    slope_ratio,
    started,
    undone,
)

pytestmark = pytest.mark.fast

one = functools.partial(torch.tensor, dtype=torch.float64)
LATER = 1000  # steps


def state(**known: float) -> StepSize:
    values = {"size": 2.0, "trust": 0.1, "slope": -1.0, "uncut": -1.0, "starts": -1.0, "ends": 0.0, "steepest": 1.0}
    values |= {
        "change": 0.5,
        "largest_change": 0.5,
        "least_output_change": step_size.LEAST_OUTPUT_CHANGE,
        "norm": 1.0,
        "spread": 0.1,
        "lr": 1.0,
    }
    values |= {"overshoots": 0.0, "measured": 0.0, "predicted": 0.0, "steps": LATER, "was_bad": 0.0}
    return StepSize(**{name: one(value) for name, value in (values | known).items()})


def look(known: StepSize, ratio: float, norm: float = 1.0, step: int = LATER, lr: float = 1.0) -> StepSize:
    known, counted = known._replace(steps=one(step)), longest_gradient(one(norm), known.norm)
    return adapted(known, known.made, one(ratio), one(norm), counted, one(lr), 0.05)


def test_ratio_of_slopes():
    found = [slope_ratio(one(slope), one(-2.0)).item() for slope in (-2.0, -1.0, 0.0, 4.0, -9.0)]
    assert found == [1, 0.5, 0, -2, 1]
    assert slope_ratio(one(1.0), one(0.0)) == 0 and slope_ratio(one(math.nan), one(1.0)) == 0
    assert slope_ratio(one(math.inf), one(-1.0)) == -1e30


def test_straight_falls_make_the_step_grow_faster_at_the_start():
    assert look(state(ends=-1.0), 1.0).size == pytest.approx(2 * math.exp(step_size.LATE_RATE))
    early = step_size.RATE / (1 + 10 / START) + step_size.START_RATE * (1 - 10 / START)
    assert look(state(ends=-1.0), 1.0, step=10).size == pytest.approx(2 * math.exp(early))


def test_one_noisy_slope_counts_for_its_part_in_the_mean():
    """The mean ratio is 1/2 before, and 0.9 / 2 - 0.1 after one slope that rises as steeply as it fell."""
    grown = look(state(ends=-0.5), -1.0).size
    assert grown == pytest.approx(2 * math.exp(step_size.LATE_RATE * 0.35))


def test_negative_slopes_alone_shrink_the_step_ever_more_slowly():
    """Batches without replacement make them negative at any step size."""
    for step in (100, 10_000):
        shrunk = look(state(ends=1.0), -1.0, step=step).size
        assert shrunk == pytest.approx(2 * math.exp(-step_size.SHRINK / (step + 1)))
    unstable = look(state(ends=1.0), -1.0, norm=1.6).size
    assert unstable == pytest.approx(2 * math.exp(-step_size.RATE))


def test_signs_of_instability_lower_the_floor():
    floors = [look(state(), ratio, norm).least_output_change for ratio, norm in ((-1.0, 1.6), (1.0, 1.6), (-1.0, 1.0))]
    least = step_size.LEAST_OUTPUT_CHANGE
    assert floors == pytest.approx([least * step_size.LESS, least, least])
    assert look(state(spread=0.5), -1.0, 1.6).least_output_change == least  # norms are as different as that
    assert undone(state(), state().made, one(-3.0)).least_output_change == pytest.approx(least * step_size.LESS)


def test_the_step_size_follows_what_the_bounds_have_left_of_it():
    """A tenth of the step was made: a size far above that would shrink without effect."""
    cut = state(slope=-0.1, uncut=-1.0, starts=-0.1, ends=0.1)
    assert look(cut, -1.0).size == pytest.approx(step_size.SLACK * 0.2 * math.exp(-step_size.SHRINK / (LATER + 1)))
    assert look(cut._replace(ends=one(-0.1)), 1.0).size > 2


def test_flat_slopes_say_nothing():
    """At zero loss gradients are rounding: the step size neither grows nor shrinks."""
    for ratio, ends in ((1.0, -1e-6), (-1.0, 1e-6)):
        flat = state(slope=-1e-6, uncut=-1e-6, starts=-1e-6, ends=ends)
        assert look(flat, ratio).size == 2


def test_a_lowered_learning_rate_does_not_make_the_step_size_grow():
    straight = state(ends=-1.0)
    assert look(straight, 1.0, lr=0.1).size == 2 and look(straight, 1.0, lr=1.0).size > 2
    low = look(state(ends=-1.0, lr=0.1), 1.0, lr=0.1)
    assert low.size == pytest.approx(2 * math.exp(0.1 * step_size.LATE_RATE)) and low.lr == 0.1
    assert look(low, 1.0, lr=0.5).lr == 0.5


def test_trust_widens_while_the_loss_falls_straight():
    found = [
        look(state(trust=bound), ratio).trust.item() for bound, ratio in ((0.1, 1), (0.19, 1), (0.1, 0), (0.05, 0))
    ]
    assert found == pytest.approx([0.11, step_size.LARGEST_TRUST, 0.08, 0.05])


def test_gradients_count_for_a_bounded_length():
    assert [longest_gradient(one(norm), one(1.0)).item() for norm in (0.5, 1.5, 9.0)] == [0.5, 1.5, 2.0]
    assert longest_gradient(one(9.0), one(0.0)) == 9  # the first gradients were zero
    assert look(state(), 0.0, norm=9.0).norm == pytest.approx(0.97 + 0.03 * 2.0)
    assert look(state(), 0.0, norm=9.0, step=1).norm == pytest.approx(1.5)
    assert look(state(), 0.0, norm=9.0).spread == pytest.approx((0.97 * 0.1**2 + 0.03 * 1.0) ** 0.5)


def test_an_overshoot_is_steep_and_has_a_long_gradient():
    """A small data set in epochs has steep negative slopes, too, but its gradients are of the usual length."""
    assert is_overshoot(one(-2.1), one(1.6), one(1.0))
    assert not is_overshoot(one(-2.1), one(1.4), one(1.0)) and not is_overshoot(one(-1.9), one(1.6), one(1.0))
    for ratio, times in ((-3.0, 0.25), (-1e30, step_size.LEAST_SHRINK)):
        cut = state(slope=-0.5, uncut=-1.0)
        after = undone(cut, cut.made, one(ratio))
        assert after.size == pytest.approx(1.0 * times) and after.overshoots == 1
        assert after.slope == 0 and after.uncut == 0
        assert look(after, 0.0).size == after.size


def test_bounds_on_the_predicted_change_of_the_outputs():
    after, size = bounded(state(size=0.5), one(0.5), one(1.0))
    assert size == after.size == 0.5  # a change of 0.25, where 0.4 is allowed
    after, size = bounded(state(size=8.0), one(0.5), one(1.0))
    assert size == after.size == pytest.approx(step_size.LARGEST_OUTPUT_CHANGE * 2 / 0.5)
    after, size = bounded(state(), one(5.0), one(9.0))  # ten times the mean: only this step is shorter
    assert after.size == 2 and size == pytest.approx(2 * step_size.CHANGE_FACTOR / 10)
    assert after.change == pytest.approx((0.95 * 0.25 + 0.05 * 0.75**2) ** 0.5)
    after, size = bounded(state(size=1e-9, least_output_change=step_size.LEAST_OUTPUT_CHANGE), one(0.5), one(1.0))
    assert size == pytest.approx(step_size.LEAST_OUTPUT_CHANGE * 2 / 0.5)


def test_gradients_that_are_zero_at_first():
    first = started(one(0.0), one(0.0), 0.1, 0)
    after, size = bounded(first, one(0.0), one(1.0))
    assert torch.isfinite(size) and after.change == 0
    after, size = bounded(after, one(0.5), one(1.0))
    assert size == pytest.approx(step_size.LARGEST_OUTPUT_CHANGE * 2 / 0.5) and after.change > 0


def decision(values: Tensor, good: bool = True, ratio: float = 1.0, norm: float = 1.0) -> step_size.Decision:
    """Of a look at a state that it changes; the next slope is -3."""
    known = StepSize(*values.unbind())
    far = is_overshoot(one(ratio), one(norm), known.norm)
    look = Look(
        values, False, one(ratio), one(norm), longest_gradient(one(norm), known.norm), far, torch.tensor(good), True,
        one(0.5), one(1.0), one(2.0), one(1.0), 0.05,
    )  # fmt: skip
    found = decided(look)
    step_size.keep(look, found, one(-3.0))
    assert found.moves + 2 * found.undoes + 4 * found.stays in (1, 2, 4)
    return found


def test_the_device_decides():
    values = torch.stack(state(ends=-1.0))
    found, after = decision(values), StepSize(*values.unbind())
    assert found.moves and found.step_size == after.size == 0.8 and found.trust == after.trust
    assert (after.steps, after.was_bad, after.uncut, after.slope) == (LATER + 1, 0, -2 * after.size, -3)
    found = decision(values, ratio=-3.0, norm=9.0)
    assert found.undoes and (after.steps, after.overshoots, after.slope) == (LATER + 2, 1, 0)


def test_the_second_bad_batch_in_a_row_undoes_the_last_displacement():
    values = torch.stack(state())
    before, after = values.clone(), StepSize(*values.unbind())
    found = decision(values, good=False, ratio=0.0, norm=math.nan)
    assert found.stays and found.step_size == 0 and after.was_bad and torch.equal(values[:-1], before[:-1])
    found = decision(values, good=False, ratio=0.0, norm=math.nan)
    assert found.undoes and (after.steps, after.slope, after.overshoots) == (LATER, 0, 1)
    assert after.size == pytest.approx(2 * step_size.LEAST_SHRINK)
