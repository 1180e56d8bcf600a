"""Curvature layer by layer from recorded uses and injected vectors: Kronecker factors, a diagonal where there are none.

A block is a layer's weight with its bias as the last input. On the weight arranged as (g, o, i) it is
``kron(rows, columns)`` per group g: rows from backprops, columns from activations (arXiv:1503.05671, equation 1;
arXiv:2311.00636 for shared weights, "expand"). A side that is too large is a `curvature.sketch`, the one-hot side of an
embedding its diagonal. All matrices are means over samples of what the injected vectors v make of them: E[J^T v v^T J].

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.kronecker import Inverse, Reading, Scheme, enough, factored, in_eigenbases, matched
from curvature.linalg import (
    add_moments,
    average_moments,
    fill_slot,
    is_sketch,
    moment_diagonal,
    scale_moment,
    sum_slots,
)
from curvature.preconditioners.block import Block
from curvature.terms import AffineLayout, Term

# for each way in which a weight is read: moment of activations, number to divide it by, moment of backprops
Sums = dict[Reading, tuple[Tensor, int | Tensor, Tensor]]


class KroneckerBlock(Block):
    """``kron(rows, columns)`` per group; each side (g, d, d), or (g, d) where it is diagonal.

    Args:
        names: the weight, and its bias where that is one more input of it.
        scheme: how they are arranged, and how their moments are summed.
    """

    structure = "kronecker"
    kept: tuple[str, ...] = ("rows", "columns")
    form = ("scheme",)
    waiting: tuple[str, ...] = ("samples", "added")

    def __init__(self, names: Sequence[str], scheme: Scheme) -> None:
        super().__init__(names)
        self.scheme = scheme
        self.rows: Tensor | None = None
        self.columns: Tensor | None = None
        self.inverse: Inverse | None = None
        self.added: Sums = {}  # since the last `fold`

    def state(self) -> dict[str, Any]:
        inverse = {} if self.inverse is None else {f.name: getattr(self.inverse, f.name) for f in fields(self.inverse)}
        return super().state() | {"scheme": asdict(self.scheme), "inverse": inverse}

    def resume(self) -> None:
        # both are as `state` left them
        place = None if self.rows is None else self.rows.device
        parts: Any = pytree.tree_map_only(Tensor, lambda t: t.to(place, copy=True), self.inverse)
        self.inverse = Inverse(**parts) if parts else None
        form: Any = self.scheme
        self.scheme = Scheme(**form | {"arrangement": AffineLayout(**form["arrangement"])})

    def measured(self, terms: Sequence[Term]) -> Any:
        if not all(self.scheme.accepts(t) for t in terms):
            return None
        return {
            reading: (
                *self.scheme.activations(enough(parts, self.scheme.sharing, self.place)),
                self.scheme.backprops(parts),
            )
            for reading, parts in self.scheme.readings(terms).items()
        }

    def take(self, found: Any, samples: float) -> None:
        self.samples += samples
        for reading, (a, number, b) in found.items():
            if reading in self.added:
                other = self.added[reading]
                a, number, b = add_moments(a, other[0]), number + other[1], add_moments(b, other[2])
            self.added[reading] = a, number, b

    def join(self, found: dict[str, Any]) -> None:
        KroneckerBlock.take(self, found["added"], found["samples"])

    def discard(self) -> None:
        self.added, self.samples = {}, 0

    def anew(self) -> Block:
        new = type(self)(self.names, self.scheme)
        new.reason = self.reason
        return new

    def adopt(self, results: Mapping[str, Any]) -> None:
        super().adopt(results)
        parts: Any = self.inverse
        self.inverse = Inverse(**parts) if parts else None

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for reading, (a, number, b) in self.added.items():
            key = "".join("ny"[flag] for flag in reading)
            sides = {"a": a, "b": b, "number": torch.as_tensor(number, dtype=a.dtype, device=a.device)}
            found |= {key + k: fill_slot(x, rank, size) if is_sketch(x) else x for k, x in sides.items()}
        if found:
            found["samples"] = next(iter(found.values())).new_tensor(self.samples)
        return found

    def take_sums(self, sums: Mapping[str, Tensor]) -> None:
        self.discard()
        self.samples = float(sums.get("samples", 0))
        for key in dict.fromkeys(k[:2] for k in sums if k != "samples"):
            a, b = (sum_slots(x) if x.ndim == 4 else x for x in (sums[key + "a"], sums[key + "b"]))
            if float(sums[key + "number"]):  # read in this way by none
                self.added[Reading(key[0] == "y", key[1] == "y")] = a, sums[key + "number"], b

    def fold(self, decay: float) -> None:
        if not self.samples:
            self.discard()
            return
        found = self.added.items()
        each = 1 / self.samples
        rows, columns = matched(
            [self.scheme.product(k, a, number, scale_moment(b, each)) for k, (a, number, b) in found]
        )
        self.discard()
        w = self.gate.weight([(self.rows, rows), (self.columns, columns)], self.weight_of_new(decay))
        self.rows, self.columns = average_moments(self.rows, rows, w), average_moments(self.columns, columns, w)
        self.updates += 1

    @property
    def is_ready(self) -> bool:
        return self.inverse is not None

    def decompose(self, damping: float) -> None:
        if self.rows is not None:
            self.decompose_all([self], damping)

    @staticmethod
    def decompose_all(blocks: Sequence[Any], damping: float) -> None:
        for block, found in zip(blocks, in_eigenbases([(b.rows, b.columns) for b in blocks], damping), strict=True):
            block.inverse = found

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
        self.rows, self.columns = (None if side is None else moment_diagonal(side) for side in whole)
        yield
        self.rows, self.columns = whole

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        arrangement = self.scheme.arrangement
        u = self.inverse(arrangement.to_matrices(gradients).to(self.scheme.dtype), own=len(gradients) > 1)
        return [u.to(g.dtype).contiguous() for u, g in zip(arrangement.from_matrices(u), gradients, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.rows is not None and self.columns is not None
        return (moment_diagonal(self.rows).mean(1) * moment_diagonal(self.columns).mean(1)).mean()

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
