"""The families of problems: each a model, its data and the loop in which its users train it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _generality_data import (
    Pair,
    Parts,
    characters,
    digits,
    heteroscedastic,
    law,
    noisy_digits,
    picture,
    ratings,
    small_digits,
    sums,
    table,
)
from _generality_models import LSTM, VAE, Encoder, Modular, Ratings, ViT, mlp, normalised, residual, siren
from _race_problems import GPT, documentation, epochs, pixel_loss, token_loss
from torch import Tensor, nn

Models = Sequence[nn.Module]
Update = Callable[[int, Callable[[], Tensor]], Tensor]  # train the model of that index on this loss; returns the loss
Loss = Callable[[Tensor, Tensor], Tensor]
CHUNK = 500  # samples of one forward pass of an evaluation


@dataclass(frozen=True)
class Family:
    """What is trained, how, and what is measured.

    Attributes:
        name: on the command line.
        title: in the table.
        objective: what is to become small: the training loss, on a fixed part of the training set in evaluation mode.
        metric: what is measured on the test part.
        make: builds the models, each of which gets an optimizer of its own; they follow the global random state.
        batches: endless batches, fixed by a seed.
        train: one round of the user's loop, with the models, a batch and `update`.
        evaluate: objective and metric of the models, which are in evaluation mode.
        budget: CPU seconds of training that the rivals have.
    """

    name: str
    title: str
    objective: str
    metric: str
    make: Callable[[], Models]
    batches: Callable[[int], Iterator[Any]]
    train: Callable[[Models, Any, Update], Tensor]
    evaluate: Callable[[Models], tuple[float, float]]
    budget: float = 5.0


def mean_of(model: nn.Module, part: Pair, measure: Loss) -> float:
    chunks = zip(part[0].split(CHUNK), part[1].split(CHUNK), strict=True)
    return sum(measure(model(x), y).item() * len(x) for x, y in chunks) / len(part[0])


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def supervised(
    name: str, title: str, make: Callable[[], nn.Module], loss: Loss, parts: Parts, batch: int, budget: float = 5.0,
    objective: str = "cross-entropy, nats", metric: str = "accuracy", measure: Loss = accuracy, seen: int = 1000,
    tested: int = 1000,
) -> Family:  # fmt: skip
    """One model, one loss of outputs and targets; the loop of every tutorial."""
    train, test = parts
    probe, rest = (train[0][:seen], train[1][:seen]), (test[0][:tested], test[1][:tested])

    def step(models: Models, pair: Pair, update: Update) -> Tensor:
        return update(0, lambda: loss(models[0](pair[0]), pair[1]))

    def evaluate(models: Models) -> tuple[float, float]:
        return mean_of(models[0], probe, loss), mean_of(models[0], rest, measure)

    title = f"{title}, batch {batch}"
    return Family(
        name, title, objective, metric, lambda: [make()], epochs(train, batch), step, evaluate, budget
    )  # fmt: skip


def vit() -> Family:
    title = "ViT 2 x 48, patches of 7 x 7, 4,000 MNIST digits"
    make = functools.partial(ViT, 48, 2, 4)
    return supervised("vit", title, make, F.cross_entropy, digits(1, 28, 28), batch=64, budget=6.0)


def residual_cnn() -> Family:
    title = "residual CNN with GroupNorm, channels 8 to 16, MNIST digits of 14 x 14"
    return supervised("resnet", title, lambda: residual(8), F.cross_entropy, small_digits(), batch=64)


def batchnorm_cnn() -> Family:
    title = "CNN with BatchNorm, channels 1-8-16-32 and 1,568 to 10, MNIST digits"
    parts = digits(1, 28, 28)
    return supervised("batchnorm", title, lambda: normalised(8, 16, 32), F.cross_entropy, parts, batch=64)


def lstm() -> Family:
    _, vocabulary = documentation()
    title = f"character LSTM, {vocabulary} symbols, width 96, 48 characters of Python's help"
    return supervised(
        "lstm", title, lambda: LSTM(vocabulary, 96), token_loss, characters(48), batch=32, budget=6.0, seen=200, tested=200
    )  # fmt: skip


def gpt() -> Family:
    _, vocabulary = documentation()
    title = "character GPT 2 x 64, 32 characters of Python's help"
    make = functools.partial(GPT, vocabulary, 32, 64, 2, 4)
    return supervised("gpt", title, make, token_loss, characters(32), batch=16, budget=6.0, seen=200, tested=200)


def dropout() -> Family:
    title = "transformer encoder 2 x 48 with dropout 0.1, MNIST digits as 14 tokens"
    make = functools.partial(Encoder, 56, 14, 48, 2, 0.1)
    return supervised("dropout", title, make, F.cross_entropy, digits(14, 56), batch=64)


def tabular() -> Family:
    title = "tabular regression, ReLU MLP 10-256-256-1, Friedman's function with noise"
    error = {"objective": "mean squared error", "metric": "mean squared error", "measure": F.mse_loss}
    make = functools.partial(mlp, 10, 256, 256, 1)
    return supervised("tabular", title, make, F.mse_loss, table(), batch=256, seen=4000, **error)  # type: ignore[arg-type]


def coordinates() -> Family:
    title = "coordinate network with sines, 2-128-128-128-3, a photograph of 96 x 96"
    error = {"objective": "mean squared error", "metric": "mean squared error", "measure": F.mse_loss}
    make = functools.partial(siren, 128, 3)
    return supervised("siren", title, make, F.mse_loss, picture(), batch=512, seen=3000, **error)  # type: ignore[arg-type]


def elbo(code: int, outputs: Tensor, images: Tensor) -> Tensor:
    """Negative evidence bound of an image: pixels, and divergence of the code from a normal one."""
    pixels, mean, logarithm = outputs.split([784, code, code], -1)
    divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).sum(-1).mean()
    return pixel_loss(pixels, images) + divergence


def vae() -> Family:
    (x, _), (x_test, _) = digits(784)
    loss = functools.partial(elbo, 16)
    bound = {"objective": "negative bound, nats", "metric": "negative bound, nats", "measure": loss}
    parts = (x, x), (x_test, x_test)
    make = functools.partial(VAE, 256, 16)
    return supervised("vae", "VAE 784-256-32 | 16-256-784, MNIST digits", make, loss, parts, batch=128, **bound)  # type: ignore[arg-type]


def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of targets (N,) under mean and logarithm of the variance, (N, 2)."""
    return F.gaussian_nll_loss(outputs[:, 0], y, outputs[:, 1].exp(), full=True)


def variance() -> Family:
    """The objective is the expected loss above that of the true law, in closed form: the loss itself may be negative."""
    parts = heteroscedastic()
    title = "mean-and-variance regression, ReLU MLP 4-256-256-2"
    make = functools.partial(mlp, 4, 256, 256, 2)
    family = supervised("variance", title, make, gaussian, parts, batch=256, metric="nats", measure=gaussian, tested=4000)
    x = parts[0][0][:4000]
    mean, deviation = law(x)

    def evaluate(models: Models) -> tuple[float, float]:
        found, logarithm = models[0](x).unbind(-1)
        ratio = (deviation.square() + (mean - found).square()) / logarithm.exp()
        excess = 0.5 * (ratio - 1 + logarithm - 2 * deviation.log())
        return excess.mean().item(), family.evaluate(models)[1]

    return Family(**{**vars(family), "objective": "nats above the true law", "evaluate": evaluate})


def modular() -> Family:
    title = "a + b modulo 97, embeddings of 64 and an MLP 128-512-97"
    return supervised("modular", title, lambda: Modular(97, 64, 512), F.cross_entropy, sums(), batch=256, seen=4000)


def rating() -> Family:
    title = "ratings of 1,000 users for 500 items, embeddings of 32 and an MLP"
    error = {"objective": "mean squared error", "metric": "mean squared error", "measure": F.mse_loss}
    make = lambda: Ratings(1000, 500, 32)
    return supervised("ratings", title, make, F.mse_loss, ratings(), batch=2000, seen=10000, **error)  # type: ignore[arg-type]


def softmax() -> Family:
    title = "softmax regression 784-10, MNIST digits"
    return supervised("softmax", title, lambda: nn.Linear(784, 10), F.cross_entropy, digits(784), batch=500, seen=4000)


@functools.cache
def pretrained() -> nn.Module:
    """An MLP after 300 steps of AdamW on a thousand digits with the right labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(784, 256, 128, 10)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        (x, y), _ = digits(784)
        batches = epochs((x[:1000], y[:1000]), 100)(0)
        for _ in range(300):
            images, labels = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def label_noise() -> Family:
    """What was pretrained gets a new last layer."""

    def make() -> nn.Module:
        model = copy.deepcopy(pretrained())
        assert isinstance(model, nn.Sequential)
        model[-1] = nn.Linear(128, 10)
        return model

    title = "fine-tuning an MLP 784-256-128-10 with 20 % of the labels at random, MNIST digits"
    return supervised("noise", title, make, F.cross_entropy, noisy_digits(), batch=128, seen=2000)


def gan() -> Family:
    """Two MLPs; the data is normal about (1, 1)."""
    generator = torch.Generator().manual_seed(0)
    noise, real = torch.randn(4000, 4, generator=generator), 1 + 0.5 * torch.randn(4000, 2, generator=generator)

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        own = torch.Generator().manual_seed(seed)
        while True:
            drawn = [torch.randn(256, size, generator=own) for size in (2, 4, 4)]
            yield 1 + 0.5 * drawn[0], drawn[1], drawn[2]

    def train(models: Models, batch: tuple[Tensor, Tensor, Tensor], update: Update) -> Tensor:
        forger, critic = models
        data, first, second = batch
        with torch.no_grad():
            fake = forger(first)

        def told_apart() -> Tensor:
            found, forged = critic(data), critic(fake)
            yes, no = torch.ones_like(found), torch.zeros_like(forged)
            return F.binary_cross_entropy_with_logits(found, yes) + F.binary_cross_entropy_with_logits(forged, no)

        def taken_for_real() -> Tensor:
            forged = critic(forger(second))
            return F.binary_cross_entropy_with_logits(forged, torch.ones_like(forged))

        update(1, told_apart)
        return update(0, taken_for_real)

    def evaluate(models: Models) -> tuple[float, float]:
        fake = models[0](noise)
        halves = torch.cdist(fake[:2000], fake[2000:]).mean() + torch.cdist(real[:2000], real[2000:]).mean()
        energy = 2 * torch.cdist(fake[:2000], real[:2000]).mean() - halves
        return (fake.mean(0) - 1).norm().item(), energy.item()

    return Family(
        "gan", "GAN of two MLPs of 128-128, a normal law about (1, 1), batch 256", "distance of the means",
        "energy distance", lambda: [mlp(4, 128, 128, 2), mlp(2, 128, 128, 1)], batches, train, evaluate,
    )  # fmt: skip


class Grid:
    """Find the goal on a board of `side` x `side`, which each step costs 1: states (place, goal), moves in four ways."""

    def __init__(self, side: int = 6, horizon: int = 15) -> None:
        self.side, self.horizon, self.cells = side, horizon, side * side
        self.moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
        place = torch.arange(self.cells)
        rows = torch.stack([place // side, place % side], -1)
        self.next = ((rows[:, None] + self.moves).clamp(0, side - 1) * torch.tensor([side, 1])).sum(-1)  # (cells, 4)
        self.states = torch.cartesian_prod(place, place)
        apart = (rows[self.states[:, 0]] - rows[self.states[:, 1]]).abs().sum(-1)
        self.best = apart.clamp(max=horizon).float().mean().item()

    def features(self, states: Tensor) -> Tensor:
        return F.one_hot(states, self.cells).flatten(-2).float()

    @torch.no_grad()
    def play(self, policy: nn.Module, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States (T, N, 2), moves (T, N), cost to come (T, N), and whether the goal was still to be found (T, N)."""
        seen, moves, open_ = [], [], []
        for _ in range(self.horizon):
            seen.append(states)
            open_.append(states[:, 0] != states[:, 1])
            moves.append(torch.multinomial(policy(self.features(states)).softmax(-1), 1).squeeze(-1))
            place = torch.where(open_[-1], self.next[states[:, 0], moves[-1]], states[:, 0])
            states = torch.stack([place, states[:, 1]], -1)
        costs = torch.stack(open_).float()
        return torch.stack(seen), torch.stack(moves), costs.flip(0).cumsum(0).flip(0), torch.stack(open_)

    def excess(self, policy: nn.Module) -> float:
        """Mean cost over all states above the least possible one, exactly."""
        chances = policy(self.features(self.states)).softmax(-1)  # (cells^2, 4)
        place, goal = self.states.unbind(-1)
        after, still = self.next[place] * self.cells + goal[:, None], (place != goal).float()
        cost = torch.zeros(len(place))
        for _ in range(self.horizon):
            cost = still * (1 + (chances * cost[after]).sum(-1))
        return cost.mean().item() - self.best


def policy_gradient() -> Family:
    """REINFORCE: moves that came out better than the mean of those at the same time become likelier."""
    grid = Grid()

    def batches(seed: int) -> Iterator[Tensor]:
        own = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(grid.cells, (64, 2), generator=own)

    def train(models: Models, starts: Tensor, update: Update) -> Tensor:
        states, moves, costs, open_ = grid.play(models[0], starts)
        x, moves, gains = grid.features(states[open_]), moves[open_], (costs.sum(1, True) / open_.sum(1, True).clamp(1) - costs)[open_]

        def surrogate() -> Tensor:
            chosen = models[0](x).log_softmax(-1).gather(-1, moves[:, None]).squeeze(-1)
            return -(chosen * gains).mean()

        return update(0, surrogate)

    def evaluate(models: Models) -> tuple[float, float]:
        excess = grid.excess(models[0])
        return excess, -excess - grid.best

    return Family(
        "policy", "policy gradient, MLP 72-64-64-4, a board of 6 x 6, 64 games", "steps above the fewest", "mean return",
        lambda: [mlp(2 * grid.cells, 64, 64, 4)], batches, train, evaluate,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Family]] = {
    "vit": vit, "resnet": residual_cnn, "batchnorm": batchnorm_cnn, "lstm": lstm, "gpt": gpt, "dropout": dropout,
    "tabular": tabular, "siren": coordinates, "vae": vae, "variance": variance, "modular": modular, "ratings": rating,
    "softmax": softmax, "gan": gan, "policy": policy_gradient, "noise": label_noise,
}  # fmt: skip
