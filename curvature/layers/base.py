"""The base class of layer rules, their table, and where samples are in a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from curvature.terms import DenseGradients, Term


class Unsupported(Exception):
    """A rule has no per-sample view of a call; the exact general path takes over."""


class Layout(NamedTuple):
    """Where the samples are: axis `dim` of a tensor has size ``outer * samples * inner``."""

    dim: int
    outer: int
    samples: int
    inner: int

    @property
    def size(self) -> int:
        """Size of the axis."""
        return self.outer * self.samples * self.inner

    def front(self, x: Tensor) -> Tensor:
        """(..., outer * N * inner, ...) to (N, ..., outer * inner, ...): one axis more, the others where they were."""
        dim = self.dim
        if self.outer == 1 and self.inner == 1:
            return (x.movedim(dim, 0) if dim else x).unsqueeze(dim + 1)
        x = x.unflatten(dim, (self.outer, self.samples, self.inner)).movedim(dim + 1, 0)
        return x.flatten(dim + 1, dim + 2)


class RecordedCall(NamedTuple):
    """One recorded call: its arguments by name, and the shape of its output."""

    args: dict[str, Any]
    shape: tuple[int, ...]


class Rule:
    """How to view one layer's input and backprop per sample.

    Attributes:
        functions: the torch functions that this rule covers.
        signature: their arguments, in order.
        parameters: the arguments that may be parameters.
        bias_of: maps a weight to the bias that acts as one more input of it, which is always one.
    """

    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    signature: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    bias_of: ClassVar[Mapping[str, str]] = {}

    def bind(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, with the data as they are before the call."""
        return dict(zip(self.signature, args, strict=False)) | dict(kwargs)

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        """The per-sample gradients of argument `slot`, given the backprop `b` of the output's shape.

        Raises:
            Unsupported: this call has no per-sample view.
        """
        raise NotImplementedError

    def bias_slot(self, call: RecordedCall, slot: str) -> str | None:
        """The bias of a weight, as in `bias_of`; None where this call gives it another factor than the weight."""
        return self.bias_of.get(slot)

    def counts_over_batch(self, call: RecordedCall) -> bool:
        """Whether torch's batch gradient is not the sum over samples (frequencies counted over the whole batch)."""
        return False


RULES: dict[Callable[..., Any], Rule] = {}


def register(rule: type[Rule]) -> type[Rule]:
    """Class decorator: add the rule to the table for each of its functions."""
    RULES.update(dict.fromkeys(rule.functions, rule()))
    return rule


def sum_over_broadcast(
    per_place: Tensor, shape: Sequence[int], layout: Layout, offset: int | None = None
) -> DenseGradients:
    """Sum gradients (N, *output axes) to a parameter of `shape` from axis `offset` on; None aligns to the right."""
    ndim = per_place.ndim - 1
    offset = ndim - len(shape) if offset is None else offset
    keep = {offset + k for k, size in enumerate(shape) if size != 1}
    if layout.dim in keep:
        raise Unsupported("the parameter varies along the axis of the samples")
    summed = [k + 1 for k in range(ndim) if k not in keep and per_place.shape[k + 1] != 1]
    out = per_place.sum(summed) if summed else per_place
    return DenseGradients(out.reshape(per_place.shape[0], *shape))
