"""The models of the benchmarks, built only of layers that most peers have a rule for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS = nn.CrossEntropyLoss()


@dataclass
class Workload:
    """A model in training mode and one batch; the loss is `LOSS`."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def result_bytes(self) -> int:
        """Size of the per-sample gradients."""
        return self.samples * sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


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


def mlp(device: str, samples: int = 256) -> Workload:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
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


def _workload(name: str, model: nn.Module, x: Tensor, y: Tensor, device: str) -> Workload:
    return Workload(name, model.to(device).train(), x.to(device), y.to(device))


Workloads = dict[str, Callable[[str], Workload]]
PER_SAMPLE: Workloads = {"mlp": mlp, "cnn": cnn, "gpt": gpt}
MATRICES: Workloads = {"mlp": partial(mlp, samples=128), "cnn": small_cnn, "gpt": gpt}
