"""Products with the matrices of single batches, kept with their graphs from one product with columns to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvature.linalg import widen
from curvature.recording import graph_bytes

KEPT_BYTES = 1 << 28  # of the graphs that an operator keeps, counted as all results of their functions
NUMBERS = bool, int, float, str, type(None)
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


class KeptBatch:
    """A batch with its product, while the tensors of the batch are as they were.

    Attributes:
        checksum: of the batch, as `Repeated` has it.
    """

    def __init__(self, x: Any, y: Any, checksum: float, product: BatchProduct) -> None:
        self.checksum, self.product = checksum, product
        self.leaves, self.form = pytree.tree_flatten((x, y))
        self.values = self._values()

    def _values(self) -> Any:
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return [None if t.is_inference() else t._version for t in tensors], quick_sums(map(_ordered, tensors))

    def is_of(self, x: Any, y: Any) -> bool:
        """Whether it was made of such a batch."""
        leaves, form = pytree.tree_flatten((x, y))
        if form != self.form or self._values() != self.values:
            return False
        return all(_are_equal(new, old) for new, old in zip(leaves, self.leaves, strict=True))


class KeptProducts:
    """The products of the first batches, as long as nothing that they depend on changes.

    Attributes:
        is_open: whether more may be kept.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self.model, self.loss = model, loss
        self.found: dict[int, KeptBatch] = {}  # by number of the batch
        self.made_for: Any = None
        # nobody sees whether what another function reads beside its arguments has changed
        is_known = loss is None or isinstance(loss, nn.Module) or loss in vars(F).values()
        self.is_able = is_known and all(map(_is_plain, self._tensors()))
        self.forget()

    def forget(self) -> None:
        """Free all that is kept."""
        self.found.clear()
        self.room, self.is_open = KEPT_BYTES, self.is_able

    def forget_outdated(self) -> None:
        """Free what was made for other values, or under another autocast."""
        if self.found and self._surroundings() != self.made_for:
            self.forget()

    def of(self, number: int, x: Any, y: Any) -> KeptBatch | None:
        """What is kept for this batch."""
        known = self.found.get(number)
        return known if known is not None and known.is_of(x, y) else None

    def add(self, new: dict[int, KeptBatch]) -> None:
        """Keep products that were made just now."""
        if new:
            self.found.update(new)
            self.made_for = self._surroundings()

    def has_room_for(self, product: BatchProduct) -> bool:
        """Whether to keep a product; after one that is too large none is kept."""
        if self.is_open:
            self.room -= graph_bytes(product.graphs)
            self.is_open = self.room >= 0
        return self.is_open

    @property
    def _modules(self) -> list[nn.Module]:
        owners = (self.model, self.loss) if isinstance(self.loss, nn.Module) else (self.model,)
        return [module for owner in owners for module in owner.modules()]

    def _tensors(self) -> list[Tensor]:
        """Parameters, buffers, and tensors that are neither."""
        own = (held for m in self._modules for held in (m._parameters, m._buffers, vars(m)))
        return [x for held in own for x in held.values() if isinstance(x, Tensor)]

    def _surroundings(self) -> Any:
        """What graphs depend on beside their batch; sums show values that changed without autograd's knowledge."""
        tensors = self._tensors()
        devices = sorted({t.device.type for t in tensors})
        casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        known = [(id(t), t._version, t.data_ptr()) for t in tensors]
        sums = quick_sums([*tensors, *map(_ordered, _tensors_of(self.loss))])
        return known, sums, casts, list(map(_settings, self._modules))


def _tensors_of(loss: Any) -> list[Tensor]:
    return [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What a module computes with beside tensors: numbers and strings; functions, hooks, by who they are."""
    own = vars(module)
    return id(module), type(module), *own, *map(_setting, own.values())


def _setting(value: Any) -> Any:
    if isinstance(value, dict | list):
        return tuple(map(id, value.values() if isinstance(value, dict) else value))
    return value if isinstance(value, NUMBERS) else id(value)


def _ordered(t: Tensor) -> Tensor:
    """The sums of its rows, times their numbers: other rows, or the same in another order, give others."""
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    wide = torch.float32 if t.dtype.itemsize < 4 and t.is_floating_point() else None
    rows = t.flatten(1).sum(1, dtype=wide) if t.ndim > 1 else t.to(wide or t.dtype)
    return rows * torch.arange(1, len(rows) + 1, device=t.device) if t.ndim else rows


def quick_sums(tensors: Iterable[Tensor]) -> list[float]:
    """The sum of the entries of each tensor, the same for the same entries; other entries may round to it."""
    real = (torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors)
    found = [t.sum(dtype=torch.float32 if t.dtype.itemsize < 4 else None) for t in real]
    if len({t.device for t in found}) > 1 or not found:
        return [float(t) for t in found]
    return torch.stack([widen(t) for t in found]).tolist()  # one wait


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_inference()


def _are_equal(new: Any, old: Any) -> bool:
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return new is old or (isinstance(new, bool | int | float | str) and type(new) is type(old) and new == old)
    if new is old:
        return True
    alike = (new.shape, new.dtype, new.device, new.layout) == (old.shape, old.dtype, old.device, old.layout)
    return alike and torch.equal(new, old)
