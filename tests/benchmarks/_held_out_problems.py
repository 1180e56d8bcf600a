"""Twelve problems, each with data held out, as their users run them, and five tables with early stopping.

Constants and hyperparameters of ours may be chosen on the problems of CHOSEN; those of UNSEEN are looked at once, when
all choices are made. `evaluate` gives the training loss, the held-out loss and the held-out metric:

    problem = PROBLEMS["vit"]()
    run = Run(problem, ENTRIES["kfac"], {}, seed=0)  # of _contest and _race_rivals; makes the model, draws the batches
    for _ in range(100):
        run.step()
    run.evaluate()
    train, held, metric = run.points[-1].loss, run.points[-1].metric, run.points[-1].accuracy

A budget of eight CPU seconds of one thread is what a user would give them; rivals take 300 to 10,000 steps in it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _generality_families import VAE, characters, digits, elbo, noisy_digits, picture, pictures, ratings, small_digits
from _networks import GPT, LSTM, Skip, ViT, mlp, normalised
from _problems import (
    CHUNK,
    Loss,
    Models,
    Pair,
    Parts,
    Problem,
    Values,
    accuracy,
    epochs,
    loop_of,
    mnist,
    pixel_loss,
    split,
    token_loss,
)
from torch import Tensor, nn

CHOSEN = ("cnn", "vit", "dropout", "gpt", "ratings", "table")
UNSEEN = ("lstm", "photograph", "vae", "resnet", "labels", "text")
BUDGET = 8.0  # CPU seconds of training
SECTION = 200  # characters that tell one page from another
PATIENCE = 15  # epochs without a lower held-out loss, after which a table's training stops
CODE = 20  # of the VAE
Augment = Callable[[Tensor, torch.Generator], Tensor]

# -- models


class Fourier(nn.Module):
    """Sines and cosines of random directions (arXiv:2006.10739): places (N, 2) to (N, 2 count)."""

    def __init__(self, count: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("directions", scale * torch.randn(2, count))

    def forward(self, x: Tensor) -> Tensor:
        angles = math.pi * x @ self.directions
        return torch.cat([angles.sin(), angles.cos()], -1)


class Factors(nn.Module):
    """Pairs (user, item), (N, 2), to ratings (N,): an MLP over embeddings, as torch draws them, and products."""

    def __init__(self, users: int, items: int, d: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, d), nn.Embedding(items, d)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.network = mlp(3 * d, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.users(x[:, 0]), self.items(x[:, 1])
        bias = self.user_bias(x[:, 0]) + self.item_bias(x[:, 1])
        return (self.network(torch.cat([user, item, user * item], -1)) + bias).squeeze(-1)


class Reader(nn.Module):
    """Characters (N, T) to the class of their text: embedding, GRU, mean over the places, dropout before and after."""

    def __init__(self, vocabulary: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.cells, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.cells(self.dropout(self.tokens(x)))[0].mean(1)))


def with_dropout(share: float) -> nn.Sequential:
    layers = [*mlp(784, 256, 128, 10)]
    return nn.Sequential(*layers[:2], nn.Dropout(share), *layers[2:4], nn.Dropout(share), *layers[4:])


def plain_cnn(width: int) -> nn.Sequential:
    """Images (N, 784) to logits, without norms."""
    stage = lambda i, o: [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers = [*stage(1, width), *stage(width, 2 * width), nn.Flatten(), *mlp(98 * width, 64, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *layers)


def small_resnet(width: int) -> nn.Sequential:
    """Images (N, 1, 14, 14) to logits: a stem and three blocks with BatchNorm."""
    w, norm = width, nn.BatchNorm2d
    stem = [nn.Conv2d(1, w, 3, padding=1, bias=False), norm(w), nn.ReLU()]
    sizes = [((w, w, 3, 1), (w, w, 3, 1)), ((w, 2 * w, 3, 2), (2 * w, 2 * w, 3, 1))]
    sizes += [((2 * w, 4 * w, 3, 2), (4 * w, 4 * w, 3, 1))]
    blocks = [Skip(*size, norm=norm) for size in sizes]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10))


# -- data


def shifted(most: int) -> Augment:
    """Each image (N, C, H, W) moved by up to `most` pixels to each side, zeros behind it."""

    def shift(x: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = x.shape
        down, right = torch.randint(2 * most + 1, (2, n, 1), generator=generator)
        rows, columns = (torch.arange(height) + down)[:, :, None], (torch.arange(width) + right)[:, None]
        return F.pad(x, [most] * 4)[torch.arange(n)[:, None, None], :, rows, columns].movedim(-1, 1)

    return shift


def some_digits() -> Parts:
    """3,600 and 900 digits of MNIST, (N, 784)."""
    images, labels = mnist()
    return split(images[:4500], labels[:4500], 3600)


def friedman(count: int, kept: int, noise: float) -> Parts:
    """Friedman's first function of five of ten features; inputs and targets standardised by the training part."""
    from sklearn.datasets import make_friedman1

    return standardised(*make_friedman1(count, 10, noise=noise, random_state=1), kept)


@functools.cache
def pages() -> tuple[list[Tensor], int]:
    """Pages of Python's help as indices of characters, none of which is part of another; how many characters there are.

    Some pages are sections of others: what is held out would be trained on.
    """
    from pydoc_data.topics import topics

    texts: list[str] = []
    for text in sorted(topics.values(), key=len, reverse=True):
        middle = text[len(text) // 2 :][:SECTION]
        if not any(middle in other for other in texts):
            texts.append(text)
    symbols = {symbol: i for i, symbol in enumerate(sorted(set("".join(texts))))}
    return [torch.tensor([symbols[symbol] for symbol in text]) for text in texts], len(symbols)


def reading(length: int, count: int) -> Parts:
    """Windows of the pages, in some order, and the next characters; `count` windows of the last tenth are held out."""
    texts, _ = pages()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    train, (x, y) = characters(length, torch.cat([texts[i] for i in order]))
    chosen = torch.linspace(0, len(x) - 1, count).long()
    return train, (x[chosen], y[chosen])


@functools.cache
def topics(length: int, classes: int) -> Parts:
    """Windows of the longest pages, the first four fifths of each for training, and which page they are from."""
    parts: list[list[Pair]] = [[], []]
    for label, tokens in enumerate(pages()[0][:classes]):
        kept = int(0.8 * len(tokens))
        for part, piece, step in ((parts[0], tokens[:kept], 8), (parts[1], tokens[kept:], length)):
            windows = piece.unfold(0, length, step)
            part.append((windows, torch.full((len(windows),), label)))
    train, held = ((torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts)
    return train, held


def standardised(x: Any, y: Any, kept: int) -> Parts:
    """Inputs and targets (N,) by mean and deviation of the training part; labels, which are whole numbers, stay."""
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    x = (x - x[:kept].mean(0)) / x[:kept].std(0)
    if y.is_floating_point():
        y = ((y - y[:kept].mean()) / y[:kept].std()).float()[:, None]
    return split(x, y, kept)


# -- problems


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def pixels(code: int, outputs: Tensor, images: Tensor) -> Tensor:
    """The part of a VAE's bound that is of the pixels."""
    return pixel_loss(outputs[..., : -2 * code], images)


def means_of(model: nn.Module, part: Pair, *measures: Loss) -> list[float]:
    """Several with the same outputs."""
    sums = torch.zeros(len(measures))
    for x, y in zip(part[0].split(CHUNK), part[1].split(CHUNK), strict=True):
        outputs = model(x)
        sums += len(x) * torch.stack([measure(outputs, y) for measure in measures])
    return (sums / len(part[0])).tolist()


def judged(
    name: str, title: str, make: Callable[[], nn.Module], loss: Loss, parts: Parts, batches: Callable[[int], Any],
    metric: str = "accuracy", measure: Loss = accuracy, seen: int = 500, kind: type[Problem] = Problem, **rest: Any,
) -> Any:  # fmt: skip
    """With the loss on the first training samples, as they are, and loss and metric on all that is held out."""
    (x, y), held = parts

    def evaluate(models: Models, whole: bool) -> Values:
        train = means_of(models[0], (x[:seen], y[:seen]), loss)
        return *train, *means_of(models[0], held, loss, measure)  # type: ignore[return-value]

    return kind(
        name, title, UNITS.get(loss, "nats"), metric, lambda: [make()], batches, loop_of(loss), evaluate, BUDGET,
        growth=1.25, loss=loss, **rest,
    )  # fmt: skip


def augmented(part: Pair, size: int, augment: Augment | None) -> Callable[[int], Iterator[Pair]]:
    """Batches of an epoch's order, changed on the way."""
    plain = epochs(part, size)
    if augment is None:
        return plain

    def batches(seed: int) -> Iterator[Pair]:
        generator = torch.Generator().manual_seed(seed)
        for x, y in plain(seed):
            yield augment(x, generator), y

    return batches


def of(
    title: str, make: Callable[[], nn.Module], loss: Loss, parts: Callable[[], Parts], batch: int,
    augment: Augment | None = None, **rest: Any,
) -> Callable[[str], Problem]:  # fmt: skip
    def build(name: str) -> Problem:
        data = parts()
        return judged(name, f"{title}, batch {batch}", make, loss, data, augmented(data[0], batch, augment), **rest)

    return build


@dataclass(frozen=True)
class Table(Problem):
    """Training stops after PATIENCE epochs without a lower held-out loss.

    Attributes:
        epoch: steps of one.
    """

    epoch: int = 0


def table_of(
    title: str, loss: Loss, parts: Callable[[], Parts], batch: int = 64, **rest: Any
) -> Callable[[str], Table]:
    """An MLP of 128-128 with ReLU; the last batch of an epoch is smaller, as a DataLoader makes it."""

    def build(name: str) -> Table:
        (x, y), held = parts()
        outputs = 2 if loss is F.cross_entropy else 1

        def batches(seed: int) -> Iterator[Pair]:
            generator = torch.Generator().manual_seed(seed)
            while True:
                for chosen in torch.randperm(len(x), generator=generator).split(batch):
                    yield x[chosen], y[chosen]

        return judged(
            name, title, partial(mlp, x.shape[1], 128, 128, outputs), loss, ((x, y), held), batches, kind=Table,
            epoch=-(-len(x) // batch), **rest,
        )  # fmt: skip

    return build


def scikit(name: str, kept: float = 0.8, raw: bool = False, **options: Any) -> Parts:
    """A table that scikit-learn has or draws, shuffled; in its own units if `raw`."""
    from sklearn import datasets

    is_drawn = name.startswith("make")
    options = options | ({"random_state": 2} if is_drawn else {"return_X_y": True})
    x, y = getattr(datasets, name)(**options)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).numpy()
    x, y, count = x[order], y[order], int(kept * len(x))
    if raw:
        return split(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None], count)
    return standardised(x, y, count)


ENTROPY, BOUND, SQUARE = F.cross_entropy, partial(elbo, CODE), F.mse_loss
UNITS = {SQUARE: "mean squared error"}
ERROR = {"metric": "mean absolute error", "measure": absolute}
TEXT = {"seen": 100}
MADE: dict[str, Callable[[str], Problem]] = {
    "cnn": of(
        "CNN with BatchNorm, channels 1-8-16-32 and 1,568 to 10, 4,000 MNIST digits with shifts",
        partial(normalised, 8, 16, 32), ENTROPY, partial(digits, 1, 28, 28), batch=64, augment=shifted(2)),
    "vit": of(
        "ViT 2 x 48, patches of 7 x 7, 4,000 MNIST digits with shifts",
        partial(ViT, 48, 2, 4, patch=7, classes=10, channels=1, side=28),
        ENTROPY, partial(digits, 1, 28, 28), batch=64, augment=shifted(3)),
    "dropout": of(
        "MLP 784-256-128-10 with dropout 0.3, 3,600 MNIST digits", partial(with_dropout, 0.3), ENTROPY, some_digits,
        batch=64),
    "gpt": of(
        "character GPT 2 x 64, 64 characters of Python's help",
        lambda: GPT(pages()[1], 64, 64, 2, tied=True), token_loss,
        partial(reading, 64, 200), batch=8, **TEXT),
    "ratings": of(
        "ratings of 600 users for 400 items, some rare, embeddings of 16 and an MLP", partial(Factors, 600, 400, 16),
        SQUARE, partial(ratings, 600, 400, 6), batch=512, seen=2000, **ERROR),
    "table": of(
        "MLP 10-128-128-1, 1,000 rows of Friedman's function with noise", partial(mlp, 10, 128, 128, 1),
        SQUARE, partial(friedman, 3000, 1000, 1.0), batch=64, **ERROR),
    "lstm": of(
        "character LSTM, two layers of 80, 40 characters of Python's help",
        lambda: LSTM(pages()[1], 80, pages()[1], layers=2), token_loss,
        partial(reading, 40, 300), batch=32, **TEXT),
    "photograph": of(
        "coordinate network, Fourier features, ReLU, 128-128-128-3, a photograph of 96 x 96",
        lambda: nn.Sequential(Fourier(64, 4.0), *mlp(128, 128, 128, 3)), SQUARE,
        partial(picture, 96, "flower.jpg"), batch=256, **ERROR),
    "vae": of(
        "VAE 784-400-40, 20-400-784, 4,000 MNIST digits", partial(VAE, 400, CODE), BOUND, pictures, batch=128,
        metric="nats of the pixels", measure=partial(pixels, CODE)),
    "resnet": of(
        "ResNet of three blocks with BatchNorm, width 12 to 48, 4,000 MNIST digits of 14 x 14 with shifts",
        partial(small_resnet, 12), ENTROPY, partial(small_digits, 1, 14, 14), batch=64, augment=shifted(1)),
    "labels": of(
        "CNN without norms, channels 1-8-16 and 784-64-10, 4,000 MNIST digits, 20 % of the labels at random",
        partial(plain_cnn, 8), ENTROPY, noisy_digits, batch=64),
    "text": of(
        "GRU of width 64 with dropout 0.2, which of ten topics of Python's help 64 characters are from",
        lambda: Reader(pages()[1], 64, 10, 0.2), ENTROPY, partial(topics, 64, 10), batch=32),
}  # fmt: skip
PROBLEMS: dict[str, Callable[[], Problem]] = {name: partial(MADE[name], name) for name in (*CHOSEN, *UNSEEN)}
TABLED: dict[str, Callable[[str], Table]] = {
    "diabetes": table_of("diabetes, standardised", SQUARE, partial(scikit, "load_diabetes"), **ERROR),
    "units": table_of(
        "diabetes, in its own units", SQUARE, partial(scikit, "load_diabetes", raw=True, scaled=False), **ERROR),
    "cancer": table_of("breast cancer", ENTROPY, partial(scikit, "load_breast_cancer")),
    "flipped": table_of(
        "make_classification, 10 % of the labels at random", ENTROPY,
        partial(scikit, "make_classification", n_samples=2000, n_informative=10, flip_y=0.1, class_sep=0.7)),
    "friedman": table_of(
        "make_friedman1 with noise", SQUARE, partial(scikit, "make_friedman1", n_samples=1500, noise=1.0), **ERROR),
}  # fmt: skip
TABLES: dict[str, Callable[[], Table]] = {name: partial(build, name) for name, build in TABLED.items()}
