"""Names and shapes of the parameters that index the rows of a matrix, and how many rows are too many."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

Named = Mapping[str, Tensor]  # by parameter
DENSE_LIMIT = 30_000  # most rows of a matrix that is built implicitly
MAX_DIRECT_SIZE = 2000  # most rows of a matrix that is built and decomposed where products would do
ROWS = re.compile(r"(.+)\[(\d+):(\d+)\]")  # rows of a parameter, as a parameter of their own: "weight[0:4]"


class Part(NamedTuple):
    """A parameter of a space, or rows of one."""

    whole: str  # the name of the parameter
    start: int  # position of its first entry in the flat vector
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """Named parameters in order, and the flat vectors that concatenate their entries.

    Attributes:
        names, shapes: of the parameters, in the order of the flat vector.
        dtype: of all vectors and matrices over the space, float32 or float64.
        device: of flat vectors, and of matrices that are not made of blocks.
        places: the device of each parameter, if not all are on `device`; else empty. Tensors by name are there.

    Raises:
        ValueError: duplicate names, no parameters, or a dtype that decompositions do not support.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    places: tuple[torch.device, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "device", _full_name(self.device))
        places = tuple(map(_full_name, self.places))
        object.__setattr__(self, "places", places if set(places) - {self.device} else ())
        if not self.names or len(set(self.names)) < len(self.names) or len(self.names) != len(self.shapes):
            raise ValueError(f"a space needs different names with one shape each, found {self.names}, {self.shapes}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"matrices are in float32 or float64, not in {self.dtype}")
        if self.places and len(self.places) != len(self.names):
            raise ValueError(f"a space needs a device for each parameter, found {self.names}, {self.places}")

    @staticmethod
    def of(parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Space:
        """The space of these parameters, in their order, with flat vectors on the device of the first.

        Args:
            parameters: tensors by name, such as ``dict(model.named_parameters())``.
            dtype: of vectors and matrices; by default the widest dtype of the parameters, at least float32.

        Raises:
            ValueError: a parameter is complex.
        """
        for name, tensor in parameters.items():
            if tensor.is_complex():
                raise ValueError(
                    f"{name}: no matrix of complex parameters, found {tensor.dtype}; keep two real ones, or leave it "
                    "out (parameters=[...], or requires_grad_(False))"
                )
        places = tuple(tensor.device for tensor in parameters.values())
        widest = reduce(torch.promote_types, (tensor.dtype for tensor in parameters.values()), torch.float32)
        shapes = tuple(tuple(tensor.shape) for tensor in parameters.values())
        return Space(tuple(parameters), shapes, dtype or widest, places[0] if places else torch.device("cpu"), places)

    @cached_property
    def devices(self) -> dict[str, torch.device]:
        """Where each parameter is."""
        return dict(zip(self.names, self.places or (self.device,) * len(self.names), strict=True))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """P, the total number of entries."""
        return sum(self.sizes)

    def subspace(self, names: Iterable[str]) -> Space:
        """The space of these parameters, in the given order, with flat vectors on the device of the first.

        Args:
            names: of parameters, or of rows of a parameter, such as ``"weight[0:4]"``.

        Raises:
            KeyError: a name is not in this space.
        """
        names = tuple(names)
        parts = [self.part(name) for name in names]
        places = tuple(self.devices[part.whole] for part in parts)
        return Space(names, tuple(part.shape for part in parts), self.dtype, places[0], places)

    @cached_property
    def _parts(self) -> dict[str, Part]:
        each = zip(self.names, itertools.accumulate(self.sizes, initial=0), self.shapes, strict=False)
        return {name: Part(name, start, shape) for name, start, shape in each}

    def part(self, name: str) -> Part:
        """Where a parameter, or rows of one, are in the flat vector; KeyError as for `subspace`."""
        if name in self._parts:
            return self._parts[name]
        whole, first, last = rows_of_name(name)
        if whole not in self._parts or not first < last <= (self._parts[whole].shape or (0,))[0]:
            raise KeyError(f"no parameters {[name]} in the space of {list(self.names)}")
        _, start, (_, *row) = self._parts[whole]
        return Part(whole, start + first * math.prod(row), (last - first, *row))

    def positions(self, names: Iterable[str]) -> Tensor:
        """Positions in the flat vector of the entries of these parameters, named as in `subspace`: (entries,)."""
        ends = [(part.start, part.start + math.prod(part.shape)) for part in map(self.part, names)]
        return torch.cat([torch.arange(*both, device=self.device) for both in ends])

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Flatten tensors (*batch, *shape) by name, in any order of names, to (*batch, P).

        Raises:
            KeyError: a name is missing or unknown.
            TypeError: something else than a tensor, such as a gradient that is None.
            ValueError: a tensor has a wrong shape or device, or a wider dtype.
        """
        missing = [name for name in self.names if name not in tensors]
        unknown = [name for name in tensors if name not in self.names]
        if missing or unknown:
            faults = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
            raise KeyError(f"vector: expected a tensor for each parameter of the matrix; {', '.join(faults)}")
        for name in self.names:
            if not isinstance(tensors[name], Tensor):
                hint = "; a gradient is there after loss.backward()" if tensors[name] is None else ""
                raise TypeError(f"vector: expected a tensor for {name}, found {type(tensors[name]).__name__}{hint}")
        first = tensors[self.names[0]]
        batch = first.shape[: first.ndim - len(self.shapes[0])]
        flat = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = self.checked(tensors[name], (*batch, *shape), name, self.devices[name])
            flat.append(tensor.reshape(*batch, math.prod(shape)).to(self.device))
        return torch.cat(flat, -1)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Inverse of `flatten`: (*batch, P) to tensors (*batch, *shape) by name.

        Raises:
            ValueError: the last dimension is not P, or device or dtype is wrong.
        """
        flat = self.checked(flat, (*flat.shape[:-1], self.size), "the flat vector")
        parts = zip(self.names, self.shapes, flat.split(self.sizes, -1), strict=True)
        return {name: part.reshape((*flat.shape[:-1], *shape)).to(self.devices[name]) for name, shape, part in parts}

    def checked(self, tensor: Tensor, shape: Sequence[int], what: str, device: torch.device | None = None) -> Tensor:
        """Check a tensor, on the device of flat vectors if none is given, and cast it to the dtype of the space.

        Raises:
            ValueError: wrong shape or device, or a dtype that cannot be cast without loss; the message names `what`.
        """
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{what} should have shape {tuple(shape)}, found {tuple(tensor.shape)}")
        if tensor.device != (device or self.device):
            raise ValueError(f"{what} should be on {device or self.device}, found {tensor.device}")
        if torch.promote_types(tensor.dtype, self.dtype) != self.dtype:
            raise ValueError(f"{what} should be {self.dtype}, found {tensor.dtype}, which does not fit without loss")
        return tensor.to(self.dtype)

    def kept(self, tensor: Tensor, shape: Sequence[int], what: str, device: torch.device | None = None) -> Tensor:
        """`checked` for a part of a matrix, detached from autograd; ValueError also if an entry is not finite."""
        tensor = self.checked(tensor, shape, what, device).detach()
        if not tensor.sum().isfinite() and not tensor.isfinite().all():  # the sum is fast but may overflow
            raise ValueError(f"{what} of the parameters {list(self.names)} has entries that are not finite")
        return tensor

    def normal(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent standard normal columns, (P, count).

        Args:
            count: number of columns.
            generator: on any device; by default a new one with seed 0, which leaves the global random state untouched.
        """
        generator = self.generator(generator)
        drawn = torch.randn(count, self.size, dtype=self.dtype, device=generator.device, generator=generator)
        return drawn.to(self.device).T

    def signs(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Independent random signs, (P, count); the generator is as for `normal`."""
        generator = self.generator(generator)
        drawn = torch.randint(2, (count, self.size), device=generator.device, generator=generator)
        return (2 * drawn - 1).to(self.device, self.dtype).T

    def generator(self, given: torch.Generator | None = None) -> torch.Generator:
        """The one that was given, or a new one on the device, with seed 0."""
        if given is None:
            return torch.Generator(self.device).manual_seed(0)
        if not isinstance(given, torch.Generator):
            raise TypeError(
                f"generator: expected a torch.Generator, as torch.Generator().manual_seed(0), found {given!r:.80}"
            )
        return given

    def state(self) -> dict[str, Any]:
        """Lists and strings for `Space.restore`."""
        shapes = [list(shape) for shape in self.shapes]
        dtype = str(self.dtype).removeprefix("torch.")
        fields = {"names": list(self.names), "shapes": shapes, "dtype": dtype, "device": str(self.device)}
        return {"structure": "Space", **fields} | ({"places": list(map(str, self.places))} if self.places else {})

    @staticmethod
    def restore(state: Mapping[str, Any], device: torch.device | str | None = None) -> Space:
        """The space with this `state`, all of it on `device` if given."""
        places = tuple(map(torch.device, state.get("places", ()))) if device is None else ()
        device = torch.device(device or state["device"])
        return Space(state["names"], state["shapes"], getattr(torch, state["dtype"]), device, places)


def name_of_rows(name: str, start: int, stop: int) -> str:
    """The name of some rows of a parameter."""
    return f"{name}[{start}:{stop}]"


def rows_of_name(name: str) -> tuple[str, int, int]:
    """Parameter, first row and the one after the last of a `name_of_rows`; no rows of other names."""
    match = ROWS.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else (name, 0, 0)


def _full_name(device: torch.device) -> torch.device:
    """ "cuda" and "cuda:0" may be the same device but compare unequal; a tensor has the full name."""
    is_full = device.index is not None or device.type == "cpu"
    return device if is_full else torch.empty(0, device=device).device


def require_dense_size(space: Space) -> None:
    """Raise ValueError where a matrix over this space has more than `DENSE_LIMIT` rows."""
    rows = space.size
    if rows > DENSE_LIMIT:
        gigabytes = rows**2 * space.dtype.itemsize / 1e9
        raise ValueError(
            f"this needs a dense {rows} x {rows} matrix ({gigabytes:.0f} GB), over the limit of {DENSE_LIMIT}. "
            "These need products only: conjugate_gradient, eigenvalues(k), xtrace, xdiag, "
            "lanczos_eigenvalues, lanczos_logdet, spectral_density"
        )


def warn_of_products(space: Space) -> None:
    """Warn that a large matrix is built column by column."""
    if space.size > MAX_DIRECT_SIZE:
        warnings.warn(
            f"this takes {space.size} products with the matrix, one for each row. Estimates take some tens: "
            "xtrace for the trace, xdiag for the diagonal, eigenvalues(k), lanczos_logdet",
            stacklevel=4,
        )


def warn_of_decomposition(space: Space) -> None:
    """Warn that all eigenvalues of a large matrix are asked for."""
    rows = space.size
    if rows > MAX_DIRECT_SIZE:
        gigabytes = rows**2 * space.dtype.itemsize / 1e9
        warnings.warn(
            f"this decomposes a {rows} x {rows} matrix ({gigabytes:.1f} GB, some {rows**3:.0e} operations). From some "
            "tens of products, eigenvalues(k) gives the k largest, and spectral_density the density of all",
            stacklevel=4,
        )
