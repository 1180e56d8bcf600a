"""The sixteen families."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _generality_data import (
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
from _generality_loops import gan, policy_gradient
from _generality_models import VAE, Encoder, Modular, Ratings, normalised, residual, siren
from _networks import LSTM, ViT, mlp
from _problems import Models, Problem, Values, documentation, epochs, pixel_loss, supervised, token_loss
from _race_problems import GPT
from torch import Tensor, nn

FEW = {"seen": 600, "tested": 400}  # samples of an evaluation where a forward pass is dear
ERROR = {"objective": "mean squared error", "metric": "mean squared error", "measure": F.mse_loss}


def vit() -> Problem:
    title = "ViT 2 x 48, patches of 7 x 7, 4,000 MNIST digits"
    make = functools.partial(ViT, 48, 2, 4, patch=7, classes=10, channels=1, side=28)
    return supervised("vit", title, make, F.cross_entropy, digits(1, 28, 28), batch=64, budget=6.0, **FEW)


def residual_cnn() -> Problem:
    title = "residual CNN with GroupNorm, channels 8 to 16, MNIST digits of 14 x 14"
    return supervised(
        "resnet", title, lambda: residual(8), F.cross_entropy, small_digits(), batch=64, budget=6.0, **FEW
    )


def batchnorm_cnn() -> Problem:
    title = "CNN with BatchNorm, channels 1-8-16-32 and 1,568 to 10, MNIST digits"
    parts = digits(1, 28, 28)
    return supervised("batchnorm", title, lambda: normalised(8, 16, 32), F.cross_entropy, parts, batch=64, **FEW)


def lstm() -> Problem:
    _, vocabulary = documentation()
    title = f"character LSTM, {vocabulary} symbols, width 96, 48 characters of Python's help"
    make = functools.partial(LSTM, vocabulary, 96, vocabulary)
    return supervised("lstm", title, make, token_loss, characters(48), batch=32, budget=6.0, seen=200, tested=200)


def gpt() -> Problem:
    _, vocabulary = documentation()
    title = "character GPT 2 x 64, 32 characters of Python's help"
    make = functools.partial(GPT, vocabulary, 32, 64, 2, 4)
    return supervised("gpt", title, make, token_loss, characters(32), batch=16, budget=6.0, seen=200, tested=200)


def dropout() -> Problem:
    title = "transformer encoder 2 x 48 with dropout 0.1, MNIST digits as 14 tokens"
    make = functools.partial(Encoder, 56, 14, 48, 2, 0.1)
    return supervised("dropout", title, make, F.cross_entropy, digits(14, 56), batch=64, budget=6.0, **FEW)


def tabular() -> Problem:
    title = "tabular regression, ReLU MLP 10-256-256-1, Friedman's function with noise"
    make = functools.partial(mlp, 10, 256, 256, 1)
    return supervised("tabular", title, make, F.mse_loss, table(), batch=256, seen=4000, **ERROR)


def coordinates() -> Problem:
    title = "coordinate network with sines, 2-128-128-128-3, a photograph of 96 x 96"
    make = functools.partial(siren, 128, 3)
    return supervised("siren", title, make, F.mse_loss, picture(), batch=512, seen=3000, **ERROR)


def elbo(code: int, outputs: Tensor, images: Tensor) -> Tensor:
    """Negative evidence bound of an image: pixels, and divergence of the code from a normal one."""
    pixels, mean, logarithm = outputs.split([784, code, code], -1)
    divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).sum(-1).mean()
    return pixel_loss(pixels, images) + divergence


def vae() -> Problem:
    (x, _), (x_test, _) = digits(784)
    loss = functools.partial(elbo, 16)
    bound = {"objective": "negative bound, nats", "metric": "negative bound, nats", "measure": loss}
    parts = (x, x), (x_test, x_test)
    make = functools.partial(VAE, 256, 16)
    return supervised("vae", "VAE 784-256-32, 16-256-784, MNIST digits", make, loss, parts, batch=128, **bound)


def gaussian(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of targets (N,) under mean and logarithm of the variance, (N, 2)."""
    return F.gaussian_nll_loss(outputs[:, 0], y, outputs[:, 1].exp(), full=True)


def variance() -> Problem:
    """The objective is the expected loss above the true law's, in closed form: the loss itself may be negative."""
    parts = heteroscedastic()
    title = "mean-and-variance regression, ReLU MLP 4-256-256-2"
    make = functools.partial(mlp, 4, 256, 256, 2)
    family = supervised(
        "variance", title, make, gaussian, parts, batch=256, metric="nats", measure=gaussian, tested=4000
    )
    x = parts[0][0][:4000]
    mean, deviation = law(x)

    def evaluate(models: Models, whole: bool) -> Values:
        found, logarithm = models[0](x).unbind(-1)
        ratio = (deviation.square() + (mean - found).square()) / logarithm.exp()
        excess = 0.5 * (ratio - 1 + logarithm - 2 * deviation.log())
        return excess.mean().item(), *family.evaluate(models, whole)[1:]

    return dataclasses.replace(family, objective="nats above the true law", evaluate=evaluate)


def modular() -> Problem:
    title = "a + b modulo 97, embeddings of 64 and an MLP 128-512-97"
    return supervised("modular", title, lambda: Modular(97, 64, 512), F.cross_entropy, sums(), batch=256, seen=4000)


def rating() -> Problem:
    title = "ratings of 1,000 users for 500 items, embeddings of 32 and an MLP"
    make = lambda: Ratings(1000, 500, 32)
    return supervised("ratings", title, make, F.mse_loss, ratings(), batch=2000, seen=10000, **ERROR)


def softmax() -> Problem:
    title = "softmax regression 196-10, MNIST digits of 14 x 14"
    (x, y), (x_test, y_test) = small_digits()
    parts = (x.flatten(1), y), (x_test.flatten(1), y_test)
    return supervised(
        "softmax", title, lambda: nn.Linear(196, 10), F.cross_entropy, parts, batch=500, budget=2.0, seen=4000
    )


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


def label_noise() -> Problem:
    """What was pretrained gets a new last layer."""

    def make() -> nn.Module:
        model = copy.deepcopy(pretrained())
        assert isinstance(model, nn.Sequential)
        model[-1] = nn.Linear(128, 10)
        return model

    title = "fine-tuning an MLP 784-256-128-10 with 20 % of the labels at random, MNIST digits"
    return supervised("noise", title, make, F.cross_entropy, noisy_digits(), batch=128, budget=2.5, seen=2000)


FAMILIES: dict[str, Callable[[], Problem]] = {
    "vit": vit, "resnet": residual_cnn, "batchnorm": batchnorm_cnn, "lstm": lstm, "gpt": gpt, "dropout": dropout,
    "tabular": tabular, "siren": coordinates, "vae": vae, "variance": variance, "modular": modular, "ratings": rating,
    "softmax": softmax, "gan": gan, "policy": policy_gradient, "noise": label_noise,
}  # fmt: skip
