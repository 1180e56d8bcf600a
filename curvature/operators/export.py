"""Operators as plain data for files, and as SciPy operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from curvature.operators.space import Space
from curvature.terms import AffineLayout


class Exportable:
    """Base of operators: the ways into files, SciPy and text."""

    space: Space
    _matmat: Callable[[Tensor], Tensor]
    fields: tuple[str, ...] = ()  # constructor arguments that are attributes, for saving

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator`` with the same product, on NumPy arrays.

        Raises:
            ImportError: SciPy is not installed.
        """
        return scipy_operator(self.space, self._matmat)

    def state(self) -> dict[str, Any]:
        """Tensors, numbers, strings and lists of them, for `save`.

        Raises:
            TypeError: the matrix is known only by its products; call `materialise` first.
        """
        name = type(self).__name__
        if not self.fields:
            raise TypeError(f"a {name} has only products, which cannot be saved: call .materialise() first")
        return {"structure": name, **{field: to_plain_data(getattr(self, field)) for field in self.fields}}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the matrix to a file, for `load`.

        Raises:
            TypeError: as for `state`.
        """
        torch.save(self.state(), path)

    def to(self, dtype: torch.dtype) -> Any:
        """The same matrix, rounded to another precision.

        In float32 or float64 it is of the same kind, over a space of that precision. In bfloat16 it is kept in 16 bits
        and computes in the precision that it had: a method makes the matrix of a block, and forgets it afterwards.
        A `Kronecker` is kept in its eigenbasis then, where rounding leaves it positive definite; of a `Dense` it may
        not, without a damping of 1/256 of the largest eigenvalue.

        Raises:
            ValueError: another dtype.
            TypeError: as for `state`.
        """
        if dtype is torch.bfloat16:
            return self._in_16_bits()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype: expected float64, float32 or bfloat16, found {dtype}")
        if dtype == self.space.dtype:
            return self
        return restore(rounded_state(self.state(), dtype, str(dtype).removeprefix("torch.")), None)

    def _in_16_bits(self) -> Any:
        held = rounded_state(self.state(), torch.bfloat16)
        return restore({"structure": "Stored", "space": self.space.state(), "held": held}, None)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device | str | None) -> Any:
        """The matrix whose `state` this is, on a device; None for the one it was on."""
        return cls(**{key: restore(item, device) for key, item in state.items() if key != "structure"})

    def _details(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        names = self.space.names
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, ..., {names[-1]} ({len(names)} parameters)"
        dtype = str(self.space.dtype).removeprefix("torch.")
        size = f"{self.space.size} x {self.space.size}"
        return f"{type(self).__name__}({', '.join([size, *self._details(), dtype, str(self.space.device)])}; {shown})"


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


def restore(value: Any, device: torch.device | str | None) -> Any:
    """The inverse of `to_plain_data`.

    Raises:
        ValueError: a structure that this version does not know.
    """
    if isinstance(value, list):
        return [restore(item, device) for item in value]
    if not isinstance(value, Mapping):
        return value
    structure = value.get("structure")
    kinds = _restorable(Exportable)
    if structure in kinds:
        return kinds[structure].from_state(value, device)
    fields = {key: restore(item, device) for key, item in value.items() if key != "structure"}
    if "structure" not in value:
        return fields
    if structure == "Space":
        return Space.restore(fields, device)
    if structure == "AffineLayout":
        return AffineLayout(**fields)
    raise ValueError(f"unknown structure {structure!r} of a matrix; known are {sorted(kinds)}")


def _restorable(kind: type[Exportable]) -> dict[str, type[Exportable]]:
    """The subclasses that can be restored, by name."""
    found = {sub.__name__: sub for sub in kind.__subclasses__() if sub.fields}
    for sub in kind.__subclasses__():
        found |= _restorable(sub)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state with every tensor replaced."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, Mapping):
        return {key: map_tensors(function, item) for key, item in state.items()}
    return [map_tensors(function, item) for item in state] if isinstance(state, list) else state


def rounded_state(state: Any, dtype: torch.dtype, space: str | None = None) -> Any:
    """A state with its floating-point tensors in another precision, and its spaces in the one that is named."""
    if isinstance(state, Tensor):
        return state.to(dtype) if state.is_floating_point() else state
    if isinstance(state, list):
        return [rounded_state(item, dtype, space) for item in state]
    if not isinstance(state, Mapping):
        return state
    own = dict(state)
    kind = own.get("structure")
    if kind == "Space" and space is not None:
        own["dtype"] = space
    elif kind == "EigenKronecker":
        del own["rounding"]  # that of the values before
    elif kind == "Dense":
        own["matrix"] = (own["matrix"] + own["matrix"].mT) / 2  # so that its rounding is symmetric
    return {key: rounded_state(item, dtype, space) for key, item in own.items()}


def copy_if_view(tensor: Tensor) -> Tensor:
    """Clone a view of a larger storage, which a file would otherwise include."""
    owns_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if owns_storage else tensor.clone()


def scipy_operator(space: Space, matmat: Callable[[Tensor], Tensor]) -> Any:
    """The ``scipy.sparse.linalg.LinearOperator`` of a symmetric matrix, given its product with columns.

    Raises:
        ImportError: SciPy is not installed.
    """
    try:
        import scipy.sparse.linalg as linalg
    except ImportError as error:
        raise ImportError("to_scipy needs SciPy, which is not installed: pip install scipy") from error

    def product(array: Any) -> Any:
        columns = torch.from_numpy(array.reshape(space.size, -1).copy())
        if columns.is_complex():
            raise TypeError("the matrix is real: apply it to the real and imaginary parts separately")
        found = matmat(columns.to(space.device, space.dtype))
        return found.detach().cpu().numpy().reshape(array.shape)

    name = str(space.dtype).removeprefix("torch.")
    products = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), product)
    return linalg.LinearOperator((space.size, space.size), dtype=name, **products)
