"""The four problems of the race: a model, its data and batches, and the training loss to reach."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from _generality_models import normalised
from _networks import Block, mlp
from _problems import Pair, Problem, documentation, epochs, mnist, pixel_loss, split, to_a_target, token_loss
from torch import Tensor, nn


def mirrored(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers down to the last width and back up, tanh after each but the code and the output."""
    path = [*widths, *widths[-2::-1]]
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(path):
        layers += [nn.Linear(i, o)] if o == widths[-1] else [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def autoencoder(device: str = "cpu", widths: Sequence[int] = (784, 1000, 500, 250, 30), batch: int = 500) -> Problem:
    """Of Hinton & Salakhutdinov (2006), with tanh and, as there, a linear code."""
    images, _ = mnist()
    train, test = split(images, images, 4500, device)
    title = f"autoencoder {'-'.join(map(str, widths))} and back, tanh, {len(train[0]):,} MNIST digits, batch {batch}"
    return to_a_target(
        "autoencoder", title, "nats per image", functools.partial(mirrored, widths), pixel_loss, (train, test),
        epochs(train, batch), target=70.0, cap=60.0, labelled=False,
    )  # fmt: skip


def cnn(device: str = "cpu", channels: tuple[int, int] = (16, 32), batch: int = 128) -> Problem:
    images, labels = mnist()
    train, test = split(images.view(-1, 1, 28, 28), labels, 4500, device)
    title = f"CNN with BatchNorm, channels 1-{channels[0]}-{channels[1]}-{channels[1]}, MNIST digits, batch {batch}"
    make = functools.partial(normalised, *channels, channels[1])
    return to_a_target(
        "cnn", title, "nats per image", make, F.cross_entropy, (train, test),
        epochs(train, batch), target=0.02, cap=15.0,
    )  # fmt: skip


class GPT(nn.Module):
    """Characters (N, T) to logits (N, T, vocabulary); the decoder is the embedding of the characters."""

    def __init__(self, vocabulary: int, length: int, d: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # as GPT-2: tied, the default of 1 gives huge logits

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.blocks(self.tokens(x) + self.positions(places))
        return F.linear(self.norm(hidden), self.tokens.weight)


def gpt(
    device: str = "cpu", d: int = 96, layers: int = 2, heads: int = 4, length: int = 64, batch: int = 32
) -> Problem:
    text, vocabulary = documentation()
    text = text.to(device)
    kept = int(0.9 * len(text))

    def windows(part: Tensor, count: int, generator: torch.Generator) -> Pair:
        starts = torch.randint(len(part) - length, (count, 1), generator=generator).to(device)
        places = starts + torch.arange(length + 1, device=device)
        return part[places[:, :-1]], part[places[:, 1:]]

    def batches(seed: int) -> Iterator[Pair]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield windows(text[:kept], batch, generator)

    fixed = torch.Generator().manual_seed(0)
    train, test = windows(text[:kept], 64, fixed), windows(text[kept:], 64, fixed)
    title = f"character GPT, {layers} x {d}, {length} characters of Python's help, tied, batch {batch}"
    make = functools.partial(GPT, vocabulary, length, d, layers, heads)
    return to_a_target(
        "gpt", title, "nats per character", make, token_loss, (train, test), batches, target=1.3, cap=100.0,
        terms="batch+sequence",
    )  # fmt: skip


def deep(width: int, depth: int) -> nn.Sequential:
    """`depth` hidden layers of tanh, without skips."""
    return mlp(64, *[width] * depth, 10, activation=nn.Tanh)


def tanh(device: str = "cpu", width: int = 128, depth: int = 12, batch: int = 128) -> Problem:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target).long()
    train, test = split(x[order], y[order], 1500, device)
    title = f"tanh network without skips, {depth} x {width}, scikit-learn's digits, batch {batch}"
    return to_a_target(
        "tanh", title, "nats per image", functools.partial(deep, width, depth), F.cross_entropy, (train, test),
        epochs(train, batch), target=0.01, cap=15.0,
    )  # fmt: skip


PROBLEMS: dict[str, Callable[..., Problem]] = {"autoencoder": autoencoder, "cnn": cnn, "gpt": gpt, "tanh": tanh}
