"""What layers do to the outputs together, per sample, wherever a layer has its samples."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import empirical
from curvature.preconditioners import SquaredChange
from optimizers import EKFAC, KFAC
from support.cases.case import Raw, seeded


def attend(m: nn.Module, x: Tensor) -> Tensor:
    """Sequences (N, T, 6), or (T, N, 6), to (N, 6)."""
    first = m.attention.batch_first
    x = x if first else x.transpose(0, 1)
    return m.attention(x, x, x)[0].mean(1 if first else 0)


def attention(batch_first: bool) -> nn.Module:
    return Raw(attend, attention=nn.MultiheadAttention(6, 2, batch_first=batch_first))


def fold(m: nn.Module, x: Tensor) -> Tensor:
    """Positions and samples in one axis, the positions first."""
    h = m.one(x.transpose(0, 1).flatten(0, 1)).tanh()
    return m.two(h).unflatten(0, (x.shape[1], -1)).sum(0)


def cut(m: nn.Module, x: Tensor) -> Tensor:
    """Positions (t, s) to an axis of t, samples and s: (2 N s, 6)."""
    h = x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)
    return m.two(m.one(h).tanh()).unflatten(0, (2, len(x), -1)).sum((0, 2))


def shut(m: nn.Module, x: Tensor) -> Tensor:
    """No gradient ever comes to a layer behind a gate that is zero."""
    return fold(m, x) + 0.0 * m.three(x).sum(1)


two_layers = lambda: {"one": nn.Linear(6, 5), "two": nn.Linear(5, 3)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch first": lambda: attention(True),
    "sequence first": lambda: attention(False),
    "folded": lambda: Raw(fold, **two_layers()),
    "as many features as samples": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)),
}


def last_layer_of_zeros() -> nn.Module:
    """No gradient comes to the attention at first."""
    model = nn.Sequential(attention(True), nn.Linear(6, 3))
    nn.init.zeros_(model[1].weight)
    return model


MAKERS = {"KFAC": KFAC, "EKFAC": EKFAC, "empirical": lambda model: KFAC(model, inject=empirical())}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


ALIKE = [(name, [(samples, 4)] * 2) for name in MODELS for samples in (8, 4)]  # four is the number of positions, too
ONE_FIRST = [(name, [(1, 4), (8, 4), (8, 4)]) for name in [*MODELS][:3]]  # one sample says nothing
OTHERS = [(name, [(8, 4), (6, 5), (5, 6)]) for name in ("batch first", "folded")]


@every_maker
@pytest.mark.parametrize("name, batches", [*ALIKE, *ONE_FIRST, *OTHERS])
def test_changes_of_samples_are_aligned(
    make: Any, name: str, batches: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_last_changes(make, MODELS[name], batches, monkeypatch)


@every_maker
def test_gradients_that_vanish_and_samples_in_the_middle_of_an_axis(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_last_changes(make, last_layer_of_zeros, [(8, 4)] * 3, monkeypatch)
    check_last_changes(make, lambda: Raw(cut, **two_layers()), [(6, 4), (5, 8)], monkeypatch)
    check_last_changes(make, lambda: Raw(shut, **two_layers(), three=nn.Linear(6, 3)), [(4, 4)] * 3, monkeypatch)


def check_last_changes(make: Any, build: Any, batches: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """``v^T J u`` of all blocks together is that of the whole step, sample by sample.

    Args:
        batches: samples and positions of each.
    """
    with seeded(0):
        model = build().double()
        data = [(torch.randn(n, t, 6, dtype=torch.float64), torch.randint(3, (n,))) for n, t in batches]
    changes: dict[str, Tensor] = {}
    sum_up = SquaredChange.of
    monkeypatch.setattr(SquaredChange, "of", lambda of_blocks: changes.update(of_blocks) or sum_up(of_blocks))
    opt, sent, arrived, squares = make(model), [], [], []
    measure = opt.recorder.store.measure

    def measured(tape: Any, outputs: Any, vectors: Any, *others: Any) -> Any:
        sent.append(vectors[0][0])
        statistics = measure(tape, outputs, vectors, *others)
        squares.append(statistics.along)
        return statistics

    opt.recorder.store.measure = measured
    opt.preconditioner.schedule.factor_every = 1
    for x, y in data:
        u = {k: d.clone() for k, d in opt._last_displacement().items()}
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        changes.clear()
        opt.zero_grad()
        out = model(x)
        out.register_hook(arrived.append)
        F.cross_entropy(out, y).backward()
        opt.step()
    found, vectors, along = torch.stack(list(changes.values())).sum(0), list(sent), squares[-1] if squares else None
    reached = set(changes)
    moved = jacobian_product(model, before, u, data[-1][0])
    if vectors:
        expected = (moved * vectors[-1]).sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(along.value, expected.square().sum(), rtol=1e-9, atol=1e-15)
        assert along.blocks == reached
    else:  # the loss's gradients, with a random sign for each sample, in units of the store
        expected = (moved * arrived[-1]).sum(1).abs()
        torch.testing.assert_close(found.abs() / found.norm(), expected / expected.norm(), rtol=1e-9, atol=1e-15)


def jacobian_product(model: nn.Module, at: Mapping[str, Tensor], u: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """J u (N, C), by two backward passes."""
    parameters = {k: p.clone().requires_grad_() for k, p in at.items()}
    out = torch.func.functional_call(model, parameters, (x,))
    v = torch.zeros_like(out, requires_grad=True)
    gradients = torch.autograd.grad(out, list(parameters.values()), v, create_graph=True)
    total = sum((g * u[k]).sum() for k, g in zip(parameters, gradients, strict=True))
    return torch.autograd.grad(total, v)[0]
