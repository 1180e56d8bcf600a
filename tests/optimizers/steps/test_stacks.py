"""Tensors of layers of one form as the rows of one matrix, and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from curvature.linalg import stacked
from optimizers.steps.stacks import Family, Stack, families, products, row_products, row_squares

pytestmark = pytest.mark.fast

SHAPES = {"a.w": (2, 3), "a.b": (2,), "b.w": (2, 3), "b.b": (2,), "c.w": (3, 2), "c.b": (2,), "s": (), "none": (0, 2)}
LAYERS = [("a.w", "a.b"), ("s",), ("b.w", "b.b"), ("c.w", "c.b"), ("none",)]


def named(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def made(**kinds: Any) -> list[Family]:
    return families(LAYERS, named(), lambda name: kinds.get(name.replace(".", "_")))


def test_layers_of_one_form_are_together():
    assert [family.layers for family in made()] == [(LAYERS[0], LAYERS[2]), (LAYERS[1],), (LAYERS[3],), (LAYERS[4],)]
    apart = made(b_w="other", b_b="other")
    assert [family.layers for family in apart][:3] == [(LAYERS[0],), (LAYERS[1],), (LAYERS[2],)]
    split = made(a_b="other")  # parameters of a layer that differ are layers of their own
    assert [family.layers for family in split][:2] == [(("a.w",),), (("a.b",),)]


def test_rows_hold_what_was_given():
    found, given = Stack.of(made(), named()), named()
    assert list(found) == [name for family in made() for name in family.names] and len(found) == len(SHAPES)
    for name, x in given.items():
        assert torch.equal(found[name], x) and found[name].shape == x.shape
    transposed = {name: x.mT.contiguous().mT if x.ndim == 2 else x for name, x in given.items()}
    for name, x in Stack.of(made(), transposed).items():
        assert torch.equal(x, given[name])


def test_views_are_found_again_without_a_copy():
    stack = Stack.of(made(), named())
    again = stack.like(dict(stack))
    assert [x.data_ptr() for x in again.rows] == [x.data_ptr() for x in stack.rows]
    changed = dict(stack) | {"b.b": stack["b.b"].clone()}
    assert stack.like(changed).rows[0].data_ptr() != stack.rows[0].data_ptr()
    swapped = dict(stack) | {"a.w": stack["b.w"], "b.w": stack["a.w"]}
    for name, x in stack.like(swapped).items():
        assert torch.equal(x, swapped[name])


def test_states_refer_to_the_rows():
    trained, states = named(1), {name: {} for name in SHAPES}
    stack = Stack.of(made(), named())
    state = stack.state("mean", states, trained)
    assert not any(x.any() for x in state.rows)
    torch._foreach_add_(state.rows, stack.rows)
    assert all(torch.equal(states[name]["mean"], stack[name]) for name in SHAPES)
    states["b.b"]["mean"] = torch.full((2,), 7.0)  # as a checkpoint does, or a hook
    again = stack.state("mean", states, trained)
    assert torch.equal(again["b.b"], torch.full((2,), 7.0)) and torch.equal(again["a.w"], stack["a.w"])
    again.rows[0].zero_()
    assert not any(states[name]["mean"].any() for name in ("a.w", "a.b", "b.w", "b.b"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_of_rows(dtype: torch.dtype):
    one, other = ([x.to(dtype) for x in Stack.of(made(), named(seed)).rows] for seed in (0, 1))
    wide = lambda rows: [x.double() for x in rows]
    close = lambda found, expected: torch.testing.assert_close(found, torch.cat(expected).float(), rtol=1e-5, atol=1e-5)
    cpu = torch.device("cpu")
    squares, along, sums = row_squares(one, cpu), row_products(one, other, cpu), products(one, other, cpu)
    close(squares, [x.square().sum(1) for x in wide(one)])
    close(along, [(x * y).sum(1) for x, y in zip(wide(one), wide(other), strict=True)])
    close(sums, [(x * y).sum()[None] for x, y in zip(wide(one), wide(other), strict=True)])
    assert squares.dtype == along.dtype == sums.dtype == torch.float32


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
