"""Sums over data in a file: going on after an interruption, and the matrix of several files' data together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.gradients import require_same
from curvature.kronecker import Basis, KroneckerStatistics, Reading, Scheme
from curvature.linalg import to_host
from curvature.matrices import accumulators
from curvature.matrices.accumulators import Accumulator
from curvature.operators import Operator, Space, read, restore
from curvature.terms import AffineLayout

SHARE = 0.05  # of the time of a pass, that writing takes at most
TOLERANCE = 1e-3  # relative, of the sums of the first batch, when they are computed again
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        accumulators.DenseAccumulator, accumulators.DiagonalAccumulator, accumulators.EigenAccumulator,
        accumulators.FixedOperator, accumulators.KroneckerAccumulator, accumulators.LayersAccumulator,
        accumulators.RowRangeAccumulator, AffineLayout, Basis, KroneckerStatistics, Reading, Scheme,
    )
}  # fmt: skip


@dataclass
class Progress:
    """What a pass over data has added up."""

    accumulator: Accumulator[Any]
    generator: torch.Generator  # of the numbers that the vectors are drawn with
    total: float = 0.0  # what the samples count for together
    batches: int = 0  # how many are in the sums
    is_sum: bool = False  # whether the loss is a sum over samples, not a mean


class StoredSums:
    """The file of a pass, which goes on with it if it exists."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
        self.path, self.about = Path(path), about  # what the sums are of: plain numbers, strings, and dicts of them
        self.written, self.seconds = time.monotonic(), 0.0

    def fill(self, progress: Progress, add: Callable[[Any], None], each: Callable[..., None]) -> None:
        """Go over the missing batches by `each(visit, wanted=)`, and write the sums now and then, and at the end."""
        space = progress.accumulator.space
        known = _read(self.path, None if space.places else space.device) if self.path.exists() else None
        done, is_whole = 0, True
        if known is not None:
            done = known["batches"]
            require_same(self.path, known["about"], self.about)
            _require_places(self.path, known["sums"].space, space)
            progress.generator.set_state(known["before"])
        before, first = progress.generator.get_state(), None

        def visit(run: Any) -> None:
            nonlocal known, first, is_whole
            is_whole = False
            add(run)
            progress.batches += 1
            first = _norms(progress.accumulator) if first is None else first
            if known is not None:
                _require_near(self.path, known["first"], first)
                if isinstance(progress.accumulator, accumulators.LayersAccumulator):
                    known["sums"].make = progress.accumulator.make  # functions are in no file
                progress.accumulator, progress.total, progress.batches = known["sums"], known["total"], done
                progress.generator.set_state(known["draws"])
                first, known = known["first"], None
            is_whole = True
            if SHARE * (time.monotonic() - self.written) > self.seconds:
                self._write(progress, before, first)

        try:
            each(visit, wanted=lambda number: number == 0 or number >= done)
        finally:
            if is_whole and progress.batches > done:
                self._write(progress, before, first)

    def _write(self, progress: Progress, before: Tensor, first: Any) -> None:
        start = time.monotonic()
        numbers = {"batches": progress.batches, "total": progress.total, "is_sum": progress.is_sum, "first": first}
        states = {"before": before, "draws": progress.generator.get_state()}
        part = self.path.with_name(self.path.name + ".part")
        torch.save({"about": self.about, "sums": _packed(progress.accumulator), **states, **numbers}, part)
        os.replace(part, self.path)
        self.written = time.monotonic()
        self.seconds = self.written - start


def combine(paths: Iterable[str | os.PathLike[str]], device: torch.device | str | None = None) -> Operator:
    """The matrix of the data of several files together, which ``kfac(..., store=path)`` and others have written.

    It is the matrix that one pass over all of these data gives: for a sum loss with the sums of the parts, for a mean
    with the mean over all. Of a pass that was interrupted, the batches that the file holds count. The matrices
    themselves cannot be combined: ``K1 + K2`` of two Kronecker products is no Kronecker product (it is a `Sum`: its
    products are exact, its solves dense). In a mean of your own, all samples have to weigh alike: a file does not tell
    whether those of one part weigh more than those of another, which nothing notices.

    Args:
        paths: of the files, of one model with the same parameters and one loss; each on other data, as of several
            processes.
        device: of the matrix; None: where the sums were.

    Raises:
        ValueError: there is no file, one comes twice, holds no sums, or is of another model, loss, vectors or
            structure; or eigenvalues are in different bases (then make all with ``ekfac(..., factors=K)``).
        TypeError: one path instead of several.
    """
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"paths: expected a list of files, found one: pass [{str(paths)!r}]")
    listed = [Path(path) for path in paths]
    if not listed:
        raise ValueError("paths: there is no file")
    if len({path.resolve() for path in listed}) < len(listed):
        raise ValueError("paths: a file comes twice, and its data would count twice")
    whole = _read(listed[0], device)
    for path in listed[1:]:
        part = _read(path, device)
        require_same(path, part["about"], whole["about"], "batches")
        apart = f"{path} and {listed[0]} do not go together"
        try:
            whole["sums"].add_(part["sums"])
        except ValueError as error:
            raise ValueError(f"{apart}: {error}") from error
        whole["total"] += part["total"]
        if part["is_sum"] != whole["is_sum"]:
            raise ValueError(f"{apart}: the loss of one is a sum, of the other a mean")
    return whole["sums"].result(1.0 if whole["is_sum"] else 1 / whole["total"])


def _read(path: Path, device: torch.device | str | None) -> dict[str, Any]:
    found = read(path, "sums of a pass over data", map_location=device)
    if not isinstance(found, dict) or not {"about", "sums", "first"} <= found.keys():
        raise ValueError(f"{path} holds no sums of a pass over data")
    states = {key: found[key].cpu() for key in ("before", "draws")}
    found.setdefault("is_sum", found["about"].get("reduction") == "sum")  # files of version 0.1 say it there
    return found | states | {"sums": _unpacked(found["sums"], device)}


def _packed(value: Any) -> Any:
    """Tensors, numbers, strings, and lists of them, for `_unpacked`."""
    if isinstance(value, Operator | Space):
        return {"operator": value.state()}
    if type(value).__name__ in KINDS:
        own = value._asdict() if isinstance(value, Reading) else vars(value)
        fields = {key: _packed(item) for key, item in own.items() if not callable(item)}
        return {"kind": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        return {"pairs": [[_packed(key), _packed(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return type(value)(map(_packed, value))
    return value


def _unpacked(value: Any, device: torch.device | str | None) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_unpacked(item, device) for item in value)
    if not isinstance(value, dict):
        return value
    if "operator" in value:
        return restore(value["operator"], device)
    if "pairs" in value:
        return {_unpacked(key, device): _unpacked(item, device) for key, item in value["pairs"]}
    kind = KINDS[value["kind"]]
    fields = {key: _unpacked(item, device) for key, item in value["fields"].items()}
    if kind is Reading:
        return Reading(**fields)
    if kind is Scheme:
        return Scheme(**fields)
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)  # some are frozen
    return made


def _norms(accumulator: Accumulator) -> list[float]:
    tensors = [x for x in pytree.tree_leaves(_packed(accumulator)) if isinstance(x, Tensor)]
    return [float(norm) for norm in to_host([x.norm() for x in tensors if x.is_floating_point()])]


def _require_near(path: Path, known: list[float], found: list[float]) -> None:
    pairs = zip(known, found, strict=False)
    if len(known) != len(found) or any(abs(a - b) > TOLERANCE * max(abs(a), abs(b)) for a, b in pairs):
        raise ValueError(
            f"{path}: the first batch does not give what it gave, with the same parameters; the loss, the data, their "
            "order or the model's mode has changed"
        )


def _require_places(path: Path, known: Space, space: Space) -> None:
    if known.devices != space.devices:
        there, here = (", ".join(f"{name} on {d}" for name, d in own.devices.items()) for own in (known, space))
        raise ValueError(
            f"{path} has its sums where the parameters were, {there}; they are now {here}; take another file"
        )
