"""Networks that several benchmarks have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SIDE = 32  # pixels


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations in between."""
    layers: list[nn.Module] = []
    for i, o in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(*layers[:-1])


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
    """Tokens (N, T) to logits (N, vocabulary, T), the layout that `nn.CrossEntropyLoss` takes."""

    def __init__(self, vocabulary: int = 256, length: int = 64, d: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.blocks = nn.Sequential(*(Block(d, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        # One row of positions per sample: Opacus and expanded weights need the batch in every layer's input.
        places = torch.arange(x.shape[1], device=x.device).expand_as(x).contiguous()
        hidden = self.blocks(self.tokens(x) + self.positions(places))
        return self.head(self.norm(hidden)).transpose(1, 2)


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


def resnet50(width: int, depths: tuple[int, ...], classes: int) -> nn.Sequential:
    """ResNet-50 with its stem for large images; `width` is 64 and `depths` are 3, 4, 6, 3 in the original."""
    norm = nn.BatchNorm2d
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    i = width
    for k, depth in enumerate(depths):
        inner = width << k
        for n in range(depth):
            stride = 2 if k and not n else 1
            layers.append(Skip((i, inner, 1, 1), (inner, inner, 3, stride), (inner, 4 * inner, 1, 1), norm=norm))
            i = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


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
