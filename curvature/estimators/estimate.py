"""The result of a random estimator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Estimate(NamedTuple):
    """A random estimate.

    Attributes:
        value: unbiased unless the function says otherwise.
        error: the standard error of the value, in the same shape, estimated from the spread of the samples.
    """

    value: Tensor
    error: Tensor


def mean_estimate(samples: Tensor) -> Estimate:
    """The mean over the first dimension and its standard error."""
    return Estimate(samples.mean(0), samples.std(0) / math.sqrt(len(samples)))


def products_per_part(k: int, parts: int, function: Callable[..., object]) -> int:
    """Split k products into equal parts.

    Raises:
        ValueError: fewer than two products per part, too few to estimate an error.
    """
    if k < 2 * parts:
        raise ValueError(f"{function.__name__} needs at least {2 * parts} products, found k={k}")
    return k // parts
