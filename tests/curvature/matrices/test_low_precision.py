"""Curvature of models in half precision and under autocast: computed and added up in single precision."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.builders import BUILDERS, evaluated
from support.cases.case import seeded

pytestmark = pytest.mark.fast

LOW = {torch.bfloat16: 2e-2, torch.float16: 2e-3}  # a few roundings of each, in the numbers that are squared


@pytest.mark.parametrize("autocast", [False, True], ids=["cast model", "autocast"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("builder", [*BUILDERS, "fisher_blocks", "kfac", "ekfac"])
def test_low_precision(builder: str, dtype: torch.dtype, autocast: bool):
    """Models in half precision have matrices in single precision; autocast ends where the model does."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        x, y = torch.randn(8, 5), torch.randint(3, (8,))
    build = functools.partial(evaluated, builder)
    expected = build(model, nn.CrossEntropyLoss(), (x, y))
    if not autocast:
        model, x = model.to(dtype), x.to(dtype)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype, enabled=autocast):
        warnings.simplefilter("error")  # rounding is not taken for another loss
        found = build(model, nn.CrossEntropyLoss(), (x, y))
    assert found.dtype == torch.float32
    assert (found - expected).norm() < LOW[dtype] * expected.norm()


@pytest.mark.parametrize("builder", ["fisher_diagonal", "kfac", "ekfac"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 60), nn.Conv1d(1, 15, 1), nn.Embedding(9, 15)], ids=str)
def test_many_vectors_in_low_precision(layer: nn.Module, builder: str):
    """Sums over vectors are in single precision: hundreds of them would be lost in eight bits."""
    with seeded(0):
        shape = (8, 1, 4) if isinstance(layer, nn.Conv1d) else (8, 4)
        x = torch.randint(9, shape) if isinstance(layer, nn.Embedding) else torch.randn(shape)
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(60, 300))
    trace = lambda found: sum(d.sum() for d in found.values()) if isinstance(found, dict) else found.trace()

    def build(dtype: torch.dtype) -> Tensor:
        target = torch.zeros(8, 300, dtype=dtype)
        inputs = x if isinstance(layer, nn.Embedding) else x.bfloat16().to(dtype)
        return trace(getattr(curvature, builder)(model.to(dtype), nn.MSELoss(), (inputs, target)))

    found = build(torch.bfloat16)
    expected = build(torch.float32)  # of the weights and inputs as rounded
    assert (found - expected).abs() < 2**-8 * expected  # a rounding of the activations
