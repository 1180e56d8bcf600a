"""The networks of the benchmarks for GPUs, each also small for a processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _networks import ViT, resnet18, resnet50
from _race_problems import GPT
from torch import Tensor, nn


class ClassesSecond(nn.Module):
    """Logits (N, T, V) as (N, V, T), the layout that `nn.CrossEntropyLoss` takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


@dataclass(frozen=True)
class Network:
    """What makes a network on a device, and its batch; the loss is the mean cross-entropy."""

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def on(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """Always the same parameters and the same batch."""
        torch.manual_seed(0)
        with torch.device(device):
            return (self.make(), *self.batch())


def gpt(name: str, vocabulary: int, length: int, batch: int, **size: Any) -> Network:
    def tokens() -> tuple[Tensor, Tensor]:
        whole = torch.randint(vocabulary, (batch, length + 1))
        return whole[:, :-1], whole[:, 1:]

    title = f"{name} {size['layers']} x {size['d']}, {vocabulary:,} words, {batch} x {length} tokens"
    return Network(title, lambda: nn.Sequential(GPT(vocabulary, length=length, **size), ClassesSecond()), tokens)


def images(name: str, make: Callable[..., nn.Module], side: int, batch: int, classes: int, **size: Any) -> Network:
    drawn = lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)))
    width = f", width {size['width']}" if "width" in size else ""
    return Network(f"{name}{width}, {side}x{side}, batch {batch}", lambda: make(classes=classes, **size), drawn)


# for each way to measure the networks that are meant, and small ones for a processor; those of "curvature" are those of
# curvlinops' own benchmark, whose figures stand beside ours
FULL = {
    "steps": {
        "resnet": images("ResNet-18", resnet18, 32, 128, 100, width=64),
        "vit": images("ViT 12 x 384", ViT, 32, 128, 100, d=384, layers=12, heads=6, patch=4),
        "gpt": gpt("GPT-2", 50257, 256, 8, d=768, layers=12, heads=12),
    },
    "curvature": {
        "nanogpt": gpt("nanoGPT", 50257, 1024, 4, d=768, layers=12, heads=12),
        "resnet50": images("ResNet-50", resnet50, 224, 64, 1000, width=64, depths=(3, 4, 6, 3)),
        "resnet18": images("ResNet-18", resnet18, 32, 512, 10, width=64),
    },
}
SMALL = {
    "steps": {
        "resnet": images("ResNet-18", resnet18, 32, 32, 100, width=16),
        "vit": images("ViT 4 x 96", ViT, 32, 16, 100, d=96, layers=4, heads=3, patch=4),
        "gpt": gpt("GPT-2", 2000, 64, 8, d=128, layers=2, heads=4),
    },
    "curvature": {
        "nanogpt": gpt("nanoGPT", 500, 32, 4, d=64, layers=2, heads=2),
        "resnet50": images("ResNet-50", resnet50, 64, 4, 100, width=8, depths=(1, 1, 1, 1)),
        "resnet18": images("ResNet-18", resnet18, 32, 16, 10, width=8),
    },
}
