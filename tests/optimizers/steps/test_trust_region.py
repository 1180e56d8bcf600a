"""The pieces of the trust region."""

from __future__ import annotations

import pytest
import torch

from curvature.preconditioners.diagonal import DiagonalBlock
from optimizers.recording.output_scale import OutputScale
from optimizers.steps.step_size import FIRST_TRUST
from optimizers.steps.trust_region import first_trust, output_change

pytestmark = pytest.mark.fast


def test_output_change_is_that_of_one_entry():
    """Two samples of three entries each, which a step of energy 12 changes by 2 in the root mean square."""
    outputs = OutputScale()
    outputs.update(OutputScale.of([torch.ones(2, 3)]), {}, torch.device("cpu"))
    assert output_change(torch.tensor(12.0), outputs) == 2 and outputs.rms == 1


def test_first_steps_of_many_layers_are_short():
    block = DiagonalBlock("p", (3,), torch.float32, "")
    layer = DiagonalBlock("q", (3,), torch.float32, "")
    layer.structure = "kronecker"  # type: ignore[misc]
    assert first_trust([block]) == first_trust([layer, block]) == FIRST_TRUST
    assert first_trust([layer, block, layer, layer, layer]) == pytest.approx(FIRST_TRUST / 2)
