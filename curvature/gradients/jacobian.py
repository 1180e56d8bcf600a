"""Jacobians of values that may contain derivatives of the model: residuals with Laplacians, forces, divergences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvature.arguments import check_module
from curvature.functional import ExactNorms
from curvature.gradients.jacobian_products import ROWS_ELEMENTS, rows_of_each
from curvature.gradients.parameter_terms import Terms, terms_by_parameter, zeros
from curvature.gradients.plans import graph_signature, kept_plan, learn
from curvature.linalg import stack
from curvature.recording import (
    Tape,
    preserve_state,
    require_exact_derivatives,
    tape_from_graph,
    trained_parameters,
    unwrap_compiled,
)
from curvature.terms import (
    DenseGradients,
    ElementwiseProduct,
    OuterProduct,
    Term,
    contractions,
    promote,
    sum_of_squares,
    to_device,
)

STACKED_ELEMENTS = 1 << 26  # entries of activations and backprops up to which pieces are put together
NO_PARAMETERS = "model: no parameter requires a gradient"


def residual_jacobian(model: nn.Module, residual: Callable[..., Tensor], *batch: Tensor) -> dict[str, Tensor]:
    """Gradient of each sample's residual with respect to every parameter, also where the residual differentiates.

    ``residual(model, *batch)`` may call ``torch.autograd.grad(..., create_graph=True)`` on the model, to any order: a
    Laplacian, a divergence, a force. Row n is what it gives for sample n alone, where samples do not mix.

    Args:
        model: any module; its parameters that do not require a gradient are left out.
        residual: a function of the model and the batch, with one value (N,) for each sample.
        batch: tensors whose axis 0 holds the samples. The residual gets them requiring a gradient, detached from the
            caller's, where they are floating point.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of residual / parameter. For
        an empty batch (N = 0) the residual is not called.

    Raises:
        TypeError: `model` is no module, or the residual no tensor.
        ValueError: the residual is not (N,), or nothing requires a gradient.
    """
    check_module(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(NO_PARAMETERS)
    if not batch or not all(isinstance(x, Tensor) and x.ndim for x in batch):
        raise TypeError("batch: expected tensors whose axis 0 holds the samples")
    if len({len(x) for x in batch}) > 1:
        raise ValueError(f"batch: expected as many samples in each tensor, found {[len(x) for x in batch]}")
    if not len(batch[0]):
        return {name: p.new_empty(0, *p.shape) for name, p in trained_parameters(model).items()}
    with preserve_state(model):
        detached = [x.detach().requires_grad_(x.is_floating_point()) for x in batch]
        with ExactNorms():
            values = residual(model, *detached)
        if not isinstance(values, Tensor):
            raise TypeError(f"residual: expected a tensor (N,), found {type(values).__name__}")
        if values.shape != (len(batch[0]),):
            raise ValueError(
                f"residual: expected shape ({len(batch[0])},), one value a sample, found {tuple(values.shape)}"
            )
        return Jacobian.of(values, model).rows()


Parts = Sequence[tuple[int, Mapping[str, list[Term]]]]


@dataclass(frozen=True)
class Jacobian:
    """Derivatives of values (M,) with respect to the P entries of the parameters, as terms; built only on request.

    Attributes:
        parts: number of values and terms of each piece; values from ``torch.cat`` have one piece for each input.
        shapes: of the parameters, by name.
        zero: in the values' precision, on their device. Terms are where their parameters are; what is made of several
            comes to the values.
    """

    parts: Parts
    shapes: Mapping[str, tuple[int, ...]]
    zero: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(M, P)."""
        return sum(size for size, _ in self.parts), sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def bytes(self) -> int:
        """Memory of the terms."""
        terms = [term for _, part in self.parts for of_parameter in part.values() for term in of_parameter]
        held = [x for term in terms for x in vars(getattr(term, "term", term)).values() if isinstance(x, Tensor)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())

    @staticmethod
    def of(values: Tensor, model: nn.Module) -> Jacobian:
        """The Jacobian of values (M,) that were computed with gradients enabled; keeps their graph.

        Nothing runs again: the graph shows how the values were computed, and the model only names its parameters.

        Raises:
            ValueError: the values are not (M,) with M >= 1, or were computed without gradients; no parameter of the
                model requires one; the values differentiate a layer, batch or instance norm and were not computed in
                the context `curvature.functional.ExactNorms()` (torch's kernels have wrong third derivatives).
        """
        if values.ndim != 1 or not len(values):
            raise ValueError(f"values: expected shape (M,), M at least 1, found {tuple(values.shape)}")
        model = unwrap_compiled(model)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError(NO_PARAMETERS)
        if not values.requires_grad:
            raise ValueError("values: they were computed without gradients, so that their derivatives are unknown")
        pieces = _pieces(values.detach(), get_gradient_edge(values))
        parts = [(len(value), _terms(value, edge, parameters, model)) for value, edge in pieces]
        return Jacobian(parts, {name: tuple(p.shape) for name, p in parameters.items()}, values.new_zeros(()))

    @staticmethod
    def recorded(tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], model: nn.Module) -> Jacobian:
        """The Jacobians (N, P) of the samples' ``<output, vector>``, a piece for each of k vectors and each length N.

        Args:
            tape: of the forward pass that gave the outputs (N, ...), samples along their first axis. P are the
                parameters that it was made for.
            vectors: (k, N, ...) for each output. Outputs of one length are of the same samples.

        In single precision at least, whatever the precision of model and outputs.
        """
        parameters = {name: p for name, p in model.named_parameters() if name in tape.parameters}
        parts = []
        alike = [[k for k, x in enumerate(outputs) if len(x) == n] for n in dict.fromkeys(map(len, outputs))]
        for sent, own_outputs in itertools.product(zip(*vectors, strict=True), alike):
            with torch.enable_grad():
                values = stack((outputs[k] * sent[k])[..., None].flatten(1).sum(1) for k in own_outputs).sum(0)
            parts.append((len(values), _terms(values.detach(), get_gradient_edge(values), parameters, model, tape)))
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        return Jacobian(parts, shapes, outputs[0].new_zeros(())).promoted(torch.float32).stacked()

    def rows(self) -> dict[str, Tensor]:
        """{name: (M, *shape)}."""
        of_pieces = {name: [contractions.gradients(terms[name]) for _, terms in self.parts] for name in self.shapes}
        return {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in of_pieces.items()}

    def to_dense(self) -> Tensor:
        """(M, P), parameters in the order of ``named_parameters()``."""
        return torch.cat([self._here(rows).reshape(len(rows), -1) for rows in self.rows().values()], 1)

    def _here(self, x: Tensor) -> Tensor:
        return x.to(self.zero.device)

    def gram(self) -> Tensor:
        """``J J^T`` (M, M)."""
        blocks = [[self.zero for _ in self.parts] for _ in self.parts]
        for k, (_, left) in enumerate(self.parts):
            diagonal = contractions.settle(contractions.tentative_gram(left[name]) for name in self.shapes)
            blocks[k][k] = contractions.sum_in_place(map(self._here, diagonal))
            for j, (_, right) in enumerate(self.parts[:k]):
                of_parameters = (self._here(contractions.cross_gram(left[name], right[name])) for name in self.shapes)
                block = contractions.sum_in_place(of_parameters)
                blocks[k][j], blocks[j][k] = block, block.mT
        return torch.cat([torch.cat(row, 1) for row in blocks])

    def norms(self) -> Tensor:
        """Squared norms of the rows, (M,)."""
        squares = contractions.each_norms_squared(terms[name] for _, terms in self.parts for name in self.shapes)
        norms, count = map(self._here, squares), len(self.shapes)
        return torch.cat([contractions.sum_in_place(itertools.islice(norms, count)) for _ in self.parts])

    def squares(self) -> dict[str, Tensor]:
        """The diagonal of ``J^T J``, in the shapes of the parameters."""
        summed = contractions.sum_in_place
        return {name: summed(sum_of_squares(terms[name]) for _, terms in self.parts) for name in self.shapes}

    def transposed(self, z: Tensor) -> dict[str, Tensor]:
        """``J^T z``, of the parameters' shapes and where they are."""
        pieces = z.split([size for size, _ in self.parts])
        both = list(zip(pieces, self.parts, strict=True))
        summed = contractions.sum_in_place
        return {
            name: summed(contractions.weighted_sum(terms[name], v.to(terms[name][0].device)) for v, (_, terms) in both)
            for name in self.shapes
        }

    def times(self, vector: Mapping[str, Tensor]) -> Tensor:
        """``J v`` (M,)."""
        return self.columns(vector, [list(self.shapes)])[:, 0]

    def columns(self, vector: Mapping[str, Tensor], groups: Sequence[Sequence[str]]) -> Tensor:
        """``J v`` restricted to the parameters of each group: (M, groups)."""
        inner, summed = contractions.inner_products, contractions.sum_in_place
        of_group = lambda terms, group: summed(self._here(inner(terms[k], vector[k])) for k in group)
        return torch.cat([torch.stack([of_group(terms, group) for group in groups], 1) for _, terms in self.parts])

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Tensors by name to (P,)."""
        return torch.cat([self._here(named[name].flatten()) for name in self.shapes])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """(P,) to tensors by name."""
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()])
        both, terms = zip(self.shapes.items(), parts, strict=True), self.parts[0][1]
        return {name: part.reshape(shape).to(terms[name][0].device) for (name, shape), part in both}

    def depends(self, name: str) -> bool:
        """Whether a value depends on this parameter."""
        return any(bool(contractions.norms_squared(terms[name]).any()) for _, terms in self.parts)

    def restricted(self, names: Iterable[str]) -> Jacobian:
        """The columns of these parameters alone, of values where the first parameter is."""
        names = list(names)
        parts = [(size, {name: terms[name] for name in names}) for size, terms in self.parts]
        zero = self.zero.to(parts[0][1][names[0]][0].device) if parts else self.zero
        return replace(self, parts=parts, shapes={name: self.shapes[name] for name in names}, zero=zero)

    def stacked(self) -> Jacobian:
        """The same Jacobian with small pieces of like terms put together: a few large products in place of many."""
        return replace(self, parts=_stacked(self.parts))

    def promoted(self, dtype: torch.dtype) -> Jacobian:
        """The same Jacobian with products in at least this precision."""
        parts = _each(self.parts, lambda terms: [promote(t, dtype) for t in terms])
        return replace(self, parts=parts, zero=self.zero.to(torch.promote_types(self.zero.dtype, dtype)))

    def merged(self) -> Jacobian:
        """The same Jacobian with the terms of each parameter merged, for many products."""
        return replace(self, parts=_each(self.parts, contractions.merge_terms))

    def scaled(self, factor: float) -> Jacobian:
        """``factor J``; its rows are built, unless the factor is one."""
        dense: Callable[[list[Term]], list[Term]] = lambda some: [DenseGradients(factor * contractions.gradients(some))]
        return self if factor == 1 else replace(self, parts=_each(self.parts, dense))

    def plus(self, other: Jacobian) -> Jacobian:
        """The sum with that of other values of the same samples; one below the other where their numbers differ."""
        both = list(zip(self.parts, other.parts, strict=False))
        if [size for size, _ in self.parts] != [size for size, _ in other.parts]:
            return replace(self, parts=[*self.parts, *other.parts])
        return replace(self, parts=[(n, {k: [*terms[k], *more[k]] for k in terms}) for (n, terms), (_, more) in both])

    def gathered(self, objects: Callable[[Any], Sequence[Any]]) -> tuple[Jacobian, Tensor]:
        """The rows of all processes; `objects` is an all-gather of Python objects.

        Returns:
            The Jacobian, with the pieces that all processes have stacked; and for each row its index among the rows of
            all processes in order.
        """
        # the inputs of norms are recomputed by functions, which cannot be sent, and rows do without
        plain = _each(self.parts, lambda terms: [t.direct if isinstance(t, ElementwiseProduct) else t for t in terms])
        of_processes = objects(_moved(plain, "cpu"))
        numbers = iter(range(sum(size for theirs in of_processes for size, _ in theirs)))
        rows = [[list(itertools.islice(numbers, size)) for size, _ in theirs] for theirs in of_processes]
        here = [_moved(theirs, self.zero.device) for theirs in of_processes]
        if len({len(theirs) for theirs in here}) == 1:
            parts = [part for piece in zip(*here, strict=True) for part in _stacked(list(piece))]
            order = [row for piece in zip(*rows, strict=True) for part in piece for row in part]
        else:
            parts = [part for theirs in here for part in theirs]
            order = [row for theirs in rows for part in theirs for row in part]
        return replace(self, parts=parts), torch.tensor(order, device=self.zero.device)

    def centred(self) -> CentredJacobian:
        """The Jacobian less the mean of its rows: ``Jc = J - 1 mean(J)``.

        For stochastic reconfiguration: with J the Jacobian of log(psi), psi a real wave function, at N points drawn
        from psi^2, and local energies E (N,) at these,

            d = LeastSquares(J.centred()).solve(-(E - E.mean()), damping)

        is ``-(Jc^T Jc + damping)^-1 Jc^T (E - mean E)``, solved for in the smaller of parameter and sample space
        (minSR, arXiv:2302.01941, arXiv:2401.10190). With ``S = Jc^T Jc / N`` (the Fisher matrix of psi^2 is 4 S) and
        the gradient of the mean energy ``g = 2 Jc^T (E - mean E) / N`` this is ``d = -1/2 (S + damping / N)^-1 g``, so
        that ``p += lr * d`` goes a time lr (hbar / unit of E) along imaginary time. The damping is in units of
        1 / parameter^2; since it is added to a sum over points, it is N times one that is added to S.
        """
        return CentredJacobian(self.parts, self.shapes, self.zero)


@dataclass(frozen=True)
class CentredJacobian(Jacobian):
    """A Jacobian less the mean of its rows; `parts` keep it. Exact to the rounding of the uncentred rows."""

    def rows(self) -> dict[str, Tensor]:
        return {name: rows - rows.mean(0) for name, rows in super().rows().items()}

    def gram(self) -> Tensor:
        gram = super().gram()
        gram = gram - gram.mean(0)
        return gram - gram.mean(1, keepdim=True)

    def norms(self) -> Tensor:
        mean = self._mean()
        square = contractions.sum_in_place(m.square().sum() for m in mean.values())
        return (super().norms() - 2 * self.times(mean) - square).clamp(min=0)

    def squares(self) -> dict[str, Tensor]:
        mean, size = self._mean(), self.shape[0]
        return {name: (x - size * mean[name].square()).clamp(min=0) for name, x in super().squares().items()}

    def transposed(self, z: Tensor) -> dict[str, Tensor]:
        return super().transposed(z - z.mean())

    def columns(self, vector: Mapping[str, Tensor], groups: Sequence[Sequence[str]]) -> Tensor:
        columns = super().columns(vector, groups)
        return columns - columns.mean(0)

    def _mean(self) -> dict[str, Tensor]:
        size = self.shape[0]
        return super().transposed(self.zero.new_full((size,), 1 / size))


def _each(parts: Parts, change: Callable[[list[Term]], list[Term]]) -> list[tuple[int, dict[str, list[Term]]]]:
    return [(size, {name: change(of_parameter) for name, of_parameter in terms.items()}) for size, terms in parts]


def _moved(parts: Parts, device: torch.device | str) -> list[tuple[int, dict[str, list[Term]]]]:
    return _each(parts, lambda terms: [to_device(t, device) for t in terms])


def _stacked(parts: Parts) -> Parts:
    together: dict[str, list[Term]] = {}
    for name in parts[0][1]:
        pieces = [terms[name] for _, terms in parts]
        held = sum(t.a.numel() + t.b.numel() if isinstance(t, OuterProduct) else 0 for terms in pieces for t in terms)
        rows = contractions.stack_terms(pieces) if held <= STACKED_ELEMENTS else None
        if rows is None:
            return parts
        together[name] = rows
    return [(sum(size for size, _ in parts), together)]


def _pieces(values: Tensor, edge: GradientEdge) -> list[tuple[Tensor, GradientEdge]]:
    """The inputs of the ``torch.cat`` that made the values (N,), with the edge where each one's backprop arrives."""
    if edge.node.name() != "CatBackward0":
        return [(values, edge)]
    edges = [GradientEdge(step, number) for step, number in edge.node.next_functions if step is not None]
    sizes = [one.node._input_metadata[one.output_nr].shape[0] for one in edges]
    if sum(sizes) < len(values):  # one of them is a constant
        return [(values, edge)]
    both = zip(values.split(sizes), edges, strict=True)
    return [piece for value, one in both if len(value) for piece in _pieces(value, one)]


def _terms(
    values: Tensor, edge: GradientEdge, parameters: Mapping[str, nn.Parameter], model: nn.Module,
    recorded: Tape | None = None,
) -> Terms:  # fmt: skip
    """The gradients of `values` (N,), whose graph begins at the edge, as terms."""
    require_exact_derivatives(edge)
    tape = tape_from_graph(edge, parameters) if recorded is None else recorded
    tape.graph = graph_signature(edge, parameters.values())

    def reference(n: Tensor) -> dict[str, Tensor]:
        one = torch.zeros_like(values).index_fill_(0, n, 1)
        gradients = torch.autograd.grad(edge, list(parameters.values()), one, retain_graph=True, materialize_grads=True)
        return dict(zip(parameters, gradients, strict=True))

    key = len(values), recorded is None
    plan = kept_plan(model, key, tape)
    if plan is None:
        plan, backprops = learn(model, key, tape, values, reference, edge)
    else:
        backprops = tape.gradients([edge], [torch.ones_like(values)])
    terms, failed = terms_by_parameter(tape, backprops, plan.layouts, plan.general, is_precise=True)
    general = {name: p for name, p in parameters.items() if name in failed}
    if general:  # one backward pass for each row
        step = max(1, ROWS_ELEMENTS // (len(values) * max(p.numel() for p in general.values())))
        rows = rows_of_each(edge, list(general.values()), values, step)
        terms |= {name: [DenseGradients(g)] for name, g in zip(general, rows, strict=True)}
    return {name: terms.get(name) or [zeros(tape, name, len(values))] for name in tape.parameters}
