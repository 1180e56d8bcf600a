"""Tensors of all layers as one vector, and layers of one form as the rows of matrices in it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers.steps import layer_vector
from optimizers.steps.layer_vector import LayerVector, inner, joined, layout_of, norms, of_states, to_states

pytestmark = pytest.mark.fast

SHAPES = {"a.w": (2, 3), "a.b": (2,), "b.w": (2, 3), "b.b": (2,), "c.w": (3, 2), "c.b": (2,), "s": (), "none": (0, 2)}
LAYERS = [("a.w", "a.b"), ("s",), ("b.w", "b.b"), ("c.w", "c.b"), ("none",)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
CPU = torch.device("cpu")
made = lambda **kinds: layout_of(LAYERS, named(), lambda name: kinds.get(name.replace(".", "_")))


def named(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def mixed_precisions(seed: int = 0) -> dict[str, Tensor]:
    """A layer in each of three precisions; the weight and the bias of one differ."""
    dtypes = {"b.w": torch.bfloat16, "b.b": torch.bfloat16, "c.w": torch.float64}
    return {name: x.to(dtypes.get(name, x.dtype)) for name, x in named(seed).items()}


def vector(tensors: dict[str, Tensor], **kinds: Any) -> LayerVector:
    layout = layout_of(LAYERS, tensors, lambda name: kinds.get(name.replace(".", "_")))
    return LayerVector.of(layout, tensors)


def test_layers_of_one_form_are_together() -> None:
    (run,) = made().runs
    assert [family.layers for family in run] == [(LAYERS[0], LAYERS[2]), (LAYERS[3],), (LAYERS[1],), (LAYERS[4],)]
    first, apart = made(b_w="other", b_b="other").runs
    assert first[0].layers == (LAYERS[0],) and [family.layers for family in apart] == [(LAYERS[2],)]
    first, split = made(a_b="other").runs  # parameters of a layer that differ are layers of their own
    assert first[0].layers == (("a.w",),) and split[0].layers == (("a.b",),)
    assert made() is made(**dict.fromkeys(["a_w", "a_b"])) and made(a_b="other") is made(a_b="third")


def test_precisions_are_apart() -> None:
    found = vector(mixed_precisions())
    assert [x.dtype for x in found.vectors] == [torch.float32, torch.bfloat16, torch.float64]
    assert ("c.w",) in found.layout.layers and ("c.b",) in found.layout.layers
    for name, x in mixed_precisions().items():
        assert torch.equal(found[name], x) and found[name].dtype == x.dtype


def test_vectors_hold_what_was_given() -> None:
    for layout in (made(), made(b_w="other")):
        found, given = LayerVector.of(layout, named()), named()
        assert list(found) == layout.names and len(found) == len(SHAPES)
        for name, x in given.items():
            assert torch.equal(found[name], x) and found[name].shape == x.shape
        transposed = {name: x.mT.contiguous().mT if x.ndim == 2 else x for name, x in given.items()}
        for name, x in LayerVector.of(layout, transposed).items():
            assert torch.equal(x, given[name])
        for family, rows in zip(layout.families, found.rows, strict=True):
            for layer, row in zip(family.layers, rows, strict=True):
                entries = torch.cat([given[name].reshape(family.rows, -1) for name in layer], 1).flatten()
                assert torch.equal(row, entries)
                parts = family.split(row[None])
                for name, part in zip(layer, parts, strict=True):
                    assert torch.equal(part[0], given[name])
                assert torch.equal(family.joined(parts), row) or not row.numel()
        assert list(map(len, found.layers)) == [sum(given[k].numel() for k in layer) for layer in layout.layers]
        found.rows[0].zero_()  # in the same memory
        assert not any(found[name].any() for name in layout.families[0].layers[0]) and named()["a.w"].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_layers(dtype: torch.dtype) -> None:
    """Sums are in single precision at least."""
    one, other = (vector(named(seed, dtype), b_w=1, b_b=1) for seed in (0, 1))
    wide = torch.promote_types(dtype, torch.float32)

    def close(found: list[Tensor], expected: Any) -> None:
        assert {x.dtype for x in found} == {wide}
        torch.testing.assert_close(found, [torch.tensor(x, dtype=wide) for x in expected], rtol=1e-5, atol=1e-5)

    def of_layers(number: Any) -> list[list[float]]:
        return [[sum(number(name) for name in layer) for layer in family.layers] for family in one.layout.families]

    square = lambda name: float(one[name].double().square().sum())
    product = lambda name: float((one[name].double() * other[name].double()).sum())
    close(norms(one.layers), [x**0.5 for row in of_layers(square) for x in row])
    close(one.layer_dots(other), of_layers(product))
    found = one.dot(other)
    assert [x.ndim for x in found] == [0, 0] and {x.dtype for x in found} == {wide}
    expected = [sum(map(product, names)) for names in one.layout.names_by_run]
    assert [float(x) for x in found] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_products_of_long_vectors_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ({"p": x} for x in torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)))
    first, second = (LayerVector.of(layout_of([("p",)], x, lambda name: None), x) for x in (one, other))
    monkeypatch.setattr(layer_vector, "MOST_ENTRIES", 300)
    torch.testing.assert_close(first.dot(second), [(one["p"] * other["p"]).sum()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixtures(dtype: torch.dtype) -> None:
    """Each run has its own share."""
    one, other = (vector(named(seed, dtype), b_w=1, b_b=1) for seed in (0, 1))
    before, shares = {name: x.clone() for name, x in one.items()}, [0.25, 1.0]
    found = one.mixed(other, shares)
    assert all(torch.equal(x, before[name]) for name, x in one.items())
    one.mix_(other, shares)
    for share, names in zip(shares, one.layout.names_by_run, strict=True):
        for name in names:
            expected = (1 - share) * before[name].double() + share * other[name].double()
            torch.testing.assert_close(found[name], expected.to(dtype))
            assert torch.equal(one[name], found[name])


def test_a_layer_is_a_matrix_with_the_bias_as_its_last_column() -> None:
    """On a processor, where one entry of it belongs to each row; else parameters come one after the other."""
    shapes: dict[str, tuple[int, ...]] = {"w": (4, 2, 3), "b": (4,), "norm.w": (5,), "norm.b": (5,)}
    shapes |= {"two.w": (6, 2), "two.b": (4,), "three.w": (4, 2), "three.b": (4,), "three.c": (4,)}
    tensors = {name: torch.arange(math.prod(shape)).view(shape) + 100.0 for name, shape in shapes.items()}
    layers = [("w", "b"), ("norm.w", "norm.b"), ("two.w", "two.b"), ("three.w", "three.b", "three.c")]
    made = layout_of(layers, tensors, lambda name: None)
    assert [family.rows for family in made.families] == [4, 5, 1, 1]
    (vector,) = LayerVector.of(made, tensors).vectors
    assert torch.equal(vector[:28].view(4, 7)[:, :6], tensors["w"].view(4, 6))
    assert torch.equal(vector[:28].view(4, 7)[:, 6], tensors["b"])
    elsewhere = {name: x.to("meta") for name, x in tensors.items()}
    assert {family.rows for family in layout_of(layers, elsewhere, lambda name: None).families} == {1}


def test_each_layer_is_multiplied_by_its_own_number() -> None:
    given = mixed_precisions()
    found = vector(given)
    factors = [0.5 * k for k in range(len(found.layout.layers))]
    found.multiply_layers_(factors)
    for layer, factor in zip(found.layout.layers, factors, strict=True):
        for name in layer:
            assert torch.equal(found[name], given[name] * factor)


def test_a_layer_times_zero_is_zero_whatever_it_was() -> None:
    given = named()
    given["a.w"][0, 1], given["b.b"][1] = math.nan, math.inf
    found = vector(given)
    zero = {("a.w", "a.b"), ("b.w", "b.b")}
    found.multiply_layers_([0.0 if layer in zero else 2.0 for layer in found.layout.layers])
    for layer in found.layout.layers:
        for name in layer:
            assert torch.equal(found[name], torch.zeros_like(given[name]) if layer in zero else 2 * given[name])


def test_states_are_views_of_what_is_kept() -> None:
    trained, states, layout = named(1), {name: {} for name in SHAPES}, made()
    assert not any(x.any() for x in of_states(layout, "mean", states, trained, None).vectors)
    kept = LayerVector.of(layout, named())
    to_states(kept, "mean", states, trained)
    assert all(states[name]["mean"] is kept[name] for name in SHAPES)
    assert of_states(layout, "mean", states, trained, kept) is kept

    states["b.b"]["mean"] = torch.full((2,), 7.0)  # as a checkpoint does, or a user
    again = of_states(layout, "mean", states, trained, kept)
    assert torch.equal(again["b.b"], torch.full((2,), 7.0)) and torch.equal(again["a.w"], kept["a.w"])
    states["b.b"]["mean"] = kept["b.b"].clone()  # equal, and in memory of its own
    assert of_states(layout, "mean", states, trained, kept) is not kept
    del states["b.b"]["mean"]
    assert not of_states(layout, "mean", states, trained, kept)["b.b"].any()


def test_states_follow_a_layout_that_changes() -> None:
    """A layer without a gradient at one step keeps what its state has, and other groups are other vectors."""
    trained, states, kept = named(1), {name: {} for name in SHAPES}, vector(named())
    to_states(kept, "mean", states, trained)
    fewer = layout_of(LAYERS, {k: x for k, x in named().items() if not k.startswith("b.")}, lambda name: None)
    now = of_states(fewer, "mean", states, trained, kept)
    assert "b.w" not in now and all(torch.equal(x, kept[name]) for name, x in now.items())
    to_states(LayerVector(fewer, [2 * x for x in now.vectors]), "mean", states, trained)
    again = of_states(made(), "mean", states, trained, kept)
    for name, x in again.items():
        assert torch.equal(x, kept[name] * (1 if name.startswith("b.") else 2))
    other = of_states(made(a_b="other"), "mean", states, trained, again)
    assert all(torch.equal(x, again[name]) for name, x in other.items())


def test_numbers_are_joined_in_the_widest_precision() -> None:
    found = joined([torch.tensor([1.0, 2.0]), torch.tensor(1 / 3, dtype=torch.float64)], CPU)
    assert found.dtype == torch.float64 and found.tolist() == [1, 2, 1 / 3]
    assert joined([torch.tensor([1.0]), torch.tensor(2.0)], CPU).tolist() == [1, 2]


def test_inner_products_are_in_single_precision_at_least() -> None:
    one = lambda *x, dtype=torch.float64: torch.tensor(x, dtype=dtype)
    assert inner(one(1.0, 2.0), one(3.0, 4.0)) == 11 and inner(one(1.0), one(1.0)).dtype == torch.float64
    low = inner(one(256.0, 1.0, dtype=torch.bfloat16), one(1.0, 1.0, dtype=torch.bfloat16))
    assert low == 257 and low.dtype == torch.float32  # 256 in bfloat16
    assert inner(torch.ones(2, 3), torch.ones(2, 3)) == 6
