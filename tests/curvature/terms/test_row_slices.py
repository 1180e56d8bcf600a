"""Parameters that are cut into rows before they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.kronecker.factors import Scheme
from curvature.terms import RowSlice
from curvature.terms.contractions import gradients, row_ranges
from support.cases.case import Raw
from support.views import WEIGHTS, N, built, close, drawn, means, terms_of

pytestmark = pytest.mark.fast


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.inner(x, y, z, need_weights=False)[0]


def cut(function: Callable[[Tensor], Sequence[Tensor]]) -> nn.Module:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        weights, biases = function(m.weight), function(m.bias)
        return torch.cat(
            [F.linear(x * k, w, b).tanh() for k, (w, b) in enumerate(zip(weights, biases, strict=True), 1)], -1
        )

    return Raw(run, weight=(5, 3), bias=(5,))


CUTS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "split": lambda w: w.split([2, 3]),
    "split_function": lambda w: torch.split(w, 3),
    "chunk": lambda w: w.chunk(2),
    "tensor_split": lambda w: w.tensor_split((1, 4)),
    "narrow": lambda w: [w.narrow(0, 1, 3), w.narrow(0, 4, 1)],
    "slices": lambda w: [w[:3], w[3:]],
    "slices_of_slices": lambda w: [w[1:][1:], w[:2]],
}


@pytest.mark.parametrize("name", CUTS)
def test_rows_that_are_read_apart_have_terms_of_their_own(name: str):
    model, x = built(lambda: cut(CUTS[name])), drawn(N, 4, 3)
    terms, biases, v = terms_of(model, x)
    numbers = [part.tolist() for part in CUTS[name](torch.arange(5))]
    found = row_ranges(terms["weight"])
    assert [list(range(piece.start, piece.stop)) for piece in found] == sorted(numbers)
    assert biases["weight"] == ("bias" if name != "slices_of_slices" else None)
    outputs = torch.cat([model.weight[rows] for rows in numbers])
    assert len(outputs) == v.shape[2]
    b = v * (1 - model(x).square()).detach()
    widths = [len(rows) for rows in numbers]
    for k, (rows, sent) in enumerate(zip(numbers, b.split(widths, 2), strict=True), 1):
        (piece,) = (piece for piece in found if piece.start == rows[0])
        scheme = Scheme.of(piece.terms, [(len(rows), 3), (len(rows),)], torch.float64, "expand")
        assert scheme is not None
        a = torch.cat([k * x, torch.ones_like(x[..., :1])], 2)
        moment, expected = means(a[:, :, None], sent[:, :, None], "expand")
        total, number = scheme.activations(piece.terms)
        close(total / number, moment)
        close(scheme.backprops([piece.terms], weights=WEIGHTS), expected)


@pytest.mark.parametrize(
    "apart",
    [
        lambda x, w, b: [F.linear(x, w[:2], b[2:]), F.linear(x, w[2:], b[:2])],
        lambda x, w, b: [F.linear(x, w[:2], b[:2]) + b[2:]],
        lambda x, w, b: [F.linear(x, w, b), x @ w.T],
        lambda x, w, b: [torch.addmm(b[:3], x[:, 0, :2], w[:2])],
    ],
)
def test_a_bias_that_meets_other_rows_does_not_belong_to_the_weight(apart: Callable[..., list[Tensor]]):
    run = lambda m, x: torch.cat([part.flatten(1) for part in apart(x, m.weight, m.bias)], 1)
    model = built(lambda: Raw(run, weight=(4, 3), bias=(4,)))
    assert terms_of(model, drawn(N, 2, 3))[1]["weight"] is None


@pytest.mark.parametrize(
    "reads",
    [
        lambda x, w, b: [F.linear(x, w, b), F.linear(x, w)],
        lambda x, w, b: [F.linear(x, w[:2], b[:2]), F.linear(x, w[2:])],
        lambda x, w, b: [F.linear(x, w, b), F.linear(x, w[2:])],
    ],
)
def test_a_bias_belongs_to_a_weight_that_is_read_without_it_too(reads: Callable[..., list[Tensor]]):
    run = lambda m, x: torch.cat([part.flatten(1) for part in reads(x, m.weight, m.bias)], 1)
    model = built(lambda: Raw(run, weight=(4, 3), bias=(4,)))
    assert terms_of(model, drawn(N, 2, 3))[1]["weight"] == "bias"


def test_cross_attention_is_in_pieces():
    model, x, y, z = built(Attention), drawn(N, 2, 4), drawn(N, 3, 4, seed=2), drawn(N, 3, 4, seed=3)
    for inputs, expected in {(x, y, y): [(0, 4), (4, 12)], (x, y, z): [(0, 4), (4, 8), (8, 12)]}.items():
        terms, biases, _ = terms_of(model, *inputs)
        assert [(p.start, p.stop) for p in row_ranges(terms["inner.in_proj_weight"])] == expected
        assert biases["inner.in_proj_weight"] == "inner.in_proj_bias"
        for start, stop, parts in row_ranges(terms["inner.in_proj_weight"]):
            assert Scheme.of(parts, [(stop - start, 4), (stop - start,)], torch.float64, "expand") is not None


@pytest.mark.parametrize(
    "function", [lambda w: [w[::2], w[1::2]], lambda w: [w[:, :2], w[:, 1:]], lambda w: [w[[2, 0]], w[[1, 3]]]]
)
def test_what_is_not_rows_next_to_each_other_is_not_taken_for_such(function):
    run = lambda m, x: sum(F.linear(x[..., : w.shape[1]], w).tanh().sum(-1) for w in function(m.weight))
    model, x = built(lambda: Raw(run, weight=(4, 3))), drawn(N, 2, 3)
    terms, _, v = terms_of(model, x)
    (piece,) = row_ranges(terms["weight"])
    assert piece.terms is terms["weight"] and not any(isinstance(term, RowSlice) for term in piece.terms)
    (expected,) = torch.autograd.grad((model(x) * v).sum(), model.weight)
    close(gradients(piece.terms).sum(0), expected)


def test_rows_of_one_parameter_read_by_one_and_together_by_another_are_one_piece():
    run = lambda m, x: F.linear(x, m.weight[:2]).sum(-1) + F.linear(x, m.weight).sum(-1)
    terms, _, _ = terms_of(built(lambda: Raw(run, weight=(4, 3))), drawn(N, 2, 3))
    (piece,) = row_ranges(terms["weight"])
    assert piece.terms is terms["weight"] and gradients(piece.terms).shape == (N, 4, 3)
