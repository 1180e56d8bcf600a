"""The three networks of the GPU benchmark, in the size that is meant and in one for a processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _networks import IMAGE_SIDE, ViT, resnet18
from _problems import token_loss
from _race_problems import GPT
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A network in training mode and one batch.

    Attributes:
        name: on the command line.
        title: in the table.
        make: builds the model on the device; its parameters follow the global random state.
        loss: of outputs and targets, a mean.
        x, y: the batch.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor


def images(
    name: str, title: str, make: Callable[..., nn.Module], size: dict[str, Any], batch: int, device: str
) -> Case:
    classes = 100
    x, y = torch.randn(batch, 3, IMAGE_SIDE, IMAGE_SIDE, device=device), torch.randint(classes, (batch,), device=device)
    return Case(name, title, lambda: make(classes=classes, **size).to(device), F.cross_entropy, x, y)


def text(title: str, size: dict[str, Any], batch: int, device: str) -> Case:
    tokens = torch.randint(size["vocabulary"], (batch, size["length"] + 1), device=device)
    return Case("gpt", title, lambda: GPT(**size).to(device), token_loss, tokens[:, :-1], tokens[:, 1:])


# for each network: what its constructor takes, and the batch
Sizes = dict[str, tuple[dict[str, Any], int]]
FULL: Sizes = {
    "resnet": ({"width": 64}, 128),
    "vit": ({"d": 384, "layers": 12, "heads": 6, "patch": 4}, 128),
    "gpt": ({"vocabulary": 50257, "length": 256, "d": 768, "layers": 12, "heads": 12}, 8),
}
SMALL: Sizes = {
    "resnet": ({"width": 16}, 32),
    "vit": ({"d": 96, "layers": 4, "heads": 3, "patch": 4}, 16),
    "gpt": ({"vocabulary": 2000, "length": 64, "d": 128, "layers": 2, "heads": 4}, 8),
}


def cases(sizes: Sizes, device: str) -> dict[str, Callable[[], Case]]:
    """What builds each case, by its name."""
    (net, net_batch), (vit, vit_batch), (gpt, gpt_batch) = (sizes[name] for name in ("resnet", "vit", "gpt"))
    size = f"{IMAGE_SIDE}x{IMAGE_SIDE}"
    titles = {
        "resnet": f"ResNet-18, width {net['width']}, {size}, batch {net_batch}",
        "vit": f"ViT {vit['layers']} x {vit['d']}, {size} in patches of {vit['patch']}, batch {vit_batch}",
        "gpt": f"GPT-2 {gpt['layers']} x {gpt['d']}, {gpt['vocabulary']:,} words, {gpt_batch} x {gpt['length']} tokens",
    }
    return {
        "resnet": lambda: images("resnet", titles["resnet"], resnet18, net, net_batch, device),
        "vit": lambda: images("vit", titles["vit"], ViT, vit, vit_batch, device),
        "gpt": lambda: text(titles["gpt"], gpt, gpt_batch, device),
    }
