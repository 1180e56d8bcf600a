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
        return block


class KroneckerBlock(Block):
    """``kron(rows, columns)`` per group; each side (g, d, d), or (g, d) where it is diagonal.

    Args:
        names: the weight, and its bias where that is one more input of it.
        term: what the weight's uses look like; a matrix without bias is always kept as (rows, columns) of itself.
    """

    structure = "kronecker"
    kept = ("rows", "columns", "row_values", "row_vectors", "column_values", "column_vectors")
    form = ("shapes", "sizes", "order", "groups", "outputs", "dtype")

    def __init__(
        self, names: Sequence[str], term: Outer | Rows, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        super().__init__(names)
        self.shapes, self.dtype = list(shapes), wide(dtype)
        self.sizes: tuple[int, ...] | None = None
        self.order: tuple[int, ...] | None = None
        self.groups, self.outputs = 1, term.shape[0]
        if isinstance(term, Outer) and (len(term.shape) > 2 or len(self.names) > 1):
            self.sizes, self.order = term.sizes, term.order
            self.groups, self.outputs = term.b.shape[2:]
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        self.row_values: Tensor | None = None
        self.row_vectors: Tensor | None = None
        self.column_values: Tensor | None = None
        self.column_vectors: Tensor | None = None
        self.sums: list[list[Any]] = []  # per term: sum of rows, sum of columns, number of places

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

    def accepts(self, term: Term) -> bool:
        """Whether a use of the weight has this block's arrangement, or its transpose."""
        if isinstance(term, Rows) or (isinstance(term, Outer) and len(term.shape) == 2):
            return True
        return isinstance(term, Outer) and (term.sizes, term.order) == (self.sizes, self.order)

    def add(self, terms: Sequence[Term], samples: int) -> None:
        parts = merged([unfolded(t) for t in terms])
        if not all(self.accepts(t) for t in parts):
            return
        sums = [self._sums(t) for t in parts]
        if not all(bool(torch.isfinite(rows.sum() + columns.sum())) for rows, columns, _ in sums):
            return
        self.samples += samples
        for k, new in enumerate(sums):
            if k < len(self.sums):
                self.sums[k] = [x + y for x, y in zip(self.sums[k], new, strict=True)]
            else:
                self.sums.append(list(new))

    def _sums(self, term: Term) -> tuple[Tensor, Tensor, int]:
        """Sums of b b^T and of a a^T over samples and places, in the block's orientation, and the number of places."""
        if isinstance(term, Rows):
            rows = torch.bincount(term.index.flatten(), minlength=term.shape[0]).to(self.dtype)
            return rows[None], _second_moment(term.values.flatten(0, 1)[:, None], self.dtype), term.index.numel()
        assert isinstance(term, Outer)
        a, b = term.a.flatten(0, 1), term.b.flatten(0, 1)
        if len(self.names) > 1:
            a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
        if len(term.shape) == 2 and term.is_transposed != (self.order == (1, 0)):
            a, b = b, a
        return _second_moment(b, self.dtype), _second_moment(a, self.dtype), len(a)

    def discard(self) -> None:
        self.sums, self.samples = [], 0

    def fold(self, decay: float) -> None:
        if not self.samples:
            return
        rows, columns = _matched([(r / self.samples, c / places) for r, c, places in self.sums])
        self.discard()
        if self.rows is None or self.columns is None:
            self.rows, self.columns = rows, columns
        else:
            if rows.ndim != self.rows.ndim or columns.ndim != self.columns.ndim:
                return  # a tied weight of which one use is missing in this batch
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
        c = self.arranged(gradients).to(self.dtype)
        c = c if left is None else left.mT @ c
        c = c if right is None else c @ right
        eigenvalues = self.row_values[:, :, None] * self.column_values[:, None, :]
        c = c / (eigenvalues + damping)
        energy = (c.square() * eigenvalues).sum()
        c = c if left is None else left @ c
        c = c if right is None else c @ right.mT
        return [u.to(g.dtype) for u, g in zip(self.restored(c), gradients, strict=True)], energy

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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of curvature: at least single."""
    return torch.promote_types(dtype, torch.float32)


def _second_moment(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over places of x x^T: (places, g, d) to (g, d, d), or of its diagonal, (g, d), beyond `MAX_SIZE`."""
    x = x.to(dtype)
    if x.shape[2] > MAX_SIZE:
        return x.square().sum(0)
    x = x.transpose(0, 1)
    return x.mT @ x


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
