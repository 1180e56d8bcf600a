"""All builders, and the results of those that compute them at the first use."""

from typing import Any

import torch
from torch import Tensor

import curvature


def evaluated(builder: str, *arguments: Any, **options: Any) -> Any:
    """A builder's result, which is computed at the first use of some."""
    found = getattr(curvature, builder)(*arguments, **options)
    return found if isinstance(found, dict) else found.to_dense()


BUILDERS = ("gauss_newton", "fisher", "empirical_fisher", "hessian")


def dense(found: Any) -> Tensor:
    """The matrix, also of a diagonal."""
    if isinstance(found, dict):
        return torch.cat([d.flatten() for d in found.values()]).diag()
    return found.to_dense()
