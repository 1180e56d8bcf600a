"""Per-sample gradients some samples at a time, and into tensors and files that exist."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvature
import curvature.gradients.per_sample
from support.cases.case import seeded
from support.oracles.brute_force import per_sample_gradients

LOSS = nn.CrossEntropyLoss()


class Scaled(nn.Module):
    """A parameter that takes the general path."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nc,c,c->nc", x, self.w, self.w).sinh()


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        layers = nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 4), Scaled(), nn.Linear(4, 3)
        return nn.Sequential(*layers).double(), torch.randn(7, 1, 3, 3).double(), torch.randint(3, (7,))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    sizes: list[int] = []
    kept = curvature.gradients.per_sample.contracted
    counted = lambda batch, contract: sizes.append(batch.count) or kept(batch, contract)
    monkeypatch.setattr(curvature.gradients.per_sample, "contracted", counted)
    found = curvature.per_sample_gradients(model, LOSS, x, y, chunk=chunk)
    torch.testing.assert_close(found, per_sample_gradients(model, LOSS, x, y))
    assert set(sizes) == {min(chunk, 7)} and not any(g.requires_grad for g in found.values())
    assert len(curvature.per_sample_gradients(model, LOSS, x[:0], y[:0], chunk=chunk)["0.weight"]) == 0


@pytest.mark.parametrize("most", [0, 1 << 22])
def test_backprops_are_contracted_as_they_arrive(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a known plan, in portions of one layer or all together, some samples of a norm at a time."""
    monkeypatch.setattr("curvature.gradients.per_sample.WAITING_BYTES", most)
    monkeypatch.setattr("curvature.layers.normalisation.CACHED_ELEMENTS", 1)
    with seeded(0):
        layers = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 4), Scaled(), nn.Linear(4, 3)
        model, x, y = nn.Sequential(*layers).double(), torch.randn(7, 1, 4, 4).double(), torch.randint(3, (7,))
    portions: list[int] = []
    kept = curvature.gradients.per_sample.precise_terms
    counted = lambda tape, backprops, *rest: (
        portions.append(sum(b is not None for b in backprops)) or kept(tape, backprops, *rest)
    )
    monkeypatch.setattr(curvature.gradients.per_sample, "precise_terms", counted)
    wanted = per_sample_gradients(model, LOSS, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in wanted.values()]).norm(dim=0)
    curvature.per_sample_norms(model, LOSS, x, y)
    portions.clear()
    torch.testing.assert_close(curvature.per_sample_gradients(model, LOSS, x, y), wanted)
    assert (max(portions) == 1) == (most == 0)
    torch.testing.assert_close(curvature.per_sample_norms(model, LOSS, x, y), norms)


def test_results_go_where_they_are_sent(tmp_path: Path) -> None:
    model, x, y = problem()
    wanted = per_sample_gradients(model, LOSS, x, y)
    files = {
        name: np.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="w+", dtype="float64", shape=tuple(g.shape))
        for name, g in wanted.items()
    }
    tensors = {name: torch.zeros_like(g, dtype=torch.float32) for name, g in wanted.items()}
    found = curvature.per_sample_gradients(model, LOSS, x, y, chunk=3, out=files)
    alone = curvature.per_sample_gradients(model, LOSS, x, y, out=tensors)
    for name, g in wanted.items():
        files[name].flush()
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), g.numpy(), atol=1e-14)
        torch.testing.assert_close(found[name], g)
        assert alone[name] is tensors[name]
        torch.testing.assert_close(tensors[name], g.float())


def test_what_is_refused() -> None:
    model, x, y = problem()
    right = {name: torch.empty(7, *p.shape) for name, p in model.named_parameters()}
    call = lambda **options: curvature.per_sample_gradients(model, LOSS, x, y, **options)
    with pytest.raises(ValueError, match="chunk: expected a number of samples, found 0"):
        call(chunk=0)
    with pytest.raises(ValueError, match=r"out: expected 4\.bias of shape \(7, 3\), found \(6, 3\)"):
        call(out=right | {"4.bias": torch.empty(6, 3)})
    with pytest.raises(ValueError, match=r"out: expected 0\.weight of shape \(7, 4, 1, 3, 3\), found none"):
        call(out={name: t for name, t in right.items() if name != "0.weight"})
    with pytest.raises(ValueError, match="out: expected more of shape no such parameter"):
        call(out=right | {"more": torch.empty(7)})
