"""Decompositions that fail: in which ways, and what makes those of torch fail."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

Fault = Callable[[Any], Any]
TRUE = {name: getattr(torch.linalg, name) for name in ("eigh", "cholesky_ex", "eigvalsh", "qr")}


def raising(found: Any) -> Any:
    raise torch.linalg.LinAlgError("injected")


def crashing(found: Any) -> Any:
    raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, injected")


def silent(found: Any) -> Any:
    """What is no number, and no error."""
    if isinstance(found, Tensor):
        return found * math.nan
    return tuple(x * math.nan if x.is_floating_point() else x for x in found)


FAULTS: list[Fault] = [raising, crashing, silent]


def fail(
    patch: pytest.MonkeyPatch, fault: Fault, calls: float = math.inf,
    on: Callable[[Tensor], bool] = lambda matrix: True, names: Iterable[str] = ("eigh", "cholesky_ex"),
) -> None:  # fmt: skip
    """Make functions of `torch.linalg` fail: so many calls, or those on matrices that `on` picks."""
    left = itertools.count()

    def failing(name: str) -> Callable[..., Any]:
        def run(matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = TRUE[name](matrix, *args, **kwargs)
            return fault(found) if on(matrix) and next(left) < calls else found

        return run

    for name in names:
        patch.setattr(torch.linalg, name, failing(name))
