"""One case for each layer rule, computed by the rule and by a loop of batch size one; the catalogue has all options."""

from typing import Any

import pytest
import torch
from torch import Tensor

import curvature
from curvature.layers import RULES
from support.cases.catalogue import CASES
from support.oracles import brute_force as oracle
from support.plans import plans_of

pytestmark = pytest.mark.fast

BY_ID = {case.id: case for case in CASES}
CASE_OF = {
    "AddMatmulRule": "raw_addmm",
    "BatchNormRule": "batch_norm2d",
    "BilinearRule": "bilinear",
    "ConvolutionRule": "conv1d_groups",
    "EinsumRule": "raw_einsum_heads",
    "ElementwiseRule": "raw_scale_and_shift",
    "EmbeddingBagRule": "bag_mean_padding",
    "EmbeddingRule": "embedding_padding",
    "GroupNormRule": "group_norm_places",
    "InstanceNormRule": "instance_norm2d_eval",
    "LayerNormRule": "layer_norm_places",
    "LinearRule": "linear_2_leading",
    "MatmulRule": "raw_matmul_heads",
    "PReLURule": "prelu_channels_places",
    "RMSNormRule": "rms_norm_places",
    "RepeatRule": "raw_repeat",
    "ReversedMatmulRule": "raw_matmul_reversed",
    "TransposedConvolutionRule": "conv_transpose1d_mixed",
}


@pytest.mark.parametrize("rule", sorted({type(rule) for rule in RULES.values()}, key=lambda rule: rule.__name__))
def test_rule(rule: type, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def term(self: Any, *args: Any, of: Any = rule.term) -> Any:
        calls.append(type(self))
        return of(self, *args)

    monkeypatch.setattr(rule, "term", term)
    case = BY_ID[CASE_OF[rule.__name__]]
    model, loss = case.build(device)
    x, y = case.batch(model)
    expected = oracle.per_sample_gradients(model, loss, x, y)
    close(curvature.per_sample_gradients(model, loss, x, y), expected)
    close({"": curvature.per_sample_norms(model, loss, x, y)}, {"": oracle.norms(expected)})
    close({"": curvature.per_sample_gram(model, loss, x, y)}, {"": oracle.gram(expected)})
    (plan,) = plans_of(model)
    assert rule in calls and not plan.general


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(found[name], right, rtol=1e-9, atol=1e-11)
