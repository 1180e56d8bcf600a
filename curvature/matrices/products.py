"""Products of curvature matrices with vectors, by passes over the data; nothing here has P x P entries.

``J^T M J v`` takes one backward pass for ``J^T``. ``J v`` comes with the forward pass, if there is one column and
`forward_mode` proves right, or is made by it for the columns of a network of convolutions; else it takes two backward
passes, the second through the first. A Hessian's product
differentiates the gradient (Pearlmutter 1994, doi:10.1162/neco.1994.6.1.147).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from curvature.gradients import Batch, batched_vjp
from curvature.linalg import full_precision, matmul, widen
from curvature.losses import Injection
from curvature.matrices.forward_mode import ForwardMode
from curvature.matrices.passes import DataSource, RecordedBatch, samples_first
from curvature.operators import Space
from curvature.recording import tensors_in

Apply = Callable[[Tensor], Tensor]  # (P, c) to (P, c)
AddProduct = Callable[[Tensor, Tensor], None]  # add the product with columns to a sum, both (c, P)


def _none(batch: Batch) -> None:
    return None


@dataclass
class Repeated:
    """Repeated passes over the data, with checks that model and data are the same each time."""

    source: DataSource
    ordered: bool  # whether the matrix depends on the order of the data
    seen: list[float] = field(default_factory=list)  # a checksum of each batch of the first pass
    forward: ForwardMode = field(default_factory=ForwardMode)

    def __post_init__(self) -> None:
        self.state = self._state()

    def _state(self) -> tuple[Any, ...]:
        model = self.source.model
        versions = tuple((id(t), t._version) for t in (*model.parameters(), *model.buffers()))
        return versions, tuple(m.training for m in model.modules())

    def each(
        self,
        visit: Callable[[RecordedBatch], None],
        direction: Callable[[Batch], Mapping[str, Tensor] | None] = _none,
        wanted: Callable[[int], bool] | None = None,
    ) -> None:
        """`Source.each` with checks.

        Args:
            wanted: whether the batch of this number is to be visited; a pass over some of them is not compared.
            direction: gives, for a batch, the direction in which `RecordedBatch.change` is wanted.

        Raises:
            RuntimeError: parameters, buffers or mode of the model have changed since the operator was made.
            ValueError: the data are not those of the first time, or the forward pass draws random numbers.
        """
        if self._state() != self.state:
            raise RuntimeError(
                "the model has changed (parameters, buffers or training mode) since this operator was made: make it "
                "anew, or call materialise() on it before the change"
            )
        seen: list[float] = []

        def checked(run: RecordedBatch) -> None:
            if run.random:
                raise ValueError(
                    "model: the forward pass draws random numbers (dropout?), so every product would be of another "
                    "matrix; call model.eval()"
                )
            seen.append(sum(float(widen(t).sum()) for t in tensors_in(run.batch.x, run.batch.y)))
            visit(run)

        forward = lambda batch: self.forward.record(batch, direction(batch))
        try:
            some = {} if wanted is None else {"wanted": wanted}
            self.source.each(checked, forward, again=bool(self.seen), **some)
        finally:
            self.state = self._state()  # an embedding with max_norm rescales its rows in every forward pass
        if wanted is not None:
            return
        self.seen = self.seen or seen
        known, found = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (self.seen, seen))
        if not self.ordered:
            known, found = known.sum(), found.sum()
        if known.shape != found.shape or not torch.allclose(known, found, rtol=1e-6, equal_nan=True):
            raise ValueError(
                "data: another pass gave other batches; use a DataLoader with shuffle=False and without random "
                "augmentation, or a list of pairs"
            )

    @property
    def is_sum(self) -> bool:
        return self.source.is_sum

    def times(
        self, prepare: Callable[[RecordedBatch], tuple[AddProduct, float]], matrix: Tensor, forward: bool = False
    ) -> Tensor:
        """The product with `matrix` (P, c): summed over batches and, for a mean loss, divided by their weight.

        Args:
            prepare: returns, for a batch, the function that adds its product, and its weight.
            forward: whether the change of the output along a single column is of use.
        """
        columns = matrix.T.contiguous()
        total = torch.zeros_like(columns)
        weight = 0.0

        def visit(run: RecordedBatch) -> None:
            nonlocal weight
            add, counts = prepare(run)
            add(columns, total)
            weight += counts

        def direction(batch: Batch) -> Mapping[str, Tensor] | None:
            """Several columns would take a forward pass each."""
            if not forward or len(columns) > 1:
                return None
            parameters = batch.parameters
            return {k: v[0] for k, v in zip(parameters, _split(columns, list(parameters.values())), strict=True)}

        self.each(visit, direction)
        return (total if self.source.is_sum else total.div_(weight)).T


def through_outputs(
    run: RecordedBatch, inject: Injection, drawn: torch.Generator, forward_mode: ForwardMode
) -> tuple[AddProduct, float]:
    """Multiply with ``sum_n weights[n] J_n^T M_n J_n``, M_n the injection's matrix at the output of sample n."""
    parameters = list(run.batch.parameters.values())
    dims = run.batch.dims
    output, loss, target = samples_first(run.output.detach(), run.loss, run.batch.y, dims)
    weights = run.weights(inject)
    rows = weights.repeat_interleave(len(output) // run.batch.count).reshape(-1, *[1] * (output.ndim - 1))
    options: Any = {"count": run.batch.count, "generator": drawn}
    multiply = cache(partial(inject.product, output, loss, target, **options))  # after `J v` has taken its memory
    changes_along, step = _changes(run, parameters, forward_mode)

    def product(part: Tensor) -> Tensor | None:
        changes = changes_along(part)
        return None if changes is None else multiply()(changes.movedim(dims[1] + 1, 1))

    def add(part: Tensor, total: Tensor) -> None:
        products = product(part)
        if products is not None:
            sent = (products * rows).movedim(1, dims[1] + 1)
            del products
            for some, where in zip(sent.split(run.pass_size), total.split(run.pass_size), strict=True):
                _add(batched_vjp([run.output], parameters, [some]), parameters, where)

    return _in_steps(add, step), float(weights.sum())


def _in_steps(add: AddProduct, step: int) -> AddProduct:
    """Add the product with `step` columns at a time."""

    def each(columns: Tensor, total: Tensor) -> None:
        for part, rows in zip(columns.split(step), total.split(step), strict=True):
            add(part, rows)

    return each


def _through_backward(run: RecordedBatch) -> int:
    """Number of columns for which to differentiate a backward pass at once: its graph is held."""
    return max(1, run.pass_size // 4)


def _changes(
    run: RecordedBatch, parameters: list[nn.Parameter], forward_mode: ForwardMode
) -> tuple[Callable[[Tensor], Tensor | None], int]:
    """A function of columns (c, P) to ``J v`` (c, *output.shape), None being zero, and for how many to call it."""
    if run.change is not None:
        known = [run.change[None]]
        run.change = None
        return (lambda _: known.pop()), 1  # for its one column
    found = forward_mode.columns(run.batch, run.tape, run.output)
    if found is None:
        return _jacobian(run.output, parameters), _through_backward(run)
    along, step = found
    return (lambda part: along(dict(zip(run.batch.parameters, _split(part, parameters), strict=True)))), step


def _jacobian(output: Tensor, parameters: list[nn.Parameter]) -> Callable[[Tensor], Tensor | None]:
    """Columns (c, P) to ``J v`` (c, *output.shape), by differentiating the backward pass; None is zero."""
    probe = torch.zeros_like(output, requires_grad=True)
    gradients = torch.autograd.grad(output, parameters, probe, create_graph=True, allow_unused=True)
    live = [k for k, g in enumerate(gradients) if g is not None and g.requires_grad]

    def changes(part: Tensor) -> Tensor | None:
        directions = _split(part, parameters)
        return batched_vjp([gradients[k] for k in live], [probe], [directions[k] for k in live])[0]

    return changes


def through_gradient(run: RecordedBatch) -> tuple[AddProduct, float]:
    """Multiply with the Hessian of ``sum_n weights[n] l_n``."""
    parameters = list(run.batch.parameters.values())
    weights = run.weights()
    losses = run.batch.losses(run.output)
    value = (weights * losses)[weights != 0].sum()  # the loss of a sample without terms is 0/0
    gradients = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    live = [k for k, g in enumerate(gradients) if g is not None and g.requires_grad]

    def add(part: Tensor, total: Tensor) -> None:
        directions = _split(part, parameters)
        if live:
            products = batched_vjp([gradients[k] for k in live], parameters, [directions[k] for k in live])
            _add(products, parameters, total)

    return _in_steps(add, _through_backward(run)), float(weights.sum())


def coarsest(model: nn.Module) -> float:
    """The relative rounding error of the least precise dtype among the parameters and autocast."""
    kinds = {p.dtype for p in model.parameters()}
    devices = {p.device.type for p in model.parameters()}
    kinds |= {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
    return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)


@full_precision()
def require_symmetric(space: Space, matmat: Apply, rounding: float) -> None:
    """Refuse a product that is not symmetric: some of torch's second derivatives are wrong.

    Args:
        rounding: relative, of the precision of the product.

    Raises:
        RuntimeError: u^T H v and v^T H u differ by more than rounding, for random u and v.
    """
    generator = torch.Generator(space.device).manual_seed(0)
    probes = torch.randn(space.size, 2, generator=generator, dtype=space.dtype, device=space.device)
    found = matmul(probes.T, matmat(probes))
    if not (found - found.T).abs().amax() <= rounding**0.5 * found.norm():
        raise RuntimeError(
            "the model: its Hessian by automatic differentiation is not symmetric: torch has a second derivative wrong "
            f"(u^T H v = {found[0, 1]:.6g}, v^T H u = {found[1, 0]:.6g}); gauss_newton() needs none"
        )


def _split(columns: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """(c, P) to (c, *shape) for each parameter, in its precision and on its device."""
    parts = columns.split([p.numel() for p in parameters], 1)
    return [part.reshape(-1, *p.shape).to(p.device, p.dtype) for part, p in zip(parts, parameters, strict=True)]


def _add(found: list[Tensor | None], parameters: list[nn.Parameter], total: Tensor) -> None:
    """Add the gradients (c, *shape) of the parameters to (c, P); None is zero."""
    parts = total.split([p.numel() for p in parameters], 1)
    for g, part in zip(found, parts, strict=True):
        if g is not None:
            part += g.reshape(len(g), -1).to(part.device)
