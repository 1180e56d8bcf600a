"""Tensors of layers of one form as the rows of one matrix, and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from curvature.linalg import stacked
from optimizers.steps.stacks import Layout, Stack, StateStack, layout_of, products, row_norms, row_products

pytestmark = pytest.mark.fast

SHAPES = {"a.w": (2, 3), "a.b": (2,), "b.w": (2, 3), "b.b": (2,), "c.w": (3, 2), "c.b": (2,), "s": (), "none": (0, 2)}
LAYERS = [("a.w", "a.b"), ("s",), ("b.w", "b.b"), ("c.w", "c.b"), ("none",)]


def named(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def made(**kinds: Any) -> Layout:
    return layout_of(LAYERS, named(), lambda name: kinds.get(name.replace(".", "_")))


def test_layers_of_one_form_are_together():
    (run,) = made().runs
    assert [family.layers for family in run] == [(LAYERS[0], LAYERS[2]), (LAYERS[1],), (LAYERS[3],), (LAYERS[4],)]
    first, apart = made(b_w="other", b_b="other").runs
    assert first[0].layers == (LAYERS[0],) and [family.layers for family in apart] == [(LAYERS[2],)]
    first, split = made(a_b="other").runs  # parameters of a layer that differ are layers of their own
    assert first[0].layers == (("a.w",),) and split[0].layers == (("a.b",),)
    assert made() is made(**dict.fromkeys(["a_w", "a_b"])) and made(a_b="other") is made(a_b="third")


def test_vectors_hold_what_was_given():
    for layout in (made(), made(b_w="other")):
        found, given = Stack.of(layout, named()), named()
        assert list(found) == layout.names and len(found) == len(SHAPES)
        for name, x in given.items():
            assert torch.equal(found[name], x) and found[name].shape == x.shape
        transposed = {name: x.mT.contiguous().mT if x.ndim == 2 else x for name, x in given.items()}
        for name, x in Stack.of(layout, transposed).items():
            assert torch.equal(x, given[name])
        for family, rows in zip(layout.families, found.rows, strict=True):
            for layer, row in zip(family.layers, rows, strict=True):
                assert torch.equal(row, torch.cat([given[name].flatten() for name in layer]))


def test_states_refer_to_the_vectors():
    trained, states, layout = named(1), {name: {} for name in SHAPES}, made()
    stack, known = Stack.of(layout, named()), StateStack("mean")
    state = known.of(layout, states, trained)
    assert not any(x.any() for x in state.vectors)
    torch._foreach_add_(state.vectors, stack.vectors)
    assert all(torch.equal(states[name]["mean"], stack[name]) for name in SHAPES)
    assert known.of(layout, states, trained) is state
    states["b.b"]["mean"] = torch.full((2,), 7.0)  # as a checkpoint does, or a hook
    again = known.of(layout, states, trained)
    assert torch.equal(again["b.b"], torch.full((2,), 7.0)) and torch.equal(again["a.w"], stack["a.w"])
    again.rows[0].zero_()
    assert not any(states[name]["mean"].any() for name in ("a.w", "a.b", "b.w", "b.b"))
    other = known.of(made(a_b="other"), states, trained)
    assert all(torch.equal(x, again[name]) and states[name]["mean"] is x for name, x in other.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_of_rows(dtype: torch.dtype):
    one, other = (Stack.of(made(), {k: x.to(dtype) for k, x in named(seed).items()}) for seed in (0, 1))
    wide = lambda tensors: [x.double() for x in tensors]
    close = lambda found, expected: torch.testing.assert_close(found, torch.cat(expected).float(), rtol=1e-5, atol=1e-5)
    cpu = torch.device("cpu")
    norms, along = row_norms(one.rows, cpu), row_products(one.rows, other.rows, cpu)
    sums = products(one.vectors, other.vectors, cpu)
    close(norms, [x.norm(dim=1) for x in wide(one.rows)])
    close(along, [(x * y).sum(1) for x, y in zip(wide(one.rows), wide(other.rows), strict=True)])
    close(sums, [(x * y).sum()[None] for x, y in zip(wide(one.vectors), wide(other.vectors), strict=True)])
    assert norms.dtype == along.dtype == sums.dtype == torch.float32


def test_stacked_is_a_view_where_it_can_be():
    whole = torch.arange(24.0)
    parts = list(whole.view(4, 6)[:, 1:5].view(4, 2, 2).unbind())
    for chosen in (parts, parts[::2], parts[1:]):
        found = stacked(chosen)
        assert torch.equal(found, torch.stack(chosen)) and found._base is whole
    for chosen in (parts[::-1], [parts[0], parts[1], parts[3]], [parts[0], parts[1].mT], [parts[0], parts[1].clone()]):
        found = stacked(chosen)
        assert torch.equal(found, torch.stack(chosen)) and found._base is not whole
    assert math.prod(stacked(parts[:1]).shape) == 4


def test_products_of_long_vectors_come_in_parts(monkeypatch: pytest.MonkeyPatch):
    one, other = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("optimizers.steps.stacks.MOST_ENTRIES", 300)
    torch.testing.assert_close(products([one], [other], one.device), (one * other).sum()[None])
