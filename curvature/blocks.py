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
from typing import Any

import torch
from torch import Tensor

from curvature.contractions import Outer, Rows, Term, merged, unfolded
from curvature.linalg import eigh

MAX_SIZE = 2048  # a side larger than this is kept as its diagonal


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

    def fold(self, decay: float) -> None:
        """Move what was added since the last time into the running average; not finite statistics are dropped."""
        raise NotImplementedError

    def decompose(self) -> None:
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
        """Add a batch, given the terms of the first parameter."""
        raise NotImplementedError

    kept: tuple[str, ...] = ()

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: plain tensors and numbers."""
        return {"updates": self.updates, **{k: getattr(self, k) for k in self.kept if getattr(self, k) is not None}}

    def load(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class KroneckerBlock(Block):
    """``kron(rows, columns)`` per group; each side (g, d, d), or (g, d) where it is diagonal."""

    structure = "kronecker"
    kept = ("rows", "columns", "row_values", "row_vectors", "column_values", "column_vectors")

    def __init__(self, names: Sequence[str], term: Outer | Rows, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(names)
        self.shapes = list(shapes)
        self.sizes, self.order, self.groups = None, None, 1
        if isinstance(term, Outer):
            self.sizes, self.order, self.groups = term.sizes, term.order, term.b.shape[2]
            self.outputs = term.b.shape[3]
        else:
            self.outputs = term.shape[0]
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        self.row_values: Tensor | None = None
        self.row_vectors: Tensor | None = None
        self.column_values: Tensor | None = None
        self.column_vectors: Tensor | None = None
        self.sums: list[tuple[Tensor, Tensor]] = []  # of rows and columns, one pair per batch

    def arranged(self, tensors: Sequence[Tensor]) -> Tensor:
        """Weight (and bias) as (g, o, i), the bias as the last input."""
        weight = tensors[0]
        if self.sizes is not None and self.order is not None:
            inner = [self.sizes[k] for k in self.order]
            weight = weight.reshape(inner).permute([self.order.index(k) for k in range(len(inner))])
        matrix = weight.reshape(self.groups, self.outputs, -1)
        if len(tensors) == 1:
            return matrix
        return torch.cat([matrix, tensors[1].reshape(self.groups, self.outputs, 1)], 2)

    def restored(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of `arranged`."""
        weight = matrix[..., :-1] if len(self.shapes) > 1 else matrix
        if self.sizes is not None and self.order is not None:
            weight = weight.reshape(self.sizes).permute(self.order)
        found = [weight.reshape(self.shapes[0])]
        return found if len(self.shapes) == 1 else [*found, matrix[..., -1].reshape(self.shapes[1])]

    def add(self, terms: Sequence[Term], samples: int) -> None:
        self.samples += samples
        self.sums.append(
            _matched([_sides(t, with_ones=len(self.names) > 1) for t in merged([unfolded(t) for t in terms])])
        )

    def fold(self, decay: float) -> None:
        if not self.sums:
            return
        rows, columns = (torch.stack([s[k] for s in self.sums]).sum(0) for k in range(2))
        # rows are a sum over samples and places; columns a mean over both, as a mean over the batches
        rows, columns = rows / self.samples, columns / len(self.sums)
        self.sums, self.samples = [], 0
        w = self.weight_of_new(decay)
        if self.rows is None or self.columns is None:
            self.rows, self.columns = torch.zeros_like(rows), torch.zeros_like(columns)
            w = 1.0
        finite = torch.isfinite(rows.sum() + columns.sum())
        self.rows = torch.where(finite, self.rows.lerp(rows, w), self.rows)
        self.columns = torch.where(finite, self.columns.lerp(columns, w), self.columns)
        self.updates += 1

    def decompose(self) -> None:
        if self.rows is not None and self.columns is not None:
            self.row_values, self.row_vectors = _spectrum(self.rows)
            self.column_values, self.column_vectors = _spectrum(self.columns)

    def solve(self, gradients: Sequence[Tensor], damping: float) -> tuple[list[Tensor], Tensor]:
        left, right = self.row_vectors, self.column_vectors
        assert self.row_values is not None and self.column_values is not None
        c = self.arranged(gradients)
        c = c if left is None else left.mT @ c
        c = c if right is None else c @ right
        eigenvalues = self.row_values[:, :, None] * self.column_values[:, None, :]
        c = c / (eigenvalues + damping)
        energy = (c.square() * eigenvalues).sum()
        c = c if left is None else left @ c
        c = c if right is None else c @ right.mT
        return self.restored(c), energy

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.row_values is not None and self.column_values is not None
        return (self.row_values.mean(1) * self.column_values.mean(1)).mean()

    @property
    def dimension(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def describe(self) -> str:
        if self.rows is None or self.columns is None:
            return "not seen yet"
        sides = (
            "x".join(map(str, s.shape[1:] * (3 - s.ndim + 1))) + " diagonal" * (s.ndim == 2)
            for s in (self.rows, self.columns)
        )
        rows, columns = sides
        return f"B {rows}, A {columns}" + f", {self.groups} groups" * (self.groups > 1)


class DiagonalBlock(Block):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    kept = ("values", "smoothed")

    def __init__(self, name: str, shape: tuple[int, ...], reason: str) -> None:
        super().__init__([name], reason)
        self.shape = shape
        self.values: Tensor | None = None
        self.sum: Tensor | None = None
        self.smoothed: Tensor | None = None

    def add(self, terms: Sequence[Term], samples: int) -> None:
        """Add a batch: the sum over its samples of squared gradients, terms of one number of samples together."""
        found: dict[int, Tensor] = {}
        for term in terms:
            g = term.gradients()
            found[len(g)] = found[len(g)] + g if len(g) in found else g
        squares = torch.stack([g.square().sum(0) for g in found.values()]).sum(0)
        self.samples += samples
        self.sum = squares if self.sum is None else self.sum + squares

    def fold(self, decay: float) -> None:
        if self.sum is None:
            return
        new = self.sum / self.samples
        self.sum, self.samples = None, 0
        if self.values is None:
            self.values = torch.zeros_like(new)
        self.values = torch.where(
            torch.isfinite(new.sum()), self.values.lerp(new, self.weight_of_new(decay)), self.values
        )
        self.updates += 1

    def decompose(self) -> None:
        """Few random vectors say little of single entries: the mean of all stands in until there are more."""
        if self.values is not None:
            self.smoothed = self.values.lerp(self.values.mean(), 1 / (1 + self.updates / 2))

    def solve(self, gradients: Sequence[Tensor], damping: float) -> tuple[list[Tensor], Tensor]:
        assert self.smoothed is not None
        u = gradients[0] / (self.smoothed + damping)
        return [u], (u.square() * self.smoothed).sum()

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


def _sides(term: Term, with_ones: bool) -> tuple[Tensor, Tensor]:
    """Sum over samples and places of b b^T, mean of a a^T; a diagonal where a side is one-hot or large."""
    if isinstance(term, Rows):
        rows = torch.bincount(term.index.flatten(), minlength=term.shape[0]).to(term.values.dtype)
        values = term.values.flatten(0, 1)
        return rows[None], _second_moment(values[:, None], 1 / len(values))
    assert isinstance(term, Outer)
    a, b = term.a.flatten(0, 1), term.b.flatten(0, 1)
    if with_ones:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
    return _second_moment(b, 1.0), _second_moment(a, 1 / len(a))


def _second_moment(x: Tensor, scale: float) -> Tensor:
    """(places, g, d) to (g, d, d), or to (g, d) beyond `MAX_SIZE`."""
    if x.shape[2] > MAX_SIZE:
        return x.square().sum(0) * scale
    x = x.transpose(0, 1)
    return (x.mT @ x) * scale


def _matched(sides: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One pair for the sum of several Kronecker products (tied weights), with the same trace.

    Each side is the sum over the products, weighted by the trace of the other side.
    """
    if len(sides) == 1:
        return sides[0]
    for k in range(2):
        if len({pair[k].ndim for pair in sides}) > 1:  # a diagonal and a full matrix meet as diagonals
            sides = [tuple(_diagonal(s) if j == k else s for j, s in enumerate(pair)) for pair in sides]  # type: ignore[misc]
    traces = [(_diagonal(r).sum(1), _diagonal(c).sum(1)) for r, c in sides]
    total = torch.stack([r * c for r, c in traces]).sum(0).clamp(min=torch.finfo(sides[0][0].dtype).tiny).sqrt()

    def side(k: int) -> Tensor:
        parts = [
            pair[k] * t[1 - k].reshape(-1, *[1] * (pair[k].ndim - 1)) for pair, t in zip(sides, traces, strict=True)
        ]
        return torch.stack(parts).sum(0) / total.reshape(-1, *[1] * (parts[0].ndim - 1))

    return side(0), side(1)


def _diagonal(side: Tensor) -> Tensor:
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)
