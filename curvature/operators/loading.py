"""Load operators from files."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from curvature.operators.base import Operator
from curvature.operators.space import Space
from curvature.terms import AffineLayout


def load(path: str | PathLike[str], device: torch.device | str | None = None) -> Operator:
    """Load the operator that `Operator.save` wrote.

    Only tensors, numbers, strings and lists of them are read, so untrusted files cannot run code.

    Args:
        path: of the file.
        device: of the operator; None for the device it was saved from.

    Raises:
        ValueError: the file holds no matrix that this version knows.
    """
    found = restore(torch.load(path, map_location=device, weights_only=True), device)
    if not isinstance(found, Operator):
        raise ValueError(f"{path} holds no matrix saved by Operator.save")
    return found


def restore(value: Any, device: torch.device | str | None) -> Any:
    """The inverse of `to_plain_data`."""
    if isinstance(value, list):
        return [restore(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: restore(item, device) for key, item in value.items() if key != "structure"}
    if "structure" not in value:
        return fields
    if value["structure"] == "Space":
        return Space.restore(fields, device)
    kinds = {**_restorable(Operator), "AffineLayout": AffineLayout}
    if value["structure"] not in kinds:
        raise ValueError(f"unknown structure {value['structure']!r} of a matrix; known are {sorted(kinds)}")
    return kinds[value["structure"]](**fields)


def _restorable(kind: Any) -> dict[str, Any]:
    """The subclasses that can be restored, by name."""
    found = {sub.__name__: sub for sub in kind.__subclasses__() if sub.fields}
    for sub in kind.__subclasses__():
        found |= _restorable(sub)
    return found
