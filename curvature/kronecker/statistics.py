"""Sums over samples that give the Kronecker factors of one weight.

The builders accumulate them over a data set, the optimizers over the batches of a step and over processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker.factors import Product, Reading, Scheme
from curvature.kronecker.sides import Side, for_groups


@dataclass
class KroneckerStatistics:
    """Sums of outer products of activations and backprops, as sides of products, by reading of the weight."""

    scheme: Scheme
    # with the number of summands, of all groups or of each (g,)
    activations: dict[Reading, tuple[Side, int | Tensor]] = field(default_factory=dict)
    backprops: dict[Reading, Side] = field(default_factory=dict)
    samples: float = 0.0
    rows: tuple[float, float] = (0.0, 0.0)  # summands of each side: backprops and activations, unless these are flipped
    looked_up: Tensor | None = None  # how often rows of a table were, by side (2,), however many vectors there are

    def add_(self, other: Any) -> None:
        """Add other statistics, which must not be used any more."""
        for reading, (moment, number) in other.activations.items():
            if reading in self.activations:
                total, count = self.activations[reading]
                moment, number = moment.add_(total), number + count
            self.activations[reading] = moment, number
        for reading, moment in other.backprops.items():
            known = reading in self.backprops
            self.backprops[reading] = moment.add_(self.backprops[reading]) if known else moment
        self.samples += other.samples
        self.rows = self.rows[0] + other.rows[0], self.rows[1] + other.rows[1]
        if other.looked_up is not None:
            self.looked_up = other.looked_up if self.looked_up is None else self.looked_up + other.looked_up

    def scale_vectors_(self, times: float) -> None:
        """Rescale as if the vectors had been `times` as long."""
        self.backprops = {reading: moment.scaled(times**2) for reading, moment in self.backprops.items()}

    def factors(self, scale: float) -> Product:
        """The factors of outputs and of inputs, backprops multiplied by `scale`."""
        products = []
        for reading, (moment, number) in self.activations.items():
            mean, outer = moment.scaled(1 / divisor(number, moment.entries)), self.backprops[reading].scaled(scale)
            products.append((mean, outer) if reading.flipped else (outer, mean))
        if len(products) == 1:
            return products[0]
        rows, columns = merge_products([(rows.unpacked(), columns.unpacked()) for rows, columns in products])
        return self.scheme.side_of_entries(0, rows.entries), self.scheme.side_of_entries(1, columns.entries)

    def parts(self, blocks: Sequence[Any]) -> list[Any]:
        """The statistics of blocks of one layout that were measured as the groups of one."""
        count = len(blocks)
        activations = {key: (moment.parts(count), number) for key, (moment, number) in self.activations.items()}
        backprops = {key: moment.parts(count) for key, moment in self.backprops.items()}
        parts = []
        for k, block in enumerate(blocks):
            moments_of_block = {key: (moments[k], number) for key, (moments, number) in activations.items()}
            sent = {key: moments[k] for key, moments in backprops.items()}
            parts.append(replace(self, scheme=block.scheme, activations=moments_of_block, backprops=sent))
        return parts

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        """Tensors that add up over `size` processes, this one being `rank`."""
        tensors: dict[str, Tensor] = {}
        for reading, (moment, number) in self.activations.items():
            key, entries = "".join("ny"[flag] for flag in reading), moment.entries
            tensors[key + "a"] = moment.to_sum(rank, size)
            tensors[key + "b"] = self.backprops[reading].to_sum(rank, size)
            tensors[key + "number"] = torch.as_tensor(number, dtype=entries.dtype, device=entries.device)
        if any(kind.is_diagonal for kind in self.scheme.kinds):
            tensors["looked_up"] = entries.new_zeros(2) if self.looked_up is None else self.looked_up
        new = next(iter(tensors.values())).new_tensor
        return tensors | {"samples": new(self.samples), "rows": new(self.rows)}

    def load_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Fill empty statistics with the all-reduced `sums`."""
        self.samples, self.looked_up = float(sums["samples"]), sums.get("looked_up")
        outputs, inputs = sums["rows"].tolist()
        self.rows = outputs, inputs
        for key in dict.fromkeys(k[:2] for k in sums if k[2:] == "number"):
            if bool(sums[key + "number"].any()):  # otherwise no process read the weight in this way
                reading = Reading(key[0] == "y", key[1] == "y")
                moment = self.scheme.side_of_sum(not reading.flipped, sums[key + "a"])
                self.activations[reading] = moment, sums[key + "number"]
                self.backprops[reading] = self.scheme.side_of_sum(reading.flipped, sums[key + "b"])


def divisor(number: int | Tensor, entries: Tensor) -> int | Tensor:
    """By which to divide sums (g, ...) for their means; `number` is of all groups, or (g,)."""
    return for_groups(number.clamp(min=1), entries) if isinstance(number, Tensor) else max(number, 1)


def merge_products(products: Sequence[Product]) -> Product:
    """One product for the sum of several (tied weights), with the same trace.

    Each side is the sum over the products, weighted by the trace of the other side. Products are those of one `Scheme`.
    """
    traces = [(rows.diagonal().sum(1), columns.diagonal().sum(1)) for rows, columns in products]
    total = torch.stack([r * c for r, c in traces]).sum(0)
    total = total.clamp(min=torch.finfo(total.dtype).tiny).sqrt()

    def merged(k: int) -> Side:
        sides = [product[k].scaled(trace[1 - k]).entries for product, trace in zip(products, traces, strict=True)]
        summed = torch.stack(sides).sum(0)
        return replace(products[0][k], entries=summed / for_groups(total, summed))

    return merged(0), merged(1)
