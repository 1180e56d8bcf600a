"""Pure functions of the step: nothing here holds state or sees a model."""

from __future__ import annotations

import torch
from torch import Tensor


def adapted(step: Tensor, slope: Tensor, predicted: Tensor, rate: float) -> Tensor:
    """The step size after a look at the last step from its end.

    Along the last displacement the loss fell with slope `predicted` at the start; `slope` is what is left of it now.
    Their ratio is one where the step could have gone on for ever, zero at the minimum along the line, negative beyond.

    Returns:
        ``step * exp(rate * clamp(ratio, -2, 1))``; the step itself where the prediction is zero.
    """
    ratio = torch.where(predicted != 0, slope / predicted, torch.zeros_like(slope))
    # noise alone can shrink the step without end: it must stay able to grow back
    return (step * (rate * ratio.nan_to_num(0.0, 0.0, 0.0).clamp(-2, 1)).exp()).clamp(min=1e-20)


def within_trust(step: Tensor, change: Tensor, reach: Tensor, length: Tensor, size: Tensor, relative: float) -> Tensor:
    """The step size cut back to a trust region in function space and one in parameter space.

    Args:
        step: step size.
        change: predicted root-mean-square change of an output entry for step size one.
        reach: largest such change that is allowed.
        length: norm of the displacement for step size one.
        size: norm of the parameters.
        relative: largest length as a fraction of `size`.
    """
    tiny = torch.finfo(step.dtype).tiny
    by_output = reach / change.clamp(min=tiny)
    by_length = relative * size / length.clamp(min=tiny)
    return torch.minimum(step, torch.minimum(by_output, by_length))
