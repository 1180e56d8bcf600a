"""Networks that several benchmarks have, and the workloads: built only of layers that most peers have a rule for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from _rows import chosen
from torch import Tensor, nn

IMAGE_SIDE = 32  # pixels
Pair = tuple[Tensor, Tensor]


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations in between."""
    layers: list[nn.Module] = []
    for i, o in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(*layers[:-1])


def normalised(*channels: int) -> nn.Sequential:
    """Images (N, 1, 28, 28) to logits: convolutions with BatchNorm, and one linear layer of 49 inputs a channel."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i < 2 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(49 * channels[-1], 10))


class Block(nn.Module):
    """Transformer block, norm first: self-attention from plain Linear layers, then a GELU layer of width 4 d."""

    def __init__(self, d: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (N, T) to logits (N, T, vocabulary); the decoder may be the embedding of the tokens."""

    def __init__(self, vocabulary: int, length: int, d: int, layers: int, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(d)
        if not tied:
            self.head = nn.Linear(d, vocabulary)
        for embedding in (self.tokens, self.positions) if tied else ():
            nn.init.normal_(embedding.weight, std=0.02)  # as GPT-2: the default of 1 gives huge logits

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        if not self.tied:  # Opacus and expanded weights need the batch in every layer's input.
            places = places.expand_as(x).contiguous()
        hidden = self.norm(self.blocks(self.tokens(x) + self.positions(places)))
        return F.linear(hidden, self.tokens.weight) if self.tied else self.head(hidden)


class ClassesSecond(nn.Module):
    """Logits (N, T, classes) as (N, classes, T), the layout that `nn.CrossEntropyLoss` takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Skip(nn.Module):
    """Convolutions, each (i, o, kernel, stride), with norms and a skip (He et al., arXiv:1512.03385, figure 5)."""

    def __init__(self, *sizes: tuple[int, int, int, int], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o, kernel, stride in sizes:
            layers += [nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False), norm(o), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.skip: nn.Module = nn.Identity()
        first, last, stride = sizes[0][0], sizes[-1][1], max(size[3] for size in sizes)
        if stride > 1 or first != last:
            self.skip = nn.Sequential(nn.Conv2d(first, last, 1, stride, bias=False), norm(last))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet18(width: int, classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """ResNet-18 with the stem for small images: one 3x3 convolution, no pooling; `width` is 64 in the original."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    blocks, i = [], width
    for o, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        blocks += [Skip((i, o, 3, stride), (o, o, 3, 1), norm=norm), Skip((o, o, 3, 1), (o, o, 3, 1), norm=norm)]
        i = o
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


class ViT(nn.Module):
    """Vision transformer (arXiv:2010.11929): patches, a class token, learned positions, norm first."""

    def __init__(
        self, d: int, layers: int, heads: int, patch: int, classes: int, channels: int = 3, side: int = IMAGE_SIDE
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, d, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, d))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, d))
        self.blocks = nn.Sequential(*(Block(d, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        hidden = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(hidden)[:, 0]))


class LSTM(nn.Module):
    """Tokens (N, T) to logits (N, T, outputs), or to those of the last place alone, (N, outputs)."""

    def __init__(self, tokens: int, width: int, outputs: int, layers: int = 1, last: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.cells = nn.LSTM(width, width, layers, batch_first=True)
        self.head, self.last = nn.Linear(width, outputs), last

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cells(self.tokens(x))[0]
        return self.head(hidden[:, -1] if self.last else hidden)


LOSS = nn.CrossEntropyLoss()


@dataclass
class Workload:
    """A model in training mode, and one batch."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor

    def on(self, device: str) -> Workload:
        return Workload(self.name, self.model.to(device).train(), self.x.to(device), self.y.to(device))

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def result_bytes(self) -> int:
        """Size of the per-sample gradients."""
        return self.samples * sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def images(samples: int, side: int = IMAGE_SIDE, channels: int = 3) -> Pair:
    return torch.randn(samples, channels, side, side), torch.randint(10, (samples,))


def perceptron(samples: int = 256) -> Workload:
    model = nn.Sequential(nn.Flatten(), *mlp(784, 512, 512, 10))
    return Workload(f"MLP 784-512-512-10, N={samples}", model, *images(samples, 28, 1))


def cnn() -> Workload:
    def stage(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU()]

    layers = [*stage(3, 32), *stage(32, 32), nn.MaxPool2d(2), *stage(32, 64), nn.MaxPool2d(2), *stage(64, 64)]
    model = nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10))
    return Workload("CNN GroupNorm 3-32-32-64-64, N=64", model, *images(64))


def small_cnn() -> Workload:
    def stage(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*stage(3, 16), *stage(16, 32), nn.Flatten(), nn.Linear(2048, 10))
    return Workload("CNN 3-16-32, N=32", model, *images(32))


def gpt() -> Workload:
    tokens, targets = torch.randint(256, (16, 64)), torch.randint(256, (16, 64))
    model = nn.Sequential(GPT(256, 64, 128, 2), ClassesSecond())
    return Workload("GPT 2 x 128, T=64, N=16", model, tokens, targets)


def resnet(samples: int = 32) -> Workload:
    model = resnet18(16, 10, norm=lambda width: nn.GroupNorm(8, width))
    return Workload(f"ResNet-18 GroupNorm, width 16, N={samples}", model, *images(samples))


def lstm() -> Workload:
    tokens, classes = torch.randint(256, (32, 32)), torch.randint(10, (32,))
    return Workload("LSTM 2 x 256, T=32, N=32", LSTM(256, 256, 10, layers=2, last=True), tokens, classes)


def vit() -> Workload:
    """ViT-Tiny (arXiv:2012.12877): 12 blocks of width 192 with three heads."""
    x, y = images(8)
    return Workload("ViT-Tiny 12 x 192, 65 tokens, N=8", ViT(192, 12, 3, 4, 10), x, y)


Workloads = dict[str, Callable[[], Workload]]
PER_SAMPLE: Workloads = {"mlp": perceptron, "cnn": cnn, "gpt": gpt, "resnet": resnet, "lstm": lstm, "vit": vit}
MATRICES: Workloads = {
    "mlp": partial(perceptron, 128), "cnn": small_cnn, "gpt": gpt, "resnet": partial(resnet, 8),
}  # fmt: skip


def workloads(options: argparse.Namespace, known: Workloads) -> Iterator[tuple[str, Workload]]:
    """Those chosen, with their names."""
    yield from ((name, known[name]().on(options.device)) for name in chosen(options, known))
