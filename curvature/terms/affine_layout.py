"""Where the weight and bias of a layer are in the grouped affine map ``z[g,o] = sum_i W[g,o,i] x[g,i]``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
        found = [weight.reshape(*batch, *self.shapes[0])]
        return found if len(self.shapes) == 1 else [*found, matrix[..., -1].reshape(*batch, *self.shapes[1])]
