"""Whether a batch is fit for a step: decided on the device, told to the host without waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def unscale_and_check_finite(gradients: Iterable[Tensor], scale: Tensor | None = None) -> Tensor:
    """Divide gradients by a scale, in place, and say whether all of them are finite: a flag () on their device.

    Args:
        gradients: at least one, on one device.
        scale: a positive scalar tensor; None: one.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for g in gradients:
        kinds.setdefault(g.dtype, []).append(g)
    device = next(iter(kinds.values()))[0].device
    bad = torch.zeros((), dtype=torch.float32, device=device)
    inverse = (
        torch.ones((), dtype=torch.float32, device=device)
        if scale is None
        else scale.double().reciprocal().float().to(device)
    )
    for alike in kinds.values():
        torch._amp_foreach_non_finite_check_and_unscale_(alike, bad, inverse)
    return bad == 0


def copy_to_host_async(flag: Tensor) -> Callable[[], bool]:
    """Send a flag to the host. To call what is returned waits for it, the first time."""
    if flag.device.type in ("cpu", "mps"):  # memory that the host shares
        return functools.cache(lambda: bool(flag))
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    arrived = torch.accelerator.current_stream(flag.device).record_event()  # where the copy is, whatever is current

    def wait() -> bool:
        arrived.synchronize()
        return bool(host)

    return wait
