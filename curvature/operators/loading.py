"""Operators from their states: loaded from files, or made when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from curvature.operators.base import Operator
from curvature.operators.block_diagonal import BlockDiagonal
from curvature.operators.export import copy_if_view, map_tensors, restore
from curvature.operators.space import Space


class Stored(Operator):
    """A matrix that is kept as its state: in few bits, or in a file.

    Every method makes the matrix, in the precision of the space, and forgets it: only what a solve needs is in memory,
    as it runs, and a decomposition is made anew for the next one (`inverse` keeps it).

    Args:
        space: of the parameters.
        held: what `Operator.state` gives. Its floating-point tensors may be of another dtype than the space, on another
            device, and mapped from a file.
    """

    fields = ("space", "held")

    def __init__(self, space: Space, held: Mapping[str, Any]) -> None:
        super().__init__(space)
        self.held = dict(held)

    def made(self) -> Operator:
        """The matrix itself."""
        device, dtype = self.space.device, self.space.dtype
        state = map_tensors(lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device), self.held)
        found = restore(state, None if self.space.places else device)
        assert isinstance(found, Operator)
        return found

    def state(self) -> dict[str, Any]:
        return {"structure": "Stored", "space": self.space.state(), "held": map_tensors(copy_if_view, self.held)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device | str | None) -> Stored:
        return cls(Space.restore(state["space"], device), state["held"])

    def to(self, dtype: torch.dtype) -> Any:
        return self.made().to(dtype)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.made()._matmat(V)

    def to_dense(self) -> Tensor:
        return self.made().to_dense()

    def compact(self) -> Operator:
        return self.made().compact()

    def diagonal(self) -> Tensor:
        return self.made().diagonal()

    def trace(self) -> Tensor:
        return self.made().trace()

    def frobenius_norm(self) -> Tensor:
        return self.made().frobenius_norm()

    def _eigenvalues(self) -> Tensor:
        return self.made()._eigenvalues()

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        return self.made()._solve(V, damping)

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        return self.made()._inverse_root(Z, damping)

    def inverse(self, damping: float = 0.0) -> Operator:
        return self.made().inverse(damping)

    def logdet(self, damping: float = 0.0) -> Tensor:
        return self.made().logdet(damping)

    def scaled(self, factor: float) -> Operator:
        return self.made().scaled(factor)

    def damped(self, damping: float) -> Operator:
        return self.made().damped(damping)

    def factored_damping(self, damping: float) -> Operator:
        return self.made().factored_damping(damping)

    def _details(self) -> list[str]:
        return [f"{self.held['structure']}, kept"]


def load(path: str | PathLike[str], device: torch.device | str | None = None, *, lazily: bool = False) -> Operator:
    """Load the operator that `Operator.save` wrote.

    Only tensors, numbers, strings and lists of them are read, so untrusted files cannot run code.

    Args:
        path: of the file.
        device: of the operator; None for the device it was saved from.
        lazily: map the file into memory and read a block when a method needs it, and again at the next time. A solve
            with one block of a `BlockDiagonal` reads that block alone. The file has to stay as it is meanwhile.

    Raises:
        ValueError: the file holds no matrix that this version knows.
    """
    place: Any = "cpu" if lazily else device
    state = torch.load(path, map_location=place, weights_only=True, mmap=True if lazily else None)
    if not isinstance(state, dict) or "structure" not in state or state["structure"] == "Space":
        raise ValueError(f"{path} holds no matrix saved by Operator.save")
    found = _lazily(state, device) if lazily else restore(state, device)
    if not isinstance(found, Operator):
        raise ValueError(f"{path} holds no matrix saved by Operator.save")
    return found


def _lazily(state: Mapping[str, Any], device: torch.device | str | None) -> Operator:
    """Blocks that are made when they are used."""
    if state["structure"] == "BlockDiagonal":
        return BlockDiagonal(
            Space.restore(state["space"], device), [_lazily(block, device) for block in state["blocks"]]
        )
    if state["structure"] == "Stored":
        return Stored.from_state(state, device)
    return Stored(_space_of(state, device), state)


def _space_of(state: Mapping[str, Any], device: torch.device | str | None) -> Space:
    """Of a multiple or a sum, that of what it is made of."""
    while "space" not in state:
        if not {"inner", "terms"} & state.keys():
            raise ValueError(f"unknown structure {state['structure']!r} of a matrix")
        state = state["inner"] if "inner" in state else state["terms"][0]
    return Space.restore(state["space"], device)
