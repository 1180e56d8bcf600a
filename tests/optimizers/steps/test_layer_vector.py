"""Tensors of all layers as one vector, and layers of one form as the rows of matrices in it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers.steps import layer_vector
from optimizers.steps.layer_vector import LayerVector, layout_of

pytestmark = pytest.mark.fast

SHAPES = {"a.w": (2, 3), "a.b": (2,), "b.w": (2, 3), "b.b": (2,), "c.w": (3, 2), "c.b": (2,), "s": (), "none": (0, 2)}
LAYERS = [("a.w", "a.b"), ("s",), ("b.w", "b.b"), ("c.w", "c.b"), ("none",)]


def named(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def vector(tensors: dict[str, Tensor], **kinds: Any) -> LayerVector:
    layout = layout_of(LAYERS, tensors, lambda name: kinds.get(name.replace(".", "_")))
    return LayerVector.of(layout, tensors)


def test_products_of_long_vectors_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ({"p": x} for x in torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)))
    first, second = (LayerVector.of(layout_of([("p",)], x, lambda name: None), x) for x in (one, other))
    monkeypatch.setattr(layer_vector, "MOST_ENTRIES", 300)
    torch.testing.assert_close(first.dot(second), [(one["p"] * other["p"]).sum()])


def test_a_layer_times_zero_is_zero_whatever_it_was() -> None:
    given = named()
    given["a.w"][0, 1], given["b.b"][1] = math.nan, math.inf
    found = vector(given)
    zero = {("a.w", "a.b"), ("b.w", "b.b")}
    found.multiply_layers_([0.0 if layer in zero else 2.0 for layer in found.layout.layers])
    for layer in found.layout.layers:
        for name in layer:
            assert torch.equal(found[name], torch.zeros_like(given[name]) if layer in zero else 2 * given[name])
