"""The three networks of the GPU benchmark, in the size that is meant and in one for a processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _race_problems import GPT, token_loss
from _workloads import Block
from torch import Tensor, nn

SIDE = 32  # pixels of an image


class Basic(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a skip (He et al., arXiv:1512.03385, figure 5 left)."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.second, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or i != o:
            self.skip = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.skip(x))


def resnet18(width: int, classes: int) -> nn.Sequential:
    """ResNet-18 with the stem for small images: one 3x3 convolution, no pooling; `width` is 64 in the original."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks, i = [], width
    for o, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        blocks += [Basic(i, o, stride), Basic(o, o, 1)]
        i = o
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


class ViT(nn.Module):
    """Vision transformer (arXiv:2010.11929): patches, a class token, learned positions, norm first."""

    def __init__(self, d: int, layers: int, heads: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (SIDE // patch) ** 2, d))
        self.blocks = nn.Sequential(*(Block(d, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        hidden = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(hidden))[:, 0])


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
    x, y = torch.randn(batch, 3, SIDE, SIDE, device=device), torch.randint(classes, (batch,), device=device)
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
    size = f"{SIDE}x{SIDE}"
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
