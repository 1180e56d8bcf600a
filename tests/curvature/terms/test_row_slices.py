"""Parameters that are cut into rows before they are read, and biases that belong to a weight or do not."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.kronecker.factors import Scheme
from curvature.terms import RowSlice
from curvature.terms.contractions import gradients, row_ranges
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.oracles.brute_force import Matrices, positions
from support.views import WEIGHTS, N, built, close, drawn, means, terms_of

pytestmark = pytest.mark.fast


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


NO_ROWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "every second": lambda w: [w[::2], w[1::2]],
    "columns": lambda w: [w[:, :2], w[:, 1:]],
    "in another order": lambda w: [w[[2, 0]], w[[1, 3]]],
    "rows beside the whole": lambda w: [w[:2], w],
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_is_not_rows_next_to_each_other_is_not_taken_for_such(name: str):
    run = lambda m, x: sum(F.linear(x[..., : w.shape[1]], w).tanh().sum(-1) for w in NO_ROWS[name](m.weight))
    model, x = built(lambda: Raw(run, weight=(4, 3))), drawn(N, 2, 3)
    terms, _, v = terms_of(model, x)
    (piece,) = row_ranges(terms["weight"])
    assert piece.terms is terms["weight"] and gradients(piece.terms).shape == (N, 4, 3)
    assert name == "rows beside the whole" or not any(isinstance(term, RowSlice) for term in piece.terms)
    (expected,) = torch.autograd.grad((model(x) * v).sum(), model.weight)
    close(gradients(piece.terms).sum(0), expected)


LOSS = nn.CrossEntropyLoss()


def scaled_bias(beta: float, alpha: float) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        forward = lambda m, x: torch.addmm(m.bias, x, m.weight, beta=beta, alpha=alpha)
        return Raw(forward, weight=(4, 3), bias=(3,)).double(), torch.randn(6, 4).double(), torch.arange(6) % 3


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_optimizers_keep_them_apart(make: Any) -> None:
    for factors, blocks in (((1.0, 1.0), 1), ((0.5, 2.0), 2)):
        model, x, y = scaled_bias(*factors)
        opt = make(model)
        LOSS(model(x), y).backward()
        opt.step()
        assert len(opt.store.blocks) == blocks


TWICE: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], bool]] = {
    "alike": (lambda m, h: torch.addmm(m.bias, h, m.weight, beta=2, alpha=2), True),
    "other factors": (lambda m, h: torch.addmm(m.bias, h, m.weight, beta=0.5), False),
    "linear": (lambda m, h: F.linear(h, m.weight, m.bias), False),
    "linear of the transpose": (lambda m, h: F.linear(h, m.weight.T, m.bias), False),
    "product": (lambda m, h: h @ m.weight, False),
}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("other", TWICE)
def test_a_weight_that_is_read_twice(other: str, is_first: bool) -> None:
    """Weight and bias are one block if both reads are of one kind; either way blocks are those of the matrix."""
    read, is_joint = TWICE[other]
    calls = [read, lambda m, h: torch.addmm(m.bias, h, m.weight)][:: 1 if is_first else -1]
    with seeded(0):
        model = Raw(lambda m, x: calls[1](m, calls[0](m, x).tanh()), weight=(3, 3), bias=(3,)).double()
        x, y = torch.randn(6, 3).double(), torch.arange(6) % 3
    exact, where = Matrices(model, LOSS, (x, y)).gauss_newton, positions(model)
    for build in (curvature.fisher_blocks, curvature.kfac):
        assert len(build(model, LOSS, (x, y)).blocks) == (1 if is_joint else 2)
    for block in curvature.fisher_blocks(model, LOSS, (x, y)).blocks.values():
        rows = torch.cat([where[name].flatten() for name in block.space.names])
        torch.testing.assert_close(block.to_dense(), exact[rows[:, None], rows])
    opt = NaturalGradient(model, loss=LOSS, layerwise=True)
    LOSS(model(x), y).backward()
    opt.step()
    assert len(opt.store.blocks) == (1 if is_joint else 2)
