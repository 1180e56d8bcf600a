"""Exact diagonals behind a wide last layer: as exact as by all columns, by fewer vectors, and only where that is so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.matrices.passes import RecordedBatch
from support.cases.case import Raw, floats, indices, randomise, seeded
from support.comparisons import matches
from support.oracles import brute_force as oracle
from support.snapshots import unchanged

pytestmark = pytest.mark.fast

N, T, WIDTH, WORDS = 3, 2, 3, 20
NARROW = T * (1 + WIDTH)  # one vector for each place for the last layer, and for each of its inputs for the rest


def body() -> dict[str, nn.Module]:
    return {"words": nn.Embedding(WORDS, 4), "inner": nn.Linear(4, WIDTH)}


def hidden(m: nn.Module, x: Tensor) -> Tensor:
    return m.inner(m.words(x)).tanh()


def ending(run: Callable[[nn.Module, Tensor], Tensor], **parts: Any) -> Callable[[], nn.Module]:
    """`parts` are functions that make modules, or shapes of parameters."""
    make = lambda: {name: part if isinstance(part, tuple) else part() for name, part in parts.items()}
    return lambda: Raw(lambda m, x: run(m, hidden(m, x)), **body(), **make())


def linear(**options: Any) -> nn.Module:
    return nn.Linear(WIDTH, WORDS, **options)


def some_ignored(count: int) -> Tensor:
    target = indices(WORDS, T)(count)
    target[0, 0] = target[1] = -100
    return target


ENTROPY, SQUARES = nn.CrossEntropyLoss, nn.MSELoss
WEIGHTS = torch.linspace(0.5, 2, WORDS, dtype=torch.float64)
labels, numbers = indices(WORDS, T), floats(T, WORDS)
as_text = ending(lambda m, h: m.head(h).mT, head=linear)
entries = ending(lambda m, h: m.head(h), head=linear)
flat = lambda count: indices(WORDS)(count * T)
# model, loss, target
NARROWED: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], Tensor]]] = {
    "mean": (as_text, ENTROPY(), labels),
    "sum": (as_text, ENTROPY(reduction="sum"), labels),
    "ignored": (as_text, ENTROPY(weight=WEIGHTS, label_smoothing=0.1), some_ignored),
    "no bias": (ending(lambda m, h: m.head(h).mT, head=lambda: linear(bias=False)), ENTROPY(), labels),
    "product": (ending(lambda m, h: (h @ m.w).mT, w=(WIDTH, WORDS)), ENTROPY(), labels),
    "rows": (ending(lambda m, h: m.head(h).flatten(0, 1), head=linear), ENTROPY(), flat),
    "squares": (entries, SQUARES(), numbers),
    "Poisson": (ending(lambda m, h: m.head(h), head=linear), nn.PoissonNLLLoss(), lambda n: numbers(n).abs().round()),
    "Bernoulli": (
        ending(lambda m, h: m.head(h), head=linear),
        nn.BCEWithLogitsLoss(),
        lambda n: numbers(n).gt(0) * 1.0,
    ),
}


def made(build: Callable[[], nn.Module], target: Callable[[int], Tensor]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with seeded(0):
        model, x, y = build(), indices(WORDS, T)(N), target(N)
        randomise(model)
    return model.double(), (x, y.double() if y.is_floating_point() else y)


def diagonal(model: nn.Module, loss: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    """The Fisher diagonal, and by how many vectors."""
    terms, sent = RecordedBatch.terms, []

    def counting(run: RecordedBatch, vectors: Tensor) -> Any:
        sent.append(len(vectors))
        return terms(run, vectors)

    with monkeypatch.context() as patch, unchanged(model, data):
        patch.setattr(RecordedBatch, "terms", counting)
        found = curvature.fisher_diagonal(model, loss, data)
    return torch.cat([d.flatten() for d in found.values()]), sum(sent)


def check(model: nn.Module, loss: Any, data: Any, monkeypatch: pytest.MonkeyPatch, weights: Any = None) -> int:
    """That the diagonal is right; by how many vectors."""
    found, sent = diagonal(model, loss, data, monkeypatch)
    matches(found, oracle.Matrices(model, loss, data, weights).fisher.diagonal())
    return sent


@pytest.mark.parametrize("name", NARROWED)
def test_fewer_vectors_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    build, loss, target = NARROWED[name]
    model, data = made(build, target)
    assert check(model, loss, data, monkeypatch) == NARROW
    expected = oracle.Matrices(model, loss, data).gauss_newton.diagonal()
    matches(curvature.gauss_newton(model, loss, data).diagonal(), expected)


def test_vectors_are_bounded(monkeypatch: pytest.MonkeyPatch):
    build, loss, target = NARROWED["mean"]
    model, data = made(build, target)
    monkeypatch.setattr("curvature.matrices.passes.BACKWARD_ELEMENTS", 500)
    check(model, loss, data, monkeypatch)


def test_last_layer_alone(monkeypatch: pytest.MonkeyPatch):
    with seeded(0):
        model, data = nn.Linear(WIDTH, WORDS).double(), (floats(WIDTH)(N).double(), indices(WORDS)(N))
    assert check(model, ENTROPY(), data, monkeypatch) == 1


def test_frozen_parts(monkeypatch: pytest.MonkeyPatch):
    for frozen in ("words.weight", "inner.weight", "head.bias", "head.weight"):
        model, data = made(as_text, labels)
        model.get_parameter(frozen).requires_grad_(False)
        check(model, ENTROPY(), data, monkeypatch)


def test_in_single_precision(monkeypatch: pytest.MonkeyPatch):
    model, data = made(as_text, labels)
    expected = oracle.Matrices(model, ENTROPY(), data).fisher.diagonal()
    found, sent = diagonal(model.float(), ENTROPY(), data, monkeypatch)
    matches(found, expected.float(), 1e-5)
    assert sent == NARROW


def tied() -> nn.Module:
    run = lambda m, x: F.linear(m.inner(m.words(x)).tanh(), m.words.weight).mT
    return Raw(run, words=nn.Embedding(WORDS, 4), inner=nn.Linear(4, 4))


around = ending(lambda m, h: (m.head(h) + m.shift(h.square())).mT, shift=linear, head=linear)
custom = ending(lambda m, h: (m.head(h) + m.w.erf()).mT, head=linear, w=(WORDS,))


class Unseen(torch.autograd.Function):
    """x @ w[:, :4].T of a weight that no record knows of."""

    @staticmethod
    def forward(context: Any, x: Tensor, w: Tensor) -> Tensor:
        context.save_for_backward(x, w)
        return x @ w[:4]

    @staticmethod
    def backward(context: Any, sent: Tensor) -> tuple[Tensor, Tensor]:
        x, w = context.saved_tensors
        rows = torch.zeros_like(w)
        rows[:4] = x.flatten(0, -2).T @ sent.flatten(0, -2)
        return sent @ w[:4].T, rows


def tied_unseen() -> nn.Module:
    run = lambda m, x: m.head(Unseen.apply(m.words(x), m.head.weight).tanh()).mT
    return Raw(run, words=nn.Embedding(WORDS, 4), head=linear())


# The columns of all outputs: something else than the last layer reaches the outputs, or they meet in the loss.
WIDE: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], Tensor]]] = {
    "a way around": (around, ENTROPY(), labels),
    "a custom way around": (custom, ENTROPY(), labels),
    "tied": (tied, ENTROPY(), labels),
    "tied where nothing sees it": (tied_unseen, ENTROPY(), labels),
    "scaled": (ending(lambda m, h: m.head(h).mT / 2, head=linear), ENTROPY(), labels),
    "normalised": (ending(lambda m, h: m.head(h).log_softmax(-1).mT, head=linear), nn.NLLLoss(), labels),
    "places of one term": (ending(lambda m, h: m.head(h).flatten(1), head=linear), ENTROPY(), indices(T * WORDS)),
    "callable": (as_text, lambda output, target: F.cross_entropy(output, target), labels),
}


@pytest.mark.parametrize("name", WIDE)
def test_all_columns_where_that_is_not_so(name: str, monkeypatch: pytest.MonkeyPatch):
    build, loss, target = WIDE[name]
    model, data = made(build, target)
    weights = None if isinstance(loss, nn.Module) else torch.full((N,), 1 / N, dtype=torch.float64)
    assert check(model, loss, data, monkeypatch, weights) >= T * (WORDS - 1)  # the rank of the root
