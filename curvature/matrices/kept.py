"""Products with the matrices of single batches, kept with their graphs from one product with columns to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from curvature.linalg import precision_settings
from curvature.matrices.snapshots import Snapshot
from curvature.recording import graph_bytes

KEPT_BYTES = 1 << 28  # of the graphs that an operator keeps, counted as all results of their functions
HOOKS_OF_ALL = [x for name, x in vars(nn.modules.module).items() if name.startswith("_global") and isinstance(x, dict)]
# From columns (c, P): write the product with them to the second tensor, (c, P), or add it there if told to.
Put = Callable[[Tensor, Tensor, bool], None]


@dataclass
class BatchProduct:
    """The product with the matrix of one batch.

    Attributes:
        put: makes it: ``put(columns, out, add)``.
        weight: what the batch counts for in a mean.
        graphs: tensors whose graphs it differentiates.
    """

    put: Put
    weight: float
    graphs: list[Tensor]


@dataclass
class KeptBatch:
    """The product of a batch.

    Attributes:
        batch: x and y as they were before the forward pass.
        checksum: of the batch, as `Repeated` has it.
    """

    batch: Snapshot
    checksum: float
    product: BatchProduct


class KeptProducts:
    """The products of the first batches, as long as nothing changes that Python code may read on its way to them.

    Args:
        owners: what is called in a forward pass and after it.

    Attributes:
        is_open: whether more may be kept.
    """

    def __init__(self, *owners: Any) -> None:
        self.owners = owners
        self.forget()

    def forget(self) -> None:
        """Free all that is kept."""
        self.found: dict[int, KeptBatch] = {}  # by number of the batch
        self.made_for: Snapshot | None = None
        self.room, self.is_open = KEPT_BYTES, True

    def prepare(self) -> None:
        """Before a pass: free what was made for other values, and note the present ones if products may be kept."""
        if self.made_for is not None and not self.made_for.is_of(*self._surroundings()):
            self.forget()
        if self.made_for is None and self.is_open:
            self.made_for = Snapshot.of(*self._surroundings())
            self.room -= 0 if self.made_for is None else self.made_for.bytes
            self.is_open = self.made_for is not None and self.room >= 0

    def of(self, number: int, x: Any, y: Any) -> KeptBatch | None:
        """What is kept for this batch."""
        known = self.found.get(number)
        return known if known is not None and known.batch.is_of(x, y) else None

    def add(self, new: dict[int, KeptBatch]) -> None:
        """Keep products that were made just now, unless what they were made of has changed meanwhile."""
        if new and self.made_for is not None and self.made_for.is_of(*self._surroundings()):
            self.found.update(new)
        if not self.found and not self.is_open:
            self.made_for = None  # nothing to compare with it

    def has_room_for(self, product: BatchProduct) -> bool:
        """Whether to keep a product; after one that is too large none is kept."""
        if self.is_open:
            self.room -= graph_bytes(product.graphs)
            self.is_open = self.room >= 0
        return self.is_open

    def _surroundings(self) -> tuple[Any, ...]:
        """What graphs depend on beside their batch: objects, torch's functions, and its settings."""
        model: nn.Module = self.owners[0]
        devices = sorted({"cpu", *(t.device.type for t in (*model.parameters(), *model.buffers()))})
        casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        modes = [*torch.overrides._get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        deterministic = torch.are_deterministic_algorithms_enabled()
        kinds = torch.get_default_dtype(), torch.get_default_device()
        return *self.owners, torch, F, HOOKS_OF_ALL, casts, modes, deterministic, kinds, precision_settings()
