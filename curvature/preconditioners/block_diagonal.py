"""Curvature of a model as a store of blocks: which block each parameter gets, and its running average."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from curvature.functional import RECURRENT
from curvature.gradients import candidate_axes, certain_layouts, layers_of, terms_by_parameter, weighted_gradients
from curvature.kronecker import Scheme
from curvature.layers import Layout
from curvature.linalg import ByDevice, absolute_sums, cat, full_precision, read, stack, without_autocast
from curvature.operators import name_of_rows
from curvature.preconditioners.block import (
    BatchFacts,
    Block,
    CurvatureStatistics,
    MeanFacts,
    SquaredChange,
    by_class,
    group,
    in_parts,
    relative_changes,
)
from curvature.preconditioners.kronecker import EigenBlock, KroneckerBlock
from curvature.preconditioners.row_ranges import RowRangeBlock
from curvature.preconditioners.structure_block import DiagonalBlock, StructureBlock
from curvature.recording import ParameterNode, Tape, Use, stream_backprops
from curvature.structures import Choices, DiagonalStructure, Structure
from curvature.terms import (
    Convolution,
    DenseGradients,
    ElementwiseProduct,
    OuterProduct,
    Term,
    contractions,
    row_ranges,
    sum_in_place,
)

MAX_SIDE = 2048  # a larger side is kept as a sketch
MOST_COMPARED = ByDevice(2**18, 2**22)  # entries of sides that are averaged, and compared with those before, together
# of backprops that wait to be measured; layers of one form among them are measured together
MOST_BYTES = ByDevice(2**20, 2**26)
MAX_EIGEN_SIDE = 512  # a larger eigenbasis makes steps several times as dear, and the loss by step is no better

FUSED = " as one kernel, which is how it runs within torch.utils.checkpoint and on packed sequences"
UNSEEN = "torch does not show what uses it (an autograd.Function or the like)"

Shapes = Sequence[tuple[int, ...]]  # of the parameters of a block
LAYERS: dict[str, type[KroneckerBlock]] = {block.structure: block for block in (KroneckerBlock, EigenBlock)}


class CurvatureStore:
    """Base: curvature of a model in blocks of parameters, as running averages over recorded passes.

    `measure` leaves averages alone; it only creates the blocks of parameters that it meets for the first time.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def measure(
        self, tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], batch: BatchFacts
    ) -> CurvatureStatistics:
        """Statistics of a recorded pass, given vectors (k, *shape), sent back from each of the outputs."""
        raise NotImplementedError

    def learn_axes(self, tape: Tape, outputs: Sequence[Tensor], count: int) -> None:
        """Find by experiment where uses have their samples, if that has to be known."""

    def update_average(self, statistics: CurvatureStatistics, decay: float) -> None:
        """Update the running averages."""
        raise NotImplementedError

    def drop_replaced(self, parameters: Mapping[str, Tensor]) -> None:
        """Forget blocks of parameters that have other shapes now, as those of a head that was replaced."""
        shapes = {name: tuple(p.shape) for name, p in parameters.items() if not nn.parameter.is_lazy(p)}
        known = [(block, block.shapes.items()) for block in self.blocks]
        is_there = lambda sizes: all(shapes.get(name, shape) == shape for name, shape in sizes)
        self.blocks = [block for block, sizes in known if is_there(sizes)]

    def right_hand_sides(self, gradients: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What blocks solve for, given the gradients that there are."""
        return gradients

    def gather(self, statistics: CurvatureStatistics, objects: Callable[[Any], Sequence[Any]]) -> None:
        """Replace statistics that do not add up by those of all processes; `objects` is an all-gather of objects."""

    def summed_blocks(self) -> list[Block]:
        """The blocks whose statistics add up over processes."""
        return self.blocks

    def statistics_from(self, sums: Mapping[tuple[str, str], Tensor]) -> dict[str, Structure]:
        """Statistics of all processes by leaf, from all-reduced sums by names of leaf and sum."""
        statistics: dict[str, Structure] = {}
        for leaf in (leaf for block in self.summed_blocks() for leaf in block.leaves):
            of_leaf = {key: x for (name, key), x in sums.items() if name == leaf.names[0]}
            if of_leaf:
                statistics[leaf.names[0]] = leaf.statistics_from(of_leaf)
        return statistics

    def complete(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Create the blocks that only other processes have, and take over the order of these states."""
        known = {block.names[0]: block for block in self.summed_blocks()}
        make = lambda state: known.get(state["names"][0]) or Block.restore(dict(state), device)
        self.blocks = [make(state) for state in states]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Plain tensors, numbers and names, by the first parameter of each block."""
        return {block.names[0]: block.state() for block in self.blocks}

    def load_state_dict(self, state: dict[str, dict[str, Any]], devices: Mapping[str, torch.device]) -> None:
        """Load a `state_dict`, each block to the device of its first parameter, given by name."""
        self.blocks = [Block.restore(entry, devices[name]) for name, entry in state.items()]


class BlockDiagonalCurvature(CurvatureStore):
    """Curvature of a model with a block for each layer.

    Args:
        sharing: "expand" counts every place of a shared weight as a sample of its own, "reduce" averages activations
            and adds backprops over the places of a sample first (arXiv:2311.00636, equations 17 and 21).
        kind: structure of the blocks, "kronecker" or "eigen" (rescaled in the eigenbasis).
        block_size: larger sides of factors are replaced by their diagonal blocks of that size; None: none is.
        choices: other structures, of some layers.
    """

    def __init__(
        self, sharing: str = "expand", kind: str = "kronecker", block_size: int | None = None,
        choices: Choices | None = None,
    ) -> None:  # fmt: skip
        if sharing not in ("expand", "reduce"):
            raise ValueError(f'sharing: expected "expand" or "reduce", found {sharing!r}')
        if kind not in ("kronecker", "eigen"):
            raise ValueError(f'kind: expected "kronecker" or "eigen", found {kind!r}')
        super().__init__()
        self.sharing, self.kind, self.block_size = sharing, kind, block_size
        self.choices = choices or Choices(None, ())
        self.axes: dict[tuple[frozenset[str], int], Layout | None] = {}  # as `learn_axes` has found them

    def learn_axes(self, tape: Tape, outputs: Sequence[Tensor], count: int) -> None:
        """Find by experiment the axes of samples that sizes leave open, once for each use.

        What layers do to the outputs together, and the squares of EKFAC, depend on them: `nn.MultiheadAttention` folds
        tokens and samples in this order into one axis. A use whose gradients do not tell is asked again; a pass of a
        single sample says nothing.
        """
        keyed = _number_uses(tape)
        new = [key not in self.axes and count > 1 and _is_open(use.shape, count) for key, use in keyed]
        tensors = [x for x in outputs if isinstance(x, Tensor) and x.shape[:1] == (count,) and x.requires_grad]
        for x in tensors if any(new) else ():
            with without_autocast([x.device]):
                certain = certain_layouts(tape, x, new)
            for k, layout in certain.items():
                key, _ = keyed[k]
                self.axes[key] = layout or self.axes.get(key)

    def _layouts(self, tape: Tape, count: int) -> list[Iterable[Layout]]:
        """Candidate sample axes, that of `learn_axes` first; at last the layout that takes everything as one sample."""
        layouts: list[Iterable[Layout]] = []
        for key, use in _number_uses(tape):
            candidates: Iterable[Layout] = candidate_axes(use.shape, count)
            if (known := self.axes.get(key)) is not None:
                candidates = sorted(candidates, key=functools.partial(_difference, known))
            layouts.append(itertools.chain(candidates, [Layout(0, 1, 1, use.shape[0])]) if use.shape else ())
        return layouts

    def measure(
        self, tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], batch: BatchFacts
    ) -> CurvatureStatistics:
        total, known, order = CurvatureStatistics(), len(self.blocks), list(tape.parameters)
        # 1. samples: their axis in each use, where sizes leave it open
        self.learn_axes(tape, outputs, batch.count)
        for k, sent in enumerate(zip(*vectors, strict=True)):
            total.add_(self._measure_vector(tape, outputs, sent, batch.count if k == 0 else 0, batch))
        # 6. blocks in the order of the model, however backprops came to them
        self.blocks[known:] = sorted(self.blocks[known:], key=lambda block: order.index(block.names[0]))
        return total

    def _measure_vector(
        self, tape: Tape, outputs: Sequence[Tensor], sent: Sequence[Tensor], samples: int, batch: BatchFacts
    ) -> CurvatureStatistics:
        """Statistics of one vector; `samples` that no other vector has counted."""
        measured, changes, unexplained = CurvatureStatistics(), dict[str, Tensor](), set[str]()
        layouts, index = self._layouts(tape, batch.count), self.index()
        noise = set(map(_memory, sent)) if batch.independent else set()

        def add(terms: dict[str, list[Term]]) -> None:
            # 4. statistics of the blocks, blocks of one class together; how far the last step has moved outputs
            measured.add_(self.measure_terms(tape, terms, index, samples, batch.rank, batch.world_size))
            changes.update(self._changes(terms, index, batch))

        def take(backprops: Sequence[Tensor | None], names: frozenset[str]) -> None:
            # 3. terms of each parameter
            terms, _ = terms_by_parameter(tape, backprops, layouts, tape.parameters.keys() - names)
            terms = {name: [_mark_independent(term, noise) for term in parts] for name, parts in terms.items() if parts}
            unexplained.update(names - terms.keys())  # read in a scripted module, without data, or without a rule
            add(terms)

        # 2. backprops of some layers at a time, which are freed when these have been measured
        with _note_copies(outputs, noise):
            stream_backprops(tape, outputs, sent, take, MOST_BYTES.at(sent[0].device))

        # 5. what no rule explains: the gradients of the whole batch
        if names := sorted(unexplained):
            roots = [tape.parameters[name].tensor for name in names]
            whole = torch.autograd.grad(outputs, roots, sent, retain_graph=True, allow_unused=True)
            add({name: [DenseGradients(g[None])] for name, g in zip(names, whole, strict=True) if g is not None})
        measured.along = SquaredChange.of(changes)
        return measured

    def index(self) -> dict[str, Block]:
        """The block of each parameter."""
        return {name: block for block in self.blocks for name in block.names}

    @staticmethod
    def _changes(
        terms: Mapping[str, Sequence[Term]], index: Mapping[str, Block], batch: BatchFacts
    ) -> dict[str, Tensor]:
        """``v^T J u`` (count,) of the blocks whose terms tell samples apart, by their first parameter."""
        changes: dict[str, Tensor] = {}
        for block in dict.fromkeys(index[name] for name in terms if terms[name]) if batch.displacement else ():
            names = [name for name in block.names if terms.get(name) and name in batch.displacement]
            if names and all(len(term) == batch.count for name in names for term in terms[name]):
                pairs = ((terms[name], batch.displacement[name]) for name in names)
                changes[block.names[0]] = sum_in_place(contractions.inner_products(*pair) for pair in pairs)
        return changes

    def measure_backprops(
        self, tape: Tape, backprops: Sequence[Tensor | None], whole: Mapping[str, Tensor], batch: BatchFacts
    ) -> CurvatureStatistics:
        """Statistics of a pass whose graph is gone, from the backprops of the loss's own backward pass.

        `whole` has sums over the batch, for parameters whose per-sample gradients the backprops do not tell.
        """
        terms, _ = terms_by_parameter(tape, backprops, self._layouts(tape, batch.count), set(whole))
        terms |= {name: [DenseGradients(g[None])] for name, g in whole.items()}
        index = self.index()
        measured = self.measure_terms(tape, terms, index, batch.count, batch.rank, batch.world_size)
        measured.along = SquaredChange.of(self._changes(terms, index, batch))
        return measured

    def weighted_gradients(
        self, tape: Tape, node: ParameterNode, backprops: Sequence[Tensor | None], weights: Tensor
    ) -> Mapping[str, Tensor]:
        """Sums over samples, with weights (N,), of the gradients of parameters behind a computed tensor.

        They are for `measure_backprops`, and need the graph of that tensor.
        """
        return weighted_gradients(tape, node, backprops, self._layouts(tape, len(weights)), weights)

    def _create_blocks(self, tape: Tape, terms: Mapping[str, list[Term]], index: dict[str, Block]) -> None:
        """Blocks of the parameters that have terms and no block yet."""
        if all(name in index for name, parts in terms.items() if parts):
            return
        new = [name for name in tape.parameters if terms.get(name) and name not in index]
        layers = layers_of(tape, new, self.choices.alone)
        made = [block for names in layers for block in self._blocks_of(tape, names, terms)]
        self.blocks += sorted(made, key=lambda block: isinstance(block, DiagonalBlock))
        index.update(self.index())

    def _blocks_of(self, tape: Tape, names: Sequence[str], terms: Mapping[str, list[Term]]) -> list[Block]:
        """One block for a layer, or the diagonals of its parameters."""
        shapes, dtype = [tuple(tape.parameters[n].tensor.shape) for n in names], tape.parameters[names[0]].tensor.dtype
        choice = self.choices.of(names)
        if choice is DiagonalStructure:
            return [self._diagonal_block(tape, name, "chosen by structure=") for name in names if terms.get(name)]
        if isinstance(choice, type):
            return [StructureBlock(choice, dict(zip(names, shapes, strict=True)), dtype)]
        kind = choice or self.kind
        block = self._kronecker_block(kind, names, terms[names[0]], shapes, dtype)
        block = block or self._row_range_block(kind, names, terms[names[0]], shapes, dtype)
        if block is not None:
            return [block]
        if choice is not None:
            raise ValueError(f'structure: {names[0]} has no Kronecker factors; choose "dense" or "diagonal"')
        return [self._diagonal_block(tape, name) for name in names if terms.get(name)]

    def _diagonal_block(self, tape: Tape, name: str, reason: str = "") -> Block:
        node = tape.parameters[name]
        if not reason:
            readers = sorted({getattr(use.function, "__name__", "a function") for use in node.uses})
            fused = FUSED if any(use.function in RECURRENT for use in node.uses) else ""
            what = f"no Kronecker factors exist for {', '.join(readers)}{fused}" if readers else UNSEEN
            reason = f"{what}; the diagonal of the curvature is used"
        return DiagonalBlock(DiagonalStructure, {name: tuple(node.tensor.shape)}, node.tensor.dtype, reason)

    def _kronecker_block(
        self, structure: str, names: Sequence[str], terms: Sequence[Term], shapes: Shapes, dtype: torch.dtype
    ) -> Block | None:
        scheme = Scheme.of(terms, shapes, dtype, self.sharing, MAX_SIDE, self.block_size)
        if scheme is None or any(isinstance(t, ElementwiseProduct) for t in terms):  # its factors would be 1 x 1
            return None
        kinds = scheme.kinds
        rows = max((max(scheme.block_sizes(k)) for k, kind in enumerate(kinds) if not kind.is_diagonal), default=0)
        is_large = rows > MAX_EIGEN_SIDE or any(kind.takes_rows for kind in kinds)
        block = LAYERS["kronecker" if is_large else structure](names, scheme)
        if is_large and structure == "eigen":
            block.reason = "too large for an eigenbasis; Kronecker factors are used"
        return block

    def _row_range_block(
        self, structure: str, names: Sequence[str], terms: Sequence[Term], shapes: Shapes, dtype: torch.dtype
    ) -> Block | None:
        """A block for every range of rows that is read apart; None unless these cover all rows and have factors."""
        parts: dict[tuple[int, int], Block] = {}
        end = 0
        for start, stop, of_rows in row_ranges(terms):
            sizes = [(stop - start, *shape[1:]) for shape in shapes]
            rows = [name_of_rows(name, start, stop) for name in names]
            part = self._kronecker_block(structure, rows, of_rows, sizes, dtype)
            if part is None or start != end:
                return None
            parts[start, stop], end = part, stop
        return RowRangeBlock(names, parts) if parts and end == shapes[0][0] else None

    def measure_terms(
        self, tape: Tape, terms: dict[str, list[Term]], index: dict[str, Block], count: int, rank: int = 0,
        world_size: int = 1,
    ) -> CurvatureStatistics:  # fmt: skip
        """Statistics from the terms of one vector; `index` is that of the blocks, to which new ones are added."""
        self._create_blocks(tape, terms, index)
        seen = dict.fromkeys(index[name] for name, parts in terms.items() if parts)
        split = [pair for block in seen if terms.get(block.names[0]) for pair in block.split_terms(terms)]
        measured: dict[int, Structure] = {}
        with full_precision():
            for alike in group([type(leaf) for leaf, _ in split]):
                leaves, each = zip(*(split[k] for k in alike), strict=True)
                measured |= zip(alike, leaves[0].measure_all(leaves, each, count, rank, world_size), strict=True)
        return CurvatureStatistics({leaf.names[0]: measured[k] for k, (leaf, _) in enumerate(split)})

    @full_precision()
    def update_average(self, statistics: CurvatureStatistics, decay: float) -> None:
        """Update the running averages, but for those of leaves whose statistics are not finite. The host waits once."""
        # 1. means over samples, of each leaf that was measured
        leaves = [leaf for block in self.blocks for leaf in block.leaves if leaf.names[0] in statistics.blocks]
        means: dict[Block, tuple[Any, MeanFacts]] = {}
        for alike in by_class(leaves):
            every = alike[0].means_all(alike, [statistics.blocks[leaf.names[0]] for leaf in alike])
            means |= {leaf: mean for leaf, mean in zip(alike, every, strict=True) if mean is not None}
        # 2. read what has to be finite
        weights = _finite_weights({leaf: facts for leaf, (_, facts) in means.items()}, decay)
        moved: dict[Block, int] = {}  # by how many of the drifts
        drifts: list[Tensor] = []
        # two averages of each are in memory no longer than for a part
        for alike in (part for leaves in by_class(list(weights)) for part in _in_parts(leaves, means)):
            # 3. average
            of_leaves = [weights[leaf] for leaf in alike]
            averages = alike[0].averages_all(alike, [means[leaf][0] for leaf in alike], of_leaves)
            each = zip(alike, averages, of_leaves, strict=True)
            sides = [leaf.update(statistics.blocks[leaf.names[0]], new, decay, weight) for leaf, new, weight in each]
            # 4. compare each side with what it was before
            moved |= {leaf: len(pairs) for leaf, pairs in zip(alike, sides, strict=True) if pairs}
            if changed := [pair for pairs in sides for pair in pairs]:
                drifts.append(relative_changes(changed))
        for leaf, drift in zip(moved, cat(drifts).split(list(moved.values())) if moved else (), strict=True):
            leaf.drift = drift


def _in_parts(leaves: Sequence[Block], means: Mapping[Block, tuple[Any, MeanFacts]]) -> list[list[Block]]:
    """Leaves of so few entries that two averages of each fit in memory, or one."""
    traces = [means[leaf][1].traces for leaf in leaves]
    entries = (sum(sum(x.numel() for x in parts) ** 2 for parts in of_leaf) for of_leaf in traces)
    return in_parts(leaves, entries, MOST_COMPARED.at(traces[0][0][0].device))


def _finite_weights(facts: Mapping[Block, MeanFacts], decay: float) -> dict[Block, float]:
    """The weights of leaves whose means are finite. The host waits once."""
    sums = absolute_sums([parts for of_leaf in facts.values() for parts in (*of_leaf.traces, *of_leaf.others)])
    numbers = iter(read(stack(sums)) if sums else ())
    weights = {}
    for leaf, (traces, others) in facts.items():
        of_traces, of_others = (list(itertools.islice(numbers, len(parts))) for parts in (traces, others))
        if all(map(math.isfinite, [*of_traces, *of_others])):
            weights[leaf] = leaf.weight(of_traces, decay)
    return weights


def _mark_independent(term: Term, noise: Collection[int]) -> Term:
    """Mark a term whose backprops are the injected random numbers themselves, in the memory `noise`, none twice."""
    if not noise or not isinstance(term, OuterProduct | Convolution):
        return term
    b = term.b
    is_sent = _memory(b) in noise and all(n < 2 or step for n, step in zip(b.shape, b.stride(), strict=True))
    return replace(term, independent=True) if is_sent else term


@contextmanager
def _note_copies(outputs: Sequence[Tensor], noise: set[int]) -> Iterator[None]:
    """Add to the memory of the noise that of its copies in another precision, where the graph ends with one."""
    held = []  # their memory must not become another tensor's meanwhile

    def note(made: Sequence[Tensor | None], sent: Sequence[Tensor]) -> None:
        if made[0] is not None and _memory(sent[0]) in noise:
            noise.add(_memory(made[0]))
            held.append(made[0])

    nodes = [x.grad_fn for x in outputs if noise and x.grad_fn is not None]
    handles = [node.register_hook(note) for node in nodes if node.name() == "ToCopyBackward0"]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _memory(x: Tensor) -> int:
    """Where the storage is, also of a tensor that `torch.func.grad` has wrapped."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.untyped_storage().data_ptr()


def _number_uses(tape: Tape) -> list[tuple[tuple[frozenset[str], int], Use]]:
    """The uses with the names of their parameters, and how many uses of these came before."""
    numbers: dict[frozenset[str], int] = {}
    keyed = []
    for use in tape.uses:
        number = numbers[use.names] = numbers.get(use.names, -1) + 1
        keyed.append(((use.names, number), use))
    return keyed


def _difference(known: Layout, other: Layout) -> tuple[bool, ...]:
    """How another layout differs from the known one of the same use; lengths of sequences change between batches."""
    is_other = (known.outer > 1) != (other.outer > 1), (known.inner > 1) != (other.inner > 1)
    return (known.dim != other.dim, *is_other, known.outer != other.outer and known.inner != other.inner)


@functools.lru_cache
def _is_open(shape: tuple[int, ...], count: int) -> bool:
    """Whether sizes leave open which axis of a use holds the samples: it is not the first, or not the only one."""
    candidates = list(candidate_axes(shape, count))
    return len(candidates) > 1 and (candidates[0] != Layout(0, 1, count, 1) or candidates[1].size == count)
