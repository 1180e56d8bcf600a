"""Weights as (g, o, i) and back, whatever the order of their axes."""

from __future__ import annotations

import pytest
import torch

from curvature.terms import AffineLayout

pytestmark = pytest.mark.fast

SIZES = (2, 3, 4)  # g, o, i


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_axes_in_any_order(order: tuple[int, ...], has_bias: bool) -> None:
    """Axis k of the weight is axis `order[k]` of (g, o, i)."""
    matrices = torch.arange(2 * 3 * (4 + has_bias)).reshape(2, 3, 4 + has_bias)
    weight, bias = matrices[..., :4].permute(order), matrices[..., 4:].reshape(-1)
    shapes = (tuple(weight.shape), (6,))[: 1 + has_bias]
    layout = AffineLayout(shapes, 2, 3, SIZES, order)
    tensors = [weight, bias][: 1 + has_bias]
    assert torch.equal(layout.to_matrices(tensors), matrices)
    assert torch.equal(layout.to_matrices([x[None] for x in tensors])[0], matrices)
    assert all(torch.equal(*pair) for pair in zip(layout.from_matrices(matrices), tensors, strict=True))
