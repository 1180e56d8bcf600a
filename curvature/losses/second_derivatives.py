"""Whether torch has all of the second derivatives of a loss that is made of functions which torch does not know."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from curvature.functional import own_functions
from curvature.linalg import full_precision, hides_second_derivatives
from curvature.losses.own_state import found_of
from curvature.losses.per_sample import map_target, per_sample_losses
from curvature.losses.table import Loss, name_of

log = logging.getLogger("curvature")


def require_second_derivatives(loss: Loss, losses: Tensor, output: Tensor, target: Any) -> None:
    """Raise RuntimeError where a function of the user's hides a second derivative from torch; once for each shape.

    Args:
        losses: (N,), those of the samples at the output.
    """
    key = "second derivatives", output.shape, output.dtype, len(losses)
    found = found_of(loss)
    if key in found:
        return
    names = ", ".join(own_functions([losses]))
    if names and _are_hidden(loss, output, target, len(losses)):
        raise RuntimeError(
            f"{name_of(loss)}: torch loses a part of its second derivative at the output, because the backward pass of "
            f"an autograd.Function hides how it depends on its input ({names}): let backward compute everything with "
            "torch functions of the gradient that it gets and of ctx.saved_tensors, without detach, NumPy, "
            "once_differentiable or what forward has put into ctx. empirical() and isotropic() need no second "
            "derivative"
        )
    found.add(key)


@full_precision()
def _are_hidden(loss: Loss, output: Tensor, target: Any, count: int) -> bool:
    """Whether second derivatives along a random direction are not what gradients near by tell."""
    try:
        double = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
        target = map_target(lambda t: t.double() if t.is_floating_point() else t, target)
        point, drawn = output.detach().double(), torch.Generator().manual_seed(0)
        direction = torch.randn(point.shape, generator=drawn, dtype=torch.float64, device="cpu").to(point)
        total = lambda x: per_sample_losses(double, x, target, count).sum()
        return hides_second_derivatives(total, point, direction)
    except Exception as error:  # whatever a loss raises that has no copy, or none in double precision
        log.info("%s: not compared with differences of gradients: %s", name_of(loss), str(error).split("\n")[0])
        return False
