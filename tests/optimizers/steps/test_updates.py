"""Small arithmetic that step rules share."""

from __future__ import annotations

import math

import pytest
import torch

from optimizers.steps.layer_vector import inner
from optimizers.steps.rule import are_finite, kept_by_decay

pytestmark = pytest.mark.fast


def test_inner_products_are_in_single_precision_at_least() -> None:
    one = lambda *x, dtype=torch.float64: torch.tensor(x, dtype=dtype)
    assert inner(one(1.0, 2.0), one(3.0, 4.0)) == 11 and inner(one(1.0), one(1.0)).dtype == torch.float64
    low = inner(one(256.0, 1.0, dtype=torch.bfloat16), one(1.0, 1.0, dtype=torch.bfloat16))
    assert low == 257 and low.dtype == torch.float32  # 256 in bfloat16
    assert inner(torch.ones(2, 3), torch.ones(2, 3)) == 6


def test_finite_entries_whose_sum_is_not() -> None:
    one = lambda *x: torch.tensor(x, dtype=torch.float64)
    assert are_finite([one(1.0), one()]) and are_finite([one(1e308, 1e308)])
    assert not any(are_finite([one(1.0), one(2.0, bad)]) for bad in (math.nan, math.inf, -math.inf))


def test_weight_decay_has_the_units_of_recipes_for_adamw() -> None:
    assert kept_by_decay({"lr": 0.5, "weight_decay": 0.1}) == pytest.approx(1 - 1e-3 * 0.5 * 0.1)
