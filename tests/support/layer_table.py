"""The table of docs/guides/layers.md, from what the package does with one model of each kind.

python tests/support/layer_table.py        # writes the table into the guide
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import curvature
from curvature.gradients.plans import PLANS
from optimizers import KFAC

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "layers.md"
HEAD = ("layer", "per-sample gradients and norms", "`curvature.kfac`", "`optimizers.KFAC`")
WORDS = {"Kronecker": "Kronecker factors", "Dense": "exact block", "Diagonal": "diagonal"}


class Own(nn.Module):
    """Reads its parameters in its own way."""

    def __init__(self, forward: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.randn(shape) / 2) for shape in shapes)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.own)


class Cube(torch.autograd.Function):
    """A function without a rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p**3

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor, Tensor]:
        x, p = ctx.saved_tensors
        return b * p**3, (3 * b * x * p**2).sum(0)


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.inner, self.copies = inner, copies

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(*[x] * self.copies)
        return found[0] if isinstance(found, tuple) else found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table(x)) @ self.table.weight.T


def with_token(x: Tensor, p: Tensor) -> Tensor:
    return torch.cat([p.expand(len(x), 1, -1), x], 1)


def by_head(x: Tensor, p: Tensor) -> Tensor:
    return torch.einsum("nti,hio->nhto", x, p)


def by_experts(x: Tensor, p: Tensor) -> Tensor:
    return torch.bmm(x.expand(len(p), -1, -1), p).movedim(1, 0)


Made = tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]
N = 5
rows, tokens = (lambda: torch.randn(N, 4)), (lambda: torch.randn(N, 3, 4))
signals, images = (lambda: torch.randn(N, 4, 6)), (lambda: torch.randn(N, 4, 6, 6))
words = lambda: torch.randint(7, (N, 3))
LAYERS: list[Made] = [
    ("Linear", lambda: nn.Linear(4, 3), rows),
    ("Linear on tokens", lambda: nn.Linear(4, 3), tokens),
    ("Bilinear", lambda: First(nn.Bilinear(4, 4, 3), 2), rows),
    ("Conv1d", lambda: nn.Conv1d(4, 3, 3), signals),
    ("Conv2d", lambda: nn.Conv2d(4, 3, 3, padding=1), images),
    ("Conv2d with groups", lambda: nn.Conv2d(4, 4, 3, groups=2), images),
    ("Conv3d", lambda: nn.Conv3d(2, 3, 3), lambda: torch.randn(N, 2, 4, 4, 4)),
    ("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), images),
    ("Embedding", lambda: nn.Embedding(7, 4), words),
    ("EmbeddingBag", lambda: nn.EmbeddingBag(7, 4), words),
    ("LayerNorm", lambda: nn.LayerNorm(4), tokens),
    ("RMSNorm", lambda: nn.RMSNorm(4), tokens),
    ("GroupNorm", lambda: nn.GroupNorm(2, 4), images),
    ("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), images),
    ("BatchNorm2d, `eval()`", lambda: nn.BatchNorm2d(4).eval(), images),
    ("BatchNorm2d, `train()`", lambda: nn.BatchNorm2d(4), images),
    ("PReLU", lambda: nn.PReLU(4), images),
    ("RNN", lambda: First(nn.RNN(4, 3, batch_first=True)), tokens),
    ("LSTM", lambda: First(nn.LSTM(4, 3, batch_first=True)), tokens),
    ("GRU", lambda: First(nn.GRU(4, 3, batch_first=True)), tokens),
    ("LSTMCell", lambda: First(nn.LSTMCell(4, 3)), rows),
    ("MultiheadAttention", lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3), tokens),
    ("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), tokens),
    ("weight_norm(Linear)", lambda: weight_norm(nn.Linear(4, 3)), rows),
    ("embedding tied to the decoder", Tied, words),
    ("a position table, `x + p`", lambda: Own(torch.add, (3, 4)), tokens),
    ("layer scale, `x * p`", lambda: Own(torch.mul, (4,)), tokens),
    ("a class token, `torch.cat`", lambda: Own(with_token, (1, 1, 4)), tokens),
    ("`x @ p`, `F.linear(x, p)`", lambda: Own(torch.matmul, (4, 3)), tokens),
    ("`einsum`, one weight for each head", lambda: Own(by_head, (2, 4, 3)), tokens),
    ("experts, `torch.bmm(x, p)`", lambda: Own(by_experts, (2, 4, 3)), rows),
    ("a computed weight, `x * p.exp()`", lambda: Own(lambda x, p: x * p.exp(), (4,)), rows),
    ("an autograd.Function of one's own", lambda: Own(lambda x, p: Cube.apply(x, p), (4,)), rows),
]  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("curvature", "optimizers")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def cells(name: str, make: Callable[[], nn.Module], draw: Callable[[], Tensor]) -> list[str]:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        model, x = make(), draw()
        y = torch.randn_like(copy.deepcopy(model)(x))
        setting = model, nn.MSELoss(), x, y
        return [name, per_sample(*setting), blocks(*setting), trained(*setting)]


def per_sample(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> str:
    try:
        curvature.per_sample_norms(model, loss, x, y)
    except ValueError:
        return "refused"
    general = set().union(*(plan.general for plan in PLANS[model].values()))
    return "general path" if general else "rule"


def blocks(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> str:
    try:
        found = curvature.kfac(model, loss, (x, y)).blocks.values()
    except ValueError:
        return "refused"
    return joined(WORDS[type(block).__name__] for block in found)


def trained(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> str:
    own = copy.deepcopy(model)
    opt = KFAC(own)
    loss(own(x), y).backward()
    opt.step()
    return joined(WORDS[block.structure.capitalize()] for block in opt.preconditioner.blocks)


def joined(kinds: Any) -> str:
    return ", ".join(dict.fromkeys(kinds))


def table() -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(cells(*made) for made in LAYERS)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_table(text: str, found: str) -> str:
    """The guide with another table."""
    start = text.index("| layer |")
    return text[:start] + found + text[text.index("\n\n", start) :]


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text("utf-8"), table()), "utf-8")
