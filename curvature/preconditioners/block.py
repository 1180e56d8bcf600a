"""Blocks of running curvature: what passes measure, the interface of blocks, how they are inverted where that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.gradients import Jacobian
from curvature.linalg import count_recovery, full_precision, stack
from curvature.operators import Space
from curvature.structures import FORMS, Structure
from curvature.terms import Term

Due = Mapping[str, Sequence[bool]]  # which sides to invert, by the first parameter of a block; of others all
TermsByName = Mapping[str, Sequence[Term]]  # of one vector
Kind = TypeVar("Kind", bound="Block")

OUTLIER_FACTOR = 1e3  # ratio of a trace to that of the running average

SHARED_FIELDS = ("names", "reason", "updates", "traces", "was_outlier", "outliers")  # of a checkpoint of any block
MAX_FAILURES = 3  # consecutive failures of a block that raise


class MeanFacts(NamedTuple):
    """What the host reads of new means before they enter an average: sums of absolute entries, of some tensors each."""

    traces: Sequence[Sequence[Tensor]]  # the diagonals of the matrices
    others: Sequence[Sequence[Tensor]] = ()  # what else has to be finite


class Block:
    """Running average of the curvature M of some parameters, a mean over samples, debiased. Sub-classes hold M."""

    structure = ""
    shapes: Mapping[str, tuple[int, ...]]  # of the parameters, by name
    dtype: torch.dtype  # of what a leaf measures
    inverse: Any = None  # what `solve` multiplies with
    failures = 0  # consecutive failures of decompositions
    # Relative change of each side (one, but for Kronecker products) by the last update, in the Frobenius norm of the
    # numbers that are kept (of a triangle, those off the diagonal count once); None if it is not known, as when loaded
    drift: Tensor | None = None
    is_outdated = False  # whether `inverse` lacks what there was no measure of before, however little sides have moved

    def __init_subclass__(cls) -> None:
        if "structure" in vars(cls):
            STRUCTURES[cls.structure] = cls

    def __init__(self, names: Sequence[str], reason: str = "") -> None:
        self.names = tuple(names)  # of the parameters
        self.reason = reason  # why the block is no better approximation; "" where it is the best there is
        self.updates = 0  # of the average
        self.traces: list[float] = []  # of the average's matrices; empty before the first update
        # whether the last statistics were far out of scale, and left out, and how often that was so
        self.was_outlier, self.outliers = False, 0

    @property
    def has_separate_rows(self) -> bool:
        """Whether M says nothing of one row of a parameter together with another."""
        return False

    def weight(self, traces: Sequence[float], decay: float) -> float:
        """Weight of the next statistics, given their traces: none if one is far out of scale, but never twice in a row.

        With it the running average of traces is updated.
        """
        known = list(zip(self.traces, traces, strict=bool(self.traces)))
        self.was_outlier = not self.was_outlier and any(new > OUTLIER_FACTOR * old > 0 for old, new in known)
        self.outliers += self.was_outlier
        weight = 0.0 if self.was_outlier else debiased_weight(decay, self.updates)
        self.traces = [old + weight * (new - old) for old, new in known] or list(traces)
        return weight

    @property
    def leaves(self) -> list[Block]:
        """The blocks that are measured, averaged and inverted separately: itself, unless it has parts."""
        return [self]

    def split_terms(self, terms: Mapping[str, Sequence[Term]]) -> list[tuple[Block, TermsByName]]:
        """What each leaf measures of the terms by parameter; empty if they do not fit."""
        return [(self, {name: terms[name] for name in self.names if terms.get(name)})]

    def space(self, device: torch.device) -> Space:
        """Of the parameters, on a device."""
        return Space(self.names, tuple(self.shapes.values()), self.dtype, device)

    def empty(self, device: torch.device) -> Structure:
        """What a leaf measures, without any samples."""
        raise NotImplementedError

    def measure(self, terms: TermsByName, samples: float, rank: int = 0, world_size: int = 1) -> Structure:
        """What one vector shows of a batch, for a leaf; arguments as for `Structure.estimate`, from `split_terms`."""
        statistics = self.empty(next(iter(terms.values()))[0].device)
        statistics.estimate(terms, samples, rank, world_size)
        return statistics

    @staticmethod
    def measure_all(
        blocks: Sequence[Any], terms: Sequence[TermsByName], samples: float, rank: int = 0, world_size: int = 1
    ) -> list[Structure]:
        """`measure` with several blocks of this class, given the terms of each."""
        return [
            block.measure(of_block, samples, rank, world_size) for block, of_block in zip(blocks, terms, strict=True)
        ]

    def statistics_from(self, sums: Mapping[str, Tensor]) -> Structure:
        """Statistics of all processes from their all-reduced `Structure.sums`."""
        statistics = self.empty(next(iter(sums.values())).device)
        statistics.load_sums(sums)
        return statistics

    scale_all: Callable[..., Sequence[Any]]  # the matrices of several statistics, each times a number

    @classmethod
    def means_all(cls, blocks: Sequence[Any], statistics: Sequence[Any]) -> list[tuple[Any, MeanFacts] | None]:
        """Of several leaves of this class the matrices of their statistics, means over samples, and their facts.

        None for a leaf without matrices.
        """
        known = [k for k, of_block in enumerate(statistics) if of_block.counts[0] and of_block.tensors]
        means = cls.scale_all([statistics[k] for k in known], [1 / statistics[k].counts[0] for k in known])
        facts = {k: (mean, blocks[k].facts(statistics[k], mean)) for k, mean in zip(known, means, strict=True)}
        return [facts.get(k) for k in range(len(blocks))]

    def facts(self, statistics: Any, means: Any) -> MeanFacts:
        """Of statistics and their means, for `means_all`."""
        raise NotImplementedError

    @staticmethod
    def averages_all(blocks: Sequence[Any], means: Sequence[Any], weights: Sequence[float]) -> list[Any]:
        """The running averages of several leaves of this class with new means, each with its weight."""
        raise NotImplementedError

    def update(self, statistics: Any, averages: Any, decay: float, weight: float) -> list[tuple[Tensor, Tensor]]:
        """Take over new running averages; returns each side before and after, if there were any."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether `solve` can be called."""
        return self.inverse is not None

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """``(M + damping I)^-1`` times gradients, each in the shape of its parameter."""
        raise NotImplementedError

    @staticmethod
    def solve_all(blocks: Sequence[Any], gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """`solve` with several blocks of this class, given the gradients of each."""
        return [block.solve(of_block) for block, of_block in zip(blocks, gradients, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        """Trace of M over its dimension, a scalar tensor."""
        raise NotImplementedError

    @property
    def dimension(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def costs(self) -> tuple[float, ...]:
        """Operations of inverting each side, up to a constant factor."""
        return (float(self.dimension),)

    @property
    def cost(self) -> float:
        return sum(self.costs)

    @property
    def bytes(self) -> int:
        """Memory of the tensors of `state`."""
        leaves = pytree.tree_leaves(self.state())
        return sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))

    @property
    def expected_bytes(self) -> int:
        """Upper bound on `bytes`, known before the first batch; zero if it is not."""
        return 0

    def condition(self) -> float:
        """Largest over smallest eigenvalue of the matrix that `solve` inverts; nan if that is not known."""
        return math.nan

    def describe(self) -> str:
        """Shapes of the factors, for reports."""
        return f"{self.dimension} parameters"

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        """Prepare `solve` of several blocks of this class, all of which have statistics; see `invert`.

        A block whose sides cannot be inverted separately ignores `due`. If a decomposition fails, it raises before
        any block has changed.
        """
        raise NotImplementedError

    def without_correlations(self) -> AbstractContextManager[None]:
        """Inside, M is its diagonal."""
        return nullcontext()

    def empty_like(self) -> Block:
        """A block of the same layout without statistics."""
        raise NotImplementedError

    def results(self) -> dict[str, Any]:
        """What `invert` sets, as plain tensors and numbers."""
        state = self.state()
        return {k: state[k] for k in self.broadcast_fields}

    def load_results(self, results: Mapping[str, Any]) -> None:
        """Load the `results` of the same block on another process."""
        for name, value in results.items():
            setattr(self, name, value)

    broadcast_fields: tuple[str, ...] = ("inverse",)  # sent by the process that decomposes
    state_fields: tuple[str, ...] = ()  # tensors and numbers of a checkpoint
    layout_fields: tuple[str, ...] = ()  # layout of the parameters

    def state(self) -> dict[str, Any]:
        """The checkpoint: plain tensors, numbers and names."""
        fields = (*SHARED_FIELDS, *self.layout_fields, *self.state_fields)
        return {"structure": self.structure} | {k: getattr(self, k) for k in fields}

    @staticmethod
    def restore(state: dict[str, Any], device: torch.device) -> Block:
        """A block from its `state`, tensors on `device`."""
        known = STRUCTURES | dict.fromkeys(FORMS.keys() - STRUCTURES.keys(), STRUCTURES["structure"])
        if state["structure"] not in known:
            raise ValueError(
                f"unknown structure {state['structure']!r} of a block; known are {sorted(known)}, and classes of your "
                "own once they are imported"
            )
        return known[state["structure"]].from_state(state, device)

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Block:
        declared = {"structure", *SHARED_FIELDS, *cls.layout_fields, *cls.state_fields}
        if foreign := sorted(set(state) - declared):
            raise ValueError(f"a block of structure {cls.structure!r} has no {', '.join(map(repr, foreign))}")
        block = cls.__new__(cls)
        for name, value in state.items():
            setattr(block, name, pytree.tree_map_only(Tensor, lambda t: t.to(device, copy=True), value))
        block.after_restore()
        return block

    def after_restore(self) -> None:
        """Rebuild what is not plain in `state`."""


STRUCTURES: dict[str, type[Block]] = {}  # by name


def group(forms: Sequence[Any]) -> list[list[int]]:
    """The places of equal forms together; None is a form of its own wherever it is."""
    places: dict[Any, list[int]] = {}
    for k, form in enumerate(forms):
        places.setdefault((k, None) if form is None else form, []).append(k)
    return list(places.values())


def by_class(blocks: Sequence[Kind]) -> list[list[Kind]]:
    """Blocks of one class together."""
    return [[blocks[k] for k in places] for places in group([type(block) for block in blocks])]


def in_parts(blocks: Iterable[Kind], sizes: Iterable[float], most: float) -> list[list[Kind]]:
    """Blocks one after the other in parts, each of at most so much together or of one block."""
    parts: list[list[Kind]] = []
    held = math.inf
    for block, size in zip(blocks, sizes, strict=True):
        held += size
        if held > most:
            parts.append([])
            held = size
        parts[-1].append(block)
    return parts


def debiased_weight(decay: float, updates: int) -> float:
    """Of the next statistics in a debiased running average after so many updates."""
    return (1 - decay) / (1 - decay ** (updates + 1))


def relative_changes(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """How far the second of each pair is from the first, in Frobenius norms (n,); zero stays zero."""
    old, new = map(list, zip(*pairs, strict=True))
    made, norms = torch._foreach_norm(torch._foreach_sub(new, old)), torch._foreach_norm(old)
    return (stack(made) / stack(norms)).nan_to_num(0.0)


def invert(blocks: Sequence[Block], share: float, damping: float | None = None, due: Due | None = None) -> None:
    """Prepare `Block.solve` of the blocks that have statistics, blocks of one class together.

    A block whose decomposition fails, however it is tried (see `curvature.linalg`), does not affect the others. It
    keeps its previous inverse; if it has none, it gets the inverse of its factors' diagonals. `recovery_counts` counts
    these events.

    Args:
        share: damping relative to each block's own curvature, see `curvature.kronecker.factored_inverses`.
        damping: added to the block instead; None: the share.
        due: which of its sides to invert, by a block's first parameter; of others, and of those that have no inverse
            of this kind yet, all.

    Raises:
        torch.linalg.LinAlgError: a block failed for the third time in a row.
        ValueError: a matrix is singular or indefinite to working precision, and damping does not change that.
    """
    seen = [leaf for block in blocks for leaf in block.leaves if leaf.updates]
    with full_precision():
        for alike in by_class(seen):
            failed: list[Block] = []
            if not _succeeds(alike, share, damping, due):
                failed = [b for b in alike if len(alike) == 1 or not _succeeds([b], share, damping, due)]
            for block in alike:
                block.failures = block.failures + 1 if block in failed else 0
            for block in failed:
                _rescue(block, share, damping)


def _succeeds(blocks: Sequence[Block], share: float, damping: float | None, due: Due | None = None) -> bool:
    """Prepare blocks of one class together; where a decomposition fails, they stay as they were."""
    try:
        blocks[0].invert(blocks, share, damping, due or {})
    except torch.linalg.LinAlgError:
        return False
    return True


def _rescue(block: Block, share: float, damping: float | None) -> None:
    if block.failures >= MAX_FAILURES:
        raise torch.linalg.LinAlgError(
            f"{', '.join(block.names)}: no decomposition of the curvature succeeded, {MAX_FAILURES} times in a row, "
            "also in float64, on the CPU and with jitter on the diagonal"
        )
    if block.is_ready:
        count_recovery("kept")
        return
    count_recovery("diagonal")
    with block.without_correlations():
        is_ready = _succeeds([block], share, damping)
    if not is_ready:
        raise torch.linalg.LinAlgError(f"{', '.join(block.names)}: the diagonal of the curvature cannot be inverted")


@dataclass(frozen=True)
class BatchFacts:
    """What is known of a recorded pass, beside what it computed."""

    count: int  # of samples
    rank: int = 0  # this process
    world_size: int = 1  # the number of processes that share the batch
    displacement: Mapping[str, Tensor] = field(default_factory=dict)  # by name, along which to measure changes, too
    independent: bool = False  # whether all entries of the vectors sent back are independent, with mean zero


@dataclass
class RowStatistics:
    """Rows ``v^T J`` of the Jacobian of all parameters."""

    parts: list[Jacobian]  # of each pass
    samples: float
    times: float = 1.0  # factor by which the vectors are yet to be multiplied

    @property
    def shapes(self) -> Any:
        """Shapes of the parameters."""
        return self.parts[0].shapes

    @property
    def jacobian(self) -> Jacobian:
        """All rows."""
        return replace(self.parts[0], parts=[part for jacobian in self.parts for part in jacobian.parts])

    def add_(self, other: RowStatistics) -> None:
        """Add rows of other samples; those of no samples are what is still missing in the rows of the last pass."""
        parts = [jacobian.scaled(other.times / self.times) for jacobian in other.parts]
        if other.samples:
            self.parts += parts
            self.samples += other.samples
        else:
            self.parts[-1] = self.parts[-1].plus(*parts)


class SquaredChange(NamedTuple):
    """``(v^T J u)^2``, what vectors v saw along a displacement u, summed over samples and vectors."""

    value: Any = 0.0  # a tensor (), where blocks were reached
    blocks: frozenset[str] = frozenset()  # those that u and v have reached, by their first parameters

    @staticmethod
    def of(changes: Mapping[str, Tensor]) -> SquaredChange:
        """From ``v^T J u`` (N,) of each block, for one vector."""
        return SquaredChange(stack(changes.values()).sum(0).square().sum() if changes else 0.0, frozenset(changes))


@dataclass
class CurvatureStatistics:
    """Statistics of one or more passes, as a value that can be added up and scaled.

    Attributes:
        blocks: sums over samples, by the first parameter of each leaf. They add up over processes, too.
        rows: processes gather these, which do not add up.
        along: the squared change along a displacement.
        outputs: sums that say how large the outputs are: of "squares", and "numbers" of samples and entries.
    """

    blocks: dict[str, Structure] = field(default_factory=dict)
    rows: RowStatistics | None = None
    along: SquaredChange = SquaredChange()
    outputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.blocks) or self.rows is not None

    def add_(self, other: CurvatureStatistics) -> None:
        """Add other statistics, which must not be used any more: their memory may be shared."""
        here = self.outputs
        self.outputs = {**here, **{k: here[k] + x if k in here else x for k, x in other.outputs.items()}}
        if other.rows is not None:
            if self.rows is None or self.rows.shapes != other.rows.shapes:  # other parameters are trained now
                self.blocks, self.rows = other.blocks, other.rows
                return
            self.rows.add_(other.rows)
        for name, block in other.blocks.items():
            if name in self.blocks:
                self.blocks[name].add_(block)
            else:
                self.blocks[name] = block
        self.along = SquaredChange(self.along.value + other.along.value, self.along.blocks | other.along.blocks)

    def scale_vectors_(self, times: float) -> None:
        """Rescale as if the vectors had been `times` as long."""
        self.blocks = {name: block.scaled(times**2) for name, block in self.blocks.items()}
        if self.rows is not None:
            self.rows.times *= times
        self.along = self.along._replace(value=times**2 * self.along.value)
        if self.outputs:
            self.outputs = {**self.outputs, "squares": times**2 * self.outputs["squares"]}
