"""Jacobians of all outputs against autograd, entry by entry and sample by sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.comparisons import matches
from support.oracles.brute_force import jacobian


class Recurrent(nn.Module):
    """Samples along axis 1, outputs (T, N, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)), (6, 3), 0),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2)), (4, 2, 5, 5), 0),
    "recurrent": (Recurrent, (3, 5, 2), 1),
    "scalar": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)), (6, 3), 0),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Softplus(), nn.Linear(4, 2)), (6, 3), 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_entry(name: str, device: str) -> None:
    make, shape, dim = MODELS[name]
    torch.manual_seed(0)
    model = make().double().to(device)
    x = torch.randn(shape, dtype=torch.float64).to(device)
    output = model(x).movedim(dim, 0)
    expected = torch.stack([jacobian(model, x.narrow(dim, n, 1))[1] for n in range(len(output))])
    found = curvature.per_sample_jacobians(model, x, sample_dim=dim)
    assert list(found) == [key for key, _ in model.named_parameters()]
    for key, rows in found.items():
        assert rows.shape == (*output.shape, *model.get_parameter(key).shape)
    matches(torch.cat([rows.reshape(*expected.shape[:2], -1) for rows in found.values()], -1), expected)


class Tokens(nn.Module):
    """(N, 5, 3) to (N * 5, 2), or (2, N * 5)."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 2), last

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).flatten(0, 1)
        return rows.T if self.last else rows


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_several_rows_for_each_sample(count: int, last: bool, create_graph: bool, device: str) -> None:
    torch.manual_seed(0)
    model, x = Tokens(last).double().to(device), torch.randn(count, 5, 3, dtype=torch.float64).to(device)
    found = curvature.per_sample_jacobians(model, x, sample_dim=(0, int(last), 0), create_graph=create_graph)
    for n in range(count):
        _, expected = jacobian(model, x[n : n + 1])  # by entry of the output
        shape = (2, 5) if last else (5, 2)
        for key, own in zip(found, expected.split([6, 2], 1), strict=True):
            rows = own.reshape(*shape, *model.get_parameter(key).shape)
            matches(found[key][n], rows.movedim(1, 0) if last else rows)


def test_frozen_and_unused_parameters(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    model[0].weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(2, device=device))
    found = curvature.per_sample_jacobians(model, torch.randn(5, 3).to(device))
    assert {name: tuple(rows.shape) for name, rows in found.items()} == {
        "spare": (5, 2, 2),
        "0.bias": (5, 2, 4),
        "2.weight": (5, 2, 2, 4),
        "2.bias": (5, 2, 2),
    }
    assert not found["spare"].any()


def test_batch_norm_in_training_mode_is_refused(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    with pytest.raises(ValueError, match="1: BatchNorm in training mode"):
        curvature.per_sample_jacobians(model, torch.randn(5, 3).to(device))
