"""Parameters that are spread over processes (FSDP2): shards for steps, wholes for what the curvature does.

Plain tensors are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvature.recording import is_sharded


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
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def spread(shard: Tensor, like: Any) -> Any:
    """A shard as part of a tensor that is spread as another is."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(shard: Tensor, like: Any) -> Tensor:
    """All of it, on every process."""
    return spread(shard, like).full_tensor() if is_sharded(like) else shard


def part(full: Tensor, like: Any) -> Tensor:
    """The shard of a tensor that all processes have."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def totals(found: Tensor, parameters: Sequence[Any]) -> Tensor:
    """Numbers (n,), one of the shard of each parameter here, added up over the processes that have the others."""
    for mesh, placements in dict.fromkeys((p.device_mesh, p.placements) for p in parameters if is_sharded(p)):
        own = [is_sharded(p) and (p.device_mesh, p.placements) == (mesh, placements) for p in parameters]
        alike = torch.tensor(own, device=found.device)
        summed = torch.where(alike, found, 0)
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(summed, group=mesh.get_group(dim))
        found = torch.where(alike, summed, found)
    return found
