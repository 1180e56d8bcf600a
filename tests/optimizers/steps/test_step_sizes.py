"""The pure functions of the trust region, in numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from optimizers.steps.directions import HORIZON
from optimizers.steps.trust_region import (
    TrustRegionConstants,
    TrustState,
    _energy,
    adapted,
    begun_again,
    bounded,
    evened,
    geometric_mean,
    is_long,
    is_overshoot,
    least_size,
    slope_ratio,
    undone,
)

pytestmark = pytest.mark.fast

C = TrustRegionConstants()
LATER = 1000  # steps


def state(**known: float) -> TrustState:
    values = {"size": 2.0, "change": 0.5, "norm": 1.0, "longest": 1.0}
    values |= {"lr": 1.0, "spread": 0.1, "slope": -1.0, "starts": -1.0, "ends": 0.0}
    return TrustState(**(values | known))


def look(known: TrustState, ratio: float, norm: float = 1.0, steps: int = LATER, lr: float = 1.0) -> TrustState:
    return adapted(known, ratio, norm, steps, lr, 30.0, C)


def test_ratio_of_slopes() -> None:
    assert [slope_ratio(slope, -2.0) for slope in (-2.0, -1.0, 0.0, 4.0, -9.0)] == [1, 0.5, 0, -2, 1]
    assert slope_ratio(1.0, 0.0) == 0 and slope_ratio(math.nan, 1.0) == 0
    assert slope_ratio(math.inf, -1.0) == -math.inf
    assert look(state(), -math.inf).ends == pytest.approx(C.overshoot * 0.1)  # as one that is just undone


def test_the_step_size_grows_with_the_mean_ratio_over_the_horizon() -> None:
    assert look(state(ends=-1.0), 1.0).size == pytest.approx(2 * math.exp(C.growth / 30))
    assert adapted(state(ends=-1.0), 1.0, 1.0, 0, 1.0, 10.0, C).size == pytest.approx(2 * math.exp(C.growth / 10))


def test_one_noisy_slope_counts_for_its_part_in_the_mean() -> None:
    """The mean ratio is 1/2 before, and 0.9 / 2 - 0.1 after one slope that rises as steeply as it fell."""
    assert look(state(ends=-0.5), -1.0).size == pytest.approx(2 * math.exp(C.growth / 30 * 0.35))


def test_negative_slopes_shrink_the_step_as_positive_ones_make_it_grow() -> None:
    """At any time, and whatever is left of the gradients; the usual ratio is -1, or -2 where all slopes are cut."""
    for steps, norm in ((100, 1.0), (10_000, 1.0), (100, 0.2)):
        assert look(state(norm=norm, ends=1.0), -1.0, steps=steps).size == pytest.approx(2 * math.exp(-C.growth / 30))
    assert look(state(ends=2.0), -math.inf).size == pytest.approx(2 * math.exp(-2 * C.growth / 30))


def test_the_step_size_follows_what_the_bounds_have_left_of_it() -> None:
    """A tenth of the step was made: a size far above that would shrink without effect."""
    assert look(state(kept=0.1, ends=1.0), -1.0).size == pytest.approx(0.2 * math.exp(-C.growth / 30))
    assert look(state(kept=0.1, ends=-1.0), 1.0).size > 2


def test_a_schedule_anneals_alone() -> None:
    """What anneals at a constant rate begins anew where lr moves; as it falls, slopes are followed over ten steps.

    Where it stays below one, or rises, growth is slower below one, and no faster above.
    """
    annealed = state(ends=-1.0, unmoved=7)
    assert look(annealed, 1.0).unmoved == 8
    for before, lr, factor in ((1.0, 0.5, 30 / HORIZON), (0.25, 0.5, 0.5), (1.0, 3.0, 1.0)):
        moved = look(annealed._replace(lr=before), 1.0, lr=lr)
        assert (moved.unmoved, moved.lr) == (0, lr)
        assert moved.size == pytest.approx(2 * math.exp(factor * C.growth / 30))
    assert look(annealed._replace(lr=0.5), 1.0, lr=0.5).size == pytest.approx(2 * math.exp(0.5 * C.growth / 30))


def test_gradients_count_for_a_bounded_length() -> None:
    assert look(state(), 0.0, norm=9.0).norm == pytest.approx(0.97 + 0.03 * 2.0)
    assert look(state(), 0.0, norm=9.0, steps=1).norm == pytest.approx(1.5)
    assert look(state(), 0.0, norm=9.0).spread == pytest.approx((0.97 * 0.1**2 + 0.03 * 1.0) ** 0.5)


def test_sizes_and_slopes_follow_the_unit_of_gradients() -> None:
    """Half as long as usual at step one: the unit is three quarters of what it was."""
    known = look(state(ends=-1.0, norm=4.0, longest=4.0), 1.0, norm=0.5, steps=1)
    assert known.norm == pytest.approx(3.0) and known.longest == 4
    assert known.size == pytest.approx(2 * 0.75 * math.exp(C.growth / 30))
    assert (known.starts, known.ends) == pytest.approx((-1 / 0.75, -1 / 0.75))


def test_gradients_that_are_far_too_long_tell_nothing_until_all_over_a_horizon_are() -> None:
    """Then the loss has another scale: the mean is theirs, and what anneals begins anew."""
    after = look(state(unmoved=9, far=HORIZON), 0.0, norm=1e6)
    assert (after.norm, after.longest, after.unmoved, after.far) == (1, 1, 10, HORIZON)
    after = look(state(unmoved=9, far=HORIZON + 1), 0.0, norm=1e6)
    assert (after.norm, after.longest, after.unmoved, after.far, after.change) == (1e6, 1e6, 0, 0, 0)
    assert look(state(), -3.0, norm=9.0).norm == pytest.approx(0.97 + 0.03 * 2)


def test_after_an_overshoot_the_step_size_is_that_of_the_secant() -> None:
    for ratio, times in ((-3.0, 0.25), (-math.inf, 0.0)):
        after = undone(state(kept=0.5), ratio, C)
        assert after.size == pytest.approx(1.0 * times)
        assert (after.slope, after.kept) == (0, 1)
        assert look(after, 0.0).size == after.size


def test_long_gradients_are_beyond_the_mean_and_its_spread() -> None:
    assert [is_long(state(spread=0.5), norm, C) for norm in (2.2, 2.3)] == [False, True]
    steep = state(spread=0.5)
    assert is_overshoot(steep, -2.1, 2.3, C) and not is_overshoot(steep, -2.1, 2.2, C)


def test_where_data_turn_the_step_size_is_the_least() -> None:
    """Batches agreed (a mean ratio of 1/2) until one turns; short gradients may well turn."""
    agreed = state(ends=-0.5, unmoved=8.0)
    assert begun_again(agreed, -0.5, C) == agreed._replace(size=0)
    for known, ratio in ((agreed, -0.2), (state(ends=-0.2, unmoved=8.0), -0.5), (agreed._replace(longest=5.0), -0.5)):
        assert begun_again(known, ratio, C) == known


def test_bounds_on_the_step_size() -> None:
    after, size = bounded(state(size=0.9), 0.5, 1.0, 0.3, C)
    assert size == after.size == 0.9  # a change of 0.45, where 0.5 is allowed
    after, size = bounded(state(size=8.0), 0.5, 1.0, 0.3, C)
    assert size == after.size == pytest.approx(C.top / 0.5)
    after, size = bounded(state(size=0.9), 5.0, 9.0, 1.2, C)  # ten times the mean: only this step is shorter
    assert after.size == 1.2
    assert size == pytest.approx(after.size * C.most / 10)
    assert after.change == pytest.approx((0.97 * 0.25 + 0.03 * 1.0**2) ** 0.5)
    assert bounded(state(size=1e-9), 0.5, 1.0, 0.3, C)[1] == 0.3
    assert bounded(state(size=1e-9), 0.5, 1.0, 3.0, C)[1] == pytest.approx(C.top / 0.5)  # the outputs decide


def test_the_least_movement_shrinks_over_time_or_less_than_gradients() -> None:
    """The root of two shorter after fifty steps, and again if lr rests; gradients of an eighth leave a quarter.

    The shorter of the two counts.
    """
    moves = [0.5, 8.0]
    assert least_size(state(), moves, 0, C) == pytest.approx(C.least / 2)
    assert least_size(state(), moves, int(C.early), C) == pytest.approx(C.least / 2 / 2**0.5)
    assert least_size(state(unmoved=C.early), moves, int(C.early), C) == pytest.approx(C.least / 4)
    for unmoved in (0.0, C.early):
        known = state(norm=0.125, unmoved=unmoved)
        assert least_size(known, moves, int(C.early), C) == pytest.approx(0.25 * C.least / 2)
    assert least_size(state(norm=0.125, unmoved=7 * C.early), moves, int(7 * C.early), C) == pytest.approx(C.least / 16)
    assert least_size(state(norm=1e-6), moves, 0, C) == pytest.approx(0.5e-6 / 2)  # next to nothing is left


def test_shares_of_norms_come_nearer_to_their_geometric_mean() -> None:
    """Four and a quarter become two and a half; what does not move says nothing."""
    scales, moves = evened([4.0, 0.25, 0.0, math.inf, math.nan], 0.5)
    assert scales == pytest.approx([0.5, 2.0, 1.0, 1.0, 1.0])
    assert moves == pytest.approx([2.0, 0.5, 0.0, math.inf, math.nan], nan_ok=True)
    assert geometric_mean(moves) == pytest.approx(1) and geometric_mean([0.0, math.inf]) == 0


def test_energy_is_without_damping() -> None:
    """u^T (M + damping) u less damping u^T u; and more than zero."""
    assert _energy(3.0, 0.5, 2.0) == 1
    assert 0 < _energy(3.0, 1.0, 2.0) < 1e-5
    assert _energy(math.nan, 0.5, 2.0) == _energy(math.inf, 0.5, 2.0) == 0
    assert _energy(-1e-3, 0.0, 2.0) == 0  # rounding in 16 bits; its root is taken
