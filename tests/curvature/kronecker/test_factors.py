"""Second moments of activations and backprops of tables and tied weights; layers: test_kronecker_factors.py."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.kronecker import factors
from curvature.kronecker.factors import Affine, Reading, Scheme
from curvature.kronecker.sides import Product, merge_products
from curvature.linalg import ByDevice
from curvature.terms import OuterProduct
from support.cases.case import Raw
from support.views import WEIGHTS, N, built, close, drawn, means, scheme_of, terms_of

pytestmark = pytest.mark.fast

each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


# -- tables

V, D = 6, 2


def bag(**options: Any) -> nn.Module:
    """Bags of different lengths, from one vector of indices."""
    run = lambda m, starts: m.words(m.index, starts)
    return Raw(run, words=nn.EmbeddingBag(V, D, **options), index=torch.tensor([1, 2, 2, 4, 3, 3, 1, 5, 2]))


def looked_up(words: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return Raw(lambda m, x: m.words(x), words=words(V, D, **options))


STARTS = torch.tensor([0, 2, 7])
BAGS = [[1, 2], [2, 4, 3, 3, 1], [5, 2]]
LINES = [[1, 3, 3, 0], [2, 2, 2, 5], [4, 3, 2, 1]]

# model, input, what each sample looks up, and the row that is not learnt
TABLES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[list[int]], int]] = {
    "plain": (lambda: looked_up(nn.Embedding), torch.tensor(LINES), LINES, -1),
    "padding": (lambda: looked_up(nn.Embedding, padding_idx=3), torch.tensor(LINES), LINES, 3),
    "bag": (lambda: looked_up(nn.EmbeddingBag), torch.tensor(LINES), LINES, -1),
    "bag_padding": (
        lambda: looked_up(nn.EmbeddingBag, mode="sum", padding_idx=-3), torch.tensor(LINES), LINES, 3
    ),
    "ragged": (lambda: bag(mode="sum"), STARTS, BAGS, -1),
    "ragged_padding": (lambda: bag(padding_idx=2), STARTS, BAGS, 2),
}  # fmt: skip


@each_sharing
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, sharing: str):
    """Only what is looked up and learnt counts: no frozen row, no filler of the shorter bags."""
    make, x, looked_up, frozen = TABLES[name]
    model = built(make)
    terms, _, v = terms_of(model, x)
    live = [[row for row in line if row != frozen] for line in looked_up]
    one_hot = [F.one_hot(torch.tensor(line), V).double() for line in live]
    scheme = scheme_of(model, "words.weight", terms, None, sharing)
    total, number = scheme.activations(terms["words.weight"])
    if sharing == "expand":
        expected = torch.cat(one_hot).mean(0)
    else:
        expected = torch.stack([a.mean(0).square() for a in one_hot]).mean(0)
    close(total[0] / number, expected)
    assert scheme.storage == ("dense", "diagonal") and (frozen < 0 or total[0, frozen] == 0)
    b = []  # backprop of every look-up that counts
    for n, (line, kept) in enumerate(zip(looked_up, live, strict=True)):
        share = 1 / len(kept) if getattr(model.words, "mode", "sum") == "mean" else 1
        each = v[n] if v.ndim == 3 else v[n].expand(len(line), D)
        b.append(share * torch.stack([each[t] for t, row in enumerate(line) if row != frozen]))
    b = [rows.sum(0, keepdim=True) if sharing == "reduce" else rows for rows in b]
    outputs = sum(w * rows.T @ rows for w, rows in zip(WEIGHTS, b, strict=True))
    close(scheme.backprops([terms["words.weight"]], weights=WEIGHTS)[0], torch.as_tensor(outputs))


def product_of(scheme: Scheme, reading: Reading, terms: Sequence[Affine], weights: Tensor | None = None) -> Product:
    moment, number = scheme.activations(terms)
    backprops = scheme.side(reading.flipped, scheme.backprops([terms], weights=weights))
    activations = scheme.side(not reading.flipped, moment).scaled(1 / torch.as_tensor(number).clamp(min=1))
    return (activations, backprops) if reading.flipped else (backprops, activations)


def test_a_batch_of_frozen_rows_has_no_curvature():
    model = built(lambda: looked_up(nn.Embedding, padding_idx=3))
    terms, _, _ = terms_of(model, torch.tensor([[3, 3], [3, 3], [3, 3]]) + torch.tensor([[0], [0], [1]]))
    terms = {"words.weight": [terms["words.weight"][0].samples(slice(0, 2))]}
    for sharing in ("expand", "reduce"):
        scheme = scheme_of(model, "words.weight", terms, None, sharing)
        (reading,) = scheme.readings(terms["words.weight"])
        sides = product_of(scheme, reading, terms["words.weight"])
        assert all((side.entries == 0).all() for side in sides)


# -- tied weights


def tied(decode: Callable[[nn.Module, Tensor], Tensor], **options: Any) -> nn.Module:
    run = lambda m, x: decode(m, m.inner(m.words(x)).tanh())
    return Raw(run, words=nn.Embedding(V, D, **options), inner=nn.Linear(D, D))


TIED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "linear": lambda m, h: F.linear(h, m.words.weight),
    "matmul": lambda m, h: h @ m.words.weight.T,
    "einsum": lambda m, h: torch.einsum("ntd,vd->ntv", h, m.words.weight),
}


@each_sharing
@pytest.mark.parametrize("name", TIED)
def test_tied_decoder(name: str, sharing: str):
    """The side of the rows is a diagonal in both reads; the one for the sum of the two has the trace of both."""
    model, x = built(lambda: tied(TIED[name], padding_idx=3)), torch.tensor(LINES)
    terms, _, v = terms_of(model, x)
    parts = terms["words.weight"]
    scheme = scheme_of(model, "words.weight", terms, None, sharing)
    readings = scheme.readings(parts)
    assert set(readings) == {Reading(True, True), Reading(False, False)} and scheme.storage == ("diagonal", "dense")
    h = model.inner(model.words(x)).tanh().detach()
    moment, outputs = means(h[:, :, None], v[:, :, None], sharing)
    decoder = readings[Reading(False, False)]
    total, number = scheme.activations(decoder)
    close(total / number, moment)
    close(scheme.backprops([decoder], weights=WEIGHTS), outputs.diagonal(dim1=1, dim2=2))
    products = [product_of(scheme, k, found, WEIGHTS) for k, found in readings.items()]
    assert [(r.entries.shape, c.entries.shape) for r, c in products] == [((1, V), (1, D, D))] * 2
    rows, columns = merge_products(products)
    trace = sum(r.diagonal().sum() * c.diagonal().sum() for r, c in products)
    close(rows.diagonal().sum() * columns.diagonal().sum(), torch.as_tensor(trace))


# -- what a scheme is


@each_sharing
def test_two_vectors(sharing: str):
    """Left and right of an indefinite matrix."""
    model = built(lambda: nn.Conv1d(2, 3, 2))
    x = drawn(N, 2, 4)
    (left, biases, v), (right, _, w) = (terms_of(model, x, seed=seed) for seed in (3, 4))
    scheme = scheme_of(model, "weight", left, biases["weight"], sharing)
    b, c = v.transpose(1, 2), w.transpose(1, 2)
    b, c = (t.sum(1, keepdim=True) if sharing == "reduce" else t for t in (b, c))
    expected = torch.einsum("n,nto,ntp->op", WEIGHTS, b, c)
    close(scheme.backprops([left["weight"]], [right["weight"]], WEIGHTS)[0], expected)


@each_sharing
def test_reads_of_different_numbers_of_samples_are_added_up(sharing: str):
    """Where samples are guessed at, one read may be taken for one sample."""
    one, two = (OuterProduct(drawn(n, 2, 1, 3), drawn(n, 2, 1, 2, seed=2), (2, 3)) for n in (N, 1))
    scheme = Scheme.of([one, two], [(2, 3)], torch.float64, sharing)
    assert scheme is not None
    for function in (lambda terms: scheme.activations(terms)[0], lambda terms: scheme.backprops([terms])):
        close(function([one, two]), function([one]) + function([two]))
    assert scheme.activations([one, two])[1] == (N + 1) * (2 if sharing == "expand" else 1)


def test_what_has_no_kronecker_factors():
    model = built(lambda: Raw(lambda m, x: m.layer(x * m.scale), layer=nn.Linear(2, 2), scale=(2,)))
    terms, _, _ = terms_of(model, drawn(N, 2))
    assert Scheme.of(terms["scale"], [(2,)], torch.float64, "expand") is None
    mixed = [*terms["layer.weight"], *terms_of(built(lambda: nn.Conv1d(2, 2, 1)), drawn(N, 2, 3))[0]["weight"]]
    assert Scheme.of(mixed, [(2, 2)], torch.float64, "expand") is None
    scheme = Scheme.of(terms["layer.weight"], [(2, 2)], torch.float64, "expand")
    assert scheme is not None
    with pytest.raises(ValueError, match="another form"):
        scheme.readings(mixed)
    with pytest.raises(ValueError, match="sharing"):
        Scheme.of(terms["layer.weight"], [(2, 2)], torch.float64, "shared")


@pytest.mark.parametrize(
    "rows, groups, d, in_parts",
    [(256, 1, 259, True), (300, 2, 256, True), (512, 1, 255, False), (127, 1, 600, False), (130, 1, 300, False)],
)
def test_a_large_moment_is_that_of_all_rows(rows: int, groups: int, d: int, in_parts: bool, monkeypatch):
    a = torch.randn(rows, groups, d, dtype=torch.float64)
    calls = []
    symmetric = factors._fill_symmetric
    monkeypatch.setattr(factors, "_fill_symmetric", lambda *sides: calls.append(1) or symmetric(*sides))
    found = factors.second_moment(a, a, False)
    assert len(calls) == in_parts
    close(found, torch.einsum("ngi,ngj->gij", a, a))
    close(factors.second_moment(a, a.flip(0), False), torch.einsum("ngi,ngj->gij", a, a.flip(0)))
    monkeypatch.setattr(factors, "BLOCK_ELEMENTS", ByDevice(100 * d, 100 * d))
    longer = torch.cat([a, torch.full((rows, groups, 1), 0.5, dtype=a.dtype)], 2)
    close(factors.second_moment_with_constant(a, 0.5), torch.einsum("ngi,ngj->gij", longer, longer))
