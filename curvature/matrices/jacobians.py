"""The Jacobian of every output entry, sample by sample, and ``J v`` for any number of directions.

There are two ways to ``J v``. `gradients.Linearised` differentiates a backward pass. `ForwardMode` has dual numbers in
place of the parameters, which takes 0.65 to 0.9 of the time for several columns through group or batch norms. The first
pass at every shape, and through other functions, is checked: backward passes with a vector that goes back, and forward
mode with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvature.attempts import attempt
from curvature.functional import ExactNorms, TwiceDifferentiable, graph_nodes
from curvature.gradients import (
    Batch,
    Linearised,
    RefuseNewData,
    complete_changes,
    differences,
    over_samples,
    tried_by_vmap,
)
from curvature.linalg import full_precision
from curvature.matrices.passes import DataSource, RecordedBatch, zeros
from curvature.recording import ModelState, Tape, call_with, preserve_state
from curvature.terms import Term, contractions, gradients

log = logging.getLogger("curvature")
ROUNDINGS = 100  # relative difference from two backward passes, in units of rounding
SLOW_TWICE = "GroupNorm", "BatchNorm"  # in the names of their backward functions
# entries of one layer's outputs, over the columns that forward mode takes: what a CPU's cache holds, and elsewhere
CACHED_ENTRIES, ENTRIES = 1 << 21, 1 << 27
Directions = Mapping[str, Tensor]  # (c, *shape) by name


def per_sample_jacobians(
    model: nn.Module,
    x: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Derivatives of every entry of each sample's output with respect to every parameter.

    Args:
        model: any module with one tensor as output; its parameters that do not require a gradient are left out.
        x: a tensor, a tuple of positional or a dict of keyword arguments, as for `per_sample_gradients`.
        parameters: as for `per_sample_gradients`.
        sample_dim: as for `per_sample_gradients`. A batch may be empty.
        create_graph: whether the result can be differentiated, in inputs that require a gradient and in the parameters.
            It is compared with the one without a graph, so both are computed.

    Returns:
        ``{name: (N, *shape, *parameter.shape)}`` for outputs whose samples have this shape, which is ``(m, ...)`` where
        the output has N * m rows. In the order of ``named_parameters()``, in units of output / parameter and at least
        single precision. All of it is in memory: for products with it take `gauss_newton` or `output_changes`.

    Raises:
        ValueError: samples are not independent (BatchNorm in training mode, named), nothing requires a gradient, a
            parameter is complex, the output has no rows for each sample, or, with `create_graph`, the forward pass
            draws random numbers.
        TypeError: an argument or an output of the wrong kind.

    One forward pass, and one backpropagated vector for each entry of a sample's output, all at once.
    """
    source = DataSource(model, None, (x, None), sample_dim, parameters=parameters)
    batch, space = source.batch(x, None), source.space
    if not batch.count:
        with preserve_state(batch.model), torch.no_grad():
            return zeros(space, *batch.output().movedim(batch.dims[1], 0).shape)
    jacobians: dict[str, Tensor] = {}
    is_random = []

    def visit(run: RecordedBatch) -> None:
        is_random.append(run.random)
        jacobians.update(_rows(run))

    source.each(visit)
    if not create_graph:
        return jacobians
    if is_random[0]:
        raise ValueError("model: the forward pass draws random numbers (dropout?); call model.eval()")
    return _with_graph(batch, jacobians)


@full_precision()
def _with_graph(batch: Batch, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """By vmap over samples; where it cannot follow, or is wrong, entry by entry."""
    axis, parameters = batch.dims[1], dict(batch.parameters)
    of_sample = lambda output, target: _by_sample(output, 1, axis)[0]

    def accepted(jacobians: dict[str, Tensor]) -> dict[str, Tensor]:
        jacobians = {name: rows.to(expected[name].dtype) for name, rows in jacobians.items()}
        for name in differences({name: rows.detach() for name, rows in jacobians.items()}, expected):
            raise RuntimeError(f"{name}: its derivatives with a graph are not those without one")
        return jacobians

    with preserve_state(batch.model) as state, sdpa_kernel(SDPBackend.MATH), ExactNorms(), torch.enable_grad():
        alone = replace(batch, loss=of_sample, y=None)
        jacobians = tried_by_vmap(lambda: accepted(over_samples(alone, jacrev, parameters)))
        if jacobians is not None:
            return jacobians
        samples = []
        for n in range(batch.count):
            with state.again():
                samples.append(_entry_by_entry(batch.sample(n), parameters))
        return accepted({name: torch.stack([rows[name] for rows in samples]) for name in parameters})


def _entry_by_entry(sample: Batch, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    output = _by_sample(sample.output(), 1, sample.dims[1])[0]
    leaves = list(parameters.values())
    rows = [torch.autograd.grad(entry, leaves, create_graph=True, materialize_grads=True) for entry in output.flatten()]
    columns = zip(parameters, zip(*rows, strict=True), strict=True)
    return {name: torch.stack(column).reshape(*output.shape, *column[0].shape) for name, column in columns}


def _by_sample(output: Tensor, count: int, axis: int) -> Tensor:
    """(..., N, ...) to (N, ...), and (..., N * m, ...) to (N, m, ...)."""
    rows = output.movedim(axis, 0)
    if rows.ndim and len(rows) == count:
        return rows
    if not rows.ndim or len(rows) % count:
        raise ValueError(f"model: {count} samples in x, but the shape of the output is {tuple(output.shape)}")
    return rows.unflatten(0, (count, len(rows) // count))


def changes_by_rows(run: RecordedBatch, directions: Mapping[str, Tensor]) -> Tensor:
    """``J v`` (c, *output.shape) for directions (c, *shape) by name, from the gradients of every entry of a sample."""
    count, axis = run.batch.count, run.batch.dims[1]
    columns = len(next(iter(directions.values())))
    changes = torch.zeros(columns, count, run.output.numel() // count, dtype=run.dtype, device=run.output.device)
    for entry, name, terms in _terms_of_entries(run):
        for change, direction in zip(changes, directions[name].to(run.dtype), strict=True):
            change[:, entry] += contractions.inner_products(terms, direction).to(changes.device)
    return changes.reshape(columns, *run.output.movedim(axis, 0).shape).movedim(1, axis + 1).to(run.output.dtype)


def _terms_of_entries(run: RecordedBatch) -> Iterator[tuple[int, str, Sequence[Term]]]:
    """The terms of each parameter by a vector that is one at the same entry of every sample's output, else zero."""
    count, axis = run.batch.count, run.batch.dims[1]
    shape = run.output.movedim(axis, 0).shape
    eye = torch.eye(run.output.numel() // count, dtype=run.output.dtype, device=run.output.device)
    for start in range(0, len(eye), run.cached_size):
        part = eye[start : start + run.cached_size]
        vectors = part[:, None].expand(-1, count, -1).reshape(-1, *shape).movedim(1, axis + 1)
        for name, of_vectors in run.terms(vectors).items():
            for entry, terms in enumerate(of_vectors, start):
                yield entry, name, terms


def _rows(run: RecordedBatch) -> dict[str, Tensor]:
    count, axis = run.batch.count, run.batch.dims[1]
    shape = _by_sample(run.output, count, axis).shape[1:]
    size = run.output.numel() // count
    jacobians = {
        name: torch.zeros(count, size, *p.shape, dtype=run.dtype, device=p.device)
        for name, p in run.batch.parameters.items()
    }
    for entry, name, terms in _terms_of_entries(run):
        jacobians[name][:, entry] = gradients(terms)
    return {name: rows.unflatten(1, shape) if shape else rows[:, 0] for name, rows in jacobians.items()}


class ForwardMode:
    """The same by a forward pass of the model with dual numbers, whose columns share the numbers that are not dual."""

    def __init__(self, batch: Batch, tape: Tape, output: Tensor) -> None:
        self.batch, self.start = batch, tape.start or ModelState(batch.model)
        largest = max([output.numel(), *(math.prod(use.shape) for use in tape.uses)])
        self.at_once = max(1, (CACHED_ENTRIES if output.device.type == "cpu" else ENTRIES) // largest)

    def __call__(self, directions: Directions) -> list[Tensor]:
        values = {name: p.detach() for name, p in self.batch.parameters.items()}
        one = lambda direction: jvp(self._output, (values,), (direction,))[1]
        with self.start.again(), torch.no_grad(), TwiceDifferentiable(), RefuseNewData():
            return [_each(one, directions)]

    def _output(self, parameters: Mapping[str, Tensor]) -> Tensor:
        stand_in: Any = lambda *args, **kwargs: call_with(self.batch.model, parameters, args, kwargs)
        return replace(self.batch, model=stand_in).output()


Way = Linearised | ForwardMode


# By what passes at a shape are known: the way, or None where not even two backward passes are right.
Proved = dict[Any, type[Way] | None]


def right_way(batch: Batch, tape: Tape, output: Tensor, proved: Proved) -> Way | None:
    """The faster of the ways to compute ``J v`` for a recorded pass that are right; None where torch loses a part."""
    functions = tuple(map(type, graph_nodes(output.grad_fn)))
    case = batch.key, functions, len(tape.uses)
    if case not in proved:
        proved[case] = _fastest_right(batch, tape, output, functions)
    kind = proved[case]
    if kind is ForwardMode:
        return ForwardMode(batch, tape, output)
    parameters = {name: node.tensor for name, node in tape.parameters.items()}
    return None if kind is None else Linearised([output], parameters)


@full_precision()
def _fastest_right(batch: Batch, tape: Tape, output: Tensor, functions: tuple[type, ...]) -> type[Way] | None:
    """The fastest way whose changes along random directions are right."""
    has_norms = any(slow in function.__name__ for function in functions for slow in SLOW_TWICE)
    forward = ForwardMode(batch, tape, output) if has_norms else None
    if forward is not None and forward.at_once == 1:  # slower: every column computes the values of the pass anew
        forward = None
    directions = random_directions(batch, 1 if forward is None else 2)
    changes = complete_changes([output], batch.parameters, directions)
    if changes is None or forward is None:
        return None if changes is None else Linearised
    expected = torch.stack([change for (change,) in changes])
    along = {name: torch.stack([d[name] for d in directions]) for name in directions[0]}
    change = attempt(lambda: forward(along), "J v takes two backward passes")  # some functions have no other
    return ForwardMode if change is not None and _is_near(change[0], expected) else Linearised


def _each(function: Callable[[dict[str, Tensor]], Tensor], directions: Directions) -> Tensor:
    """A function of each direction."""
    if len(next(iter(directions.values()))) == 1:
        return function({name: d[0] for name, d in directions.items()})[None]
    return vmap(function)(dict(directions))


def random_directions(batch: Batch, count: int) -> list[dict[str, Tensor]]:
    """The same at every call."""
    drawn = torch.Generator().manual_seed(0)
    normal = lambda p: torch.randn(p.shape, generator=drawn, dtype=torch.float64, device="cpu").to(p)
    return [{name: normal(p) for name, p in batch.parameters.items()} for _ in range(count)]


def _is_near(change: Tensor, expected: Tensor) -> bool:
    """Whether forward mode gives what two backward passes give; the log says where not."""
    difference, size = float((change - expected).norm()), float(expected.norm())
    # far less than one wrong layer of a deep model changes; below single precision rounding hides that
    rounding = torch.finfo(expected.dtype).eps
    agrees = rounding <= torch.finfo(torch.float32).eps and difference <= ROUNDINGS * rounding * size
    if not agrees:
        log.info("J v takes two backward passes: forward mode differs by %.2g of %.2g", difference, size)
    return agrees
