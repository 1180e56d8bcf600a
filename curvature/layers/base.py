"""What a layer rule is, the table of rules, and the axes of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from curvature.terms import DenseGradients, Term


class Unsupported(Exception):
    """A use that a rule cannot view per sample; the exact general path takes over."""


class Layout(NamedTuple):
    """Where the samples are: axis `dim` of a tensor has size ``outer * samples * inner``."""

    dim: int
    outer: int
    samples: int
    inner: int

    @property
    def size(self) -> int:
        """Of the axis."""
        return self.outer * self.samples * self.inner

    def front(self, x: Tensor, dim: int | None = None) -> Tensor:
        """(..., outer * N * inner, ...) to (N, ..., outer * inner, ...); one more axis, the others in their place."""
        dim = self.dim if dim is None else dim
        if self.outer == 1 and self.inner == 1:
            return x.movedim(dim, 0).unsqueeze(dim + 1)
        x = x.unflatten(dim, (self.outer, self.samples, self.inner)).movedim(dim + 1, 0)
        return x.flatten(dim + 1, dim + 2)


class RecordedCall(NamedTuple):
    """One recorded call: the arguments by name, its output's shape."""

    args: dict[str, Any]
    shape: tuple[int, ...]


class Rule:
    """How one layer's input and backprop are viewed per sample.

    `functions` are the torch functions it explains, `signature` their arguments in order, `parameters` those
    arguments that may be parameters.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    signature: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    bias_of: ClassVar[Mapping[str, str]] = {}  # weight to the bias that is one more input of it, constantly one

    def bind(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name; the data in them as they are before the call."""
        return dict(zip(self.signature, args, strict=False)) | dict(kwargs)

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        """The per-sample gradients of argument `slot`, given the backprop `b` (the output's shape).

        Raises:
            Unsupported: this call has no per-sample view.
        """
        raise NotImplementedError

    def counts_over_batch(self, call: RecordedCall) -> bool:
        """Whether torch's batch gradient is not the sum of the samples' own (frequencies counted over the batch)."""
        return False


RULES: dict[Callable[..., Any], Rule] = {}


def register(rule: type[Rule]) -> type[Rule]:
    """Class decorator: enter a rule into the table for each of its functions."""
    instance = rule()
    for function in rule.functions:
        RULES[function] = instance
    return rule


def sum_over_broadcast(
    per_place: Tensor, shape: Sequence[int], layout: Layout, offset: int | None = None
) -> DenseGradients:
    """Sum per-place gradients, the layout's axes in (N, ...), over all that a parameter of `shape` is broadcast along.

    `offset` is the output axis of the parameter's first axis; None aligns to the right as broadcasting does.
    """
    ndim = per_place.ndim - 1
    offset = ndim - len(shape) if offset is None else offset
    keep = {offset + k for k, size in enumerate(shape) if size != 1}
    if layout.dim in keep:
        raise Unsupported("the parameter varies along the axis of the samples")
    summed = [k + 1 for k in range(ndim) if k not in keep and per_place.shape[k + 1] != 1]
    out = per_place.sum(summed) if summed else per_place
    return DenseGradients(out.reshape(len(per_place), *shape))
