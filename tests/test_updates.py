"""The pure functions of the step."""

import functools
import math

import pytest
import torch

from optimizers.updates import adapted, within_trust


def test_updates():
    one = functools.partial(torch.tensor, dtype=torch.float64)
    found = [adapted(one(2.0), one(slope), one(-1.0), 0.3).item() for slope in (-1.0, 0.0, 1.0, 9.0, -9.0)]
    assert found == pytest.approx([2 * math.exp(0.3 * ratio) for ratio in (1, 0, -1, -2, 1)])
    for slope, predicted in ((1.0, 0.0), (math.nan, 1.0), (math.inf, math.inf)):
        assert adapted(one(2.0), one(slope), one(predicted), 0.3).item() == 2
    cut = lambda change, length: within_trust(one(2.0), one(change), one(3.0), one(length), one(10.0), 0.1).item()
    expected = {(1.0, 0.1): 2, (6.0, 0.1): 0.5, (1.0, 4.0): 0.25, (0.0, 0.0): 2}
    assert [cut(*pair) for pair in expected] == pytest.approx(list(expected.values()))
