"""The pieces of the directions that rules share."""

from __future__ import annotations

import pytest
import torch

from optimizers.steps.descent import LONGEST_GRADIENT, NORM_DECAY, OUTLIER_FACTOR, MomentumDescent, _energy

pytestmark = pytest.mark.fast


def test_gradients_count_for_a_bounded_length():
    """A longer one is cut; one far longer is an outlier, unless the last was so, too."""
    descent, trained = MomentumDescent(), {"p": torch.zeros(2)}
    longest = 1.0
    for length, is_outlier in ((1.0, False), (0.5, False), (50.0, False), (1e6, True), (1e6, False)):
        (found,) = descent._clipped({"p": torch.tensor([0.0, length])}, trained)
        counted = min(length, LONGEST_GRADIENT * longest)
        torch.testing.assert_close(found, torch.tensor([0.0, counted]))
        longest = max(counted, NORM_DECAY * longest)
        assert descent.norms.longest == pytest.approx(longest)
        assert bool(descent.norms.is_outlier) == is_outlier, (length, OUTLIER_FACTOR)


def test_energy_is_without_damping():
    """u^T (M + damping) u less damping u^T u; and more than zero."""
    slope, square = torch.tensor(3.0), torch.tensor(4.0)
    assert _energy(slope, None, None) == 3 and _energy(slope, 0.5, square) == 1
    assert 0 < _energy(slope, 1.0, square) < 1e-5
