"""Inverses that stay where they are, for a CUDA graph that solves with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.preconditioners.block import Block


class InversePlaces:
    """The memory of the inverses that blocks have now.

    Args:
        blocks: of layers, each with an `inverse` where it is ready.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        leaves = [leaf for block in blocks for leaf in block.leaves]
        self.inverses = {leaf: getattr(leaf, "inverse", None) for leaf in leaves}

    def return_to(self) -> None:
        """Copy new inverses there; one of another form, as of another rank, stays where it is."""
        for leaf, old in self.inverses.items():
            new: Any = getattr(leaf, "inverse", None)
            if new is not old and _copied(new, old):
                leaf.inverse = old  # type: ignore[attr-defined]


def _copied(new: Any, old: Any) -> bool:
    """Whether an inverse could be copied over another, being of the same form."""
    (ours, form), (theirs, other) = (pytree.tree_flatten(_parts(inverse)) for inverse in (new, old))
    if form != other or any(_kind(x) != _kind(y) for x, y in zip(ours, theirs, strict=True)):
        return False
    for x, y in zip(ours, theirs, strict=True):
        if isinstance(x, Tensor):
            y.copy_(x)
    return True


def _parts(inverse: Any) -> Any:
    return {f.name: getattr(inverse, f.name) for f in fields(inverse)} if is_dataclass(inverse) else inverse


def _kind(part: Any) -> Any:
    return (part.shape, part.dtype, part.device) if isinstance(part, Tensor) else part
