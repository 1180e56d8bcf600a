"""Matrices that are kept as their state: in few bits, or in files."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.operators.base import Operator
from curvature.operators.block_diagonal import BlockDiagonal
from curvature.operators.space import Space
from curvature.operators.storage import copy_if_view, read, restore


def _of_the_matrix(method: Any) -> Any:
    """The method of `Stored` that makes the matrix and calls its own."""

    @functools.wraps(method)
    def call(self: Stored, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._decomposed(), method.__name__)(*args, **kwargs)

    return call


class Stored(Operator):
    """A matrix that is kept as its state: in few bits, or in a file, on any device.

    Every method makes the matrix, in the precision of the space, and forgets it: only what a solve needs is in memory,
    as it runs, and a decomposition is made anew for the next one (`inverse` keeps it).
    """

    fields = ("space", "held")

    def __init__(self, space: Space, held: Mapping[str, Any]) -> None:
        super().__init__(space)
        self.held = dict(held)

    def _decomposed(self) -> Operator:
        device, dtype = self.space.device, self.space.dtype
        place = lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device)
        state = pytree.tree_map_only(Tensor, place, self.held)
        operator: Operator = restore(state, None if self.space.places else device)
        return operator

    def state(self) -> dict[str, Any]:
        return {
            "structure": "Stored",
            "space": self.space.state(),
            "held": pytree.tree_map_only(Tensor, copy_if_view, self.held),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device | str | None) -> Stored:
        return cls(Space.restore(state["space"], device), state["held"])

    def _matmat(self, V: Tensor) -> Tensor:
        return self._decomposed()._matmat(V)

    to = _of_the_matrix(Operator.to)
    to_dense = _of_the_matrix(Operator.to_dense)
    compact = _of_the_matrix(Operator.compact)
    diagonal = _of_the_matrix(Operator.diagonal)
    trace = _of_the_matrix(Operator.trace)
    frobenius_norm = _of_the_matrix(Operator.frobenius_norm)
    scaled = _of_the_matrix(Operator.scaled)
    damped = _of_the_matrix(Operator.damped)
    factored_damping = _of_the_matrix(Operator.factored_damping)

    def _details(self) -> list[str]:
        return [f"{self.held['structure']}, kept"]


def in_memory(K: Operator) -> Operator:
    """The matrix of its own kind that is kept as its state; any other as it is."""
    return K._decomposed() if isinstance(K, Stored) else K


def blocks_of(K: Operator) -> Iterator[Operator]:
    """The blocks of a block-diagonal matrix, in memory; any other is its only one."""
    yield from map(in_memory, K.blocks.values() if isinstance(K, BlockDiagonal) else [K])


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
    state = read(path, "matrix saved by Operator.save", map_location=place, mmap=True if lazily else None)
    if not isinstance(state, dict) or state.get("structure") in (None, "Space", "AffineLayout"):
        raise ValueError(f"{path} holds no matrix saved by Operator.save")
    operator: Operator = _lazily(state, device) if lazily else restore(state, device)
    return operator


def _lazily(state: Mapping[str, Any], device: torch.device | str | None) -> Operator:
    """Blocks that are made when they are used."""
    if state["structure"] == "BlockDiagonal":
        blocks = [_lazily(block, device) for block in state["blocks"]]
        return BlockDiagonal(Space.restore(state["space"], device), blocks)
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
