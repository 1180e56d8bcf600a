"""The public functions of per-sample gradients: gradients, norms, inner products, and a check of all of them."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvature.gradients.batch import Batch, SampleDim, either_form
from curvature.gradients.general_path import check_once, general_path_terms, terms_of_object_output
from curvature.gradients.meeting_samples import SamplesMeet, where_samples_meet
from curvature.gradients.parameter_terms import Backprops, Terms, terms_by_parameter, zeros
from curvature.gradients.plans import differences, learn, record, single_sample_reference
from curvature.linalg import full_precision, stack
from curvature.losses import TORCH_LOSSES, Loss, count_alike, name_of, require_repeats, require_weighted_sum
from curvature.recording import graph_leaves, preserve_state, stream_backprops, warn_once
from curvature.terms import DenseGradients, Term, contractions

Contraction = Callable[[list[Term]], Any]
Run = TypeVar("Run", bound=Callable[..., Any])
WAITING_BYTES = 1 << 22  # of backprops that wait to be contracted
DIFFERENTIATED = (
    "the model is differentiated on the way to the loss (torch.autograd.grad with create_graph=True), so that a "
    "layer's backprop arrives more than once; use curvature.residual_jacobian(model, residual, *batch), where "
    "residual(model, *batch) gives each sample's loss (N,)"
)
UNEQUAL = (
    "clipped gradients: samples count differently in %s, which divides by the weights or tokens of the whole batch; "
    "their own losses know nothing of that and count alike. A loss (w * l).mean() keeps weights, and is private"
)


def _for_logits_or_whole(run: Run) -> Run:
    """Decorator of functions of a batch: run again with whole outputs if the loss reads what logits do not have."""

    @functools.wraps(run)
    def wrapper(batch: Batch, *args: Any) -> Any:
        try:
            return run(batch, *args)
        except AttributeError as error:
            if not batch.takes_logits or _is_of(error, batch.model):
                raise
            return run(replace(batch, takes_logits=False), *args)

    return cast("Run", wrapper)


def _is_of(error: BaseException, model: nn.Module) -> bool:
    """Whether the error comes from a call of the model."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_locals.get("self") is model for frame in frames)


@either_form
def per_sample_gradients(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0, chunk: int | None = None, out: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradient of each sample's own loss with respect to every parameter.

    Row n equals the gradient of ``loss`` on a batch that holds sample n alone, whatever the reduction. With a mean over
    one term per sample the rows average to ``.grad``.

    Args:
        model: any module; its parameters that do not require a gradient are left out.
        loss: a torch loss module or a callable ``loss(output, target) -> scalar``.
        x: a tensor, a tuple of positional or a dict of keyword arguments; a dict with other keys is one argument.
            Samples may also be bags, as ``(values, offsets)`` for `nn.EmbeddingBag`, or a `PackedSequence`.
        y: the target, as the loss takes it: N, or N * m rows. It may be left out if x is the pair ``(x, y)``, as in all
            ``per_sample_*`` functions.
        parameters: names of parameters, or of modules for all that are below them: the others count as frozen, which
            saves the backward pass to them; None: all that require a gradient.
        sample_dim: the axis of the samples; or one each for input, output and target.
        chunk: how many samples to process at a time. This bounds all memory but that of the results, and changes them
            only if the forward pass draws random numbers (each chunk draws the same ones).
        out: where to write the results: ``{name: (N, *parameter.shape)}`` of tensors, or of numpy arrays
            (memory-mapped ones write to files).

    Returns:
        ``{name: (N, *parameter.shape)}``, those of `out` if given, in the order of ``named_parameters()``, in units of
        loss / parameter. A batch may be empty.

    Raises:
        ValueError: samples are not independent (BatchNorm in training mode, named), the loss has no scalar reduction,
            model or loss differentiate the model (then `residual_jacobian` is right), nothing requires a gradient, no
            parameter has one of the names (near ones are shown), or sizes disagree. `chunk` is not positive; `out` has
            other names or shapes than the parameters asked for, or cannot hold fractions.
        TypeError: an argument of the wrong kind.

    The call leaves the model as it was: ``.grad``, buffers, mode, hooks and random state. The first call at each input
    shape checks its own results. Parameters that no layer rule covers go through ``torch.func.vmap``, which is exact
    but slower; the log says so once.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    if out is None and (chunk is None or not batch.count):
        return contracted(batch, contractions.gradients)
    results = _results(batch, out)
    for _, part in batch.parts(chunk, "chunk"):
        for name, gradients in contracted(batch.part(part), contractions.gradients).items():
            results[name][part] = gradients
    return results


def _results(batch: Batch, out: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Tensors for the gradients of all samples: those of `out`, which share its memory, or new ones."""
    shapes = {name: (batch.count, *p.shape) for name, p in batch.parameters.items()}
    if out is None:
        return {name: torch.empty(shapes[name], dtype=p.dtype, device=p.device) for name, p in batch.parameters.items()}
    if not isinstance(out, Mapping) or not all(isinstance(t, Tensor | np.ndarray) for t in out.values()):
        raise TypeError("out: expected {name: tensor or numpy array}, as per_sample_gradients returns it")
    given = {name: tuple(t.shape) for name, t in out.items()}
    for name in dict.fromkeys([*shapes, *given]):
        if given.get(name) != shapes.get(name):
            expected = shapes.get(name, "no such parameter")
            raise ValueError(f"out: expected {name} of shape {expected}, found {given.get(name, 'none')}")
    tensors = {name: out[name] if isinstance(out[name], Tensor) else torch.from_numpy(out[name]) for name in shapes}
    for name, p in batch.parameters.items():
        if not torch.can_cast(p.dtype, tensors[name].dtype):
            raise ValueError(f"out: {name} is {tensors[name].dtype}, which cannot hold gradients of {p.dtype}")
    return tensors


@either_form
def per_sample_norms(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, parameters: Iterable[str] | None = None, sample_dim: SampleDim = 0
) -> Tensor:
    """Norm (N,) of each sample's gradient over all parameters together, or over those asked for.

    Arguments and errors as for `per_sample_gradients`. The gradients are built, a bounded number of samples at a time,
    only where the inner products of activations and of backprops would cost more.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    return stack(_settle(batch, contractions.tentative_norms_squared).values()).sum(0).sqrt()


@either_form
def per_sample_norms_by_parameter(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, parameters: Iterable[str] | None = None, sample_dim: SampleDim = 0
) -> dict[str, Tensor]:
    """Norm (N,) of each sample's gradient with respect to every parameter, ``{name: (N,)}``; their squares add up to
    those of `per_sample_norms`. Arguments and errors as for `per_sample_gradients`.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    norms_squared = _settle(batch, contractions.tentative_norms_squared)
    return {name: squares.sqrt() for name, squares in norms_squared.items()}


@either_form
def per_sample_gram(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, parameters: Iterable[str] | None = None, sample_dim: SampleDim = 0
) -> Tensor:
    """Inner products (N, N) of the samples' gradients over all parameters together (the empirical tangent kernel of
    the loss). Arguments and errors as for `per_sample_gradients`.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    return stack(_settle(batch, contractions.tentative_gram).values()).sum(0)


def _settle(batch: Batch, contract: Contraction) -> dict[str, Tensor]:
    """What `contract` makes of the terms of every parameter, once it is right."""
    tentative = contracted(batch, contract)
    return dict(zip(tentative, contractions.settle(tentative.values()), strict=True))


@either_form
@full_precision()
def check_gradients(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, parameters: Iterable[str] | None = None, sample_dim: SampleDim = 0
) -> None:
    """Compare `per_sample_gradients` with plain backward passes of single samples.

    Every sample is run alone, so this costs N forward and backward passes, without TF32. Arguments as for
    `per_sample_gradients`.

    Raises:
        RuntimeError: a gradient differs; names the parameter, the sample and both norms.
        ValueError: the forward pass draws random numbers, so that there is nothing to compare with.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    with preserve_state(batch.model) as state, torch.no_grad():
        batch.output()
        if state.random.differs():
            raise ValueError("model: the forward pass draws random numbers (dropout?); check it in evaluation mode")
    _check_each_alone(batch)


@_for_logits_or_whole
def _check_each_alone(batch: Batch) -> None:
    rows = contracted(batch, contractions.gradients)
    for n in range(batch.count):
        with preserve_state(batch.model, batch.parameters):
            alone = batch.sample(n).gradients()
        if not all(g.isfinite().all() for g in alone.values()) and batch.without_terms([n]):
            alone = {name: torch.zeros_like(g) for name, g in alone.items()}
        for name in differences({k: g[n] for k, g in rows.items()}, alone):
            raise RuntimeError(
                f"{name}: the gradient of sample {n} has norm {rows[name][n].norm():.10g}, "
                f"run alone {alone[name].norm():.10g}; their difference {(rows[name][n] - alone[name]).norm():.3g}"
            )


class RefuseDoubleBackward(TorchFunctionMode):
    """Raise where the loss differentiates the model: a layer's backprop would arrive more than once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("create_graph"):  # torch hands it over by name
            raise ValueError(DIFFERENTIATED)
        return func(*args, **kwargs)


def sample_terms(batch: Batch) -> Terms:
    """The per-sample gradients of every parameter as terms, in the order of the parameters."""
    return contracted(batch, list)


@_for_logits_or_whole
def contracted(batch: Batch, contract: Contraction) -> dict[str, Any]:
    """What `contract` makes of the terms of every parameter, in the order of the parameters."""
    if not batch.count:  # Poisson sampling draws such batches
        return {name: contract([DenseGradients(p.new_empty(0, *p.shape))]) for name, p in batch.parameters.items()}
    with preserve_state(batch.model, batch.parameters) as state:
        # 1. record: which functions read which parameters, and what they met there
        tape, output, plan = record(batch, state)
        one_pass = state.is_of_one_pass()
        if tape.differentiates:
            raise ValueError(DIFFERENTIATED)
        if batch.count == 1:
            return {name: contract([DenseGradients(g[None])]) for name, g in batch.gradients(output).items()}
        if where := where_samples_meet(batch, tape):
            raise SamplesMeet(where)
        if not isinstance(output, Tensor):  # the loss takes it, but nothing says where its samples are
            terms = terms_of_object_output(batch, tape, output, plan, state)
            return {name: contract(terms[name]) for name in batch.parameters}

        # 2. losses: each sample's own; one that reads parameters itself, as a penalty does, has plans of its own
        of_torch, samples = type(batch.loss) in TORCH_LOSSES, (output, batch.y, batch.count, *batch.dims[1:])
        with nullcontext() if of_torch else RefuseDoubleBackward():
            if not of_torch:  # before vmap, whose tensors a loss that keeps them could not use any more
                check_once(batch, functools.partial(require_repeats, batch.loss, output, batch.y))
            losses = batch.losses(output)
        shares = require_weighted_sum(batch.loss, *samples)
        if batch.are_clipped and not count_alike(batch.loss, shares, *samples):
            warn_once(UNEQUAL, name_of(batch.loss))
        key = batch.key
        if not of_torch:
            reached = set(map(id, graph_leaves(losses, beyond=output)))
            if penalised := tuple(name for name, p in batch.parameters.items() if id(p) in reached):
                plan, key = None, (key, penalised)

        # 3. plan: where the samples are at every use; learnt at a new shape, which sends the losses back
        backprops = None
        if plan is None:
            plan, backprops = learn(batch.model, key, tape, losses, single_sample_reference(batch, one_pass))
        layouts, general, results = plan.layouts, set(plan.general), dict[str, Any]()

        # 4. terms of the backprops, and 5. their contraction, some parameters at a time: this frees the backprops
        def take(arrived: Backprops, names: Collection[str]) -> None:
            skip = general | (tape.parameters.keys() - names)
            terms, failed = terms_by_parameter(tape, arrived, layouts, skip, is_precise=True)
            general.update(failed.intersection(names))
            results.update((name, contract(of_parameter)) for name, of_parameter in terms.items() if of_parameter)

        if backprops is None:
            stream_backprops(tape, [losses], [torch.ones_like(losses)], take, WAITING_BYTES)
        else:
            take(backprops, tape.parameters.keys())

        # what no rule explains, and what the losses do not depend on
        if general:
            terms = general_path_terms(batch, plan, general, losses if one_pass else None)
            results.update((name, contract(of_parameter)) for name, of_parameter in terms.items())
        for name in tape.parameters.keys() - results.keys():
            results[name] = contract([zeros(tape, name, batch.count)])
        return {name: results[name] for name in tape.parameters}
