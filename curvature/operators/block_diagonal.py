"""Diagonal and block-diagonal matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from curvature.linalg import damp_eigenvalues, require_finite
from curvature.operators.base import Operator
from curvature.operators.space import Named, Space, require_dense_size, rows_of_name

Curvature = Operator | Named  # a matrix, or a diagonal by parameter


class Diagonal(Operator):
    """``diag(values)``; its entries count as exact, so any positive entry can be inverted.

    Args:
        space: of the parameters.
        values: (P,).

    Raises:
        ValueError: wrong shape, dtype or device, or not finite.
    """

    fields = ("space", "values")

    def __init__(self, space: Space, values: Tensor) -> None:
        super().__init__(space)
        self.values = space.kept(values, (space.size,), "the diagonal")

    def _damped(self, damping: float) -> Tensor:
        return damp_eigenvalues(self.values, torch.zeros_like(self.values), damping, repr(self))

    def _matmat(self, V: Tensor) -> Tensor:
        return self.values[:, None] * V

    def to_dense(self) -> Tensor:
        require_dense_size(self.space)
        return self.values.diag()

    def diagonal(self) -> Tensor:
        return self.values

    def frobenius_norm(self) -> Tensor:
        return self.values.norm()

    def _eigenvalues(self) -> Tensor:
        return self.values.sort().values

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        return V / self._damped(damping)[:, None]

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        return Z / self._damped(damping).sqrt()[:, None]

    def inverse(self, damping: float = 0.0) -> Operator:
        return Diagonal(self.space, 1 / self._damped(float(damping)))

    def logdet(self, damping: float = 0.0) -> Tensor:
        return self._damped(float(damping)).log().sum()

    def scaled(self, factor: float) -> Operator:
        return Diagonal(self.space, require_finite(factor) * self.values)

    def damped(self, damping: float) -> Operator:
        return Diagonal(self.space, self.values + require_finite(damping))

    def __add__(self, other: Operator) -> Operator:
        if isinstance(other, Diagonal) and other.space == self.space:
            return Diagonal(self.space, self.values + other.values)
        return super().__add__(other)


class BlockDiagonal(Operator):
    """Operators on disjoint sets of parameters; every method works block by block.

    Args:
        space: of all parameters.
        blocks: operators on subspaces that together cover the space, in any order; names may interleave. One may be
            over rows of parameters, ``"weight[0:4]"``, as of the projections of cross attention, which share a weight.

    Attributes:
        blocks: the operators by the name of their first parameter.

    Raises:
        ValueError: a parameter is in no block, in several, or differs from that of the space.
    """

    fields = ("space", "blocks")

    def __init__(self, space: Space, blocks: Iterable[Operator]) -> None:
        super().__init__(space)
        listed = list(blocks)
        names = [name for block in listed for name in block.space.names]
        wholes = [name if name in space.names else rows_of_name(name)[0] for name in names]
        parts = [space.part(name) for name, whole in zip(names, wholes, strict=True) if whole in space.names]
        ends = sorted((part.start, part.start + math.prod(part.shape)) for part in parts)
        if len(parts) < len(names) or [0, *(stop for _, stop in ends)] != [*(start for start, _ in ends), space.size]:
            raise ValueError(
                f"blocks should cover each parameter once: missing {sorted(set(space.names) - set(wholes))}, "
                f"not in the space {sorted(set(wholes) - set(space.names))}, "
                f"more than once {sorted({name for name in names if names.count(name) > 1})}"
            )
        self.order = sorted(names, key=lambda name: space.part(name)[1:])  # as the flat vector has them
        for block in listed:
            expected = space.subspace(block.space.names)
            if block.space != expected:
                raise ValueError(f"a block is over {block.space}, which in the whole space is {expected}")
        self.blocks = {block.space.names[0]: block for block in listed}

    __iter__ = None  # `for block in K.blocks.values()`; Python would go by K[0], K[1], ...

    def __getitem__(self, layer: str) -> Operator:
        """The block of a layer, by the name of its module or of a parameter; KeyError if there is none, or several."""
        is_of = lambda block: any(f"{name}.".startswith(f"{layer}.") for name in block.space.names)
        matching = [block for block in self.blocks.values() if is_of(block)]
        if len(matching) != 1:
            there = [block.space.names[0] for block in matching] or self.blocks
            raise KeyError(f"{len(matching)} blocks are called {layer!r}: there are {', '.join(there)}")
        return matching[0]

    def by_blocks(self, function: Callable[[Operator, Tensor], Tensor], V: Tensor) -> Tensor:
        """Apply a function to each block and its rows (P_block, ...) of V, where it is, and concatenate the results."""
        home = self.space.device
        sizes = [math.prod(self.space.part(name).shape) for name in self.order]
        rows = dict(zip(self.order, V.split(sizes), strict=True))
        results: dict[str, Tensor] = {}
        for block in self.blocks.values():
            names = block.space.names
            result = function(block, torch.cat([rows[name] for name in names]).to(block.space.device)).to(home)
            results.update(zip(names, result.split(block.space.sizes), strict=True))
        return torch.cat([results[name] for name in self.order])

    def _of_blocks(self, function: Callable[[Operator], Tensor]) -> list[Tensor]:
        """What a function gives of each block, on the device of flat vectors."""
        return [function(block).to(self.space.device) for block in self.blocks.values()]

    def _matmat(self, V: Tensor) -> Tensor:
        return self.by_blocks(lambda block, rows: block._matmat(rows), V)

    def diagonal(self) -> Tensor:
        template = self.space.positions(self.space.names)  # only its rows matter
        return self.by_blocks(lambda block, _: block.diagonal(), template)

    def trace(self) -> Tensor:
        return torch.stack(self._of_blocks(lambda block: block.trace())).sum()

    def frobenius_norm(self) -> Tensor:
        return torch.stack(self._of_blocks(lambda block: block.frobenius_norm())).norm()

    def _eigenvalues(self) -> Tensor:
        return torch.cat(self._of_blocks(lambda block: block._eigenvalues())).sort().values

    def _largest_eigenvalues(self, k: int) -> Tensor:
        parts = self._of_blocks(lambda block: block.eigenvalues(min(k, block.space.size)))
        return torch.cat(parts).sort().values[-k:]

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        return self.by_blocks(lambda block, rows: block._solve(rows, damping), V)

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        return self.by_blocks(lambda block, rows: block._inverse_root(rows, damping), Z)

    def inverse(self, damping: float = 0.0) -> Operator:
        return self._map_blocks(lambda block: block.inverse(damping))

    def logdet(self, damping: float = 0.0) -> Tensor:
        return torch.stack(self._of_blocks(lambda block: block.logdet(damping))).sum()

    def _in_16_bits(self) -> Operator:
        return self._map_blocks(lambda block: block.to(torch.bfloat16))

    def scaled(self, factor: float) -> Operator:
        return self._map_blocks(lambda block: block.scaled(factor))

    def damped(self, damping: float) -> Operator:
        return self._map_blocks(lambda block: block.damped(damping))

    def factored_damping(self, damping: float) -> Operator:
        """Every block with its own `factored_damping`: exact for those that have no Kronecker factors."""
        return self._map_blocks(lambda block: block.factored_damping(damping))

    def _map_blocks(self, function: Callable[[Operator], Operator]) -> BlockDiagonal:
        return BlockDiagonal(self.space, [function(block) for block in self.blocks.values()])

    def to_dense(self) -> Tensor:
        require_dense_size(self.space)
        dense = torch.zeros(self.shape, dtype=self.space.dtype, device=self.space.device)
        for block in self.blocks.values():
            where = self.space.positions(block.space.names)
            dense[where[:, None], where] = block.to_dense().to(self.space.device)
        return dense

    def __add__(self, other: Operator) -> Operator:
        """Blocks of the same parameters are added apart."""
        if isinstance(other, BlockDiagonal) and other.space == self.space:
            pairs = [(block, other.blocks.get(name)) for name, block in self.blocks.items()]
            alike = [(a, b) for a, b in pairs if b is not None and a.space == b.space]
            if len(alike) == len(pairs):
                return BlockDiagonal(self.space, [a + b for a, b in alike])
        return super().__add__(other)

    def _details(self) -> list[str]:
        return [f"{len(self.blocks)} blocks"]

    def __repr__(self) -> str:
        blocks = (repr(block).replace("\n", "\n  ") for block in self.blocks.values())
        return "\n  ".join([super().__repr__(), *blocks])


def as_operator(K: Curvature) -> Operator:
    """An operator as it is, and as a matrix the diagonal that `fisher_diagonal` gives as tensors by parameter.

    Raises:
        TypeError: neither of these.
    """
    if isinstance(K, Operator):
        return K
    if not isinstance(K, Mapping) or not K or not all(isinstance(x, Tensor) for x in K.values()):
        raise TypeError(
            "curvature: expected an operator, as curvature.kfac(...) gives, or a diagonal as tensors by parameter "
            f"name, as curvature.fisher_diagonal(...) gives, found a {type(K).__name__}"
        )
    space = Space.of(K)
    return BlockDiagonal(space, [Diagonal(space.subspace([name]), x.detach().flatten()) for name, x in K.items()])
