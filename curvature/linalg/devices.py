"""What differs between devices: where numbers are that belong together, how they get there, and their precision."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Nest = TypeVar("Nest")  # of tensors
SHARED_MEMORY = "cpu", "mps"  # kinds of devices whose memory is that of the host


class ByDevice(NamedTuple):
    """A limit where the host computes, and on accelerators, which compute fast and start kernels slowly."""

    host: int
    accelerator: int

    def at(self, device: torch.device) -> int:
        return self.host if device.type in SHARED_MEMORY else self.accelerator


def stack(parts: Iterable[Tensor]) -> Tensor:
    """``torch.stack`` on the device of the first; those of layers on other devices come over to it."""
    first, *others = parts
    return torch.stack([first, *(part.to(first.device) for part in others)])


def cat(parts: Iterable[Tensor]) -> Tensor:
    """``torch.cat`` on the device of the first, likewise."""
    first, *others = parts
    return torch.cat([first, *(part.to(first.device) for part in others)])


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in runs of one device."""
    return [list(run) for _, run in itertools.groupby(tensors, lambda x: x.device)]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; if it comes from the host, that does not wait for it to arrive."""
    is_there = x.device.type != "cpu" or device.type in SHARED_MEMORY
    return x.to(device) if is_there else x.pin_memory().to(device, non_blocking=True)


def copy_to_host_async(flag: Tensor) -> Callable[[], bool]:
    """Send a flag to the host. To call what is returned waits for it, the first time."""
    if flag.device.type in SHARED_MEMORY:
        return functools.cache(lambda: bool(flag))
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    arrived = torch.accelerator.current_stream(flag.device).record_event()  # where the copy is, whatever is current

    @functools.cache
    def wait() -> bool:
        arrived.synchronize()
        return bool(host)

    return wait


@functools.cache
def widest(kind: str) -> torch.dtype:
    """Double precision; single precision on kinds of devices that have no other (MPS, some integrated GPUs)."""
    try:
        torch.ones((), dtype=torch.float64, device=kind).add_(1)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def widen(x: Tensor) -> Tensor:
    """The tensor in the widest precision of its device."""
    return x.to(widest(x.device.type))


def to_host(tensors: Nest) -> Nest:
    """The tensors of a list, or of a nest of tuples, lists and dicts, on the CPU, in float64, by one transfer."""
    leaves, form = pytree.tree_flatten(tensors)
    away = [x for x in leaves if x.device.type != "cpu"]
    # whole numbers alone are changed before they meet others; cat promotes the rest
    flat = [(x if x.is_floating_point() or x.dtype == torch.bool else widen(x)).reshape(-1) for x in away]
    whole = torch.cat([x.to(flat[0].device) for x in flat]).cpu() if away else torch.empty(0, device="cpu")
    parts = iter(whole.split([x.numel() for x in away]))
    here = [(x if x.device.type == "cpu" else next(parts).view(x.shape)).double() for x in leaves]
    return cast("Nest", pytree.tree_unflatten(here, form))


def absolute_sums(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of the absolute entries of each, which is one or several tensors on one device, in few calls."""
    sums: list[Tensor] = []
    for run in by_device([tensors[0] for tensors in parts]):
        of_run = parts[len(sums) : len(sums) + len(run)]
        copied = [tensors for tensors in of_run if not _is_one_piece(tensors)]
        whole = torch.cat([x.reshape(-1) for tensors in copied for x in tensors]) if copied else run[0].new_empty(0)
        pieces = iter(whole.split([sum(x.numel() for x in tensors) for tensors in copied]))
        sums += torch._foreach_norm([x[0] if _is_one_piece(x) else next(pieces) for x in of_run], 1)
    return sums


def _is_one_piece(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) == 1 and tensors[0].is_contiguous()


def read(facts: Any) -> Any:
    """Numbers in the places of tensors, likewise."""
    is_here = all(x.device.type == "cpu" for x in pytree.tree_leaves(facts))
    return pytree.tree_map(Tensor.tolist, facts if is_here else to_host(facts))


def look(flags: Sequence[Tensor]) -> list[bool]:
    """What flags () say, by one transfer to the host."""
    place = next((x.device for x in flags if x.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([x.to(place) for x in flags]).tolist() if flags else []
