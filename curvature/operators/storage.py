"""Operators as plain data, in files and in other precisions."""

from __future__ import annotations

import dataclasses
import pickle
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvature.operators.space import Space
from curvature.terms import AffineLayout

# Classes of operators by the name that their states give; each that has a state enters itself where it is defined.
KINDS: dict[str, type[Any]] = {}


def to_plain_data(value: Any) -> Any:
    """The parts of an operator as tensors, numbers, strings, and lists or dicts of them; a mapping as a list."""
    if isinstance(value, Tensor):
        return copy_if_view(value)
    if hasattr(value, "state"):
        return value.state()
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"structure": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        value = list(value.values())
    return [to_plain_data(item) for item in value] if isinstance(value, list | tuple) else value


def read(path: str | PathLike[str], what: str, **options: Any) -> Any:
    """What `torch.save` wrote; ValueError for a file of another kind, or with more than plain data."""
    is_file = isinstance(path, str | PathLike) and Path(path).is_file()  # if there is none, torch says so
    if is_file and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} holds no {what}: torch.save has not written it")
    try:
        return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds no {what}, but objects other than tensors and plain data") from error


def restore(value: Any, device: torch.device | str | None) -> Any:
    """The inverse of `to_plain_data`; ValueError for a structure that this version does not know."""
    if isinstance(value, list):
        return [restore(item, device) for item in value]
    if not isinstance(value, Mapping):
        return value
    structure = value.get("structure")
    if structure in KINDS:
        return KINDS[structure].from_state(value, device)
    fields = {key: restore(item, device) for key, item in value.items() if key != "structure"}
    if structure == "Space":
        return Space.restore(fields, device)
    if structure == "AffineLayout":
        return AffineLayout(**fields)
    raise ValueError(f"unknown structure {structure!r} of a matrix; known are {sorted(KINDS)}")


def rounded_state(state: Any, dtype: torch.dtype, space: str | None = None) -> Any:
    """A state with its floating-point tensors in another precision, and its spaces in the one that is named."""
    if isinstance(state, Tensor):
        return state.to(dtype) if state.is_floating_point() else state
    if isinstance(state, list):
        return [rounded_state(item, dtype, space) for item in state]
    if not isinstance(state, Mapping):
        return state
    state = dict(state)
    structure = state.get("structure")
    if structure == "Space" and space is not None:
        state["dtype"] = space
    elif structure == "EigenKronecker":
        del state["rounding"]  # that of the values before
    elif structure in ("Dense", "Kronecker"):  # symmetric up to rounding: in another precision, altogether
        whole = {key: x for key, x in state.items() if isinstance(x, Tensor) and (structure == "Dense" or x.ndim == 3)}
        state |= {key: (x + x.mT) / 2 for key, x in whole.items()}
    return {key: rounded_state(item, dtype, space) for key, item in state.items()}


def copy_if_view(tensor: Tensor) -> Tensor:
    """Clone a view of a larger storage, which a file would otherwise include."""
    owns_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if owns_storage else tensor.clone()
