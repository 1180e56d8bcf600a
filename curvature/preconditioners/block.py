"""The running curvature of some parameters: what every structure of it can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.preconditioners.outliers import OutlierFilter
from curvature.terms import Term


class BlockStatistics(Protocol):
    """What batches show of a block: sums over samples."""

    samples: float

    def add_(self, other: Any) -> None: ...

    def scale_vectors_(self, times: float) -> None:
        """As if the vectors had been so many times as long."""

    def tensors(self) -> list[Tensor]:
        """All that is summed up."""

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        """Tensors that add up over `size` processes, this one being `rank`."""


class Block:
    """Running curvature of some parameters. Sub-classes hold the matrices; the mean over samples is debiased."""

    structure = ""

    def __init__(self, names: Sequence[str], reason: str = "") -> None:
        self.names = tuple(names)
        self.reason = reason  # why there are no Kronecker factors; "" where there are
        self.updates = 0
        self.gate = OutlierFilter()

    def debiased_weight(self, decay: float, updates: int | None = None) -> float:
        """Weight of the next statistics in a debiased running average of so many (None: the block's `updates`)."""
        return (1 - decay) / (1 - decay ** ((self.updates if updates is None else updates) + 1))

    def average(self, old: Tensor | None, new: Tensor, decay: float) -> Tensor:
        """The running average of what has no negative entries."""
        w = self.debiased_weight(decay)
        return new if old is None else old.lerp(new, self.gate.weight([(old.reshape(1, -1), new.reshape(1, -1))], w))

    @property
    def leaves(self) -> list[Block]:
        """The blocks that are measured, averaged and inverted one by one: itself, unless it has parts."""
        return [self]

    def split_terms(self, terms: Sequence[Term]) -> list[tuple[Block, Sequence[Term]]]:
        """The terms of the first parameter by leaf; without leaves where these do not fit."""
        return [(self, terms)]

    def measure(self, terms: Sequence[Term], samples: float, rank: int = 0, world_size: int = 1) -> Any:
        """Statistics of a leaf and a batch, from the terms of the first parameter; None where these do not fit.

        Args:
            samples: that the statistics are of.
            rank, world_size: which process this is, of those that share the batch.
        """
        raise NotImplementedError

    def statistics_from(self, sums: Mapping[str, Tensor]) -> Any:
        """Statistics of all processes, from their `sums`."""
        raise NotImplementedError

    def update_average(self, statistics: Any, decay: float) -> None:
        """Take statistics into the running average."""
        raise NotImplementedError

    def decompose(self, damping: float) -> None:
        """Prepare `solve` for the running average as it is now, plus ``damping I``."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether `solve` was ever prepared."""
        raise NotImplementedError

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """``(M + damping I)^-1 gradients``, tensors in the shapes of the parameters."""
        raise NotImplementedError

    @property
    def mean_eigenvalue(self) -> Tensor:
        """Trace over dimension, a scalar tensor."""
        raise NotImplementedError

    @property
    def dimension(self) -> int:
        raise NotImplementedError

    @property
    def cost(self) -> float:
        """Operations of `decompose`, to a constant factor."""
        return float(self.dimension)

    @property
    def bytes(self) -> int:
        """Memory of what is kept, but for single numbers."""
        found = pytree.tree_leaves({key: value for key, value in self.state().items() if key != "gate"})
        return sum(t.numel() * t.element_size() for t in found if isinstance(t, Tensor))

    @property
    def expected_bytes(self) -> int:
        """Memory that will be kept, at most, before anything was seen."""
        raise NotImplementedError

    @property
    def outliers(self) -> int:
        """Batches that were kept out of the running average."""
        return 0 if self.gate.count is None else int(self.gate.count)

    def condition(self) -> float:
        """Largest over least eigenvalue of what `solve` inverts, nan where that is not prepared."""
        raise NotImplementedError

    def describe(self) -> str:
        """Shapes of what is kept."""
        raise NotImplementedError

    @staticmethod
    def decompose_all(blocks: Sequence[Any], damping: float) -> None:
        """`decompose` blocks of this class that have statistics."""
        for block in blocks:
            block.decompose(damping)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        """Prepare `solve` of blocks of this class that have statistics, see `curvature.invert`."""
        raise NotImplementedError

    failures = 0  # of decompositions, in a row

    @property
    def inverse_tensors(self) -> list[Tensor]:
        """What `solve` uses of a decomposition."""
        return []

    def without_correlations(self) -> AbstractContextManager[None]:
        """As if the matrices were zero off their diagonals."""
        return nullcontext()

    def empty_like(self) -> Block:
        """A block of the same layout that has seen nothing."""
        raise NotImplementedError

    def results(self) -> dict[str, Any]:
        """What `decompose` and `invert` set: plain tensors and numbers."""
        state = self.state()
        return {k: state[k] for k in self.broadcast_fields}

    def load_results(self, results: Mapping[str, Any]) -> None:
        """Take the `results` of the same block of another process."""
        for name, value in results.items():
            setattr(self, name, value)

    broadcast_fields: tuple[str, ...] = ("inverse",)  # from the process that decomposes
    state_fields: tuple[str, ...] = ()  # tensors of a checkpoint, and numbers
    layout_fields: tuple[str, ...] = ()  # how the parameters are arranged

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: plain tensors, numbers and names."""
        fields = ("names", "reason", "updates", *self.layout_fields, *self.state_fields)
        return {"structure": self.structure, "gate": self.gate.state(), **{k: getattr(self, k) for k in fields}}

    @staticmethod
    def restore(state: dict[str, Any], device: torch.device) -> Block:
        """A block from its `state`, tensors on `device`."""
        kind = next(k for k in _subclasses(Block) if k.structure == state["structure"])
        return kind.from_state(state, device)

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Block:
        block = cls.__new__(cls)
        block.gate = OutlierFilter.restored(state.get("gate", {}), device)
        for name, value in state.items():
            if name not in ("structure", "gate"):
                setattr(block, name, value.to(device, copy=True) if isinstance(value, Tensor) else value)
        block.after_restore()
        return block

    def after_restore(self) -> None:
        """Complete what `restore` set."""


def _subclasses(kind: type[Block]) -> Iterator[type[Block]]:
    """All sub-classes."""
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
