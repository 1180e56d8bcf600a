"""Renews and inverts curvature when it is due, and solves with it: statistics and gradients in, directions out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import PRODUCTS, ByDevice, full_precision, stack
from curvature.operators import Named
from curvature.preconditioners import Block, CurvatureStore, KroneckerBlock, by_class, in_parts, invert
from curvature.recording import warn_once
from optimizers.distributed.processes import Team
from optimizers.distributed.sharding import any_sharded, to_full, to_shard
from optimizers.monitor import Monitor
from optimizers.recording.recorder import Recorder
from optimizers.schedule import Schedule
from optimizers.steps.layer_vector import Family, Layer, LayerVector, Layout

WITHOUT_CURVATURE = (
    "no forward pass of the model was seen that shows any curvature, and parameters move along their gradients; call "
    "the model that the optimizer was given, after making the optimizer, have it return its outputs, and call it "
    "on the batch, not inside torch.func transforms such as vmap"
)
# operations of inverting blocks together: more would save no calls, and takes more memory
MOST_WORK = ByDevice(10**8, 10**11)
DAMPING_SHARE = 0.05  # of a factor's mean eigenvalue, the default damping of that factor

Options = Mapping[str, Mapping[str, Any]]
Piece = Callable[[LayerVector, Named], Tensor]  # solves for layers that follow each other, flat; by name what is known


@dataclass(frozen=True)
class Renewal:
    """What a step did for the curvature."""

    renewed: bool = False  # whether it renews the running averages
    inverted: int = 0  # number of blocks


class Preconditioner:
    """Solves linear systems with the damped running curvature, whose averages decay by `decay`."""

    def __init__(
        self, store: CurvatureStore, recorder: Recorder, schedule: Schedule, team: Team, monitor: Monitor,
        decay: float, owner: str,
    ) -> None:  # fmt: skip
        self.store, self.recorder, self.schedule, self.team, self.monitor = store, recorder, schedule, team, monitor
        self.decay, self.owner = decay, owner
        self.solver: VectorSolver | None = None  # with the inverses that there are now
        self.lacks_inverses = False  # of blocks that have been loaded without: then the next step makes them
        # whether blocks solve for gradients as they are
        self.is_plain = type(store).right_hand_sides is CurvatureStore.right_hand_sides

    @property
    def blocks(self) -> Sequence[Block]:
        return self.store.blocks

    @property
    def layer_count(self) -> int:
        """Number of blocks that are more than diagonals."""
        return len([b for b in self.blocks if b.structure != "diagonal"])

    def renew(self, gradients: Named, trained: Named, options: Options) -> Renewal:
        """Update the running averages by the recorded passes, and invert the blocks that are due.

        Raises where gradients differ between processes.
        """
        is_renewal, processes = self.schedule.renews(self.monitor.steps), self.team.processes
        with self.monitor.timed("factors"):
            # 1. what the passes that count have measured, on all processes
            measured = self.recorder.take()
            if is_renewal and processes.size > 1:
                if not any_sharded(trained.values()):
                    processes.check_same_gradients(gradients)
                self.team.add_up(measured)
            # 2. running averages
            if not self.blocks:
                warn_once(f"{self.owner}.step: {WITHOUT_CURVATURE}", logger="optimizers")
            self.store.update_average(measured, self.decay)
            # 3. the next renewal, by how far averages have moved
            if is_renewal or measured.blocks:  # rules may call this at every step
                self._note_renewal(measured.blocks, trained)
        with self.monitor.timed("inverses"):
            # 4. inverses of blocks that have moved far enough
            inverted = self._invert_due(options, next((p.device for p in trained.values()), torch.device("cpu")))
        # 5. the size of the outputs, and their change along the last step
        self.recorder.outputs.update(measured.outputs, measured.along)
        return Renewal(is_renewal, inverted)

    def _note_renewal(self, seen: Mapping[str, Any], trained: Named) -> None:
        """Tell the schedule how far blocks have moved, the same on all processes, and which there are.

        The host waits once, where an interval depends on it.
        """
        step, schedule = self.monitor.steps, self.schedule
        is_seen = [any(leaf.names[0] in seen for leaf in b.leaves) for b in self.blocks]
        drifts: dict[str, Tensor] = {}
        if None in (schedule.factor_every, schedule.decompose_every):
            moved = itertools.compress(self.blocks, is_seen)
            drifts = {b.names[0]: b.drift for b in moved if b.drift is not None}
        schedule.note_renewal(step, self.team.processes.read(drifts))
        left = [b for b, known in zip(self.blocks, is_seen, strict=True) if seen and not known]
        known = {name for block in self.blocks for name in block.names}
        schedule.note_seen(step, known, not any(trained.keys() >= set(block.names) for block in left))

    def _invert_due(self, options: Options, device: torch.device) -> int:
        """Invert the blocks that are due; returns their number."""
        step, workers = self.monitor.steps, self.team.workers
        self.lacks_inverses = False
        # 1. which sides of which blocks are due
        blocks = [b for b in self.blocks if b.updates]
        workers.assign(blocks)
        costs = {b.names[0]: b.costs for b in blocks}
        sides = {
            b.names[0]: self.schedule.inverts(step, *pair)
            if b.is_ready and not b.is_outdated
            else [True] * len(pair[1])
            for b, pair in zip(blocks, costs.items(), strict=True)
        }
        due = [b for b in blocks if any(sides[b.names[0]])]
        if due or (self.solver is not None and self.solver.left):
            self.solver = None
        # 2. those of this process, of one damping together
        ours = [b for b in due if workers.makes(b)]
        dampings = [options[b.names[0]]["damping"] if b.names[0] in options else None for b in ours]
        for damping in dict.fromkeys(dampings):
            alike = [b for b, other in zip(ours, dampings, strict=True) if other == damping]
            for some in in_parts(alike, (sum(costs[b.names[0]]) for b in alike), MOST_WORK.at(device)):
                invert(some, DAMPING_SHARE, damping, sides)
        # 3. those of the others
        workers.exchange(due)
        for b in due:
            self.schedule.note_inversion(step, b.names[0], sides[b.names[0]])
            for leaf in b.leaves:
                leaf.is_outdated = False
        return len(due)

    def has_nothing_due(self) -> bool:
        """Whether this step neither renews averages nor inverts blocks."""
        is_due = self.recorder.has_measured or self.schedule.renews(self.monitor.steps) or self.lacks_inverses
        return not is_due and bool(self.blocks)

    def has_seen_empty_batches_only(self) -> bool:
        """Whether all batches so far were empty on all processes."""
        team, is_empty = self.team, self.recorder.was_empty and not self.blocks
        if team.processes.size > 1:
            is_new = not team.layout  # the same on all processes
            is_empty = is_new and team.processes.all_reduce_max([float(not is_empty)]) == [0.0]
        return is_empty

    @full_precision()
    def solve(self, gradients: Named, trained: Named) -> dict[str, Tensor]:
        """``(M + damping I)^-1 g``, local shards; without curvature ``g`` over the mean eigenvalue of all blocks."""
        is_spread = any_sharded(trained.values())
        whole = {k: to_full(g, trained[k]) for k, g in gradients.items()} if is_spread else gradients
        right = self.store.right_hand_sides(whole, trained)
        ready = [b for b in self.blocks if b.is_ready and all(name in right for name in b.names)]
        solved = solved_by_name(ready, right)
        left = [name for name in gradients if name not in solved]
        if left:
            mean = mean_eigenvalue(ready)
            solved |= {name: right[name] / mean.to(right[name]) for name in left}
        return {k: to_shard(u, trained[k]) if is_spread else u for k, u in solved.items() if k in gradients}

    def solve_vector(self, vector: LayerVector, trained: Named) -> LayerVector:
        """`solve` for all layers of a vector at once, where processes have whole tensors."""
        if not self.is_plain or any_sharded(trained.values()):
            return LayerVector.of(vector.layout, self.solve(vector, trained))
        if self.solver is None or self.solver.layout is not vector.layout:
            self.store.drop_replaced(vector)
            self.solver = VectorSolver(vector.layout, self.blocks)
            self.schedule.note_unknown(self.monitor.steps, [name for layer in self.solver.left for name in layer])
        with full_precision(PRODUCTS):
            return self.solver(vector)


# -- vectors of all layers: equal ones together, in few calls and without a copy that could be avoided


class VectorSolver:
    """``(M + damping)^-1`` for vectors of one layout; without curvature, over the mean eigenvalue of all."""

    def __init__(self, layout: Layout, blocks: Sequence[Block]) -> None:
        self.layout, layers = layout, set(layout.layers)
        ready = [b for b in blocks if b.is_ready and set(layout.names).issuperset(b.names)]
        # where weight and bias have options of their own, they are not one layer of the vector
        whole = {b.names: b for b in ready if isinstance(b, KroneckerBlock) and b.names in layers}
        self.others = [b for b in ready if b.names not in whole]
        known = {name for b in self.others for name in b.names}
        # layers without curvature; the mean eigenvalue that stands in changes with every renewal
        self.left = [layer for layer in layout.layers if layer not in whole and not known.issuperset(layer)]
        made = partial(_pieces, whole=whole, known=known, mean=mean_eigenvalue(ready if self.left else ()))
        families = enumerate(layout.families)
        self.pieces: list[list[Piece]] = [
            [piece for k, family in itertools.islice(families, len(run)) for piece in made(k, family)]
            for run in layout.runs
        ]

    def __call__(self, vector: LayerVector) -> LayerVector:
        known = solved_by_name(self.others, vector) if self.others else {}
        each = [[piece(vector, known) for piece in part] for part in self.pieces]
        return LayerVector(self.layout, [part[0] if len(part) == 1 else torch.cat(part) for part in each])


def _pieces(number: int, family: Family, whole: Mapping[Layer, Any], known: set[str], mean: Tensor) -> Iterator[Piece]:
    """For a family of layers: one for all that follow each other and are solved for in one way."""

    def way(k: int) -> Any:
        layer = family.layers[k]
        if (block := whole.get(layer)) is None:
            return known.issuperset(layer)
        return (block.inverse.form, type(block), block.scheme) if block.inverse.form is not None else block

    for _, alike in itertools.groupby(range(len(family.layers)), way):
        first, *others = alike
        at = slice(first, first + 1 + len(others))
        layers = family.layers[at]
        if layers[0] in whole:
            yield _kronecker_piece([whole[layer] for layer in layers], number, at, family)
        elif known.issuperset(layers[0]):
            yield partial(_named_piece, layers, family)
        else:
            yield partial(_scaled_piece, number, at, mean)


def _named_piece(layers: Sequence[Layer], family: Family, vector: LayerVector, known: Named) -> Tensor:
    return family.joined([torch.stack([known[name] for name in names]) for names in zip(*layers, strict=True)])


def _scaled_piece(number: int, at: slice, mean: Tensor, vector: LayerVector, known: Named) -> Tensor:
    rows = vector.rows[number][at]
    return (rows / mean.to(rows)).view(-1)


def _kronecker_piece(blocks: Sequence[Any], number: int, at: slice, family: Family) -> Piece:
    block = blocks[0]
    inverse = block.inverse if len(blocks) == 1 else type(block).joint_inverse(blocks)
    here, dtype = block.scheme.arrangement, block.scheme.dtype
    groups, outputs, inputs = here.sides
    is_transposed = here.order == (1, 0) and len(here.shapes) == 1
    if is_transposed:
        inverse, outputs, inputs = inverse.transposed(), inputs, outputs
    # whether layers are in memory as matrices
    if is_transposed or here.order is None and (len(here.shapes) == 1 or family.rows == groups * outputs):

        def solve(vector: LayerVector, known: Named) -> Tensor:
            rows = vector.rows[number]
            x = (rows if len(blocks) == len(rows) else rows[at]).view(-1, outputs, inputs)
            return inverse(x if x.dtype == dtype else x.to(dtype)).view(-1).to(rows.dtype)

        return solve

    def rearranged(vector: LayerVector, known: Named) -> Tensor:
        rows = vector.rows[number][at]
        x = here.to_matrices(family.split(rows)).to(dtype)
        u = inverse(x.reshape(-1, outputs, inputs), in_place=len(here.shapes) > 1).view_as(x)
        return family.joined(here.from_matrices(u)).to(rows.dtype)

    return rearranged


def solved_by_name(blocks: Sequence[Block], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    solved: dict[str, Tensor] = {}
    for alike in by_class(blocks):
        solutions = alike[0].solve_all(alike, [[right[name] for name in b.names] for b in alike])
        for block, of_block in zip(alike, solutions, strict=True):
            solved |= zip(block.names, of_block, strict=True)
    return solved


def mean_eigenvalue(blocks: Sequence[Block]) -> Tensor:
    """The mean eigenvalue over all blocks, a scalar; 1 without blocks."""
    if not blocks:
        return torch.ones((), device="cpu")
    traces = stack(b.mean_eigenvalue.float() * b.dimension for b in blocks)
    return (traces.sum() / sum(b.dimension for b in blocks)).clamp(min=torch.finfo(torch.float32).tiny)
