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


@pytest.mark.parametrize("samples", [8, 4])  # four is the number of positions, too
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("make", [KFAC, EKFAC, lambda model: KFAC(model, inject=empirical())])
def test_changes_of_samples_are_aligned(make: Any, name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``v^T J u`` of all blocks together is that of the whole step, sample by sample."""
    with seeded(0):
        model = MODELS[name]().double()
        x, y = torch.randn(samples, 4, 6, dtype=torch.float64), torch.randint(3, (samples,))
    changes: dict[str, Tensor] = {}
    energies = block_diagonal._energies
    monkeypatch.setattr(block_diagonal, "_energies", lambda own: changes.update(own) or energies(own))
    opt, sent, arrived = make(model), [], []
    measure = opt.recorder.store.measure

    def measured(tape: Any, outputs: Any, vectors: Any, *others: Any) -> Any:
        sent.append(vectors[0][0])
        return measure(tape, outputs, vectors, *others)

    opt.recorder.store.measure = measured
    for _ in range(2):
        u = {k: d.clone() for k, d in opt._last_displacement().items()}
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        opt.zero_grad()
        out = model(x)
        out.register_hook(arrived.append)
        F.cross_entropy(out, y).backward()
        opt.step()
    found, vectors = torch.stack(list(changes.values())).sum(0), list(sent)
    moved = jacobian_product(model, before, u, x)
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
