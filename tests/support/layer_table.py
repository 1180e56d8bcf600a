"""The table of docs/guides/layers.md, from what the package does with one model of each kind.

python tests/support/layer_table.py        # writes the table into the guide
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import curvature
from optimizers import KFAC
from support.plans import plans_of

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a program
from support.cases.case import Raw

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "layers.md"
HEAD = ("layer", "per-sample gradients and norms", "`curvature.kfac`", "`optimizers.KFAC`")
WORDS = {"Kronecker": "Kronecker factors", "Dense": "exact block", "Diagonal": "diagonal"}


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


def own(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> nn.Module:
    """A module that reads its parameter in its own way."""
    return Raw(lambda m, x: function(x, m.own), own=nn.Parameter(torch.randn(shape) / 2))


def first(inner: nn.Module, copies: int = 1) -> nn.Module:
    """The first of what a module returns."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        found = m.inner(*[x] * copies)
        return found[0] if isinstance(found, tuple) else found

    return Raw(run, inner=inner)


tied = lambda: Raw(lambda m, x: m.table(x).tanh() @ m.table.weight.T, table=nn.Embedding(7, 4))
with_token = lambda x, p: torch.cat([p.expand(len(x), 1, -1), x], 1)
by_head = lambda x, p: torch.einsum("nti,hio->nhto", x, p)
by_experts = lambda x, p: torch.bmm(x.expand(len(p), -1, -1), p).movedim(1, 0)
Made = tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]
N = 5
rows, tokens = (lambda: torch.randn(N, 4)), (lambda: torch.randn(N, 3, 4))
signals, images = (lambda: torch.randn(N, 4, 6)), (lambda: torch.randn(N, 4, 6, 6))
words = lambda: torch.randint(7, (N, 3))
LAYERS: list[Made] = [
    ("Linear", lambda: nn.Linear(4, 3), rows),
    ("Linear on tokens", lambda: nn.Linear(4, 3), tokens),
    ("Bilinear", lambda: first(nn.Bilinear(4, 4, 3), 2), rows),
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
    ("RNN", lambda: first(nn.RNN(4, 3, batch_first=True)), tokens),
    ("LSTM", lambda: first(nn.LSTM(4, 3, batch_first=True)), tokens),
    ("GRU", lambda: first(nn.GRU(4, 3, batch_first=True)), tokens),
    ("LSTMCell", lambda: first(nn.LSTMCell(4, 3)), rows),
    ("MultiheadAttention", lambda: first(nn.MultiheadAttention(4, 2, batch_first=True), 3), tokens),
    ("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True), tokens),
    ("weight_norm(Linear)", lambda: weight_norm(nn.Linear(4, 3)), rows),
    ("embedding tied to the decoder", tied, words),
    ("a position table, `x + p`", lambda: own(torch.add, 3, 4), tokens),
    ("layer scale, `x * p`", lambda: own(torch.mul, 4), tokens),
    ("a class token, `torch.cat`", lambda: own(with_token, 1, 1, 4), tokens),
    ("`x @ p`, `F.linear(x, p)`", lambda: own(torch.matmul, 4, 3), tokens),
    ("`einsum`, one weight for each head", lambda: own(by_head, 2, 4, 3), tokens),
    ("experts, `torch.bmm(x, p)`", lambda: own(by_experts, 2, 4, 3), rows),
    ("a computed weight, `x * p.exp()`", lambda: own(lambda x, p: x * p.exp(), 4), rows),
    ("an autograd.Function of one's own", lambda: own(lambda x, p: Cube.apply(x, p), 4), rows),
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
    general = set().union(*(plan.general for plan in plans_of(model)))
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
