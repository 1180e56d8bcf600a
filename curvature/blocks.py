"""Curvature layer by layer from recorded uses and injected vectors: Kronecker factors, a diagonal where there are none.

A block is a layer's weight with its bias as the last input. On the weight arranged as (g, o, i) it is
``kron(rows, columns)`` per group g: rows from backprops, columns from activations (arXiv:1503.05671, equation 1;
arXiv:2311.00636 for shared weights, "expand"). A side that is too large, and the one-hot side of an embedding, is its
diagonal. All matrices are means over samples of what the injected vectors v make of them: E[J^T v v^T J].

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from curvature.arrangement import Arrangement
from curvature.linalg import eigh
from curvature.moments import Reading, Scheme, matched, wide
from curvature.terms import Term


class Block:
    """Running curvature of some parameters. Sub-classes hold the matrices; the mean over samples is debiased."""

    structure = ""

    def __init__(self, names: Sequence[str], reason: str = "") -> None:
        self.names = tuple(names)
        self.reason = reason  # why there are no Kronecker factors; "" where there are
        self.updates = 0
        self.samples = 0  # of the statistics added since the last `fold`

    def weight_of_new(self, decay: float) -> float:
        """Weight of the next statistics in a debiased running average."""
        return (1 - decay) / (1 - decay ** (self.updates + 1))

    def discard(self) -> None:
        """Forget what was added since the last `fold`."""
        raise NotImplementedError

    def fold(self, decay: float) -> None:
        """Move what was added since the last time into the running average."""
        raise NotImplementedError

    def decompose(self) -> None:
        """Prepare `solve` for the running average as it is now."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether `decompose` was ever called on some statistics."""
        raise NotImplementedError

    def solve(self, gradients: Sequence[Tensor], damping: float) -> tuple[list[Tensor], Tensor]:
        """``u = (M + damping I)^-1 gradients`` and ``u^T M u``, tensors in the shapes of the parameters."""
        raise NotImplementedError

    @property
    def mean_eigenvalue(self) -> Tensor:
        """Trace over dimension, a scalar tensor."""
        raise NotImplementedError

    @property
    def dimension(self) -> int:
        raise NotImplementedError

    def describe(self) -> str:
        """Shapes of what is kept."""
        raise NotImplementedError

    def add(self, terms: Sequence[Term], samples: int) -> None:
        """Add a batch, given the terms of the first parameter; one that is not finite is left out."""
        raise NotImplementedError

    kept: tuple[str, ...] = ()  # tensors of a checkpoint
    form: tuple[str, ...] = ()  # what the arrangement of the parameters needs

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: plain tensors, numbers and names."""
        fields = ("names", "reason", "updates", *self.form, *self.kept)
        return {"structure": self.structure, **{k: getattr(self, k) for k in fields}}

    @staticmethod
    def restore(state: dict[str, Any], device: torch.device) -> Block:
        """A block from its `state`, tensors on `device`."""
        kind = next(k for k in Block.__subclasses__() if k.structure == state["structure"])
        block = kind.__new__(kind)
        block.discard()
        for name, value in state.items():
            if name != "structure":
                setattr(block, name, value.to(device) if isinstance(value, Tensor) else value)
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
    kept = ("rows", "columns", "row_values", "row_vectors", "column_values", "column_vectors")
    form = ("scheme",)

    def __init__(self, names: Sequence[str], scheme: Scheme) -> None:
        super().__init__(names)
        self.scheme = scheme
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        self.row_values: Tensor | None = None
        self.row_vectors: Tensor | None = None
        self.column_values: Tensor | None = None
        self.column_vectors: Tensor | None = None
        # since the last `fold`: moment of activations, number to divide it by, moment of backprops
        self.sums: dict[Reading, tuple[Tensor, int | Tensor, Tensor]] = {}

    def state(self) -> dict[str, Any]:
        return super().state() | {"scheme": asdict(self.scheme)}

    def resume(self) -> None:
        fields: Any = self.scheme  # as `state` left it
        self.scheme = Scheme(**fields | {"arrangement": Arrangement(**fields["arrangement"])})

    def add(self, terms: Sequence[Term], samples: int) -> None:
        if not all(self.scheme.accepts(t) for t in terms):
            return
        sums = {
            reading: (*self.scheme.activations(parts), self.scheme.backprops(parts))
            for reading, parts in self.scheme.readings(terms).items()
        }
        if not all(bool(torch.isfinite(a.sum() + b.sum())) for a, _, b in sums.values()):
            return
        self.samples += samples
        for reading, (a, number, b) in sums.items():
            if reading in self.sums:
                other = self.sums[reading]
                a, number, b = a + other[0], number + other[1], b + other[2]
            self.sums[reading] = a, number, b

    def discard(self) -> None:
        self.sums, self.samples = {}, 0

    def fold(self, decay: float) -> None:
        if not self.samples:
            return
        found = self.sums.items()
        rows, columns = matched([self.scheme.product(k, a, number, b / self.samples) for k, (a, number, b) in found])
        self.discard()
        if self.rows is None or self.columns is None:
            self.rows, self.columns = rows, columns
        else:
            w = self.weight_of_new(decay)
            self.rows, self.columns = self.rows.lerp(rows, w), self.columns.lerp(columns, w)
        self.updates += 1

    @property
    def is_ready(self) -> bool:
        return self.row_values is not None

    def decompose(self) -> None:
        if self.rows is not None and self.columns is not None:
            self.row_values, self.row_vectors = _spectrum(self.rows)
            self.column_values, self.column_vectors = _spectrum(self.columns)

    def solve(self, gradients: Sequence[Tensor], damping: float) -> tuple[list[Tensor], Tensor]:
        left, right = self.row_vectors, self.column_vectors
        assert self.row_values is not None and self.column_values is not None
        arrangement = self.scheme.arrangement
        c = arrangement.arranged(gradients).to(self.scheme.dtype)
        c = c if left is None else left.mT @ c
        c = c if right is None else c @ right
        eigenvalues = self.row_values[:, :, None] * self.column_values[:, None, :]
        c = c / (eigenvalues + damping)
        energy = (c.square() * eigenvalues).sum()
        c = c if left is None else left @ c
        c = c if right is None else c @ right.mT
        return [u.to(g.dtype) for u, g in zip(arrangement.restored(c), gradients, strict=True)], energy

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.row_values is not None and self.column_values is not None
        return (self.row_values.mean(1) * self.column_values.mean(1)).mean()

    @property
    def dimension(self) -> int:
        return self.scheme.arrangement.dimension

    def describe(self) -> str:
        if self.rows is None or self.columns is None:
            return "not seen yet"
        sides = (
            "x".join(map(str, s.shape[1:] * (3 - s.ndim + 1))) + " diagonal" * (s.ndim == 2)
            for s in (self.rows, self.columns)
        )
        rows, columns = sides
        return f"B {rows}, A {columns}" + f", {len(self.rows)} groups" * (len(self.rows) > 1)


class DiagonalBlock(Block):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    kept = ("values", "smoothed")
    form = ("shape", "dtype")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
        super().__init__([name], reason)
        self.shape, self.dtype = shape, wide(dtype)
        self.values: Tensor | None = None
        self.smoothed: Tensor | None = None
        self.sum: Tensor | None = None

    def add(self, terms: Sequence[Term], samples: int) -> None:
        """Add the sum over a batch's samples of squared gradients, terms of one number of samples together."""
        found: dict[int, Tensor] = {}
        for term in terms:
            g = term.gradients().to(self.dtype)
            found[len(g)] = found[len(g)] + g if len(g) in found else g
        squares = torch.stack([g.square().sum(0) for g in found.values()]).sum(0)
        if bool(torch.isfinite(squares.sum())):
            self.samples += samples
            self.sum = squares if self.sum is None else self.sum + squares

    def discard(self) -> None:
        self.sum, self.samples = None, 0

    def fold(self, decay: float) -> None:
        if self.sum is None or not self.samples:
            return
        new = self.sum / self.samples
        self.discard()
        self.values = new if self.values is None else self.values.lerp(new, self.weight_of_new(decay))
        self.updates += 1

    @property
    def is_ready(self) -> bool:
        return self.smoothed is not None

    def decompose(self) -> None:
        """Few random vectors say little of single entries: the mean of all stands in until there are more."""
        if self.values is not None:
            self.smoothed = self.values.lerp(self.values.mean(), 1 / (1 + self.updates / 2))

    def solve(self, gradients: Sequence[Tensor], damping: float) -> tuple[list[Tensor], Tensor]:
        assert self.smoothed is not None
        u = gradients[0].to(self.dtype) / (self.smoothed + damping)
        return [u.to(gradients[0].dtype)], (u.square() * self.smoothed).sum()

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.smoothed is not None
        return self.smoothed.mean()

    @property
    def dimension(self) -> int:
        return math.prod(self.shape)

    def describe(self) -> str:
        return "x".join(map(str, self.shape)) or "1"


def _spectrum(side: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues and eigenvectors of a side; a diagonal is its own."""
    return (side.clamp(min=0), None) if side.ndim == 2 else eigh(side)
