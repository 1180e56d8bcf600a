"""Whether a batch is fit for a step, decided on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from curvature.linalg import widen


def unscale_and_check_finite(gradients: Iterable[Tensor], scale: Tensor | None = None) -> Tensor:
    """Divide gradients by a scale, in place, and say whether all are finite: a flag () on the device of the first.

    Args:
        gradients: at least one.
        scale: a positive scalar tensor; None: one.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for g in gradients:
        kinds.setdefault((g.dtype, g.device), []).append(g)
    devices = {device: torch.zeros((), dtype=torch.float32, device=device) for _, device in kinds}
    for (_, device), alike in kinds.items():
        inverse = (
            torch.ones((), dtype=torch.float32, device=device)
            if scale is None
            else widen(scale).reciprocal().float().to(device)
        )
        torch._amp_foreach_non_finite_check_and_unscale_(alike, devices[device], inverse)
    first, *others = devices.values()
    for found in others:
        first = first + found.to(first.device)
    return first == 0
