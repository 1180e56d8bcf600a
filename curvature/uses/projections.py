"""Random projections of per-sample gradients: a few numbers for each sample, in place of as many as parameters.

In: a model, a loss, data, and a projection (`SignProjection`, `NormalProjection`, `KroneckerProjection`: small values
that name a linear map by a seed). Out: projected gradients (N, K) of a batch (`per_sample_projections`), or of all data
in a file (`store_projections`). Neither the gradients nor the map exist as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib.format import dtype_to_descr, write_array_header_1_0
from torch import Tensor, nn
from tqdm import tqdm

from curvature.gradients import Batch, either_form, number_of_batches, pairs, require_order, require_pairs, sample_terms
from curvature.losses import Loss
from curvature.recording import trained_parameters
from curvature.terms import DenseGradients, Term, gradients, pieces, project_sides

BLOCK_ENTRIES = 1 << 18  # of a dense map that are drawn at a time; other blocks are other maps


# -- projections as values: a kind, a size and a seed, from which any part of the map can be drawn again
#
# Every part of a map is drawn on the CPU by a generator of its own, seeded with a hash of the seed, the parameter's
# name and the number of the part. So a parameter's part depends on nothing but these and its shape.


@dataclass(frozen=True)
class Projection(ABC):
    """A random linear map of gradients to vectors, whose inner products are right on average."""

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The projections (N, K) of gradients, or steps, or task vectors: ``{name: (N, *parameter.shape)}``.

        Raises:
            ValueError: there are none.
        """
        if not gradients:
            raise ValueError("gradients: no parameter")
        return self.of_terms({name: [DenseGradients(g)] for name, g in gradients.items()})

    @torch.no_grad()
    def of_terms(self, terms: Mapping[str, Sequence[Term]]) -> Tensor:
        """(N, K) of gradients as terms, in single precision at least, on the device of the first."""
        terms = {name: _real(parts) for name, parts in terms.items()}
        columns = self._columns({name: parts[0].shape for name, parts in terms.items()})
        out = None
        for name, parts in terms.items():
            projected = self._of_parameter(name, parts)
            if out is None:
                out = projected.new_zeros(len(projected), max(part.stop for part in columns.values()))
            out = out.to(torch.promote_types(out.dtype, projected.dtype))
            out[:, columns[name]] += projected.to(out)
        assert out is not None
        return out

    def columns(self, model: nn.Module, parameters: Iterable[str] | None = None) -> dict[str, slice]:
        """Which of the K columns each parameter counts in, of those that `per_sample_projections` would take."""
        trained = trained_parameters(model, parameters).items()
        return self._columns({name: (*p.shape, 2) if p.is_complex() else tuple(p.shape) for name, p in trained})

    @abstractmethod
    def _columns(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
        """Likewise, for parameters of these shapes."""

    @abstractmethod
    def _of_parameter(self, name: str, terms: Sequence[Term]) -> Tensor:
        """What a parameter adds to its columns."""


@dataclass(frozen=True)
class _DenseProjection(Projection):
    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        _require_size("k", self.k)

    def _columns(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
        return dict.fromkeys(shapes, slice(0, self.k))

    def _of_parameter(self, name: str, terms: Sequence[Term]) -> Tensor:
        entries, height = math.prod(terms[0].shape), max(1, BLOCK_ENTRIES // self.k)
        out = None if entries else gradients(terms).new_zeros(len(terms[0]), self.k)
        for samples, start, values in pieces(terms):
            out = values.new_zeros(len(terms[0]), self.k) if out is None else out
            stop = start + values.shape[1]
            for block in range(start // height, -(-stop // height)):
                first, last = block * height, min((block + 1) * height, entries)
                part = slice(max(start, first), min(stop, last))
                some = values[:, part.start - start : part.stop - start]
                if some.any():  # most rows of an embedding are not looked up
                    drawn = self._draw(last - first, _generator(self.seed, name, block), out.device)
                    out[samples].addmm_(some, drawn[part.start - first : part.stop - first].to(out.dtype))
        assert out is not None
        return out * self.k**-0.5

    @abstractmethod
    def _draw(self, rows: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """Numbers (rows, k) of mean 0 and variance 1, in single precision."""


@dataclass(frozen=True)
class SignProjection(_DenseProjection):
    """``R g / sqrt(k)`` of the whole gradient g, R (k, P) of random signs; the columns are (N, k).

    Inner products of projections are those of the gradients on average, with a standard deviation of at most
    ``sqrt((|g|^2 |h|^2 + (g . h)^2) / k)`` (Johnson-Lindenstrauss; TRAK, Park et al. 2023, arXiv:2303.14186, section
    3). R is drawn a block at a time and never kept; the same seed gives the same R at every call and on every device.

    Args:
        k: numbers for each sample.
        seed: names R.

    Raises:
        ValueError: k is no positive integer.
    """

    def _draw(self, rows: int, generator: torch.Generator, device: torch.device) -> Tensor:
        return _signs(rows * self.k, generator, device).view(rows, self.k)


@dataclass(frozen=True)
class NormalProjection(_DenseProjection):
    """`SignProjection` with standard normal numbers, which take several times as long to draw.

    Drawn in single precision on the CPU; other kinds of CPU may round them differently.
    """

    def _draw(self, rows: int, generator: torch.Generator, device: torch.device) -> Tensor:
        return torch.randn(rows, self.k, generator=generator, dtype=torch.float32, device="cpu").to(device)


@dataclass(frozen=True)
class KroneckerProjection(Projection):
    """``L G R^T / sqrt(l r)`` of each parameter's gradient G, a matrix (shape[0], all other axes); L, R random signs.

    Of a layer that is ``sum_t (L b_t) (R a_t)^T``: activations and backprops are projected, and no gradient is built
    (LoGra, Choe et al. 2024, arXiv:2405.13954, section 3.1). The columns of all parameters follow each other
    (`columns`). Inner products are right on average; their error falls with the side, the root of a layer's columns,
    so that for as many columns in all it is larger than that of a `SignProjection`, for much less time.

    Args:
        side: the rows l of L and r of R; a side of G that is not longer is kept as it is, so that biases have at most
            this many columns.
        seed: names L and R.

    Raises:
        ValueError: side is no positive integer.
    """

    side: int
    seed: int = 0

    def __post_init__(self) -> None:
        _require_size("side", self.side)

    def _columns(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, slice]:
        columns, start = {}, 0
        for name, shape in shapes.items():
            stop = start + math.prod(min(self.side, size) for size in _sides(shape))
            columns[name] = slice(start, stop)
            start = stop
        return columns

    def _of_parameter(self, name: str, terms: Sequence[Term]) -> Tensor:
        sides = _sides(tuple(terms[0].shape))
        left, right = (self._draw(name, number, size, terms[0].device) for number, size in enumerate(sides))
        scale = math.prod(self.side**-0.5 for size in sides if size > self.side)
        return project_sides(terms, left, right).flatten(1) * scale

    def _draw(self, name: str, number: int, size: int, device: torch.device) -> Tensor:
        """One side of the map, (side, size) at most, not scaled."""
        if size <= self.side:
            return torch.eye(size, device=device)
        return _signs(size * self.side, _generator(self.seed, name, number), device).view(size, self.side).mT


@either_form
def per_sample_projections(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    projection: Projection,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
) -> Tensor:
    """The projection (N, K) of the gradient of each sample's own loss.

    It is ``projection(per_sample_gradients(model, loss, x, y, parameters=parameters))``, without the gradients: a
    sample has the same projection in every batch and in every call with the same seed, unless the forward pass draws
    random numbers (dropout in training mode).

    Args:
        projection: `SignProjection(k)`, `NormalProjection(k)` or `KroneckerProjection(side)`.

    The other arguments are those of `per_sample_gradients`. A batch may be empty.

    Raises:
        TypeError: ``projection`` is none of these.
        ValueError, TypeError: as for `per_sample_gradients`; BatchNorm in training mode is refused by name.

    Beside what a forward and a backward pass take, memory is about ten megabytes, K numbers for each sample, and the
    gradients of parameters that no layer rule explains, N at once. Time: a `KroneckerProjection` takes less than a
    backward pass if its side is small beside the layers, a dense projection N * K products for each parameter.
    """
    require_projection(projection)
    return projection.of_terms(sample_terms(Batch.of(model, loss, x, y, sample_dim, parameters)))


def require_projection(projection: Projection) -> None:
    if not isinstance(projection, Projection):
        raise TypeError(
            f"projection: expected a SignProjection, NormalProjection or KroneckerProjection, "
            f"found a {type(projection).__name__}"
        )


def _real(terms: Sequence[Term]) -> Sequence[Term]:
    """Complex gradients as pairs of real numbers."""
    if isinstance(terms[0], DenseGradients) and terms[0].values.is_complex():
        return [DenseGradients(torch.view_as_real(gradients(terms).resolve_conj()))]
    return terms


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    height, *rest = shape or (1,)
    return height, math.prod(rest)


def _generator(seed: int, name: str, part: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{part}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _signs(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """-1 and 1, (count,): the bits of random words, looked up eight at a time."""
    limit = torch.iinfo(torch.int64)
    words = torch.randint(limit.min, limit.max, (-(-count // 64),), generator=generator, device="cpu")
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    signs = (2 * bits - 1).to(torch.float32)
    return signs.index_select(0, words.view(torch.uint8).to(device).int()).flatten()[:count]


def _require_size(name: str, size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name}: expected a positive integer, found {size!r}")


# -- all samples of a data set, in a file


@either_form
def store_projections(
    model: nn.Module,
    loss: Loss,
    data: Any,
    projection: Projection,
    path: str | os.PathLike[str],
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    progress: bool = False,
) -> np.ndarray:
    """`per_sample_projections` of all data in a numpy file, row n for sample n in the order of the data.

    The file is there once it is complete; until then it is called ``path + ".part"``.

    Args:
        data: one pair ``(x, y)``, or an iterable of pairs that does not shuffle (a DataLoader, a list, a generator). It
            is gone over once.
        path: of the file, as ``"gradients.npy"``.
        progress: whether to show a bar over the batches.

    The other arguments are those of `per_sample_projections`.

    Returns:
        The file as an array (N, K), mapped into memory for reading: ``numpy.load(path, mmap_mode="r")``.

    Raises:
        ValueError: the data shuffle, or have no samples. Or as for `per_sample_gradients`.
        FileExistsError: there is such a file.
        TypeError: an argument of the wrong kind.
    """
    require_projection(projection)
    require_pairs(data)
    require_order(data)
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists: take another file, or delete it")
    batches = tqdm(pairs(data), total=number_of_batches(data), unit="batch", leave=False, disable=not progress)
    options: Any = {"parameters": parameters, "sample_dim": sample_dim}
    every = (per_sample_projections(model, loss, x, y, projection, **options).cpu().numpy() for x, y in batches)
    first = next((rows for rows in every if len(rows)), None)
    if first is None:
        raise ValueError("data: no samples")
    count, part = 0, path.with_name(path.name + ".part")
    with part.open("wb") as file:
        start = _write_header(file, first, count)
        for rows in itertools.chain([first], every):
            rows.tofile(file)
            count += len(rows)
        file.seek(0)  # the number of samples is known now
        if (end := _write_header(file, first, count)) != start:
            raise ValueError(
                f"{part}: the header for {count} rows takes {end} bytes, where {start} were left for it; store the "
                "data in several files"
            )
    os.replace(part, path)
    return np.load(path, mmap_mode="r")


def _write_header(file: BinaryIO, rows: np.ndarray, count: int) -> int:
    """Of a file of so many rows like these; returns where the first of them is: 128, however many there are."""
    form = {"descr": dtype_to_descr(rows.dtype), "fortran_order": False, "shape": (count, rows.shape[1])}
    write_array_header_1_0(file, form)
    return file.tell()
