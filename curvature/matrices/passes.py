"""One pass over the data: record every batch, send vectors back from its output, return the terms of every parameter.

A batch gives a bounded number of vectors at a time, as a `Chunk`; structures add chunks up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm

from curvature import gradients, recording
from curvature.attempts import attempt
from curvature.functional import graph_nodes
from curvature.gradients import Batch, Plan, SamplesMeet
from curvature.losses import (
    TORCH_LOSSES,
    Curved,
    Injection,
    Loss,
    NoWeightedSum,
    SampleMasses,
    VectorPair,
    is_entrywise,
    name_of,
    reduction_of,
    resolve,
)
from curvature.operators import Space
from curvature.recording import ModelState, RandomState, Tape, graph_leaves, in_turn, map_tensors
from curvature.structures import Chunk, Vectors
from curvature.terms import DenseGradients, Term, contractions

RANDOM = (
    "model: the forward pass draws random numbers (dropout?), so this is the curvature of one draw; call model.eval() "
    "for that of the model as it predicts"
)
BACKWARD_ELEMENTS = 1 << 25  # entries that one batched backward pass may hold
# On a CPU, where fresh memory costs more than a call:
CACHED_ELEMENTS = 1 << 22  # entries that the backprops of one chunk hold at best
SCORES = "SoftmaxBackward"  # in the names of the nodes whose outputs have an entry for each pair of tokens
BATCHED_ELEMENTS = 1 << 18  # entries of one vector's backprops from which each vector goes back alone
ROWS = (
    "loss: {} reads {} itself (a penalty?), and empirical() sends back from the output of the model alone; leave that "
    "out of the loss, or take the rows of per_sample_gradients, which have it"
)
BATCHES = (
    "loss: {} reads {} itself, so that how several batches make up the loss of all data cannot be told. Give all data "
    "as one batch"
)
MANY = (
    "{}: the output of a sample changes with the other samples of its batch, so that several batches do not make up "
    "the loss of all data. Give all data as one batch"
)


@dataclass(frozen=True)
class DataSource:
    """A model, a loss and data, checked; every builder goes over one."""

    model: nn.Module
    loss: Loss | None
    data: Any
    sample_dim: int | tuple[int, int, int] = 0
    progress: bool = False
    parameters: Iterable[str] | None = None
    masses: SampleMasses = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Check all that can be checked before the first batch."""
        object.__setattr__(self, "parameters", tuple(recording.trained_parameters(self.model, self.parameters)))
        object.__setattr__(self, "model", recording.unwrap_compiled(self.model))
        object.__setattr__(self, "masses", SampleMasses(self.loss))
        gradients.require_pairs(self.data)

    @property
    def space(self) -> Space:
        """Its parameters, in single precision at least."""
        return Space.of(recording.trained_parameters(self.model, self.parameters))

    def batch(self, x: Any, y: Any) -> Batch:
        """A batch of the data, checked."""
        return Batch.of(self.model, self.loss or _half_square, x, y, self.sample_dim, self.parameters)

    @in_turn()
    def each(
        self,
        visit: Callable[[RecordedBatch], None],
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext,  # of the forward passes
    ) -> None:
        """Call `visit` on every batch with samples, recorded. State of the model and random numbers are preserved."""
        seen, number = False, -1
        random = RandomState(self.model.modules())  # a DataLoader draws from it
        try:
            batches: Iterable[tuple[Any, Any]] = gradients.pairs(self.data)
            if self.progress:
                batches = tqdm(batches, total=gradients.number_of_batches(self.data), unit="batch", leave=False)
            for number, (x, y) in enumerate(batches):
                batch = self.batch(x, y)
                if not batch.count:
                    continue
                with self.surroundings() as state:
                    with mode():  # for this alone: it slows every other function down
                        tape, output, _ = gradients.record(batch, state)
                    run = RecordedBatch(self, number, batch, state, tape, output)
                    del tape, output  # `run` alone holds them
                    visit(run)
                    if run.random:
                        recording.warn_once(RANDOM)
                seen = True
        finally:
            random.restore()
        if not seen and number < 0:
            raise ValueError("data: no batch; an iterator gives its batches once: pass a list or a DataLoader")
        if not seen:
            raise ValueError("x: there is no sample, all batches are empty")
        self.masses.require_told()

    @contextmanager
    def surroundings(self) -> Iterator[ModelState]:
        """What the model runs in, and the derivatives of its pass."""
        # fused attention has no second derivatives and no batched backward pass
        with recording.preserve_state(self.model, tuple(self.parameters or ())) as state, sdpa_kernel(SDPBackend.MATH):
            yield state


class NotFewRows(Exception):
    """There are more rows than asked for, or the matrix is no sum of squares of known rows."""


class RecordedBatch:
    """The recorded forward pass of one batch; sends vectors back from its output."""

    def __init__(
        self, source: DataSource, number: int, batch: Batch, state: ModelState, tape: Tape, output: Any
    ) -> None:
        self.source, self.number, self.masses = source, number, source.masses
        self.batch, self.state, self.tape = batch, state, tape
        self.random, self.one_pass = state.random.differs(), state.is_of_one_pass()
        self.by_graph = self.one_pass  # whether what no rule explains comes from the recorded graph
        self.whole: SamplesMeet | NoWeightedSum | None = None  # why the batch is one sample, if its samples meet
        if not isinstance(output, Tensor):
            raise TypeError(
                f"model: expected a tensor as output (or one in .logits), found {gradients.kind_of(output)}; return "
                "all that the loss needs as one tensor with an axis of samples, such as torch.cat([mean, log_std], 1), "
                "and let the loss take it apart"
            )
        self.output = output
        self._patches: dict[str, list[Tensor]] = {}

    @cached_property
    def plan(self) -> Plan:
        """How parameters are explained: known, or learnt from a random vector, as the loss may be flat somewhere."""
        plan = gradients.kept_plan(self.batch.model, self.batch.key, self.tape)
        if plan is not None:
            return plan
        self.require_apart()  # kept plans are of such batches
        if self.batch.count == 1 and not self.whole and not self.one_pass:
            plan = gradients.plan_beside_copy(self.batch, self.tape)
        if plan is not None:
            return plan
        probed = self.batch.probe(self.output)
        reference = gradients.single_sample_reference(probed, self.one_pass)
        losses = probed.losses(self.output)
        return gradients.learn(self.batch.model, self.batch.key, self.tape, losses, reference)[0]

    def as_seen_by(self, inject: Injection, by_rows: bool = True) -> RecordedBatch:
        """This batch, or the same as one sample where samples meet, if rows ``v^T J`` of samples are needed."""
        if self.output.ndim == 0:
            raise ValueError(
                "model: it returns one number for all samples, perhaps its loss, and none has an output of its own; "
                "return the outputs with an axis of samples, and let the loss take them (hessian() needs none)"
            )
        if not inject.weighs_samples:
            require_none(self.batch, self.output)
        try:
            masses = self._masses
        except NoWeightedSum as error:
            if not isinstance(inject, Curved):
                raise
            return self._as_one_sample(error, self.masses.whole(self.number, self.output))
        if by_rows or inject.is_random or not inject.weighs_samples:
            where = self._where_samples_meet()
            if where and (not inject.weighs_samples or self.batch.is_uneven):
                raise SamplesMeet(where)
            if where:
                total = masses.new_ones(1) if self.masses.is_sum else masses.sum()[None]
                return self._as_one_sample(SamplesMeet(where), total)
        return self

    def _where_samples_meet(self) -> str:
        """As `gradients.where_samples_meet`; ValueError if they meet in one of several batches."""
        where = gradients.where_samples_meet(self.batch, self.tape)
        if where:
            self.masses.require_only(self.number, ValueError(MANY.format(where)))
        return where

    def require_only_if_samples_meet(self, is_single: bool) -> None:
        """Raise ValueError for one of several batches, if its samples meet in the model: asked once of each batch."""
        if not is_single and self.number not in self.masses.apart and not self._where_samples_meet():
            self.masses.apart.add(self.number)

    def _as_one_sample(self, why: SamplesMeet | NoWeightedSum, mass: Tensor) -> RecordedBatch:
        batch = replace(self.batch, count=1)
        merged = RecordedBatch(self.source, self.number, batch, self.state, self.tape, self.output)
        merged.whole, merged._masses = why, mass
        merged.random, merged.one_pass, merged.by_graph = self.random, self.one_pass, self.by_graph
        return merged

    def require_apart(self) -> None:
        """Raise `SamplesMeet` for a batch whose samples meet in the model."""
        where = self._where_samples_meet() if self.whole is None else ""
        if where:
            raise SamplesMeet(where)

    def mass_of_batch(self) -> float:
        """What the batch counts for beside others: 1 in a sum, the masses of its samples together in a mean."""
        try:
            masses = self._masses
        except NoWeightedSum:
            masses = self.masses.whole(self.number, self.output)
        return 1.0 if self.masses.is_sum else float(masses.sum())

    def loss_beside_others(self) -> Tensor:
        """The loss of the batch; in a sum over several, only the first one has what belongs to no sample."""
        is_later = self.masses.is_sum and self.masses.first not in (None, self.number)
        return without_penalty(self.batch, self.output) if is_later else self.batch.loss_of(self.output)

    def weights(self, inject: Injection) -> Tensor:
        """Weight of every sample (N,), not divided by their sum: its mass in a mean, else 1."""
        return self._masses if inject.weighs_samples else torch.ones_like(self._masses)

    @cached_property
    def _masses(self) -> Tensor:
        batch, output = self.batch, self.output.detach()
        try:
            return self.masses.of(self.number, output, batch.y, batch.count, *batch.dims[1:])
        except AttributeError:  # of a loss that reads more than logits, which this explains
            batch.loss_of(output)
            raise

    @property
    def chunk_size(self) -> int:
        """Number of vectors to make at once."""
        return max(1, BACKWARD_ELEMENTS // self._backprop_entries)

    @property
    def cached_size(self) -> int:
        """Number of vectors whose backprops are best held at a time."""
        limit = CACHED_ELEMENTS if self.output.device.type == "cpu" else BACKWARD_ELEMENTS
        return max(1, limit // self._backprop_entries)

    @property
    def pass_size(self) -> int:
        """Number of vectors to send back in one batched pass."""
        return 1 if self.output.device.type == "cpu" and self._backprop_entries > BATCHED_ELEMENTS else self.chunk_size

    @cached_property
    def _backprop_entries(self) -> int:
        """Entries of the backprops of one vector, those at the weights of attention among them."""
        shapes = [use.shape for use in self.tape.uses]
        nodes: Sequence[Any] = graph_nodes(self.output.grad_fn)
        shapes += [node._input_metadata[0].shape for node in nodes if SCORES in type(node).__name__]
        return max(1, self.output.numel() + sum(map(math.prod, shapes)))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of terms: many of their squares are added up."""
        return torch.promote_types(self.output.dtype, torch.float32)

    def terms(self, vectors: Tensor) -> Vectors:
        """The terms of ``J^T v`` for each of the vectors (k, *output.shape), by parameter; none where they are zero."""
        self.require_apart()
        plan, parts = self.plan, [self._backprops(part) for part in vectors.split(self.pass_size)]
        size, by_parameter = self.pass_size, dict[str, list[list[Term]]]()
        rows = ([None if b is None else b[k % size] for b in parts[k // size]] for k in range(len(vectors)))
        for v, backprops in zip(vectors, rows, strict=True):
            terms, failed = gradients.terms_by_parameter(self.tape, backprops, plan.layouts, plan.general)
            if failed:
                general = self._general_terms(v, plan, failed)
                terms |= {
                    k: [DenseGradients(contractions.gradients(parts).to(self.dtype))] for k, parts in general.items()
                }
            for name, of_parameter in terms.items():
                if of_parameter:
                    by_parameter.setdefault(name, []).append(of_parameter)
        assert all(len(x) == len(vectors) for x in by_parameter.values())  # they are read by number
        return by_parameter

    def _general_terms(self, vector: Tensor, plan: Plan, names: set[str]) -> dict[str, list[Term]]:
        """Of what no rule explains: from samples alone, or where their outputs have other shapes, the recorded pass."""
        along = self.batch.along(vector)
        if not self.by_graph:
            try:
                return gradients.general_path_terms(along, plan, names)
            except gradients.OtherShapeAlone:
                self.by_graph = True
        return gradients.general_path_terms(along, plan, names, along.losses(self.output))

    def _backprops(self, vectors: Tensor) -> list[Tensor | None]:
        """The backprops (k, *shape) of vectors at every use."""
        cast = lambda b: b if b.is_complex() else b.to(self.dtype)
        # none at an expert that no sample reaches
        return [cast(b) if b is not None and b.numel() else None for b in self.tape.backprops(self.output, vectors)]

    def chunks(self, inject: Injection, generator: torch.Generator, as_rows: bool = False) -> Iterator[Chunk]:
        """Send the vectors of an injection back, a bounded number at a time; as rows times the roots of weights."""
        axis = self.batch.dims[1] + 1
        weights, first = self.weights(inject), True
        roots = self.by_row(weights.sqrt()) if as_rows else None
        _ = self.plan  # learnt before there are vectors: either takes several times the output's memory
        for left, right in self.pairs(inject, generator):
            if roots is not None:
                if right is not None:
                    raise NotFewRows
                left = (left * roots).to(left)
            rights = None if right is None else right.movedim(1, axis).split(self.cached_size)
            for number, part in enumerate(left.movedim(1, axis).split(self.cached_size)):
                terms = self.terms(part)
                yield self.chunk(len(part), terms, self.terms(rights[number]) if rights else terms, weights, first)
                first = False

    def by_row(self, each: Tensor) -> Tensor:
        """A number of each sample (N,), to multiply the rows of outputs with their samples first."""
        rows = self.output.shape[self.batch.dims[1]] // self.batch.count
        return each.repeat_interleave(rows).reshape(-1, *[1] * (self.output.ndim - 1))

    def pairs(self, inject: Injection, generator: torch.Generator) -> Iterator[VectorPair]:
        """Those of the injection, with the samples along dim 1; zero if no sample counts, whose losses are 0/0."""
        output, loss, target = self.samples_first()
        if not self.counts:
            return iter([(torch.zeros_like(output)[None], None)])
        options: Any = {"count": self.batch.count, "size": self.chunk_size, "generator": generator}
        return inject.pairs(output, loss, target, **options)

    @property
    def counts(self) -> bool:
        """Whether any sample counts in the loss of the batch."""
        return bool(self._masses.any())

    def samples_first(self) -> tuple[Tensor, Loss | None, Any]:
        """Output, detached, loss and target with the samples along dim 0 of both tensors."""
        loss, dims = self.source.loss, self.batch.dims
        output = self.output.detach().movedim(dims[1], 0)
        target = recording.map_tensors(lambda t: t.movedim(dims[2], 0), self.batch.y)
        if loss is None or dims[1:] == (0, 0) or is_entrywise(loss):
            return output, loss, target

        given = resolve(loss)

        def moved(output: Any, target: Any) -> Tensor:
            return given(output.movedim(0, dims[1]), recording.map_tensors(lambda t: t.movedim(0, dims[2]), target))

        moved.reduction = reduction_of(loss)  # type: ignore[attr-defined]
        return output, moved, target

    def chunk(self, vectors: int, left: Vectors, right: Vectors, weights: Tensor, first: bool) -> Chunk:
        """A chunk of this batch."""
        return Chunk(self.tape, vectors, left, right, weights, first, self._patches, self.whole)


def zeros(space: Space, *lead: int) -> dict[str, Tensor]:
    """Zeros (*lead, *shape) by name, where the parameters are."""
    entries = zip(space.devices.items(), space.shapes, strict=True)
    return {name: torch.zeros(*lead, *shape, dtype=space.dtype, device=device) for (name, device), shape in entries}


def _half_square(output: Tensor, target: Any) -> Tensor:
    """Stands in where there is no loss; `hessian` alone evaluates it."""
    return output.square().sum() / 2


# -- what a loss makes of the parameters itself, beside the output of the model: a penalty, a learnt temperature


def require_none(batch: Batch, output: Tensor) -> None:
    """Raise ValueError if the gradients of the samples do not all go through the output."""
    read, value = _read_by_loss(batch, output)
    if read and any(bool(g.any()) for g in _gradients(value, list(read.values()))):
        raise ValueError(ROWS.format(name_of(batch.loss), ", ".join(read)))


def without_penalty(batch: Batch, output: Tensor) -> Tensor:
    """The loss of a batch of a sum over several, less what it adds to each batch, and not to each sample."""
    value = batch.loss_of(output)
    read, penalty = _read_by_loss(batch, output)
    if not read:
        return value
    _, dim, target_dim = batch.dims
    both = replace(batch, y=map_tensors(lambda t: torch.cat([t, t], target_dim), batch.y))
    unknown = ValueError(BATCHES.format(name_of(batch.loss), ", ".join(read)))
    read_twice = attempt(lambda: _read_by_loss(both, torch.cat([output, output], dim)), str(unknown))
    if read_twice is None:
        raise unknown
    once, again = (_derivatives(x, list(read.values())) for x in (penalty, read_twice[1]))
    if _near(again, 2 * once):
        return value
    if not _near(again, once):
        raise unknown
    return value - penalty


def _read_by_loss(batch: Batch, output: Tensor) -> tuple[dict[str, nn.Parameter], Tensor]:
    """The parameters that the loss reads by itself, and the loss as a function of these alone."""
    if type(batch.loss) in TORCH_LOSSES:
        return {}, output.new_zeros(())
    with torch.enable_grad():
        value = batch.loss_of(output.detach().clone())
    reached = set(map(id, graph_leaves(value))) if value.requires_grad else set()
    return {name: p for name, p in batch.parameters.items() if id(p) in reached}, value


def _gradients(value: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> Sequence[Tensor]:
    return torch.autograd.grad(value, parameters, create_graph=create_graph, retain_graph=True, materialize_grads=True)


def _derivatives(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """First derivatives, and second ones along a random direction."""
    generator = torch.Generator().manual_seed(0)
    first = _gradients(value, parameters, create_graph=True)
    drawn = [torch.randn(g.shape, generator=generator, device="cpu").to(g) for g in first]
    along = torch.stack([(g * v).sum().to(first[0]) for g, v in zip(first, drawn, strict=True)]).sum()
    second = _gradients(along, parameters) if along.requires_grad else ()
    return torch.cat([g.detach().flatten().to(first[0]) for g in (*first, *second)])


def _near(value: Tensor, expected: Tensor) -> bool:
    return bool((value - expected).norm() <= 10 * torch.finfo(value.dtype).eps ** 0.5 * expected.norm())
