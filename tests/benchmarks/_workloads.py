"""The models of the benchmarks, built only of layers that most peers have a rule for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from _networks import GPT, IMAGE_SIDE, LSTM, ViT, resnet18
from _networks import mlp as perceptron
from _rows import chosen
from torch import Tensor, nn

LOSS = nn.CrossEntropyLoss()


@dataclass
class Workload:
    """A model in training mode, one batch, and a loss module."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    loss: nn.Module = LOSS

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def result_bytes(self) -> int:
        """Size of the per-sample gradients."""
        return self.samples * sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def mlp(device: str, samples: int = 256) -> Workload:
    model = nn.Sequential(nn.Flatten(), *perceptron(784, 512, 512, 10))
    x, y = torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,))
    return _workload(f"MLP 784-512-512-10, N={samples}", model, x, y, device)


def cnn(device: str) -> Workload:
    def stage(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU()]

    layers = [*stage(3, 32), *stage(32, 32), nn.MaxPool2d(2), *stage(32, 64), nn.MaxPool2d(2), *stage(64, 64)]
    model = nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10))
    name = "CNN GroupNorm 3-32-32-64-64, N=64"
    return _workload(name, model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,)), device)


def small_cnn(device: str) -> Workload:
    def stage(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*stage(3, 16), *stage(16, 32), nn.Flatten(), nn.Linear(2048, 10))
    return _workload("CNN 3-16-32, N=32", model, torch.randn(32, 3, 32, 32), torch.randint(10, (32,)), device)


def gpt(device: str) -> Workload:
    tokens, targets = torch.randint(256, (16, 64)), torch.randint(256, (16, 64))
    return _workload("GPT 2 x 128, T=64, N=16", GPT(), tokens, targets, device)


def resnet(device: str, samples: int = 32) -> Workload:
    model = resnet18(16, 10, norm=lambda width: nn.GroupNorm(8, width))
    x, y = torch.randn(samples, 3, IMAGE_SIDE, IMAGE_SIDE), torch.randint(10, (samples,))
    return _workload(f"ResNet-18 GroupNorm, width 16, N={samples}", model, x, y, device)


def lstm(device: str) -> Workload:
    tokens, classes = torch.randint(256, (32, 32)), torch.randint(10, (32,))
    return _workload("LSTM 2 x 256, T=32, N=32", LSTM(256, 256, 10, layers=2, last=True), tokens, classes, device)


def vit(device: str) -> Workload:
    """ViT-Tiny (arXiv:2012.12877): 12 blocks of width 192 with three heads."""
    x, y = torch.randn(8, 3, IMAGE_SIDE, IMAGE_SIDE), torch.randint(10, (8,))
    return _workload("ViT-Tiny 12 x 192, 65 tokens, N=8", ViT(192, 12, 3, 4, 10), x, y, device)


def _workload(name: str, model: nn.Module, x: Tensor, y: Tensor, device: str) -> Workload:
    return Workload(name, model.to(device).train(), x.to(device), y.to(device))


Workloads = dict[str, Callable[[str], Workload]]
PER_SAMPLE: Workloads = {"mlp": mlp, "cnn": cnn, "gpt": gpt, "resnet": resnet, "lstm": lstm, "vit": vit}
MATRICES: Workloads = {
    "mlp": partial(mlp, samples=128), "cnn": small_cnn, "gpt": gpt, "resnet": partial(resnet, samples=8),
}  # fmt: skip


def handed_in(place: str, device: str) -> Workload:
    """What ``module:function`` returns, ``(model, (x, y), loss)``; the module is looked for where the script runs, too.

    Raises:
        ValueError: it is something else.
    """
    module, _, function = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    found = getattr(importlib.import_module(module), function)()
    try:
        model, (x, y), loss = found
        return Workload(place, model.to(device).train(), x.to(device), y.to(device), loss)
    except (TypeError, ValueError, AttributeError) as error:
        expected = "(model, (x, y), loss), x and y tensors whose first axis is that of the samples"
        raise ValueError(f"--model {place}: expected {expected}, found {found!r:.80}") from error


def workloads(options: argparse.Namespace, known: Workloads) -> Iterator[tuple[str, Workload]]:
    """The models handed in, else those chosen, with their names."""
    if options.model:
        yield from ((place, handed_in(place, options.device)) for place in options.model)
    else:
        yield from ((name, known[name](options.device)) for name in chosen(options, known))
