"""What a first user does, on the installed packages alone: `python -I smoke.py` in an environment with the wheel."""

import importlib.metadata
from pathlib import Path

import torch
from torch import nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient


def train(make) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    opt, losses = make(model), []
    for _ in range(20):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main() -> None:
    for make in (KFAC, EKFAC, NaturalGradient):
        first, last = train(make)
        assert last < 0.7 * first, (make, first, last)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    data = torch.randn(5, 1, 8, 8), torch.randint(3, (5,))
    loss = nn.CrossEntropyLoss()
    rows = curvature.per_sample_gradients(model, loss, *data)
    diagonal = curvature.fisher_diagonal(model, loss, data)
    assert rows.keys() == diagonal.keys() and rows["0.weight"].shape == (5, 4, 1, 3, 3)
    posterior = curvature.laplace(model, loss, data)
    assert torch.isfinite(posterior.predict(data[0]).mean).all()
    assert curvature.plots.matrix(torch.eye(3)) is not None
    folders = [Path(module.__file__ or "").parent for module in (curvature, __import__("optimizers"))]
    assert all((folder / "py.typed").exists() for folder in folders)
    print(importlib.metadata.version("curvature-optimizers"), torch.__version__, *folders)


if __name__ == "__main__":
    main()
