"""Exact diagonals of models with a wide last layer, from as many vectors as it has inputs, not outputs.

If the model ends in a linear layer ``z = W h + c`` (a vocabulary, a thousand classes), its other layers see the
curvature H at the output only as ``W^T H W``. With ``W^T H W = Q L Q^T``, the columns of ``H W Q L^(-1/2)`` have the
same sum of squares there as the columns of a root of H. The diagonal of the last layer itself needs only that of H.

Indices: k vector, n sample, t place, o output, d input of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.layers import Layout, Unsupported
from curvature.linalg import full_precision, qr, symmetric_eigh, widen, widest
from curvature.losses import Injection
from curvature.matrices.passes import RecordedBatch
from curvature.recording import Use
from curvature.structures import Chunk
from curvature.terms import AffineLayout, OuterProduct

MIN_WIDTH_RATIO = 2  # the outputs of the last layer are at least this many times its inputs


@dataclass(frozen=True)
class LastLayer:
    """The linear layer that ends the model."""

    names: frozenset[str]  # of its weight and bias, which nothing else reads
    weight: Tensor  # W, (o, d)
    index: Tensor  # (n, t, o), the positions of its outputs in the flat output of the model
    shape: torch.Size  # of the model's output

    @property
    def places(self) -> int:
        return self.index.shape[1]

    def probe(self) -> Tensor:
        """Normal numbers (n, t, o), the same at every call."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.index.shape, generator=generator, dtype=torch.float64, device="cpu")

    def to_output(self, z: Tensor) -> Tensor:
        """(k, n, t, o) to (k, *output.shape)."""
        out = z.new_empty(len(z), self.index.numel())
        return out.index_copy_(1, self.index.flatten(), z.flatten(1)).reshape(len(z), *self.shape)

    def from_output(self, v: Tensor) -> Tensor:
        """The inverse of `to_output`."""
        return v.flatten(1)[:, self.index]


def diagonal_chunks(run: RecordedBatch, inject: Injection, generator: torch.Generator) -> Iterator[Chunk]:
    """Chunks with the same diagonal as ``run.chunks(inject, generator)``, from fewer vectors where possible."""
    dims = run.batch.dims
    output, loss, target = run.samples_first()
    count = run.batch.count
    head = find_last_layer(run) if inject.number(output, count) > 1 else None
    if head is None or output.numel() // count < MIN_WIDTH_RATIO * head.places * (head.weight.shape[1] + 1):
        yield from run.chunks(inject, generator)
        return
    diagonal = inject.known_diagonal(output, loss, target, count=count)
    apply = inject.product(output, loss, target, count=count)

    def product(z: Tensor) -> Tensor:
        """H z for (k, n, t, o)."""
        return head.from_output(apply(head.to_output(z).movedim(dims[1] + 1, 1)).movedim(1, dims[1] + 1))

    if diagonal is None or _mixes_places(head, product):
        yield from run.chunks(inject, generator)
        return
    squares = head.from_output(diagonal.movedim(0, dims[1])[None])[0]
    weights = run.weights(inject)
    for number, (part, names) in enumerate(_vectors(head, squares, product, run)):
        vectors = run.terms(head.to_output(part).to(run.output.dtype))
        terms = {name: of_vectors for name, of_vectors in vectors.items() if name in names}
        yield run.chunk(len(part), terms, terms, weights, number == 0)


def _vectors(
    head: LastLayer, diagonal: Tensor, product: Callable[[Tensor], Tensor], run: RecordedBatch
) -> Iterator[tuple[Tensor, frozenset[str]]]:
    """Vectors (k, n, t, o), with the names of the parameters whose diagonal they give."""
    step = run.cached_size
    roots = diagonal.clamp(min=0).sqrt()
    for places in torch.arange(head.places, device=roots.device).split(step):
        yield _at_places(roots[:, places].movedim(1, 0), places, head), head.names
    rest = frozenset(run.batch.parameters) - head.names
    if not rest:
        return
    W = head.weight.to(roots.dtype)
    root = _root(W, product, head, step)
    inputs = W.shape[1]
    for k in torch.arange(head.places * inputs, device=roots.device).split(step):
        columns = root[:, k // inputs, :, k % inputs] @ W.T  # (k, n, o)
        yield product(_at_places(columns, k // inputs, head)), rest


@full_precision()
def _root(W: Tensor, product: Callable[[Tensor], Tensor], head: LastLayer, step: int) -> Tensor:
    """``Q L^(-1/2)`` (n, t, d, d) of ``W^T H W = Q L Q^T``; zero where L is zero."""
    rows = []
    for part in W.T.split(step):
        spread = part[:, None, None, :].expand(-1, *head.index.shape)
        rows.append(product(spread) @ W)
    matrix = torch.stack(list(torch.cat(rows)), 2)  # (n, t, d, d)
    values, vectors = symmetric_eigh(matrix)
    least = 10 * torch.finfo(W.dtype).eps * values.abs().amax(-1, keepdim=True)
    return vectors * torch.where(values > least, values.clamp(min=0).rsqrt(), 0)[..., None, :]


def _at_places(x: Tensor, places: Tensor, head: LastLayer) -> Tensor:
    """Vectors (k, n, t, o) that are x (k, n, o), each at its own of the places (k,), and zero elsewhere."""
    z = x.new_zeros(len(x), *head.index.shape)
    z[torch.arange(len(x), device=x.device), :, places] = x
    return z


def _mixes_places(head: LastLayer, product: Callable[[Tensor], Tensor]) -> bool:
    """Whether the loss has curvature between two places."""
    probe = head.probe().to(head.index.device, widest(head.index.device.type))
    for t in range(head.places if head.places > 1 else 0):
        mixed = product(_at_places(probe[None, :, t], torch.tensor([t], device=probe.device), head))
        mixed[:, :, t] = 0
        if mixed.any():
            return True
    return False


@full_precision()
def find_last_layer(run: RecordedBatch) -> LastLayer | None:
    """The linear layer that ends the model: every entry of the output is one of its, and nothing bypasses it."""
    use = run.tape.uses[-1] if run.tape.uses else None
    if use is None or not any(_is_wide(use, tuple(node.tensor.shape)) for node in use.slots.values()):
        return None
    if any(node.origin is not None or node.uses != [use] for node in use.slots.values()):
        return None
    if use.names & run.plan.general:  # read by something that was not recorded
        return None
    layout = next(iter(run.plan.layouts[use.index]), None)
    if layout is None:
        return None
    digits = [_affine_term(use, b, layout) for b in _positions(run, use.index)]
    terms = [entry for entry in digits if entry is not None]
    if len(terms) < len(digits):
        return None
    name, term = terms[0]
    base = _digit_base(run.output.dtype)
    index = sum(term.b[:, :, 0].round().long() * base**k for k, (_, term) in enumerate(terms))
    assert isinstance(index, Tensor)
    index = index.to(run.output.device)  # where the model may have moved its output to
    if not torch.equal(index.flatten().sort().values, torch.arange(run.output.numel(), device=index.device)):
        return None
    arrangement = AffineLayout((term.shape,), 1, term.outputs, term.sizes, term.order)
    weight = arrangement.to_matrices([run.batch.parameters[name].detach()])[0].to(run.output.device)
    head = LastLayer(use.names, weight, index, run.output.shape)
    return head if _is_only_way(run, head) else None


def _is_wide(use: Use, weight: tuple[int, ...]) -> bool:
    """Judged by the shapes alone, since the other checks send vectors back."""
    pairs = (weight, weight[::-1]) if len(weight) == 2 else ()
    return any(outputs in use.shape and outputs >= MIN_WIDTH_RATIO * (inputs + 1) for outputs, inputs in pairs)


def _digit_base(dtype: torch.dtype) -> int:
    """The base of digits that this precision holds exactly."""
    return round(min(2.0**20, 1 / torch.finfo(dtype).eps))


def _positions(run: RecordedBatch, use: int) -> Iterator[Tensor]:
    """Send the positions of the output's entries back to a use, digit by digit."""
    numel, base, scale = run.output.numel(), _digit_base(run.output.dtype), 1
    while scale < numel:
        digit = torch.arange(numel, device=run.output.device) // scale % base
        b = run.tape.gradients([run.output], [digit.to(run.output.dtype).reshape(run.output.shape)])[use]
        yield torch.zeros_like(run.output) if b is None else b
        scale *= base


def _affine_term(use: Use, b: Tensor, layout: Layout) -> tuple[str, OuterProduct] | None:
    """The name of the weight that the use multiplies its input with, and its term."""
    for slot, node in use.slots.items():
        try:
            term = use.term(slot, b, layout)
        except Unsupported:
            return None
        if isinstance(term, OuterProduct) and term.groups == 1 and len(node.names) == 1:
            return next(iter(node.names)), term
    return None


def _is_only_way(run: RecordedBatch, head: LastLayer) -> bool:
    """Whether vectors in the null space of ``W^T`` reach no other parameter."""
    rest = [p for name, p in run.batch.parameters.items() if name not in head.names]
    basis = qr(widen(head.weight))[0]
    z = head.probe()[None].to(basis)
    norms = []
    for vector in (z, z - (z @ basis) @ basis.T):
        sent = head.to_output(vector).to(run.output.dtype)[0]
        gradients = (
            torch.autograd.grad([run.output], rest, [sent], retain_graph=True, allow_unused=True) if rest else ()
        )
        norms.append([0.0 if g is None else float(g.norm()) for g in gradients])
    rounding = 100 * torch.finfo(run.output.dtype).eps
    return all(left <= rounding * whole for whole, left in zip(*norms, strict=True))
