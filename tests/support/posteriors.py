"""Small posteriors beside their oracles."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import curvature
from support.cases.case import seeded
from support.oracles.brute_force import Matrices, positions
from support.oracles.kronecker import affine_layers, kronecker
from support.oracles.laplace import Posterior

PRIOR, NOISE = 0.7, 0.6


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


LABELS: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
    "squares": (nn.MSELoss(), lambda: torch.randn(5, 3).double()),
    "classes": (nn.CrossEntropyLoss(), lambda: torch.randint(3, (5,))),
    "weighted": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]).double(), ignore_index=0),
        lambda: torch.tensor([0, 1, 2, 2, 0]),
    ),
    "binary": (nn.BCEWithLogitsLoss(), lambda: torch.rand(5, 3).round().double()),
    "counts": (nn.PoissonNLLLoss(), lambda: torch.poisson(torch.ones(5, 3)).double()),
}
STRUCTURES: dict[str, Callable[[Matrices], Tensor]] = {
    "kfac": lambda of: kronecker(affine_layers(of)),
    "diagonal": lambda of: of.fisher.diagonal().diag(),
    "dense": lambda of: of.fisher,
    "last_layer": lambda of: of.fisher,
}


def problem(labels: str, model: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    loss, draw = LABELS[labels]
    with seeded(0):
        shape = (5, 2, 4, 4) if model is cnn else (5, 3)
        return model().double(), loss, (torch.randn(shape).double(), draw())


def both(
    structure: str, labels: str, model: Callable[[], nn.Module] = mlp, prior: Any = PRIOR
) -> tuple[Any, Posterior]:
    """The posterior, and its oracle."""
    net, loss, data = problem(labels, model)
    noise = NOISE if labels == "squares" else None
    found = curvature.laplace(net, loss, data, structure, prior=prior, noise=noise)
    summed = copy.copy(loss)
    summed.reduction = "sum"
    of = Matrices(net, summed, data)
    where = positions(net)
    last = list(where)[-2:] if structure == "last_layer" else list(where)
    index = torch.cat([where[name].flatten() for name in last])
    owners = [found.layers.index(name.rpartition(".")[0]) for name in last for _ in range(where[name].numel())]
    each = torch.as_tensor(prior, dtype=torch.float64).expand(len(found.layers))[owners]
    return found, Posterior(of, STRUCTURES[structure](of)[index][:, index], each, noise, index)
