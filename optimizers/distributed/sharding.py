"""Sharded parameters (FSDP2): steps use local shards, curvature full tensors. Plain tensors stay what they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvature.recording import is_sharded

PLAIN = {Tensor, nn.Parameter}


def any_sharded(tensors: Collection[Any]) -> bool:
    """Whether one of the tensors is spread over processes."""
    return not PLAIN.issuperset(map(type, tensors)) and any(map(is_sharded, tensors))


def refuse_sharded(model: Any, what: str) -> None:
    """Refuse a model with sharded parameters; names the first."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    sharded = [name for name, p in named if is_sharded(p)]
    if sharded:
        raise NotImplementedError(
            f"{what}: {sharded[0]} is spread over processes (FSDP), where only the plain steps of KFAC and EKFAC work; "
            "use DistributedDataParallel, which all optimizers work with"
        )


def to_local(x: Tensor) -> Tensor:
    """The local shard of a tensor, sharing its memory."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def to_sharded(shard: Tensor, like: Any) -> Any:
    """A DTensor made of local shards, placed like another."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def to_full(shard: Tensor, like: Any) -> Tensor:
    """The full tensor on every process, from local shards placed like another."""
    return to_sharded(shard, like).full_tensor() if is_sharded(like) else shard


def to_shard(full: Tensor, like: Any) -> Tensor:
    """The local shard of a full tensor that all processes have."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def sum_over_shards(numbers: Tensor, parameters: Sequence[Any]) -> Tensor:
    """Sum numbers (n,), one for each parameter's local shard, over the processes that hold its other shards."""
    for mesh, placements in dict.fromkeys((p.device_mesh, p.placements) for p in parameters if is_sharded(p)):
        are_alike = [is_sharded(p) and (p.device_mesh, p.placements) == (mesh, placements) for p in parameters]
        alike = torch.tensor(are_alike, device=numbers.device)
        summed = torch.where(alike, numbers, 0)
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                dist.all_reduce(summed, group=mesh.get_group(dim))
        numbers = torch.where(alike, summed, numbers)
    return numbers
