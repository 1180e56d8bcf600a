"""The models of the sixteen families, as their users write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from _networks import mlp
from torch import Tensor, nn


class Residual(nn.Module):
    """x + two 3 x 3 convolutions, GroupNorm and ReLU before each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [(nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(2)]
        self.path = nn.Sequential(*layers[0], *layers[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(x)


def residual(width: int) -> nn.Sequential:
    """Images (N, 1, 14, 14) to logits."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), Residual(width),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), Residual(2 * width), Residual(2 * width),
        nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def normalised(*channels: int) -> nn.Sequential:
    """Images (N, 1, 28, 28) to logits: convolutions with BatchNorm, and one linear layer of 49 inputs a channel."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i < 2 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(49 * channels[-1], 10))


class Encoder(nn.Module):
    """PyTorch's own transformer encoder over sequences (N, T, inputs), to logits of their mean."""

    def __init__(self, inputs: int, length: int, d: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(inputs, d), nn.Parameter(0.02 * torch.randn(length, d))
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.positions).mean(1))


class Sine(nn.Module):
    """A linear layer and a sine, initialised as in SIREN (arXiv:2006.09661)."""

    def __init__(self, i: int, o: int, first: bool, frequency: float = 30.0) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(i, o), frequency
        bound = 1 / i if first else math.sqrt(6 / i) / frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


def siren(width: int, hidden: int) -> nn.Sequential:
    """Places (N, 2) to colours (N, 3)."""
    sines = [Sine(2 if i == 0 else width, width, first=i == 0) for i in range(hidden)]
    return nn.Sequential(*sines, nn.Linear(width, 3))


class VAE(nn.Module):
    """Pictures (N, 784) to one vector (N, 784 + 2 code): logits of the pixels, mean, logarithm of the variance."""

    def __init__(self, hidden: int, code: int) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(784, hidden, 2 * code), mlp(code, hidden, 784)

    def forward(self, x: Tensor) -> Tensor:
        coded = self.encoder(x)
        mean, logarithm = coded.chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * logarithm).exp()
        return torch.cat([self.decoder(drawn), coded], -1)


class Modular(nn.Module):
    """Pairs of numbers (N, 2) to logits of their sum modulo p."""

    def __init__(self, p: int, d: int, hidden: int) -> None:
        super().__init__()
        self.numbers, self.rest = nn.Embedding(p, d), mlp(2 * d, hidden, p)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.numbers(x).flatten(1))


class Ratings(nn.Module):
    """Pairs (user, item), (N, 2), to ratings (N,): inner product of embeddings, biases, and a small network beside."""

    def __init__(self, users: int, items: int, d: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, d), nn.Embedding(items, d)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.network = mlp(2 * d, d, 1)
        for table in (self.users, self.items, self.user_bias, self.item_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.users(x[:, 0]), self.items(x[:, 1])
        bias = self.user_bias(x[:, 0]) + self.item_bias(x[:, 1])
        return (user * item).sum(-1) + (bias + self.network(F.relu(torch.cat([user, item], -1)))).squeeze(-1)
