"""The pieces of the directions that rules share."""

from __future__ import annotations

import pytest
import torch

from optimizers.steps.descent import without_damping

pytestmark = pytest.mark.fast


def test_energy_is_without_damping():
    """u^T (M + damping) u less damping u^T u; and more than zero."""
    slope, square = torch.tensor(3.0), torch.tensor(4.0)
    assert without_damping(slope, torch.tensor(0.5), square) == 1
    assert 0 < without_damping(slope, torch.tensor(1.0), square) < 1e-5
