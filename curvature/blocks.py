"""Curvature layer by layer from recorded uses and injected vectors: Kronecker factors, a diagonal where there are none.

A block is a layer's weight with its bias as the last input. On the weight arranged as (g, o, i) it is
``kron(rows, columns)`` per group g: rows from backprops, columns from activations (arXiv:1503.05671, equation 1;
arXiv:2311.00636 for shared weights, "expand"). A side that is too large is a `curvature.sketch`, the one-hot side of an
embedding its diagonal. All matrices are means over samples of what the injected vectors v make of them: E[J^T v v^T J].

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.arrangement import Arrangement
from curvature.inverses import Inverse, factored, in_eigenbasis, not_zero
from curvature.moments import Reading, Scheme, diagonal_of, matched, wide
from curvature.outliers import Gate
from curvature.sketch import added, mixed, scaled
from curvature.terms import Rows, Term

ENOUGH = 8  # rows of activations for each column of their moment
LEAST = 16  # samples that they are of

# for each way in which a weight is read: moment of activations, number to divide it by, moment of backprops
Sums = dict[Reading, tuple[Tensor, int | Tensor, Tensor]]


class Block:
    """Running curvature of some parameters. Sub-classes hold the matrices; the mean over samples is debiased."""

    structure = ""

    def __init__(self, names: Sequence[str], reason: str = "") -> None:
        self.names = tuple(names)
        self.reason = reason  # why there are no Kronecker factors; "" where there are
        self.updates = 0
        self.samples: float = 0  # of the statistics added since the last `fold`
        self.gate = Gate()

    def weight_of_new(self, decay: float, updates: int | None = None) -> float:
        """Weight of the next statistics in a debiased running average of so many (None: the block's `updates`)."""
        return (1 - decay) / (1 - decay ** ((self.updates if updates is None else updates) + 1))

    def mixed(self, old: Tensor | None, new: Tensor, decay: float) -> Tensor:
        """The running average of what has no negative entries."""
        w = self.weight_of_new(decay)
        return new if old is None else old.lerp(new, self.gate.weight([(old.reshape(1, -1), new.reshape(1, -1))], w))

    def discard(self) -> None:
        """Forget what was added since the last `fold`."""
        raise NotImplementedError

    def fold(self, decay: float) -> None:
        """Move what was added since the last time into the running average."""
        raise NotImplementedError

    def decompose(self, damping: float) -> None:
        """Prepare `solve` for the running average as it is now, plus ``damping I``."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether `solve` was ever prepared."""
        raise NotImplementedError

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """``(M + damping I)^-1 gradients``, tensors in the shapes of the parameters."""
        raise NotImplementedError

    @property
    def mean_eigenvalue(self) -> Tensor:
        """Trace over dimension, a scalar tensor."""
        raise NotImplementedError

    @property
    def dimension(self) -> int:
        raise NotImplementedError

    @property
    def cost(self) -> float:
        """Operations of `decompose`, to a constant factor."""
        return float(self.dimension)

    @property
    def bytes(self) -> int:
        """Memory of what is kept."""
        found = pytree.tree_leaves(self.state())
        return sum(t.numel() * t.element_size() for t in found if isinstance(t, Tensor))

    @property
    def expected(self) -> int:
        """Memory that will be kept, at most, before anything was seen."""
        raise NotImplementedError

    def condition(self) -> float:
        """Largest over least eigenvalue of what `solve` inverts, nan where that is not prepared."""
        raise NotImplementedError

    def describe(self) -> str:
        """Shapes of what is kept."""
        raise NotImplementedError

    def measured(self, terms: Sequence[Term]) -> Any:
        """Statistics of a batch, a tree of tensors, of the first parameter's terms; None where they do not fit."""
        raise NotImplementedError

    def take(self, found: Any, samples: int) -> None:
        """Add what `measured` gave, which is finite."""
        raise NotImplementedError

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        """Prepare `solve` of blocks of this class that have statistics, see `curvature.invert`."""
        raise NotImplementedError

    def multiply(self, times: float) -> None:
        """Take what was added since the last `fold` as if its vectors had been so many times as long."""
        self.samples /= times**2

    failures = 0  # of decompositions, in a row

    @property
    def prepared(self) -> list[Tensor]:
        """What `solve` uses of a decomposition."""
        return []

    def without_correlations(self) -> AbstractContextManager[None]:
        """As if the matrices were zero off their diagonals."""
        return nullcontext()

    kept: tuple[str, ...] = ()  # tensors of a checkpoint, and numbers
    form: tuple[str, ...] = ()  # what the arrangement of the parameters needs

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: plain tensors, numbers and names."""
        fields = ("names", "reason", "updates", *self.form, *self.kept)
        return {"structure": self.structure, "gate": self.gate.state(), **{k: getattr(self, k) for k in fields}}

    @staticmethod
    def restore(state: dict[str, Any], device: torch.device) -> Block:
        """A block from its `state`, tensors on `device`."""
        kind = next(k for k in _below(Block) if k.structure == state["structure"])
        block = kind.__new__(kind)
        block.discard()
        block.gate = Gate.restored(state.get("gate", {}), device)
        for name, value in state.items():
            if name not in ("structure", "gate"):
                setattr(block, name, value.to(device, copy=True) if isinstance(value, Tensor) else value)
        block.resume()
        return block

    def resume(self) -> None:
        """Complete what `restore` set."""


class KroneckerBlock(Block):
    """``kron(rows, columns)`` per group; each side (g, d, d), or (g, d) where it is diagonal.

    Args:
        names: the weight, and its bias where that is one more input of it.
        scheme: how they are arranged, and how their moments are summed.
    """

    structure = "kronecker"
    kept: tuple[str, ...] = ("rows", "columns")
    form = ("scheme",)

    def __init__(self, names: Sequence[str], scheme: Scheme) -> None:
        super().__init__(names)
        self.scheme = scheme
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        self.inverse: Inverse | None = None
        self.sums: Sums = {}  # since the last `fold`

    def state(self) -> dict[str, Any]:
        inverse = {} if self.inverse is None else {f.name: getattr(self.inverse, f.name) for f in fields(self.inverse)}
        return super().state() | {"scheme": asdict(self.scheme), "inverse": inverse}

    def resume(self) -> None:
        # both are as `state` left them
        place = None if self.rows is None else self.rows.device
        parts: Any = pytree.tree_map_only(Tensor, lambda t: t.to(place, copy=True), self.inverse)
        self.inverse = Inverse(**parts) if parts else None
        form: Any = self.scheme
        self.scheme = Scheme(**form | {"arrangement": Arrangement(**form["arrangement"])})

    def measured(self, terms: Sequence[Term]) -> Any:
        if not all(self.scheme.accepts(t) for t in terms):
            return None
        return {
            reading: (*self.scheme.activations(_enough(parts, self.scheme.sharing)), self.scheme.backprops(parts))
            for reading, parts in self.scheme.readings(terms).items()
        }

    def take(self, found: Any, samples: int) -> None:
        self.samples += samples
        for reading, (a, number, b) in found.items():
            if reading in self.sums:
                other = self.sums[reading]
                a, number, b = added(a, other[0]), number + other[1], added(b, other[2])
            self.sums[reading] = a, number, b

    def discard(self) -> None:
        self.sums, self.samples = {}, 0

    def fold(self, decay: float) -> None:
        if not self.samples:
            self.discard()
            return
        found = self.sums.items()
        rows, columns = matched(
            [self.scheme.product(k, a, number, scaled(b, 1 / self.samples)) for k, (a, number, b) in found]
        )
        self.discard()
        w = self.gate.weight([(self.rows, rows), (self.columns, columns)], self.weight_of_new(decay))
        self.rows, self.columns = mixed(self.rows, rows, w), mixed(self.columns, columns, w)
        self.updates += 1

    @property
    def is_ready(self) -> bool:
        return self.inverse is not None

    def decompose(self, damping: float) -> None:
        if self.rows is not None and self.columns is not None:
            self.inverse = in_eigenbasis(self.rows, self.columns, damping)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        pairs, before = [(b.rows, b.columns) for b in blocks], [b.inverse for b in blocks]
        anew = [b.updates & (b.updates - 1) == 0 for b in blocks]  # at 1, 2, 4, 8, ...: their ranks change ever slower
        for block, found in zip(blocks, factored(pairs, share, before, anew), strict=True):
            block.inverse = found

    @property
    def prepared(self) -> list[Tensor]:
        i = self.inverse
        return [] if i is None else [t for t in (i.rows, i.columns, i.values, *i.shifts) if t is not None]

    @contextmanager
    def without_correlations(self) -> Iterator[None]:
        whole = self.rows, self.columns
        self.rows, self.columns = (None if side is None else diagonal_of(side) for side in whole)
        yield
        self.rows, self.columns = whole

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        arrangement = self.scheme.arrangement
        u = self.inverse(arrangement.arranged(gradients).to(self.scheme.dtype), own=len(gradients) > 1)
        return [u.to(g.dtype).contiguous() for u, g in zip(arrangement.restored(u), gradients, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.rows is not None and self.columns is not None
        return (diagonal_of(self.rows).mean(1) * diagonal_of(self.columns).mean(1)).mean()

    @property
    def dimension(self) -> int:
        return self.scheme.arrangement.dimension

    @property
    def expected(self) -> int:
        return 2 * sum(self.scheme.sides) * self.scheme.dtype.itemsize

    @property
    def cost(self) -> float:
        sides = [side for side in (self.rows, self.columns) if side is not None]
        return float(sum(side.numel() * (side.shape[1] if side.ndim == 3 else 1) for side in sides))

    def condition(self) -> float:
        return math.nan if self.inverse is None else self.inverse.condition()

    def describe(self) -> str:
        if self.rows is None or self.columns is None:
            return "not seen yet"
        ranks = (None, None) if self.inverse is None else self.inverse.ranks
        rows, columns = (
            "x".join(2 * [str(s.shape[-1])])
            + " diagonal" * (s.ndim == 2)
            + ("" if rank is None else f" by {rank} eigenvalues")
            for s, rank in zip((self.rows, self.columns), ranks, strict=True)
        )
        return f"B {rows}, A {columns}" + f", {len(self.rows)} groups" * (len(self.rows) > 1)


def _enough(terms: Sequence[Any], sharing: str) -> Sequence[Any]:
    """Some of the samples, evenly, where there are many places for each input: the mean of `a a^T` needs no more.

    It is a mean over a batch that is itself a sample, and goes on as a running mean.
    """
    whole = [term for term in terms if not isinstance(term, Rows)]
    if not whole:
        return terms
    inputs = math.prod(whole[0].shape) // (whole[0].groups * whole[0].outputs)
    rows = sum(len(term) * (term.places if sharing == "expand" else 1) for term in whole)
    stride = rows // (ENOUGH * inputs)
    stride = min([stride, *(len(term) // LEAST for term in whole)])
    if stride < 2:
        return terms
    return [term if isinstance(term, Rows) else term.samples(slice(None, None, stride)) for term in terms]


class DiagonalBlock(Block):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    kept = ("values", "inverse")
    form = ("shape", "dtype")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
        super().__init__([name], reason)
        self.shape, self.dtype = shape, wide(dtype)
        self.values: Tensor | None = None
        self.inverse: Tensor | None = None
        self.sum: Tensor | None = None

    def measured(self, terms: Sequence[Term]) -> Any:
        """The sum over a batch's samples of squared gradients, terms of one number of samples together."""
        found: dict[int, Tensor] = {}
        for term in terms:
            g = term.gradients().to(self.dtype)
            found[len(g)] = found[len(g)] + g if len(g) in found else g
        return torch.stack([g.square().sum(0) for g in found.values()]).sum(0)

    def take(self, found: Any, samples: int) -> None:
        self.samples += samples
        self.sum = found if self.sum is None else self.sum + found

    def discard(self) -> None:
        self.sum, self.samples = None, 0

    def fold(self, decay: float) -> None:
        new = None if self.sum is None or not self.samples else self.sum / self.samples
        self.discard()
        if new is not None:
            self.values = self.mixed(self.values, new, decay)
            self.updates += 1

    @property
    def is_ready(self) -> bool:
        return self.inverse is not None

    @property
    def smoothed(self) -> Tensor:
        """Few random vectors say little of single entries: the mean of all stands in until there are more."""
        assert self.values is not None
        return self.values.lerp(self.values.mean(), 1 / (1 + self.updates / 2))

    def decompose(self, damping: float) -> None:
        if self.values is not None:
            self.inverse = 1 / (self.smoothed + damping)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        for block in blocks:
            block.inverse = 1 / (block.smoothed + share * not_zero(block.mean_eigenvalue))

    @property
    def prepared(self) -> list[Tensor]:
        return [] if self.inverse is None else [self.inverse]

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        return [(gradients[0].to(self.dtype) * self.inverse).to(gradients[0].dtype)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.values is not None
        return self.values.mean()

    @property
    def dimension(self) -> int:
        return math.prod(self.shape)

    @property
    def expected(self) -> int:
        return 2 * self.dimension * self.dtype.itemsize

    def condition(self) -> float:
        return math.nan if self.inverse is None else float(self.inverse.amax() / self.inverse.amin())

    def describe(self) -> str:
        return "x".join(map(str, self.shape)) or "1"


def _below(kind: type[Block]) -> Iterator[type[Block]]:
    """All sub-classes."""
    for sub in kind.__subclasses__():
        yield sub
        yield from _below(sub)
