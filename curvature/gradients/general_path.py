"""The general path: exact per-sample gradients of any model, by the definition.

``torch.func.vmap`` of the gradient over samples; where vmap cannot follow the model, a loop of batch size one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributions import Distribution
from torch.func import grad, vmap
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from curvature.attempts import attempt
from curvature.gradients.batch import Batch, OtherShapeAlone
from curvature.gradients.data import kind_of
from curvature.gradients.jacobian_products import gradient_rows, rows_of_each
from curvature.gradients.parameter_terms import Terms
from curvature.gradients.plans import Plan, differences, keep_plan
from curvature.linalg import full_precision, to_host
from curvature.losses import LossVaries, NoWeightedSum, settings_of, shares_of_parts
from curvature.recording import ModelState, Tape, call_model, call_with, facts_of, graph_bytes, map_tensors
from curvature.terms import DenseGradients

log = logging.getLogger("curvature")
Found = TypeVar("Found")
Back = Callable[[Sequence[Tensor]], list[Tensor]]
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
# of the functions of a graph, that vectors sent back together may compute anew: what a CPU's cache holds, and elsewhere
CACHED_BYTES, BYTES = 1 << 25, 1 << 29
VMAP_ELEMENTS = 1 << 27  # entries of the per-sample gradients above which vmap takes a part of the batch at a time


@full_precision()
def general_path_terms(batch: Batch, plan: Plan, names: set[str], recorded: Tensor | None = None) -> Terms:
    """Terms of the parameters of these names, checked against one sample alone; the plan keeps which way was right.

    Where no other pass would be of the function of the recorded one, which drew random numbers or moved buffers, or has
    another shape for a sample alone (`OtherShapeAlone`), the samples' losses (N,) are sent back through that.
    """
    batch = replace(batch, parameters={k: p for k, p in batch.parameters.items() if k in names})
    if recorded is not None:
        log.info("%s: one backward pass of the recorded graph for each sample", ", ".join(sorted(names)))
        rows = by_recorded_pass(batch, recorded)
    else:
        batched = None if plan.loop or batch.is_uneven else tried_by_vmap(lambda: by_vmap(batch))
        if batched is not None:
            with ModelState(batch.model).again():
                alone = batch.sample(batch.count - 1).gradients()
            batched = None if differences({k: g[-1] for k, g in batched.items()}, alone) else batched
        plan.loop = batched is None
        rows = by_loop(batch) if batched is None else batched
    flat = (g.reshape(batch.count, math.prod(g.shape[1:])) for g in rows.values())
    finite = torch.stack(to_host([g.sum(1).isfinite() for g in flat])).all(0)
    empty = batch.without_terms(finite.logical_not().nonzero().flatten().tolist())
    if empty:
        rows = {name: g.index_fill(0, torch.tensor(empty, device=g.device), 0) for name, g in rows.items()}
    return {name: [DenseGradients(g)] for name, g in rows.items()}


def terms_of_object_output(batch: Batch, tape: Tape, output: Any, plan: Plan | None, state: ModelState) -> Terms:
    """Terms of every parameter for an output that is no tensor, whose samples only the loss can find."""
    check_once(batch, lambda: _require_apart_in_loss(batch, output))
    if plan is None:
        plan = Plan([], set(batch.parameters))
        keep_plan(batch.model, batch.key, tape, plan)
    losses = losses_of_parts(batch, output) if state.random.differs() else None
    with state.again():
        return general_path_terms(batch, plan, plan.general, losses)


def check_once(batch: Batch, check: Callable[[], None]) -> None:
    """Call it unless it has passed for this model, shape and loss, with the plain attributes that this has now."""
    known, settings = facts_of(batch.model, batch.key).losses, settings_of(batch.loss)
    is_known = False
    with suppress(TypeError):  # a loss without hash or weak references
        is_known = known.get(batch.loss) == settings
    if is_known:
        return
    check()
    with suppress(TypeError):
        known[batch.loss] = settings


def losses_of_parts(batch: Batch, output: Any) -> Tensor:
    """The loss (N,) of every sample's part of the output; ValueError where it is not known which part that is."""
    is_by_entry, dim = batch.is_by_entry(output), batch.dims[1]
    opaque = "" if is_by_entry else _without_axis(batch, output)
    if opaque:
        raise ValueError(
            f"model: its forward pass draws random numbers (dropout?), and {opaque}; return a tensor, or a tuple, dict "
            f"or dataclass of tensors with the samples along axis {dim}, or a list with an entry for each sample, or "
            "call model.eval()"
        )
    return _losses_of_parts(batch, output, is_by_entry)


def _losses_of_parts(batch: Batch, output: Any, is_by_entry: bool) -> Tensor:
    part = (lambda n: output[n : n + 1]) if is_by_entry else _along_axis(batch, output)
    return torch.stack([batch.loss(part(n), batch.sample(n).y) for n in range(batch.count)])


def _along_axis(batch: Batch, output: Any) -> Callable[[int], Any]:
    """Makes the part of a sample of the tensors in an output; ValueError where these lack an axis of samples."""
    opaque = _without_axis(batch, output)
    if opaque:
        raise ValueError(opaque)
    rows = lambda t, n: t.unflatten(batch.dims[1], (batch.count, -1)).select(batch.dims[1], n)
    return lambda n: map_tensors(lambda t: rows(t, n) if _holds_samples(batch, t) else t, output)


def _without_axis(batch: Batch, output: Any) -> str:
    """Why the samples of an output cannot be told apart; "" where all tensors with a gradient have their axis."""
    for leaf in _leaves(output):
        what = "" if isinstance(leaf, Tensor | int | float | str | None) else f"holds {kind_of(leaf)}"
        if isinstance(leaf, Tensor) and leaf.requires_grad and not _holds_samples(batch, leaf):
            what = f"holds one of shape {tuple(leaf.shape)}, without {batch.count} samples along axis {batch.dims[1]}"
        if what:
            return f"its output, {kind_of(output)}, {what}, so that nobody knows which part of it is a sample's"
    return ""


def _holds_samples(batch: Batch, t: Tensor) -> bool:
    dim = batch.dims[1]
    return t.ndim > dim and t.shape[dim] > 0 and t.shape[dim] % batch.count == 0


def _require_apart_in_loss(batch: Batch, output: Any) -> None:
    """Raise `NoWeightedSum` where a sample's part of the output gets another gradient from the batch than alone."""
    as_real = lambda t: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    widened = lambda t: as_real(t.detach().to(torch.promote_types(t.dtype, torch.float32)))
    leaves = [widened(t) for t in _with_gradient(output)]

    def at(point: Sequence[Tensor]) -> Any:
        parts = iter(point)
        cloned = lambda t: torch.view_as_complex(next(parts).clone()) if t.is_complex() else next(parts).clone()
        return map_tensors(lambda t: cloned(t) if t.requires_grad else t, output)

    def measure() -> None:
        is_by_entry = batch.is_by_entry(output)
        numbers = [len(_with_gradient(entry)) for entry in output] if is_by_entry else []
        point, back = _rows_of_entries(leaves, numbers) if is_by_entry else (leaves, list)
        whole = lambda point: batch.loss(at(back(point)), batch.y)
        alone = lambda point: _losses_of_parts(batch, at(back(point)), is_by_entry)
        shares_of_parts(batch.loss, point, batch.count, 0 if is_by_entry else batch.dims[1], whole, alone)

    # nobody may know which part is a sample's, or the loss may not run on one
    attempt(measure, "not tried whether samples meet in the loss", passing=(LossVaries, NoWeightedSum))


def _with_gradient(output: Any) -> list[Tensor]:
    """The tensors of an output that require a gradient, in the order of `map_tensors`."""
    leaves: list[Tensor] = []
    map_tensors(lambda t: leaves.append(t) if t.requires_grad else None, output)
    return leaves


def _rows_of_entries(leaves: Sequence[Tensor], numbers: Sequence[int]) -> tuple[list[Tensor], Back]:
    """The leaves of entries, which have so many each, as rows of a tensor, zeros at the end; and the way back."""
    each = iter(leaves)
    entries = [[next(each) for _ in range(number)] for number in numbers]
    table = pad_sequence([torch.cat([t.flatten() for t in entry]) for entry in entries], batch_first=True)

    def back(point: Sequence[Tensor]) -> list[Tensor]:
        tensors: list[Tensor] = []
        for row, entry in zip(point[0], entries, strict=True):
            pieces = row.split([*(sizes := [t.numel() for t in entry]), len(row) - sum(sizes)])
            tensors += [piece.reshape(t.shape) for piece, t in zip(pieces, entry, strict=False)]
        return tensors

    return [table], back


def _leaves(tree: Any) -> Iterator[Any]:
    """What `map_tensors` comes to, distributions whole: their shape is more than that of their tensors."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Mapping):
            inner = list(leaf.values())
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner = [getattr(leaf, member.name) for member in fields(leaf)]
        elif hasattr(leaf, "logits") and not isinstance(leaf, Distribution):
            inner = list(vars(leaf).values())
        else:
            yield leaf
            continue
        yield from _leaves(inner)


def tried_by_vmap(call: Callable[[], Found]) -> Found | None:
    """What the call returns; None where it raises, as it does on an operation of the model without a batched form."""
    return attempt(call, "vmap cannot follow the model; looping over the samples")


def by_recorded_pass(batch: Batch, losses: Tensor) -> dict[str, Tensor]:
    """(N, *shape) for each parameter, by N backward passes of the graph of the samples' losses."""
    leaves = list(batch.parameters.values())
    named = lambda rows: dict(zip(batch.parameters, rows, strict=True))
    at_once = (CACHED_BYTES if losses.device.type == "cpu" else BYTES) // max(1, graph_bytes([losses]))
    if at_once > 1:  # of a small graph, if the rows add up to what one more pass gives for all
        rows = rows_of_each(losses, leaves, losses, at_once)
        total = gradient_rows(losses, leaves, torch.ones_like(losses)[None])
        if not differences(named(g.sum(0) for g in rows), named(g[0] for g in total)):
            return named(rows)
    return named(rows_of_each(losses, leaves, losses, 1))


def by_vmap(batch: Batch) -> dict[str, Tensor]:
    """(N, *shape) for each parameter."""
    wanted = {k: p.detach() for k, p in batch.parameters.items()}
    chunk = max(1, VMAP_ELEMENTS // max(1, sum(p.numel() for p in wanted.values())))
    return {k: g.detach() for k, g in over_samples(batch, grad, wanted, chunk).items()}


def over_samples(batch: Batch, transform: Callable[[Any], Any], values: Any, chunk: int | None = None) -> Any:
    """What a transform of ``loss(values, x, y)``, as `torch.func.grad` is, gives for every sample alone, by vmap.

    The loss takes parameters by name, and the input and target of one sample. Chunks are numbers of samples.
    """
    n, (dim, _, target_dim) = batch.count, batch.dims
    has_samples = lambda t: isinstance(t, Tensor) and batch.has_samples(t)
    in_x = pytree.tree_map(lambda t: dim if has_samples(t) else None, batch.x)
    y = map_tensors(lambda t: t.unflatten(target_dim, (n, -1)), batch.y)
    in_y = pytree.tree_map(lambda t: target_dim if isinstance(t, Tensor) else None, y)
    # nothing of autograd's beside the values: vmap has no batched form of some functions there
    held = {k: p.detach() for k, p in batch.model.named_parameters()}
    buffers = dict(batch.model.named_buffers())

    def loss(values: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        # each chunk begins from the same
        held.update({k: b.detach().clone() for k, b in buffers.items()})
        batch_of_one = pytree.tree_map(lambda t, dim: t if dim is None else t.unsqueeze(dim), x, in_x)
        run = lambda *args, **kwargs: call_with(batch.model, held | values, args, kwargs)
        return batch.loss(batch.for_loss(call_model(run, batch_of_one)), y)

    each = vmap(transform(loss), (None, in_x, in_y), randomness="different", chunk_size=chunk)
    with RefuseNewData():
        return each(values, batch.x, y)


class RefuseNewData(TorchFunctionMode):
    """Raise where a tensor is given other data, as where a module is cast: torch.func's tensors have none, and torch
    kills the process (pytorch/pytorch#184876)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and any(is_functorch_wrapped_tensor(t) for t in args):
            raise RuntimeError("the model casts or moves a module in its forward pass")
        return func(*args, **(kwargs or {}))


def by_loop(batch: Batch) -> dict[str, Tensor]:
    """(N, *shape) for each parameter, by N forward and backward passes of one sample."""
    rows, start = [], ModelState(batch.model)
    for n in range(batch.count):
        try:
            with start.again():
                rows.append(batch.sample(n).gradients())
        except OtherShapeAlone:
            raise
        except Exception as error:  # the model's own, to which the names of the parameters are added
            raise RuntimeError(
                f"{', '.join(sorted(batch.parameters))}: no per-sample rule, and sample {n} alone does not run: {error}"
            ) from error
    return {k: torch.stack([row[k] for row in rows]) for k in batch.parameters}
