"""The pieces of the trust region."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from curvature.preconditioners.diagonal import DiagonalBlock
from optimizers.recording.output_scale import OutputScale
from optimizers.steps.step_size import FIRST_TRUST
from optimizers.steps.trust_region import first_trust, output_gain

pytestmark = pytest.mark.fast


def test_output_change_is_that_of_one_entry():
    """Two samples of three entries each, which a step of energy 12 changes by 2 in the root mean square."""
    outputs = OutputScale()
    outputs.update(OutputScale.of([torch.ones(2, 3)]), {}, torch.device("cpu"))
    context: Any = SimpleNamespace(outputs=outputs, numbers=SimpleNamespace(values=torch.ones(1)))
    assert 12 * output_gain(context, None) == 4 and outputs.rms == 1
    known: Any = SimpleNamespace(measured=torch.tensor(6.0), predicted=torch.tensor(2.0))
    assert 12 * output_gain(context, known) == pytest.approx(12)


def test_first_steps_of_many_layers_are_short():
    block = DiagonalBlock("p", (3,), torch.float32, "")
    layer = DiagonalBlock("q", (3,), torch.float32, "")
    layer.structure = "kronecker"  # type: ignore[misc]
    assert first_trust([block]) == first_trust([layer, block]) == FIRST_TRUST
    assert first_trust([layer, block, layer, layer, layer]) == pytest.approx(FIRST_TRUST / 2)
