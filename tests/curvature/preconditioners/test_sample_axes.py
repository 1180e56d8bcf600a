"""What layers do to the outputs together, per sample, wherever a layer has its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import empirical
from curvature.preconditioners import block_diagonal
from optimizers import EKFAC, KFAC
from support.cases.case import seeded


class Attention(nn.Module):
    """Sequences (N, T, 6), or (T, N, 6), to (N, 6)."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.first, self.attention = batch_first, nn.MultiheadAttention(6, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        return self.attention(x, x, x)[0].mean(1 if self.first else 0)


class Folded(nn.Module):
    """Positions and samples in one axis, the positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x.transpose(0, 1).flatten(0, 1)).tanh()
        return self.two(h).unflatten(0, (x.shape[1], -1)).sum(0)


MODELS = {
    "batch first": lambda: Attention(True),
    "sequence first": lambda: Attention(False),
    "folded": Folded,
    "as many features as samples": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)),
}


class Windows(nn.Module):
    """Positions (t, s) to an axis of t, samples and s."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        h = x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)  # (2 N s, 6)
        return self.two(self.one(h).tanh()).unflatten(0, (2, count, -1)).sum((0, 2))


def last_layer_of_zeros() -> nn.Module:
    """No gradient comes to the attention at first."""
    model = nn.Sequential(Attention(True), nn.Linear(6, 3))
    nn.init.zeros_(model[1].weight)
    return model


MAKERS = {"KFAC": KFAC, "EKFAC": EKFAC, "empirical": lambda model: KFAC(model, inject=empirical())}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_maker
@pytest.mark.parametrize("samples", [8, 4])  # four is the number of positions, too
@pytest.mark.parametrize("name", MODELS)
def test_changes_of_samples_are_aligned(make: Any, name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_last_changes(make, MODELS[name], [(samples, 4)] * 2, monkeypatch)


@every_maker
@pytest.mark.parametrize("name", [*MODELS][:3])
def test_a_first_batch_of_one_sample_says_nothing(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_last_changes(make, MODELS[name], [(1, 4), (8, 4), (8, 4)], monkeypatch)


@every_maker
def test_gradients_that_vanish_say_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_last_changes(make, last_layer_of_zeros, [(8, 4)] * 3, monkeypatch)


@every_maker
@pytest.mark.parametrize("name", ["batch first", "folded"])
def test_lengths_and_batches_that_change(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_last_changes(make, MODELS[name], [(8, 4), (6, 5), (5, 6)], monkeypatch)


@every_maker
def test_samples_in_the_middle_of_an_axis(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_last_changes(make, Windows, [(6, 4), (5, 8)], monkeypatch)


def check_last_changes(make: Any, build: Any, batches: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """``v^T J u`` of all blocks together is that of the whole step, sample by sample.

    Args:
        batches: samples and positions of each.
    """
    with seeded(0):
        model = build().double()
        data = [(torch.randn(n, t, 6, dtype=torch.float64), torch.randint(3, (n,))) for n, t in batches]
    changes: dict[str, Tensor] = {}
    energies = block_diagonal._energies
    monkeypatch.setattr(block_diagonal, "_energies", lambda own: changes.update(own) or energies(own))
    opt, sent, arrived = make(model), [], []
    measure = opt.recorder.store.measure

    def measured(tape: Any, outputs: Any, vectors: Any, *others: Any) -> Any:
        sent.append(vectors[0][0])
        return measure(tape, outputs, vectors, *others)

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
    found, vectors = torch.stack(list(changes.values())).sum(0), list(sent)
    moved = jacobian_product(model, before, u, data[-1][0])
    if vectors:
        torch.testing.assert_close(found, (moved * vectors[-1]).sum(1), rtol=1e-9, atol=1e-15)
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
