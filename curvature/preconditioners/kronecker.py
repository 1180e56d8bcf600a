"""Running Kronecker factors of one layer.

A block is a layer's weight with its bias as the last input. On the weight arranged as (g, o, i) it is
``kron(rows, columns)`` per group g: rows from backprops, columns from activations (arXiv:1503.05671, equation 1;
arXiv:2311.00636 for shared weights, "expand"). A side that is too large is a `curvature.linalg.sketch`, the one-hot
side of an embedding a diagonal; of any other large one a triangle is kept (`curvature.kronecker.pack`). All matrices
are means over samples of E[J^T v v^T J] with the injected vectors v.

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.kronecker import (
    KroneckerInverse,
    KroneckerStatistics,
    Packed,
    Scheme,
    Side,
    as_packed,
    cuts_of,
    diagonal_of,
    eigen_inverses,
    entries_of,
    factored_inverses,
    inverses_in_blocks,
    kept_activations,
    subsample_samples,
    whole,
)
from curvature.linalg import average_moments
from curvature.preconditioners.block import Block, relative_change
from curvature.preconditioners.outliers import OutlierFilter
from curvature.terms import AffineLayout, OuterProduct, Term

SIDES, NONE = ("row_side", "column_side"), (None, None)
MAX_JOINED = 1 << 16  # entries of a layer's activations and backprops, up to which copying them costs less than a call


class KroneckerBlock(Block):
    """``kron(rows, columns)`` per group; each side (g, d, d), or (g, d) where it is diagonal, or a sketch.

    Args:
        names: the weight, and its bias where that is one more input of it.
        scheme: how they are arranged, and how their moments are summed.
    """

    structure = "kronecker"
    state_fields: tuple[str, ...] = ("row_side", "column_side", "tried", "inverse")
    layout_fields = ("scheme",)
    tried = 0  # `updates` when `invert` last looked for few eigenvalues that stand out

    def __init__(self, names: Sequence[str], scheme: Scheme) -> None:
        super().__init__(names)
        self.scheme = scheme
        self.row_side: Tensor | None = None  # as `curvature.kronecker.pack` keeps it
        self.column_side: Tensor | None = None
        self.inverse: KroneckerInverse | None = None

    def state(self) -> dict[str, Any]:
        inverse = {} if self.inverse is None else {f.name: getattr(self.inverse, f.name) for f in fields(self.inverse)}
        scheme = asdict(self.scheme)
        scheme["few"] = scheme.pop("sketched")  # as checkpoints call it
        return super().state() | {"scheme": scheme, "inverse": inverse}

    def after_restore(self) -> None:
        place = None if self.row_side is None else self.row_side.device
        parts: Any = pytree.tree_map_only(Tensor, lambda t: t.to(place, copy=True), self.inverse)
        self.inverse = KroneckerInverse(**parts) if parts else None
        form: Any = dict(self.scheme)  # type: ignore[call-overload]
        changed = {"arrangement": AffineLayout(**form["arrangement"]), "sketched": form.pop("few")}
        self.scheme = Scheme(**form | changed)

    @property
    def sides(self) -> list[Side] | None:
        """Those of the running average; None before the first update."""
        if self.row_side is None or self.column_side is None:
            return None
        both = zip((self.row_side, self.column_side), self.cuts, strict=True)
        return [as_packed(side, cut) for side, cut in both]

    @property
    def rows(self) -> Tensor | None:
        """The side of the outputs, unpacked."""
        return None if self.sides is None else whole(self.sides[0])

    @property
    def columns(self) -> Tensor | None:
        """The side of the inputs, unpacked."""
        return None if self.sides is None else whole(self.sides[1])

    def measure(self, terms: Sequence[Term], samples: float, rank: int = 0, world_size: int = 1) -> Any:
        if not all(self.scheme.accepts(t) for t in terms):
            return None
        found = KroneckerStatistics(self.scheme, samples)
        for reading, parts in self.scheme.readings(terms).items():
            some = subsample_samples(parts, self.scheme.sharing, rank, world_size)
            waiting = kept_activations(self.scheme, some)
            if waiting is None:
                found.activations[reading] = self.scheme.activations(some)
            else:
                found.waiting[reading] = waiting
            found.backprops[reading] = self.scheme.backprops([parts])
        return found.packed()

    @staticmethod
    def measure_all(
        blocks: Sequence[Any], terms: Sequence[Sequence[Term]], samples: float, rank: int = 0, world_size: int = 1
    ) -> list[Any]:
        """Small blocks of one layout are measured as the groups of one."""
        found: dict[int, Any] = {}
        for alike in grouped([_form(block, own) for block, own in zip(blocks, terms, strict=True)]):
            if len(alike) == 1:
                found[alike[0]] = blocks[alike[0]].measure(terms[alike[0]], samples, rank, world_size)
                continue
            own = [blocks[k] for k in alike]
            joint = own[0].joined(own)
            term = _side_by_side([terms[k][0] for k in alike], joint.scheme.arrangement.shapes[0])
            whole = joint.measure([term], samples, rank, world_size)
            parts = [None] * len(own) if whole is None else whole.parts([block.scheme for block in own])
            for k, part in zip(alike, parts, strict=True):
                found[k] = part
        return [found[k] for k in range(len(blocks))]

    @property
    def has_separate_rows(self) -> bool:  # type: ignore[override]
        here = self.scheme.arrangement
        is_matrix = len(here.shapes[0]) == 2 and here.groups == 1
        return is_matrix and self.scheme.diagonal[1 if here.order == (1, 0) else 0]

    @property
    def joint_form(self) -> Any:
        """What has to be equal for blocks to be `joined`, beside their schemes; None if this one cannot be."""
        return ()

    @staticmethod
    def joined(blocks: Sequence[Any]) -> Any:
        """A block without statistics whose groups are those of several blocks of one layout."""
        first = blocks[0]
        arrangement = first.scheme.arrangement.repeated(len(blocks))
        return type(first)(
            [name for block in blocks for name in block.names], replace(first.scheme, arrangement=arrangement)
        )

    def statistics_from(self, sums: Mapping[str, Tensor]) -> Any:
        found = KroneckerStatistics(self.scheme)
        found.load_sums(sums)
        return found

    def empty_like(self) -> Block:
        new = type(self)(self.names, self.scheme)
        new.reason = self.reason
        return new

    def load_results(self, results: Mapping[str, Any]) -> None:
        super().load_results(results)
        parts: Any = self.inverse
        self.inverse = KroneckerInverse(**parts) if parts else None

    def update_average(self, statistics: Any, decay: float) -> None:
        self.update_all([self], [statistics], decay)

    @staticmethod
    def update_all(blocks: Sequence[Any], statistics: Sequence[Any], decay: float) -> None:
        seen = [(b, own) for b, own in zip(blocks, statistics, strict=True) if own.samples and own.backprops]
        news = [own.factors(1 / own.samples) for _, own in seen]
        pairs = [b._diagonals(*sides) for (b, _), sides in zip(seen, news, strict=True)]
        weights = OutlierFilter.weights([b.gate for b, _ in seen], pairs, [b.debiased_weight(decay) for b, _ in seen])
        for (block, _), sides, w in zip(seen, news, weights, strict=True):
            changes = []
            for name, old, new, is_sketch in zip(SIDES, block.sides or NONE, sides, block.scheme.sketched, strict=True):
                before = old.entries if isinstance(old, Packed) else old
                setattr(block, name, average_moments(before, new, w))
                if before is not None and not is_sketch:  # a sketch turns without a change
                    changes.append(relative_change(before, getattr(block, name)))
            block.drift = torch.stack(changes).amax() if changes else None
            block.updates += 1

    def _diagonals(self, *news: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """Of both sides, old and new."""
        old = [None, None] if self.sides is None else list(map(diagonal_of, self.sides))
        return list(zip(old, map(diagonal_of, map(as_packed, news, self.cuts)), strict=True))

    @property
    def is_ready(self) -> bool:
        return self.inverse is not None

    def decompose(self, damping: float) -> None:
        if self.sides is not None:
            self.decompose_all([self], damping)

    @staticmethod
    def decompose_all(blocks: Sequence[Any], damping: float) -> None:
        cuts = [cut for block in blocks for cut in block.cuts]
        inverses = eigen_inverses([b.sides for b in blocks], damping, cuts)
        for block, found in zip(blocks, inverses, strict=True):
            block.inverse = found.owned()

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        cut = [b for b in blocks if b.is_cut]
        parts = inverses_in_blocks([b.sides for b in cut], share, [c for b in cut for c in b.cuts])
        for block, found in zip(cut, parts, strict=True):
            block.inverse = found.owned()
        blocks = [b for b in blocks if not b.is_cut]
        pairs, before = [b.sides for b in blocks], [b.inverse for b in blocks]
        anew = [b.updates >= 2 * b.tried for b in blocks]  # ranks change more and more slowly
        for block in itertools.compress(blocks, anew):
            block.tried = block.updates
        for block, found in zip(blocks, factored_inverses(pairs, share, before, anew), strict=True):
            block.inverse = found.owned()

    @property
    def inverse_tensors(self) -> list[Tensor]:
        i = self.inverse
        return [] if i is None else [t for t in (i.rows, i.columns, i.values, *i.shifts) if t is not None]

    @contextmanager
    def without_correlations(self) -> Iterator[None]:
        before = self.row_side, self.column_side
        if self.sides is not None:
            self.row_side, self.column_side = map(diagonal_of, self.sides)
        yield
        self.row_side, self.column_side = before

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        arrangement = self.scheme.arrangement
        x = arrangement.to_matrices(gradients).to(self.scheme.dtype)
        u = arrangement.from_matrices(self.inverse(x, own=len(gradients) > 1))
        return [part.to(g.dtype).contiguous() for part, g in zip(u, gradients, strict=True)]

    @staticmethod
    def joint_inverse(blocks: Sequence[Any]) -> KroneckerInverse:
        """The inverses of blocks of one form as one, of which those of the blocks are parts from then on."""
        whole = KroneckerInverse.stacked([block.inverse for block in blocks])
        for block, part in zip(blocks, whole.parts(len(blocks)), strict=True):
            block.inverse = part
        return whole

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.sides is not None
        rows, columns = (diagonal_of(side).mean(1) for side in self.sides)
        return (rows * columns).mean()

    @property
    def cuts(self) -> list[tuple[int, ...]]:
        """Numbers of rows of the diagonal blocks of both sides."""
        return cuts_of(self.scheme)

    @property
    def is_cut(self) -> bool:
        """Whether a side has several diagonal blocks."""
        return any(len(cut) > 1 for cut in self.cuts)

    @property
    def dimension(self) -> int:
        return self.scheme.arrangement.dimension

    @property
    def expected_bytes(self) -> int:
        here, cuts = self.scheme, self.cuts
        averages = (
            here.sides[k] if here.diagonal[k] or here.sketched[k] else here.arrangement.groups * entries_of(cuts[k])
            for k in (0, 1)
        )
        return (sum(averages) + sum(here.sides)) * here.dtype.itemsize

    @property
    def cost(self) -> float:
        return float(sum(map(_cost, self.sides or (), self.cuts)))

    def condition(self) -> float:
        return math.nan if self.inverse is None else self.inverse.condition()

    def describe(self) -> str:
        if self.sides is None:
            return "not seen yet"
        ranks = (None, None) if self.inverse is None else self.inverse.ranks
        rows, columns = (
            "x".join(2 * [str(s.shape[-1])])
            + " diagonal" * (s.ndim == 2)
            + (f" in {len(cut)} blocks" if len(cut) > 1 else "")
            + ("" if rank is None else f" by {rank} eigenvalues")
            for s, rank, cut in zip(self.sides, ranks, self.cuts, strict=True)
        )
        groups = len(self.sides[0])
        return f"B {rows}, A {columns}" + f", {groups} groups" * (groups > 1)


def _cost(side: Side, cut: Sequence[int]) -> int:
    """Operations of a decomposition, up to a constant factor."""
    if side.ndim == 3 and len(cut) > 1:
        return len(side) * sum(size**3 for size in cut)
    return math.prod(side.shape) * (side.shape[1] if side.ndim == 3 else 1)


def grouped(forms: Sequence[Any]) -> list[list[int]]:
    """The places of equal forms together; None is a form of its own wherever it is."""
    found: dict[Any, list[int]] = {}
    for k, form in enumerate(forms):
        found.setdefault((k, None) if form is None else form, []).append(k)
    return list(found.values())


def _form(block: KroneckerBlock, terms: Sequence[Term]) -> Any:
    """Equal for blocks and terms that can be measured side by side; None if these cannot, or need not."""
    first = terms[0]
    if len(terms) > 1 or not isinstance(first, OuterProduct) or first.order is not None or first.is_routed:
        return None
    form = block.joint_form
    is_plain = block.scheme.arrangement.order is None and not any(block.scheme.sketched) and form is not None
    is_small = first.a.numel() + first.b.numel() <= MAX_JOINED
    own = (
        block.scheme,
        form,
        first.independent,
        first.a.device,
        first.a.shape,
        first.b.shape,
        first.a.dtype,
        first.b.dtype,
    )
    return own if is_plain and is_small else None


def _side_by_side(terms: Sequence[Any], shape: tuple[int, ...]) -> OuterProduct:
    """Terms of one layout as those of the groups of one layer."""
    a, b = (torch.cat([getattr(term, side) for term in terms], 2) for side in "ab")
    return OuterProduct(a, b, shape, independent=terms[0].independent)
