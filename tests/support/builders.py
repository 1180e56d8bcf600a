"""All builders, and the results of those that compute them at the first use."""

from __future__ import annotations

from typing import Any

import curvature


def evaluated(builder: str, *arguments: Any, **options: Any) -> Any:
    """A builder's result, which is computed at the first use of some."""
    found = getattr(curvature, builder)(*arguments, **options)
    return found if isinstance(found, dict) else found.to_dense()


BUILDERS = ("gauss_newton", "fisher", "empirical_fisher", "hessian")
