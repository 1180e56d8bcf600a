"""Terms that are stored in the form in which they are summed: outer products, indexed rows, dense gradients.

`AffineLayout` says where a layer's parameters are in the grouped affine map ``z[g,o] = sum_i W[g,o,i] x[g,i]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

# Indices of some inputs of a layer (None: all) and their activations (N, t, g, i) at some places. A term yields each
# place once, except places where every input is zero.
Activations = tuple[Tensor | None, Tensor]
Samples = slice | Tensor  # some samples, or their indices


@dataclass(frozen=True)
class AffineLayout:
    """Where the entries of a layer's parameters are in a (g, o, i) array; a bias is the last input.

    The weight's axes in the order (g, o, i) have `sizes`; `order` permutes them into the weight's own axes (None: the
    weight is (g * o, i) as stored).
    """

    shapes: tuple[tuple[int, ...], ...]  # of the weight and, if the block includes it, the bias
    groups: int
    outputs: int
    sizes: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @cached_property
    def dimension(self) -> int:
        """Number of entries."""
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def sides(self) -> tuple[int, int, int]:
        """Sizes (g, o, i), the bias among the inputs."""
        return self.groups, self.outputs, self.dimension // (self.groups * self.outputs)

    def repeated(self, times: int) -> AffineLayout:
        """The layout of several such layers as groups of one, parameters one after the other; not of permuted ones."""
        if self.order is not None:
            raise ValueError("the groups of a permuted weight do not follow each other")
        shapes = tuple((times * first, *rest) for first, *rest in self.shapes)
        return AffineLayout(shapes, times * self.groups, self.outputs)

    def to_matrices(self, tensors: Sequence[Tensor]) -> Tensor:
        """Arrange tensors of shapes (*batch, *shape) as (*batch, g, o, i)."""
        weight = tensors[0]
        batch = weight.shape[: weight.ndim - len(self.shapes[0])]
        if self.sizes is not None and self.order is not None:
            inner = [self.sizes[k] for k in self.order]
            back = [self.order.index(k) for k in range(len(inner))]
            weight = weight.reshape(*batch, *inner).permute(*range(len(batch)), *(len(batch) + k for k in back))
        inputs = math.prod(self.shapes[0]) // (self.groups * self.outputs)
        matrix = weight.reshape(*batch, self.groups, self.outputs, inputs)
        if len(tensors) == 1:
            return matrix
        return torch.cat([matrix, tensors[1].reshape(*batch, self.groups, self.outputs, 1)], -1)

    def from_matrices(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of `to_matrices`."""
        batch = matrix.shape[:-3]
        weight = matrix[..., :-1] if len(self.shapes) > 1 else matrix
        if self.sizes is not None and self.order is not None:
            weight = weight.reshape(*batch, *self.sizes)
            weight = weight.permute(*range(len(batch)), *(len(batch) + k for k in self.order))
        weights = [weight.reshape(*batch, *self.shapes[0])]
        return weights if len(self.shapes) == 1 else [*weights, matrix[..., -1].reshape(*batch, *self.shapes[1])]


@dataclass(frozen=True)
class OuterProduct:
    """``sum_t b[n,t,g,o] a[n,t,g,i]``, its axes split into `sizes` (g, o, i) and permuted by `order` into `shape`."""

    a: Tensor  # (N, t, g, i)
    b: Tensor  # (N, t, g, o)
    shape: tuple[int, ...]
    sizes: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    has_bias: bool = True  # whether the layer's bias, if it has one, is added at these places
    is_routed: bool = False  # whether groups are experts, which get zeros from the places that are not sent to them
    independent: bool = False  # whether b are random numbers independent of each other: their moment is its diagonal

    overlap: ClassVar[float] = 1.0  # number of places that share an input

    @property
    def device(self) -> torch.device:
        return self.b.device

    @property
    def arrived(self) -> Tensor:
        """Which places are sent to which group, (N, t, g)."""
        return (self.a != 0).any(3)

    @property
    def places(self) -> int:
        return self.b.shape[1]

    @property
    def groups(self) -> int:
        return self.b.shape[2]

    @property
    def outputs(self) -> int:
        return self.b.shape[3]

    def activations(self) -> Iterator[Activations]:
        yield None, self.a

    def backprops(self) -> Tensor:
        """(N, t, g, o)."""
        return self.b

    def assemble(self, blocks: Tensor) -> Tensor:
        """(N, g, o, i) to (N, *shape)."""
        if self.sizes is not None and self.order is not None:
            blocks = blocks.reshape(len(blocks), *self.sizes).permute(0, *(k + 1 for k in self.order))
        return blocks.reshape(len(blocks), *self.shape)

    def __len__(self) -> int:
        return self.b.shape[0]  # Python's `len` of a tensor takes several times as long

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_n weights[n] g[n]``."""
        b = (self.b * weights.to(self.b.dtype)[:, None, None, None]).flatten(0, 1)
        return self.assemble((b.permute(1, 2, 0) @ self.a.flatten(0, 1).transpose(0, 1))[None])[0]

    def gradients(self) -> Tensor:
        term = self if self.order is None else self.untransposed
        a, b = term.a, term.b
        if a.shape[1] == 1:
            return term.assemble(b[:, 0, :, :, None] * a[:, 0, :, None, :])
        return term.assemble(b.permute(0, 2, 3, 1) @ a.permute(0, 2, 1, 3))

    def inner_products(self, vector: Tensor) -> Tensor:
        """Inner products (N,) of the gradients with a tensor of their shape."""
        return self.place_products(vector).sum(1)

    def place_products(self, vector: Tensor) -> Tensor:
        """What each place adds to the `inner_products`, (N, t)."""
        layout = AffineLayout((self.shape,), self.groups, self.outputs, self.sizes, self.order)
        weight = layout.to_matrices([vector.to(self.a.dtype).reshape(self.shape)])
        moved = torch.bmm(self.a.permute(2, 0, 1, 3).flatten(1, 2), weight.mT)
        return moved.view(self.groups, *self.b.shape[:2], self.outputs).permute(1, 2, 0, 3).mul_(self.b).sum((2, 3))

    def transpose(self) -> OuterProduct:
        """The same term for the transpose of a matrix parameter."""
        if len(self.shape) != 2 or self.order not in (None, (1, 0)):
            raise ValueError("only a matrix can be transposed")
        sizes, order = (self.shape, (1, 0)) if self.order is None else (None, None)
        return replace(self, shape=self.shape[::-1], sizes=sizes, order=order)

    @property
    def untransposed(self) -> OuterProduct:
        """The same gradients of a matrix stored as (i, o), with activations and backprops exchanged."""
        if len(self.shape) != 2 or self.order != (1, 0) or self.groups > 1:
            return self
        return replace(self, a=self.b, b=self.a, sizes=None, order=None)

    def samples(self, part: Samples) -> OuterProduct:
        return replace(self, a=self.a[part], b=self.b[part])

    @property
    def has_rows(self) -> bool:
        """Whether each output of the layer has a row of the parameter, seen as a matrix (shape[0], all other axes)."""
        return self.groups == 1 and self.order is None and self.shape[0] == self.outputs

    def rows(self, start: int, stop: int) -> OuterProduct:
        """The same for some rows of the parameter, if it has rows."""
        return replace(self, b=self.b[..., start:stop], shape=(stop - start, *self.shape[1:]))

    def projected(self, left: Tensor, right: Tensor) -> Tensor:
        """``left g[n] right^T`` (N, k, l) of the gradients as matrices, if it has rows."""
        b, a = (
            (t.flatten(0, 2) @ side.mT.to(t.dtype)).view(*t.shape[:3], len(side))
            for t, side in ((self.b, left), (self.a, right))
        )
        return OuterProduct(a, b, (len(left), len(right))).gradients()

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for terms that differ in their places alone."""
        return self.shape, self.sizes, self.order, self.a.shape[2:]


@dataclass(frozen=True)
class IndexedRows:
    """``sum_t`` of `values[n,t]` added to row `index[n,t]` of a table of `shape` (rows, width)."""

    index: Tensor  # (N, t)
    values: Tensor  # (N, t, width)
    shape: tuple[int, ...]
    valid: Tensor | None = None  # (N, t), bool: False for padding, where the values are zero

    groups: ClassVar[int] = 1
    order: ClassVar[tuple[int, ...]] = (1, 0)
    overlap: ClassVar[float] = 1.0  # as of `OuterProduct`
    has_rows: ClassVar[bool] = True

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.shape[::-1]

    @property
    def outputs(self) -> int:
        return self.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def places(self) -> int:
        return self.values.shape[1]

    def backprops(self) -> Tensor:
        """(N, t, 1, width)."""
        return self.values[:, :, None]

    def __len__(self) -> int:
        return self.values.shape[0]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        values = (self.values * weights.to(self.values.dtype)[:, None, None]).flatten(0, 1)
        return values.new_zeros(self.shape).index_add(0, self.index.flatten(), values)

    def inner_products(self, vector: Tensor) -> Tensor:
        return self.place_products(vector).sum(1)

    def place_products(self, vector: Tensor) -> Tensor:
        return (self.values * vector.to(self.values.dtype).view(self.shape)[self.index]).sum(2)

    def gradients(self) -> Tensor:
        n = len(self.index)
        rows, width = self.shape
        start = torch.arange(0, n * rows, rows, device=self.index.device)[:, None]
        out = self.values.new_zeros(n * rows, width)
        return out.index_add_(0, (self.index + start).flatten(), self.values.flatten(0, 1)).view(n, rows, width)

    def rows(self, start: int, stop: int) -> IndexedRows:
        """The same for some rows of the table."""
        inside = (self.index >= start) & (self.index < stop)
        index = torch.where(inside, self.index - start, 0)
        valid = inside if self.valid is None else inside & self.valid
        return IndexedRows(index, self.values * inside[..., None], (stop - start, self.shape[1]), valid)

    def projected(self, left: Tensor, right: Tensor) -> Tensor:
        """``left g[n] right^T`` (N, k, l)."""
        left, right = left.to(self.values.dtype), right.to(self.values.dtype)
        values = (self.values.flatten(0, 1) @ right.mT).unflatten(0, self.index.shape)
        return left.mT[self.index].mT @ values

    def samples(self, part: Samples) -> IndexedRows:
        valid = None if self.valid is None else self.valid[part]
        return replace(self, index=self.index[part], values=self.values[part], valid=valid)


@dataclass(frozen=True)
class DenseGradients:
    """The per-sample gradients themselves, (N, *shape)."""

    values: Tensor

    has_rows: ClassVar[bool] = True
    places: ClassVar[int] = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return self.values.shape[0]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.tensordot(weights.to(self.values.dtype), self.values, 1)

    def inner_products(self, vector: Tensor) -> Tensor:
        rows, v = self.values.reshape(len(self), -1), vector.to(self.values.dtype).flatten()
        return (rows @ v.conj()).real if v.is_complex() else rows @ v

    def place_products(self, vector: Tensor) -> Tensor:
        """`inner_products` as those of a single place, (N, 1)."""
        return self.inner_products(vector)[:, None]

    def gradients(self) -> Tensor:
        return self.values

    def rows(self, start: int, stop: int) -> DenseGradients:
        """The same for some rows of the parameter."""
        return DenseGradients(self._matrices()[:, start:stop])

    def projected(self, left: Tensor, right: Tensor) -> Tensor:
        """``left g[n] right^T`` (N, k, l) of the gradients as matrices (shape[0], all other axes)."""
        left, right = left.to(self.values.dtype), right.to(self.values.dtype)
        products = left @ (self._matrices() @ right.mT).movedim(1, 0).flatten(1)
        return products.view(len(left), len(self), len(right)).movedim(1, 0)

    def _matrices(self) -> Tensor:
        height, *rest = self.shape or (1,)
        return self.values.reshape(len(self), height, math.prod(rest))

    def samples(self, part: Samples) -> DenseGradients:
        return DenseGradients(self.values[part])


class WithDirectForm:
    """Base of terms that sum gradients in another form, `direct`, than the one in which the layer is affine."""

    direct: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.direct.shape

    @property
    def device(self) -> torch.device:
        return self.direct.device

    def __len__(self) -> int:
        return len(self.direct)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.direct.weighted_sum(weights)

    def inner_products(self, vector: Tensor) -> Tensor:
        return self.direct.inner_products(vector)

    def place_products(self, vector: Tensor) -> Tensor:
        return self.direct.place_products(vector)

    def gradients(self) -> Tensor:
        return self.direct.gradients()


@dataclass(frozen=True)
class ElementwiseProduct(WithDirectForm):
    """``sum_t b[n,t,g] a[n,t,g]`` of a weight that multiplies entry by entry; `direct` is that sum.

    Only Kronecker factors need activations, so `inputs` recomputes the normalized input instead of storing it.
    """

    direct: DenseGradients
    inputs: Callable[[], Tensor]  # a (N, t, g)
    b: Tensor  # (N, t, g)
    has_bias: bool = True  # as of `OuterProduct`

    outputs: ClassVar[int] = 1
    sizes: ClassVar[tuple[int, ...] | None] = None
    order: ClassVar[tuple[int, ...] | None] = None
    overlap: ClassVar[float] = 1.0  # as of `OuterProduct`

    @property
    def groups(self) -> int:
        return math.prod(self.shape)

    @property
    def places(self) -> int:
        return self.b.shape[1]

    def place_products(self, vector: Tensor) -> Tensor:
        return (self.inputs() * self.b) @ vector.to(self.b.dtype).flatten()

    def activations(self) -> Iterator[Activations]:
        yield None, self.inputs()[..., None]

    def backprops(self) -> Tensor:
        """(N, t, g, 1)."""
        return self.b[..., None]

    def samples(self, part: Samples) -> ElementwiseProduct:
        return replace(self, direct=self.direct.samples(part), b=self.b[part], inputs=lambda: self.inputs()[part])

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickles, which take no function that was made inside another: with the inputs as they are."""
        return type(self), (self.direct, _Known(self.inputs()), self.b, self.has_bias)


@dataclass(frozen=True)
class _Known:
    """A function that returns a tensor."""

    value: Tensor

    def __call__(self) -> Tensor:
        return self.value


def without_bias(term: Any) -> Any:
    """A term of places at which the layer adds no bias."""
    if "has_bias" in term.__dataclass_fields__:
        return replace(term, has_bias=False)
    direct = getattr(term, "direct", None)
    return term if direct is None else replace(term, direct=without_bias(direct))
