"""Projected gradients of all samples of a data set, in a file that grows and can be gone on with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from curvature import gradients
from curvature.losses import Loss
from curvature.recording import trained_parameters
from curvature.uses.projections.projection import Projection, per_sample_projections, require_projection

SECONDS = 1.0  # between two notes of how far the file is
TOLERANCE = 1e-3  # of a row's norm, between what is stored and what is computed again: other machines round differently


@gradients.either_form
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

    Beside it, in ``path + ".json"``, is noted what the rows are of and how many are there, at least once a second and
    when the pass ends, with or without an exception. The same call goes on with a file that is not complete: the
    gradients of rows that are there are not computed again, but for the first batch, which must agree with them.

    Args:
        data: one pair ``(x, y)``, or an iterable of pairs that can be gone over twice and does not shuffle (a
            DataLoader, a list).
        path: of the file, as ``"gradients.npy"``.
        progress: whether to show a bar over the batches.

    The other arguments are those of `per_sample_projections`.

    Returns:
        The file as an array (N, K), mapped into memory for reading: ``numpy.load(path, mmap_mode="r")``.

    Raises:
        ValueError: the data shuffle, do not tell how many samples they have, or have none; or the file was begun with
            another model (the parameters are named), choice of parameters, projection or amount of data, or the first
            batch has other rows now (another loss, mode, order or transform). Or as for `per_sample_gradients`.
        FileExistsError: there is such a file, which this function has not begun.
        TypeError: an argument of the wrong kind.
    """
    require_projection(projection)
    gradients.require_pairs(data)
    gradients.require_order(data)
    names = list(trained_parameters(model, parameters))
    about: dict[str, Any] = {
        "rows": 0,
        "samples": _number_of_samples(data, model, loss, sample_dim),
        "batches": gradients.number_of_batches(data),
        "projection": repr(projection),
        "model": gradients.digests(model),
        "parameters": names,
    }
    file, batches, start = _File(Path(path), about), gradients.pairs(data), 0
    try:
        for x, y in tqdm(batches, total=about["batches"], unit="batch", leave=False, disable=not progress):
            stop = start + gradients.Batch.of(model, loss, x, y, sample_dim).count
            if start == 0 or stop > about["rows"]:
                rows = per_sample_projections(model, loss, x, y, projection, parameters=names, sample_dim=sample_dim)
                file.put(start, stop, rows)
            start = stop
    finally:
        file.write_note()
    if start != about["samples"]:
        raise ValueError(f"data: {about['samples']} samples when they were counted, {start} in the pass")
    return np.load(path, mmap_mode="r")


class _File:
    """The array in its file, and the note beside it."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about, self.note = path, about, path.with_name(path.name + ".json")
        self.array: np.ndarray | None = None
        self.noted = time.monotonic()
        if self.note.exists():
            found = json.loads(self.note.read_text("utf-8"))
            gradients.require_same(path, found, about, "rows")
            about["rows"] = found["rows"]
            self.array = open_memmap(path, mode="r+")
        elif path.exists():
            raise FileExistsError(f"{path} exists, without {self.note.name} that says what its rows are: take another")

    def put(self, start: int, stop: int, rows: Tensor) -> None:
        """Write rows; those that are there have to agree."""
        values = rows.cpu().numpy()
        if self.array is None:
            shape = (self.about["samples"], values.shape[1])
            self.array = open_memmap(self.path, mode="w+", dtype=values.dtype, shape=shape)
            self.write_note()
        if stop > len(self.array):
            raise ValueError(f"data: {len(self.array)} samples when they were counted, at least {stop} in the pass")
        known = max(start, min(stop, self.about["rows"]))
        there, again = self.array[start:known], values[: known - start]
        norms = np.linalg.norm(there, axis=1)
        apart = np.linalg.norm(there - again, axis=1) > TOLERANCE * (norms + TOLERANCE * norms.max(initial=0))
        if apart.any():
            raise ValueError(
                f"{self.path}: the projected gradient of sample {start + int(apart.argmax())} is not the one stored, "
                f"with the same parameters; the loss, the data, their order or the model's mode has changed"
            )
        self.array[known:stop] = values[known - start :]
        self.about["rows"] = max(self.about["rows"], stop)
        if time.monotonic() - self.noted > SECONDS:
            self.write_note()

    def write_note(self) -> None:
        """Rows first, so that the note never promises more than there is."""
        if isinstance(self.array, np.memmap):
            self.array.flush()
            other = self.note.with_name(self.note.name + ".part")
            other.write_text(json.dumps(self.about, indent=1), "utf-8")
            os.replace(other, self.note)
        self.noted = time.monotonic()


def _number_of_samples(data: Any, model: nn.Module, loss: Loss, sample_dim: Any) -> int:
    """By the indices that a DataLoader will ask for; else by going over the data."""
    if isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) or isinstance(data, Iterator):
        kind = type(getattr(data, "dataset", data)).__name__
        raise ValueError(
            f"data: a {kind} does not tell how many samples it has; pass a list of batches, or a DataLoader of a "
            f"dataset with a length"
        )
    if isinstance(data, DataLoader) and data.batch_sampler is not None:
        count = sum(len(indices) for indices in data.batch_sampler)
    else:
        count = sum(gradients.Batch.of(model, loss, x, y, sample_dim).count for x, y in gradients.pairs(data))
    if not count:
        raise ValueError("data: no samples")
    return count
