"""How operators leave the package: as plain data for a file, and as SciPy sees them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvature.operators.space import Space


def to_plain_data(value: Any) -> Any:
    """Tensors, numbers, strings and lists or dicts of them for what an operator is made of; of a dict the values."""
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


def copy_if_view(tensor: Tensor) -> Tensor:
    """The tensor without the rest of a storage that it is a view of, which a file would hold too."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def scipy_operator(space: Space, matmat: Callable[[Tensor], Tensor]) -> Any:
    """The ``scipy.sparse.linalg.LinearOperator`` of a symmetric matrix with this product of columns.

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        linalg = importlib.import_module("scipy.sparse.linalg")
    except ImportError as error:
        raise ImportError("to_scipy needs SciPy, which is not installed: pip install scipy") from error

    def product(array: Any) -> Any:
        columns = torch.from_numpy(array.reshape(space.size, -1).copy())
        if columns.is_complex():
            raise TypeError("the matrix is real: apply it to the real and imaginary parts separately")
        found = matmat(columns.to(space.device, space.dtype))
        return found.detach().cpu().numpy().reshape(array.shape)

    name = str(space.dtype).removeprefix("torch.")
    ways = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), product)
    return linalg.LinearOperator((space.size, space.size), dtype=name, **ways)
