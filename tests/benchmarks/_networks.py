"""Networks of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_SIDE = 32  # pixels


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


class Basic(nn.Module):
    """Two 3x3 convolutions with norms and a skip (He et al., arXiv:1512.03385, figure 5 left)."""

    def __init__(self, i: int, o: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), norm(o)
        self.second, self.norm2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), norm(o)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or i != o:
            self.skip = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), norm(o))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.skip(x))


def resnet18(width: int, classes: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """ResNet-18 with the stem for small images: one 3x3 convolution, no pooling; `width` is 64 in the original."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    blocks, i = [], width
    for o, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        blocks += [Basic(i, o, stride, norm), Basic(o, o, 1, norm)]
        i = o
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


class ViT(nn.Module):
    """Vision transformer (arXiv:2010.11929): patches, a class token, learned positions, norm first."""

    def __init__(self, d: int, layers: int, heads: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (IMAGE_SIDE // patch) ** 2, d))
        self.blocks = nn.Sequential(*(Block(d, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        hidden = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(hidden))[:, 0])


class LSTM(nn.Module):
    """Tokens (N, T) to the logits (N, classes) of the sequence."""

    def __init__(self, vocabulary: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, classes)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.tokens(x))[0][:, -1])
