"""Kronecker products of second moments: ``kron(B, A)`` for each group of a weight."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from curvature import kronecker
from curvature.operators import Kronecker, Operator, Space
from curvature.structures.structure import Chunk, Structure
from curvature.terms import Term, TermsByVector

SIDES = "a", "b"  # ends of the names of sums of outer products: of activations, and of backprops


class KroneckerStructure(Structure):
    """Sums of outer products of activations and of backprops, by reading of the weight.

    Each reading gives a product. Only `factors` merges several, so that sums over data and processes stay exact. The
    numbers are the entries of sides, the number of summands of those of activations, and, if they are estimates, how
    often rows of a table were looked up, by side (2,), however many vectors there are. Summands are counted for each
    side.

    Args:
        space: of the weight, and of its bias where that is one more input of it.
        scheme: how moments are summed and stored.
    """

    def __init__(self, space: Space, scheme: kronecker.Scheme) -> None:
        super().__init__(space)
        self.scheme = scheme
        self.counts = [0.0, 0.0, 0.0]

    def add(self, chunk: Chunk) -> None:
        vectors = chunk.by_sample(self.space.names[0])
        if vectors is not None:
            left, right = vectors
            self._add_backprops(left, None if right is left else right, chunk.scales)
            if chunk.first:
                self._add_activations(left[0])

    def estimate(self, terms: Mapping[str, Sequence[Term]], samples: float, rank: int, world_size: int) -> None:
        of_weight = terms[self.space.names[0]]
        self.counts[0] += samples
        self._add_backprops([of_weight])
        if samples:  # later vectors have the same activations
            self._add_activations(of_weight, (rank, world_size))

    def _add_backprops(
        self, left: TermsByVector, right: TermsByVector | None = None, weights: Tensor | None = None
    ) -> None:
        here, others = self.scheme, {} if right is None else self._readings(right)
        for reading, vectors in self._readings(left).items():
            k = int(reading.flipped)
            moment = here.backprops(vectors, None if right is None else others[reading], weights)
            if right is not None and not here.kinds[k].is_diagonal:
                moment = (moment + moment.mT) / 2  # symmetric up to rounding of the right vectors
            self.add_to(_name(reading, "b"), here.side(k, moment).entries)
            self.counts[1 + k] += len(vectors) * kronecker.count_rows(vectors[0], here.sharing)

    def _add_activations(self, terms: Sequence[Term], part: tuple[int, int] | None = None) -> None:
        """Of fewer of many samples if this `part`, rank and number of processes, of a batch is one of many."""
        here = self.scheme
        for reading, (whole,) in self._readings([terms]).items():
            k = int(not reading.flipped)
            chosen = whole if part is None else kronecker.subsample_samples(whole, here.sharing, *part)
            moment, number = here.activations(chosen)
            if part is not None and reading.one_hot and here.kinds[k].is_diagonal:
                look_ups = moment.new_zeros(2)
                look_ups[k] = here.look_ups(chosen, moment, number)
                self.add_to("looked_up", look_ups)
            if not isinstance(number, Tensor):
                number = torch.tensor(number, dtype=torch.float64, device="cpu")
            self.add_to(_name(reading, "number"), number)
            self.add_to(_name(reading, "a"), here.side(k, moment).entries)
            self.counts[1 + k] += kronecker.count_rows(chosen, here.sharing)

    def _readings(self, vectors: TermsByVector) -> dict[kronecker.Reading, Sequence[Sequence[kronecker.Affine]]]:
        """The terms of each vector by their reading of the weight: those of one pass are the same for all vectors."""
        try:
            first = self.scheme.readings(vectors[0])
        except ValueError as error:
            layer = self.space.names[0].rpartition(".")[0] or self.space.names[0]
            raise ValueError(
                f"{', '.join(self.space.names)}: a batch reads it in another form than the first one, as where only "
                f'some of the samples reach an expert; choose structure={{"{layer}": "dense"}} or "diagonal"'
            ) from error
        if len(first) == 1:
            return {reading: cast("Sequence[Sequence[kronecker.Affine]]", vectors) for reading in first}
        each = [self.scheme.readings(terms) for terms in vectors]
        return {reading: [parts[reading] for parts in each] for reading in first}

    def _side(self, name: str, entries: Tensor) -> kronecker.Side:
        return self.scheme.side_of_entries(_index(name), entries)

    def _sides(self) -> dict[str, kronecker.Side]:
        """Those of the numbers that are entries of sides."""
        return {name: self._side(name, x) for name, x in self.tensors.items() if name[2:] in SIDES}

    def add_to(self, name: str, value: Tensor) -> None:
        if name in self.tensors and name[2:] in SIDES:
            value = self._side(name, value).add_(self._side(name, self.tensors.pop(name))).entries
        super().add_to(name, value)

    def scaled(self, factor: float) -> Any:
        new = copy.copy(self)
        outer = {name: side.scaled(factor).entries for name, side in self._sides().items() if name[2:] == "b"}
        new.tensors = self.tensors | outer
        return new

    def factors(self) -> kronecker.Product:
        """The side of the outputs, and that of the inputs."""
        return factors_of([self], [1.0])[0]

    def operator(self) -> Operator:
        return self._operator_of(self.factors())

    def result(self, scale: float) -> Operator:
        """In place: sides may be larger than all else that a pass over the data makes."""
        return self._operator_of(factors_of([self], [scale], in_place=True)[0])

    def _operator_of(self, factors: kronecker.Product) -> Operator:
        rows, columns = (side.diagonal() if side.is_diagonal else side.dense() for side in factors)
        return Kronecker(self.space, self.scheme.arrangement, rows, columns, is_symmetric=True)

    def trace(self) -> Tensor:
        rows, columns = (side.diagonal().sum(1) for side in self.factors())
        return (rows * columns).sum()

    def joined(self, others: Sequence[Any]) -> Any:
        """An empty one whose groups are those of this one and of others of its layout, one after the other."""
        arrangement = self.scheme.arrangement.repeated(1 + len(others))
        space = Space(self.space.names, arrangement.shapes, self.space.dtype, self.space.device)
        return KroneckerStructure(space, replace(self.scheme, arrangement=arrangement))

    def split(self, parts: Sequence[KroneckerStructure]) -> None:
        """Fill empty ones of one layout, which were `joined`."""
        each = {name: x.chunk(len(parts)) if x.ndim else x.repeat(len(parts)) for name, x in self.tensors.items()}
        for k, part in enumerate(parts):
            part.counts, part.tensors = list(self.counts), {name: x[k] for name, x in each.items()}

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        sums = {name: x.to(self.space.device, self.space.dtype) for name, x in super().sums(rank, size).items()}
        return sums | {name: side.to_sum(rank, size) for name, side in self._sides().items()}

    def load_sums(self, sums: Mapping[str, Tensor]) -> None:
        super().load_sums(sums)
        # without summands no process read the weight in this way
        unread = {name[:2] for name, x in sums.items() if name[2:] == "number" and not bool(x.any())}
        self.tensors = {
            name: self.scheme.side_of_sum(_index(name), x).entries if name[2:] in SIDES else x
            for name, x in self.tensors.items()
            if name[:2] not in unread
        }


def factors_of(
    structures: Sequence[KroneckerStructure], scales: Sequence[float], in_place: bool = False
) -> list[kronecker.Product]:
    """The `factors` of each times a number, all sides scaled together; `in_place` where the sums are used up."""
    named = [structure._sides() for structure in structures]
    factors: list[float | Tensor] = []
    for structure, sides, scale in zip(structures, named, scales, strict=True):
        of_inputs = {name: structure.tensors[name[:2] + "number"] for name in sides if name[2:] == "a"}
        factors += [_inverse_of_number(of_inputs[name]) if name in of_inputs else scale for name in sides]
    scaled = iter(kronecker.scale_all([side for sides in named for side in sides.values()], factors, in_place))
    products = []
    for sides in named:
        by_name = {name: next(scaled) for name in sides}
        pairs = {name: (side, by_name[name[:2] + "b"]) for name, side in by_name.items() if name[2:] == "a"}
        every = [pair if _index(name) == 0 else pair[::-1] for name, pair in pairs.items()]
        products.append(every[0] if len(every) == 1 else kronecker.merge_products(every))
    return products


def _inverse_of_number(number: Tensor) -> float | Tensor:
    """One over a number of summands, which is on the host unless each group has its own."""
    return 1 / number.clamp(min=1) if number.ndim or number.device.type != "cpu" else 1 / max(float(number), 1.0)


def _name(reading: kronecker.Reading, what: str) -> str:
    return "".join("ny"[flag] for flag in reading) + what


def _index(name: str) -> int:
    """Whether a sum of a reading goes into the side of the outputs (0) or into that of the inputs (1)."""
    return int((name[1] == "y") == (name[2] == "b"))
