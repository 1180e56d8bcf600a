"""Parameters that are spread over processes (FSDP2): shards for steps, wholes for what the curvature does.

Plain tensors are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def is_sharded(x: Any) -> bool:
    return isinstance(x, DTensor)


def refuse_shards(model: Any, what: str) -> None:
    """
    Raises:
        NotImplementedError: the model has such parameters; by name.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    found = [name for name, p in named if is_sharded(p)]
    if found:
        raise NotImplementedError(
            f"{what}: {found[0]} is spread over processes (FSDP), where only the plain steps of KFAC and EKFAC work; "
            "use DistributedDataParallel, which all optimizers work with"
        )


def local(x: Tensor) -> Tensor:
    """What of a tensor is here: its own memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def spread(shard: Tensor, like: Tensor) -> Tensor:
    """A shard as part of a tensor that is spread as another is."""
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(shard: Tensor, like: Tensor) -> Tensor:
    """All of it, on every process."""
    found = spread(shard, like)
    return found.full_tensor() if isinstance(found, DTensor) else found


def part(full: Tensor, like: Tensor) -> Tensor:
    """The shard of a tensor that all processes have."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def totals(found: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Numbers (n,), one of the shard of each parameter here, added up over the processes that have the others."""
    spread_over = [p if isinstance(p, DTensor) else None for p in parameters]
    first = next((p for p in spread_over if p is not None), None)
    if first is None:
        return found
    mask = torch.tensor([p is not None for p in spread_over], device=found.device)
    summed = torch.where(mask, found, 0)
    for dim, placement in enumerate(first.placements):
        if isinstance(placement, Shard):
            dist.all_reduce(summed, group=first.device_mesh.get_group(dim))
    return torch.where(mask, summed, found)
