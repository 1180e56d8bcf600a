"""Products of curvature matrices with vectors, by passes over the data; nothing here has P x P entries.

``J^T M J v`` takes one backward pass for ``J^T``. ``J v`` differentiates a backward pass, or takes one in forward mode
(`jacobians`). Where torch loses a part of it, it comes by rows. A Hessian's product differentiates the gradient
(Pearlmutter 1994, doi:10.1162/neco.1994.6.1.147).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from curvature.functional import TwiceDifferentiable, graph_nodes, require_second_derivatives
from curvature.gradients import UNSTEADY, Batch, are_adjoint, batched_vjp, changes_by_backward_passes, number_of_batches
from curvature.linalg import full_precision, matmul, widen
from curvature.losses import TORCH_LOSSES, Injection, require_repeats, require_terms
from curvature.matrices.jacobians import Proved, changes_by_rows, random_directions, right_way
from curvature.matrices.passes import CACHED_ELEMENTS, DataSource, RecordedBatch
from curvature.operators import Space
from curvature.recording import graph_dtypes, in_turn, tensors_in

NEEDS_NONE = "gauss_newton() needs no second derivative of the model"
SAME = 1e-3  # relative difference of the norms of outputs, beyond what TF32 rounds
# From columns (c, P): write the product with them to the second tensor, (c, P), or add it there if told to.
Put = Callable[[Tensor, Tensor, bool], None]
# With the matrix of one batch, by its graph; for how many columns at once; what the batch counts for in a mean.
BatchProduct = tuple[Put, int, float]
Prepare = Callable[[RecordedBatch, bool], BatchProduct]  # of a batch, and whether it is the only one


@dataclass
class Repeated:
    """Repeated passes over the data, with checks that model and data are the same each time."""

    source: DataSource
    inject: Injection | None = None
    seen: list[float] = field(default_factory=list)  # a checksum of each batch of the first pass
    proved: Proved = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state, self.masses = self._state(), self.source.masses
        self.kept: list[BatchProduct] | None = None  # of all batches, once there are; None: `times` keeps nothing
        self.kept_for: dict[str, Any] = {}
        self.size: float | None = None  # of the outputs of the last pass over a single batch
        # whether the matrix depends on the order of the data
        self.ordered = isinstance(self.inject, Injection) and self.inject.is_random
        self.is_single = number_of_batches(self.source.data) == 1

    def __getstate__(self) -> dict[str, Any]:
        """For copies, of a model of their own. What was learnt of shapes stays behind; it is learnt again."""
        self._require_same_model()
        return {name: getattr(self, name) for name in ("source", "inject", "seen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _require_same_model(self) -> None:
        if self._state() != self.state:
            raise RuntimeError(
                "the model has changed (parameters, buffers or training mode) since this operator was made: make it "
                "anew, or call materialise() on it before the change"
            )

    def _state(self) -> tuple[Any, ...]:
        model = self.source.model
        seen = tuple(map(_state_of, (*model.parameters(), *model.buffers())))
        return seen, tuple(m.training for m in model.modules())

    @in_turn()
    def each(self, visit: Callable[[RecordedBatch], None]) -> None:
        """`DataSource.each` with checks."""
        self._require_same_model()
        seen: list[float] = []

        def checked(run: RecordedBatch) -> None:
            if run.random:
                raise ValueError(
                    "model: the forward pass draws random numbers (dropout?), so every product would be of another "
                    "matrix; call model.eval()"
                )
            seen.append(_checksum(run.batch))
            if self.is_single:
                self._require_steady(run)
            visit(run)

        try:
            self.source.each(checked, TwiceDifferentiable)
        finally:
            self.state = self._state()  # an embedding with max_norm rescales its rows in every forward pass
        self.seen = self.seen or seen
        known, now = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (self.seen, seen))
        if not self.ordered:
            known, now = known.sum(), now.sum()
        if known.shape != now.shape or not torch.allclose(known, now, rtol=1e-6, equal_nan=True):
            raise ValueError(
                "data: another pass gave other batches; use a DataLoader with shuffle=False and without random "
                "augmentation, or a list of pairs"
            )

    def _require_steady(self, run: RecordedBatch) -> None:
        """Raise ValueError where outputs are not those of the last pass, nor again those of this one."""
        size = lambda output: float(widen(output.detach().abs()).norm())
        last, self.size = self.size, size(run.output)
        if last is None or math.isclose(last, self.size, rel_tol=SAME) or not math.isfinite(self.size):
            return
        with run.state.again(), torch.no_grad():
            again = run.batch.output()
        if not math.isclose(size(again), self.size, rel_tol=SAME):
            raise ValueError(UNSTEADY)

    @in_turn()
    def times(self, prepare: Prepare, matrix: Tensor) -> Tensor:
        """The product with `matrix` (P, c): summed over batches and, for a mean loss, divided by their weight."""
        columns = matrix.T.contiguous()
        total = torch.empty_like(columns)
        weights: list[float] = []
        made: list[BatchProduct] = []

        def add(put: Put, step: int, weight: float) -> None:
            for some, out in zip(columns.split(step), total.split(step), strict=True):
                put(some, out, bool(weights))
            weights.append(weight)

        def visit(run: RecordedBatch) -> None:
            run.require_only_if_samples_meet(self.is_single)
            product = prepare(run, self.is_single)
            add(*product)
            if self.kept is not None and not run.one_pass:
                made.append(product)

        if self.kept:
            self._require_unchanged()
            with self.source.surroundings():
                for product in self.kept:
                    add(*product)
        else:
            self.each(visit)
            if len(made) == len(weights):
                self.kept, self.kept_for = made, self._surroundings()
        if self.masses.is_sum or self.is_single and weights[0]:
            return total.T
        require_terms(sum(weights))
        return total.div_(sum(weights)).T

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, the products of the batches are kept with their graphs; the outermost block frees them."""
        if self.kept is not None:
            yield
            return
        self.kept = []
        try:
            yield
        finally:
            self.kept = None

    def keeping_one_batch(self) -> AbstractContextManager[None]:
        """The same for data in one batch: the first product at a shape, which is checked, takes as much memory."""
        return self.keeping() if self.is_single else nullcontext()

    def _surroundings(self) -> dict[str, Any]:
        """What kept graphs are of, as far as it takes no look at values."""
        model, loss, data = self.source.model, self.source.loss, self.source.data
        surroundings: dict[str, Any] = {"data: the number of batches": number_of_batches(data)}
        for what, module in (("model", model), ("loss", loss)):
            if isinstance(module, nn.Module):
                named = [*module.named_parameters(), *module.named_buffers()]
                surroundings |= {f"{what}: {name}": _state_of(t) for name, t in named}
                surroundings[f"{what}: its training mode"] = [m.training for m in module.modules()]
        surroundings |= {f"data: tensor {k}": _state_of(t) for k, t in enumerate(tensors_in(data))}
        kinds = {"cpu", *(p.device.type for p in model.parameters())}
        surroundings["autocast"] = {
            kind: torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds
        }
        return surroundings

    def _require_unchanged(self) -> None:
        before, now = self.kept_for, self._surroundings()
        for what in before | now:
            if before.get(what) != now.get(what):
                raise RuntimeError(
                    f"{what} has changed inside `with curvature.kept(...)`, whose graphs are of what was there before; "
                    "leave the block, and make the operator anew if the model is another"
                )


def _state_of(t: Tensor) -> tuple[int, int | None, int | None]:
    """Which tensor it is, where it is, and how often autograd has seen it change."""
    has_place = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
    return id(t), t.data_ptr() if has_place else None, None if t.is_inference() else t._version


def through_outputs(
    run: RecordedBatch, is_single: bool, inject: Injection, drawn: torch.Generator, passes: Repeated
) -> BatchProduct:
    """Multiply with ``sum_n weights[n] J_n^T M_n J_n``, M_n the injection's matrix at the output of sample n."""
    run = run.as_seen_by(inject, by_rows=False)
    parameters = list(run.batch.parameters.values())
    dims = run.batch.dims
    output, loss, target = run.samples_first()
    weights = run.weights(inject)
    weight = weights.sum()
    shares = weights / weight if is_single and not passes.masses.is_sum else weights
    rows = run.by_row(shares)
    options: Any = {"count": run.batch.count, "generator": drawn}
    multiply = cache(partial(inject.product, output, loss, target, **options))  # after `J v` has taken its memory
    at_once = _columns_at_once(run)
    changes_along, step = _changes(run, parameters, passes, inject)
    counts = run.counts

    def put(part: Tensor, out: Tensor, add: bool) -> None:
        changes = changes_along(part) if counts else None
        if changes is None:
            return _write([None] * len(parameters), parameters, out, add)
        products = multiply()(changes.movedim(dims[1] + 1, 1))
        del changes
        sent = (products * rows).movedim(1, dims[1] + 1)
        del products
        for some, where in zip(sent.split(at_once), out.split(at_once), strict=True):
            _write(batched_vjp([run.output], parameters, [some]), parameters, where, add)

    return put, step, float(weight)


def _columns_at_once(run: RecordedBatch) -> int:
    """Number of columns whose gradients to make in one backward pass."""
    if run.output.device.type != "cpu":
        return run.pass_size
    entries = sum(p.numel() for p in run.batch.parameters.values())
    return max(1, min(run.pass_size, CACHED_ELEMENTS // entries))


def _through_backward(run: RecordedBatch) -> int:
    """Number of columns for which to differentiate a backward pass at once: its graph is held."""
    return max(1, min(run.pass_size // 4, _columns_at_once(run)))


def _changes(
    run: RecordedBatch, parameters: list[nn.Parameter], passes: Repeated, inject: Injection
) -> tuple[Callable[[Tensor], Tensor | None], int]:
    """Columns (c, P) to ``J v`` (c, *output.shape), None being zero; and for how many at once."""
    named = lambda part: dict(zip(run.batch.parameters, _split(part, parameters), strict=True))
    way = right_way(run.batch, run.tape, run.output, passes.proved)
    if way is None:
        rows = run.as_seen_by(inject)
        return (lambda part: changes_by_rows(rows, named(part))), run.pass_size
    return (lambda part: way(named(part))[0]), way.at_once or _through_backward(run)


def through_gradient(run: RecordedBatch, is_single: bool) -> BatchProduct:
    """Multiply with the Hessian of the loss of the batch, times its mass in a mean over several."""
    parameters = list(run.batch.parameters.values())
    weight = 1.0 if is_single else run.mass_of_batch()
    # the loss of a batch without terms is 0/0
    value = weight * run.loss_beside_others() if weight else run.output.sum() * 0
    gradients = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    live = [k for k, g in enumerate(gradients) if g is not None and g.requires_grad and g.numel()]

    def put(part: Tensor, out: Tensor, add: bool) -> None:
        directions = _split(part, parameters)
        products: list[Tensor | None] = [None] * len(parameters)
        if live:
            products = batched_vjp([gradients[k] for k in live], parameters, [directions[k] for k in live])
        _write(products, parameters, out, add)

    # of several columns torch mixes the axes up where they come to the means of a group norm
    has_group_norm = any("GroupNorm" in type(node).__name__ for node in graph_nodes(run.output.grad_fn))
    return put, 1 if has_group_norm else _through_backward(run), weight


def through_complete_gradient(run: RecordedBatch, is_single: bool) -> BatchProduct:
    """`through_gradient`; RuntimeError where the gradient of the loss cannot be differentiated in all of its parts:
    by name those of the user's functions, by a random vector what hooks detach.
    """
    value = [run.batch.loss_of(run.output)]
    if value[0].isnan() and not run.mass_of_batch() and (not is_single or _has_finite_gradient(value[0], run)):
        return through_gradient(run, is_single)
    if not value[0].isfinite():
        raise ValueError(
            f"loss: it is {float(value[0].detach())} over a batch, so that it has no Hessian: no term of it counts "
            "(all targets ignored or of weight zero), or the model's output or a target is not finite"
        )
    if type(run.batch.loss) not in TORCH_LOSSES:
        require_repeats(run.batch.loss, run.output, run.batch.y)
    require_second_derivatives(value, "the Hessian", f"; {NEEDS_NONE}")
    put, step, weight = through_gradient(run, is_single)
    is_known = False  # of a kept graph the first product says it

    def put_or_explain(part: Tensor, out: Tensor, add: bool) -> None:
        nonlocal is_known
        try:
            put(part, out, add)
            if is_known:
                return
            parameters, along = run.batch.parameters, random_directions(run.batch, 1)
            # the model alone; at a minimum the loss has nothing but rounding
            probed = [run.batch.probe(run.output).loss_of(run.output)]
            changes = changes_by_backward_passes(probed, parameters, along, 1.0)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = str(error).split("\n")[0].rstrip(".")
            raise RuntimeError(f"torch has no Hessian of the loss: {why}; {NEEDS_NONE}") from error
        if changes[0][0].isfinite() and not are_adjoint(probed, parameters, along, changes):
            raise RuntimeError(
                "torch loses a part of the Hessian: a hook of the model, or a function that says twice_differentiable, "
                f"detaches the gradient that it gets; {NEEDS_NONE}"
            )
        is_known = True

    return put_or_explain, step, weight


def _has_finite_gradient(value: Tensor, run: RecordedBatch) -> bool:
    (slope,) = torch.autograd.grad(value, run.output, retain_graph=True, materialize_grads=True)
    return bool(slope.isfinite().all())


@full_precision()
def require_symmetric(space: Space, passes: Repeated) -> None:
    """Refuse a Hessian that is not finite or not symmetric, up to rounding in the least precise dtype.

    Torch has some second derivatives wrong. A model in double precision may compute a part of its layers in single, as
    many norms of language models do.
    """
    parameters = list(passes.source.model.parameters())
    kinds = {p.dtype for p in parameters if p.is_floating_point()}
    devices = {p.device.type for p in parameters}
    kinds |= {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}

    def prepare(run: RecordedBatch, is_single: bool) -> BatchProduct:
        kinds.update(graph_dtypes([run.output]))
        return through_complete_gradient(run, is_single)

    generator = torch.Generator(space.device).manual_seed(0)
    probes = torch.randn(space.size, 2, generator=generator, dtype=space.dtype, device=space.device)
    forms = matmul(probes.T, passes.times(prepare, probes))
    rounding = max(torch.finfo(kind).eps for kind in kinds)
    if not (forms - forms.T).abs().amax() <= rounding**0.5 * forms.norm():
        raise RuntimeError(
            "the model: its Hessian by automatic differentiation is not symmetric or not finite: the second derivative "
            "of a function of torch is wrong or not finite where the model or the loss calls it "
            f"(u^T H v = {forms[0, 1]:.6g}, v^T H u = {forms[1, 0]:.6g}); {NEEDS_NONE}"
        )


def _checksum(batch: Batch) -> float:
    """The same in any order of the samples; another where an entry of a sample is another, or elsewhere in it."""
    total = 0.0
    for data, dim in ((batch.x, batch.dims[0]), (batch.y, batch.dims[2])):
        for t in tensors_in(data):
            entries = widen(t.detach())
            entries = entries.movedim(dim, 0).sum(0) if t.ndim > dim else entries
            places = torch.arange(entries.numel(), device=t.device, dtype=torch.float32)
            total += float((entries.flatten() * (1 + places.cos())).sum())
    return total


def _split(columns: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """(c, P) to (c, *shape) for each parameter, in its precision and on its device."""
    parts = columns.split([p.numel() for p in parameters], 1)
    return [part.reshape(len(part), *p.shape).to(p.device, p.dtype) for part, p in zip(parts, parameters, strict=True)]


def _write(gradients: list[Tensor | None], parameters: list[nn.Parameter], out: Tensor, add: bool) -> None:
    """Write the gradients (c, *shape) of the parameters to (c, P), or add them; None is zero."""
    parts = out.split([p.numel() for p in parameters], 1)
    for g, part in zip(gradients, parts, strict=True):
        if g is not None and add:
            part += g.reshape(part.shape).to(part.device)
        elif g is not None:
            part.copy_(g.reshape(part.shape))
        elif not add:
            part.zero_()
