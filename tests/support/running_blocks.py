"""Models of which one block of running curvature is looked at, and what it should be."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import capture
from curvature.kronecker import DiagonalSide
from curvature.preconditioners import BatchFacts, BlockDiagonalCurvature, CurvatureStatistics
from support.cases.case import Raw, seeded

N = 6


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(3, 4)


def tied_words() -> nn.Module:
    run = lambda m, x: F.linear(m.inner(m.words(x)).tanh(), m.words.weight)
    return Raw(run, words=nn.Embedding(5, 3), inner=nn.Linear(3, 3))


def tied_autoencoder(hidden: int) -> Callable[[], nn.Module]:
    """The decoder is the encoder's transpose: the two reads have their inputs and outputs exchanged."""
    run = lambda m, x: F.linear(F.linear(x, m.weight).tanh(), m.weight.T)
    return lambda: Raw(run, weight=(hidden, 4))


floats = lambda *shape: lambda: torch.randn(N, *shape)
indices = lambda high, *shape: lambda: torch.randint(high, (N, *shape))
# A model whose first parameter's block is looked at, and its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), floats(4)),
    "places": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), floats(5, 4)),
    "no_bias": (lambda: nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh()), floats(4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh()), floats(2, 3, 4)),
    "grouped_conv": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2, padding=1), nn.Tanh()), floats(4, 5)),
    "conv_transpose": (lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3, groups=2), nn.Tanh()), floats(4, 3)),
    "transformers_conv1d": (lambda: nn.Sequential(conv1d(), nn.Tanh()), floats(2, 4)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Tanh()), indices(5, 4)),
    "tied_words": (tied_words, indices(5, 4)),
    "transposed_words": (
        lambda: Raw(lambda m, x: m.words(x).tanh() @ m.words.weight.T, words=nn.Embedding(5, 3)),
        indices(5, 4),
    ),
    "tied_autoencoder": (tied_autoencoder(3), floats(4)),
    "tied_autoencoder_square": (tied_autoencoder(4), floats(4)),
}


# Rows that a sample is to its factors: places at which it reads that parameter, over the windows that an input is in.
# Tied ones are read once more the other way round.
ROWS = {
    **{"linear": 1, "places": 5, "no_bias": 1, "conv": 6 / 4, "grouped_conv": 5 / 3, "conv_transpose": 5 / 3},
    **{"transformers_conv1d": 2, "embedding": 4, "tied_words": 4, "transposed_words": 4},
    **{"tied_autoencoder": 1, "tied_autoencoder_square": 1},
}
TIED = {"tied_words", "transposed_words", "tied_autoencoder", "tied_autoencoder_square"}


def unit_vectors(output: Tensor) -> Tensor:
    """Every entry of a sample's output once: the squares of these add up to the identity."""
    eye = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device)
    return eye.reshape(-1, 1, *output.shape[1:]).expand(-1, *output.shape)


def normal_vectors(k: int, seed: int = 5) -> Callable[[Tensor], Tensor]:
    def draw(output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(k, *output.shape, generator=generator, dtype=output.dtype).to(output.device) / math.sqrt(k)

    return draw


def measure(
    factors: BlockDiagonalCurvature, model: nn.Module, x: Any, vectors: Callable[[Tensor], Tensor]
) -> CurvatureStatistics:
    with capture(model) as tape:
        output = model(x)
    return factors.measure(tape, [output], [vectors(output.detach())], BatchFacts(len(output)))


def recorded(
    model: nn.Module,
    x: Any,
    vectors: Callable[[Tensor], Tensor] = unit_vectors,
    sharing: str = "expand",
    **options: Any,
) -> BlockDiagonalCurvature:
    factors = BlockDiagonalCurvature(sharing=sharing, **options)
    factors.update_average(measure(factors, model, x, vectors), 0.95)
    return factors


def block_of(factors: BlockDiagonalCurvature, model: nn.Module, name: str = "") -> Any:
    """The block of a parameter; of the first one unless named."""
    name = name or next(iter(model.named_parameters()))[0]
    return next(block for block in factors.blocks if name in block.names)


def shrinkage(size: int, counts: Sequence[int], decay: float) -> float:
    """What a side of this size has added, in its mean eigenvalues, after batches of so many rows.

    With the weights w of the debiased average, ``3 size sum_k w_k^2 / n_k``.
    """
    weights = [decay ** (len(counts) - 1 - k) for k in range(len(counts))]
    return 3 * size * sum((w / sum(weights)) ** 2 / n for w, n in zip(weights, counts, strict=True))


def jacobians(model: nn.Module, x: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Per parameter (N, outputs of a sample, *shape), one autograd call for each entry."""
    parameters = [dict(model.named_parameters())[name] for name in names]
    rows = []
    for n in range(len(x)):
        entries = model(x[n : n + 1])[0].flatten()
        rows.append([torch.autograd.grad(e, parameters, retain_graph=True) for e in entries])
    return [torch.stack([torch.stack([e[k] for e in row]) for row in rows]) for k in range(len(names))]


# The sides of outputs and of inputs, (g, d, d), or (g, d) if it is a diagonal.
_entries = lambda side: side.entries if isinstance(side, DiagonalSide) else side.dense()
rows_of, columns_of = (lambda block: _entries(block.row_side)), (lambda block: _entries(block.column_side))
full = lambda side: torch.diag_embed(side) if side.ndim == 2 else side


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def scaled() -> nn.Module:
    """A norm layer, a position table, a scale: all but the head is without Kronecker factors."""
    run = lambda m, x: m.head((m.norm(x + m.place) * m.scale).tanh())
    return Raw(run, norm=nn.LayerNorm(3), place=(2, 3), scale=(3,), head=nn.Linear(3, 2))


def batches(*scales: float, device: str = "cpu") -> tuple[nn.Module, list[Tensor]]:
    with seeded(0):
        model = scaled().to(device, torch.float64)
        return model, [scale * torch.randn(N, 2, 3, dtype=torch.float64).to(device) for scale in scales]


def evened(values: Tensor, block: Any) -> Tensor:
    """A diagonal (g, o, i) in an eigenbasis, its mean in the null space of a factor, where that is arbitrary."""
    found = values.clone()
    for eigenvalues, rows in ((block.row_values, found), (block.column_values, found.mT)):
        for group, own in zip(rows, eigenvalues, strict=True):
            null = own < 1e-12 * own.max()
            if null.any():
                group[null] = group[null].mean(0)
    return found


def convolutions() -> nn.Module:
    """Two layers of one layout, with groups."""
    layers = [nn.Conv1d(4, 4, 3, groups=2, padding=1) for _ in range(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 2, bias=False))


def different() -> nn.Module:
    """Sides of one size, of weights that are arranged in different ways."""
    run = lambda m, x: m.linear(x) + m.convolution(x.unflatten(1, (4, 3)))[..., 0]
    return Raw(run, linear=nn.Linear(12, 4), convolution=nn.Conv1d(4, 4, 3))


def lookups() -> nn.Module:
    """The sides of embeddings are diagonals."""
    words = [nn.Embedding(5, 3) for _ in range(2)]
    run = lambda m, x: m.head((m.one(x) + m.other(x.flip(1))).tanh())
    return Raw(run, one=words[0], other=words[1], head=nn.Linear(3, 3))


linears = lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3))
norms = lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
# Models with layers of one form, their inputs, and the number of stacks.
STACKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "linear": (linears, floats(4), 1),
    "convolutions": (convolutions, floats(4, 5), 1),
    "different": (different, floats(12), 0),
    "lookups": (lookups, indices(5, 4), 1),
    "norms": (norms, floats(4), 1),
}
