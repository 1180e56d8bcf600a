"""Sums over samples that give the Kronecker factors of one weight.

The builders accumulate them over a data set, the optimizers over the batches of a step and over processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker.diagonal_blocks import cuts_of
from curvature.kronecker.factors import Reading, Scheme, at_least_one
from curvature.kronecker.packing import as_packed, pack, whole
from curvature.kronecker.waiting import Waiting
from curvature.linalg import add_moments_, fill_slot, is_sketch, moment_diagonal, own_precision, scale_moment, sum_slots


@dataclass
class KroneckerStatistics:
    """Second moments of activations and backprops, by reading of the weight.

    Attributes:
        samples: number of samples.
        activations: sums of outer products, each with its number of summands, of all groups or of each (g,).
        backprops: sums of outer products.
        waiting: activations that are yet to be summed up (`curvature.kronecker.kept_activations`).

    All of them as sides of products, or all as `curvature.kronecker.packing.pack` keeps them.
    """

    scheme: Scheme
    samples: float = 0.0
    activations: dict[Reading, tuple[Tensor, int | Tensor]] = field(default_factory=dict)
    backprops: dict[Reading, Tensor] = field(default_factory=dict)
    waiting: dict[Reading, Waiting] = field(default_factory=dict)

    def secure(self) -> None:
        """Copy what waits of the layer's own inputs, which may change from now on."""
        self.waiting = {reading: own.copied() for reading, own in self.waiting.items()}

    def completed(self) -> Any:
        """The same with all activations summed up, packed."""
        if not self.waiting:
            return self
        cuts, sums = cuts_of(self.scheme), dict(self.activations)
        for reading, own in self.waiting.items():
            with own_precision(self.backprops[reading]):
                moment, number = self.scheme.activations(own.checked())
            sums[reading] = pack(moment, cuts[not reading.flipped]), number
        return replace(self, activations=sums, waiting={})

    def _complete(self) -> None:
        vars(self).update(vars(self.completed()))

    def add_(self, other: Any) -> None:
        self._complete()
        other = other.completed()
        self.samples += other.samples
        for reading, (moment, number) in other.activations.items():
            if reading in self.activations:
                total, count = self.activations[reading]
                moment, number = add_moments_(total, moment), number + count
            self.activations[reading] = moment, number
        for reading, moment in other.backprops.items():
            known = reading in self.backprops
            self.backprops[reading] = add_moments_(self.backprops[reading], moment) if known else moment

    def scale_vectors_(self, times: float) -> None:
        """Rescale as if the vectors had been `times` as long."""
        self.samples /= times**2

    def factors(self, scale: float) -> tuple[Tensor, Tensor]:
        """The factors of outputs and of inputs, packed, backprops multiplied by `scale`."""
        self._complete()
        cuts = cuts_of(self.scheme)
        found = [
            self.scheme.product(reading, *self.activations[reading], scale_moment(moment, scale))
            for reading, moment in self.backprops.items()
        ]
        if len(found) > 1:
            of = lambda pair: [whole(as_packed(side, cut)) for side, cut in zip(pair, cuts, strict=True)]
            found = [merge_products([(rows, columns) for rows, columns in map(of, found)])]
        rows, columns = map(pack, found[0], cuts)
        return rows, columns

    def packed(self) -> KroneckerStatistics:
        """The same, packed."""
        cuts = cuts_of(self.scheme)
        activations = {k: (pack(a, cuts[not k.flipped]), number) for k, (a, number) in self.activations.items()}
        backprops = {k: pack(b, cuts[k.flipped]) for k, b in self.backprops.items()}
        return replace(self, activations=activations, backprops=backprops)

    def factors_(self, scale: float) -> tuple[Tensor, Tensor]:
        """`factors` of moments that are no sketches, in their memory: the sums are used up."""
        for reading, (moment, number) in self.activations.items():
            moment.div_(at_least_one(number, moment))
            self.backprops[reading].mul_(scale)
        pairs = {k: (b, self.activations[k][0]) for k, b in self.backprops.items()}
        return merge_products([(a, b) if k.flipped else (b, a) for k, (b, a) in pairs.items()])

    def parts(self, schemes: Sequence[Scheme]) -> list[Any]:
        """The statistics of layers of one layout that were measured as the groups of one."""
        self._complete()
        of = lambda tensor: tensor.chunk(len(schemes))
        activations = {key: (of(moment), number) for key, (moment, number) in self.activations.items()}
        backprops = {key: of(moment) for key, moment in self.backprops.items()}
        return [
            type(self)(
                scheme,
                self.samples,
                {key: (moments[k], number) for key, (moments, number) in activations.items()},
                {key: moments[k] for key, moments in backprops.items()},
            )
            for k, scheme in enumerate(schemes)
        ]

    def tensors(self) -> list[Tensor]:
        """All sums; of activations that wait, a bound of theirs."""
        numbers = [number for _, number in self.activations.values() if isinstance(number, Tensor)]
        bounds = [own.bound() for own in self.waiting.values()]
        return [*(moment for moment, _ in self.activations.values()), *numbers, *self.backprops.values(), *bounds]

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        """Tensors that add up over `size` processes, this one being `rank`."""
        self._complete()
        found: dict[str, Tensor] = {}
        for reading, (a, number) in self.activations.items():
            key = "".join("ny"[flag] for flag in reading)
            sides = {
                "a": a,
                "b": self.backprops[reading],
                "number": torch.as_tensor(number, dtype=a.dtype, device=a.device),
            }
            found |= {key + k: fill_slot(x, rank, size) if is_sketch(x) else x for k, x in sides.items()}
        return found | {"samples": next(iter(found.values())).new_tensor(self.samples)}

    def load_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Fill empty statistics with the all-reduced `sums`."""
        self.samples = float(sums["samples"])
        for key in dict.fromkeys(k[:2] for k in sums if k[2:] == "number"):
            a, b = (sum_slots(x) if x.ndim == 4 else x for x in (sums[key + "a"], sums[key + "b"]))
            if bool(sums[key + "number"].any()):  # otherwise no process read the weight in this way
                reading = Reading(key[0] == "y", key[1] == "y")
                self.activations[reading], self.backprops[reading] = (a, sums[key + "number"]), b


def merge_products(sides: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One pair for the sum of several Kronecker products (tied weights), with the same trace.

    Each side is the sum over the products, weighted by the trace of the other side. Pairs are those of one `Scheme`.
    """
    if len(sides) == 1:
        return sides[0]
    traces = [(moment_diagonal(r).sum(1), moment_diagonal(c).sum(1)) for r, c in sides]
    total = torch.stack([r * c for r, c in traces]).sum(0).clamp(min=torch.finfo(sides[0][0].dtype).tiny).sqrt()

    def side(k: int) -> Tensor:
        parts = [
            pair[k] * t[1 - k].reshape(-1, *[1] * (pair[k].ndim - 1)) for pair, t in zip(sides, traces, strict=True)
        ]
        return torch.stack(parts).sum(0) / total.reshape(-1, *[1] * (parts[0].ndim - 1))

    return side(0), side(1)
