"""What a step of data-parallel K-FAC costs on p ranks: pure functions of the measured costs of single operations.

All ranks hold the whole model and a batch of their own. Every `EVERY` steps the statistics of all layers are averaged
over the ranks in one flat buffer, behind the backward pass; each layer's pair of factors is inverted by one rank. A
layer's inverses are kept by g of p ranks (KAISA's gradient workers, arXiv:2107.01739, section 3.2), g / p being the
fraction f. The others receive the preconditioned gradient at every step. With f = 1 all keep all, with f = 1/p only the
owner does. Seconds and bytes are means over `EVERY` steps, of the rank that has most to do.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

FLOAT = 4  # bytes
EVERY = 10  # steps from one renewal to the next, and from one inversion of a layer to the next
MOST_TURNS = 3  # of an interval, at which layers are inverted
LARGEST = 2048  # a side larger than this is a sketch, as in `curvature.factors`
RANK, ROWS = 128, 256  # of a sketch: directions that are kept, rows of a batch, as in `curvature.sketch`
ROWS_PER_INPUT, MIN_SUBSAMPLE = 8, 16  # rows for each column of a moment, and samples, as in `curvature.moments`
SGD_TOUCHES, KFAC_TOUCHES = 6, 20  # how often a step reads or writes a number of each parameter
CALLS = 25  # operations for each layer of a step, beside products


@dataclass(frozen=True)
class Layer:
    """``outputs x inputs`` (the bias among the inputs), used at `places` of a sample.

    `flat`: the side of the outputs is kept as its diagonal, as that of a tied vocabulary.
    """

    inputs: int
    outputs: int
    places: int = 1
    flat: bool = False

    @property
    def sides(self) -> tuple[tuple[int, bool], tuple[int, bool]]:
        return (self.outputs, self.flat), (self.inputs, False)

    @property
    def bytes(self) -> int:
        """Of the gradient."""
        return FLOAT * self.inputs * self.outputs

    @property
    def statistics(self) -> int:
        """Bytes of both factors, full and symmetric: an upper bound of what is averaged."""
        return FLOAT * sum(d if flat else (ROWS + 1) * d if d > LARGEST else d * d for d, flat in self.sides)

    @property
    def inverses(self) -> int:
        """Bytes of both inverses."""
        return FLOAT * sum(d if flat else RANK * d if d > LARGEST else d * d for d, flat in self.sides)


@dataclass(frozen=True)
class Curve:
    """Measured seconds at growing sizes; straight lines between and beyond them, both axes logarithmic."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        k = min(max(bisect.bisect(self.sizes, size), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[k - 1 : k + 1], self.seconds[k - 1 : k + 1]
        slope = math.log(y1 / y0) / math.log(x1 / x0)
        return y0 * (size / x0) ** slope

    def faster(self, factor: float) -> Curve:
        return Curve(self.sizes, tuple(s / factor for s in self.seconds))


@dataclass(frozen=True)
class Costs:
    """Seconds of operations.

    Attributes:
        product: of one multiply-add of a matrix product, by its smallest dimension.
        inverse: of a Cholesky inverse, by rows.
        eigen: of an eigendecomposition, by rows.
        touch: of one number that an elementwise operation reads or writes.
        call: of an operation on next to nothing.
    """

    product: Curve
    inverse: Curve
    eigen: Curve
    touch: float
    call: float

    def faster(self, products: float, decompositions: float) -> Costs:
        """Those of a supposed machine; calls stay."""
        curves = (c.faster(decompositions) for c in (self.inverse, self.eigen))
        return Costs(self.product.faster(products), *curves, self.touch / products, self.call)

    def matmul(self, m: float, k: float, n: float) -> float:
        return self.call + m * k * n * self.product(min(m, k, n))


@dataclass(frozen=True)
class Network:
    """Latency in seconds and bandwidth in bytes per second of one rank's link, both ways at once."""

    latency: float
    bandwidth: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Reduce-scatter by halving and all-gather by doubling (Rabenseifner; Thakur et al. 2005, section 4.5.2).

        A ring sends the same bytes, with ``2 (p - 1)`` latencies.
        """
        if not size:
            return 0.0
        return 2 * _rounds(ranks) * self.latency + reduced(size, ranks) / self.bandwidth

    def gather(self, received: float, ranks: int) -> float:
        """All-gather by doubling (as there, section 4.1), by the bytes that a rank receives."""
        return _rounds(ranks) * self.latency + received / self.bandwidth if ranks > 1 and received else 0.0


def reduced(size: float, ranks: int) -> float:
    """Bytes that a rank receives in an all-reduce, and sends."""
    return 2 * (ranks - 1) / ranks * size


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


# -- work of one rank


def kept_rows(layer: Layer, samples: int) -> float:
    """Rows of activations that a renewal looks at (`curvature.kronecker.factors.subsample_samples`)."""
    rows = samples * layer.places
    stride = min(rows // (ROWS_PER_INPUT * layer.inputs), samples // MIN_SUBSAMPLE)
    return rows if stride < 2 else math.ceil(samples / stride) * layer.places


def forward(layer: Layer, samples: int, costs: Costs) -> float:
    rows = samples * layer.places
    passes = 2 * rows * (layer.inputs + layer.outputs)  # activation functions, norms
    return costs.matmul(rows, layer.inputs, layer.outputs) + passes * costs.touch + 4 * costs.call


def backward(layer: Layer, samples: int, costs: Costs) -> float:
    return 2 * forward(layer, samples, costs)


def statistics(layer: Layer, samples: int, costs: Costs) -> float:
    """The second backward pass, without gradients of weights, and both moments with their running means."""
    rows = samples * layer.places
    total = forward(layer, samples, costs) + CALLS * costs.call
    for (d, flat), own in zip(layer.sides, (rows, kept_rows(layer, samples)), strict=True):
        if flat:
            total += 4 * own * d * costs.touch
        elif d > LARGEST:
            both = ROWS + RANK
            total += costs.matmul(ROWS, own, d) * (own > ROWS) + costs.matmul(both, d, both) + costs.eigen(both)
            total += costs.matmul(RANK, both, d) + 10 * both * d * costs.touch
        else:
            total += costs.matmul(d, own, d) + 6 * d * d * costs.touch
    return total


def inversion(layer: Layer, costs: Costs, eigen: bool = False) -> float:
    """Of both factors; those of a sketch are at hand once it is merged."""
    decomposed = costs.eigen if eigen else costs.inverse
    found = [
        d * costs.touch if flat else 4 * RANK * d * costs.touch if d > LARGEST else decomposed(d)
        for d, flat in layer.sides
    ]
    return sum(found) + CALLS * costs.call


def application(layer: Layer, costs: Costs) -> float:
    """Both inverses to the running mean of the gradient."""
    total, numbers = 4 * layer.inputs * layer.outputs * costs.touch, layer.inputs * layer.outputs
    for (d, flat), other in zip(layer.sides, (layer.inputs, layer.outputs), strict=True):
        if flat or d > LARGEST:
            total += 3 * numbers * costs.touch
        if d > LARGEST and not flat:
            total += 2 * costs.matmul(RANK, d, other)
        elif not flat:
            total += costs.matmul(d, d, other)
    return total


def update(layer: Layer, costs: Costs, touches: int) -> float:
    return touches * layer.inputs * layer.outputs * costs.touch + CALLS * costs.call


# -- who does what


def assigned(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each piece: the longest first, to whoever has least (Graham 1969)."""
    loads = [(0.0, rank) for rank in range(ranks)]
    found = [0] * len(work)
    for k in sorted(range(len(work)), key=lambda k: -work[k]):
        load, rank = heapq.heappop(loads)
        found[k] = rank
        heapq.heappush(loads, (load + work[k], rank))
    return found


def placed(work: Sequence[float], ranks: int, g: int) -> tuple[list[int], list[int]]:
    """The group of g ranks that keeps each piece, and the rank of the group that does the work.

    Groups come first: to find the rank first, and then its group, puts few layers on many ranks into one group.
    """
    groups = assigned(work, ranks // g)
    owners = [0] * len(work)
    for group in set(groups):
        own = [k for k, other in enumerate(groups) if other == group]
        for k, rank in zip(own, assigned([work[k] for k in own], g), strict=True):
            owners[k] = group * g + rank
    return groups, owners


def longest(work: Sequence[float], ranks: Sequence[int]) -> float:
    """The work of the rank that has most."""
    loads: dict[int, float] = {}
    for own, rank in zip(work, ranks, strict=True):
        loads[rank] = loads.get(rank, 0.0) + own
    return max(loads.values(), default=0.0)


def turns(work: Sequence[float], interval: int = EVERY) -> list[int]:
    """The step of the interval in which each piece is done if it is spread over some."""
    total, before, found = sum(work) or 1.0, 0.0, []
    count = min(interval, MOST_TURNS)
    for own in work:
        found.append(min(math.floor(count * before / total), count - 1) * (interval // count))
        before += own
    return found


def inverting(work: Sequence[float], owners: Sequence[int], by_turns: bool) -> float:
    """Seconds of inverting each piece once, all ranks waiting for the last at every step in which there are some."""
    steps = turns(work) if by_turns else [0] * len(work)
    chosen = lambda values, step: [v for v, own in zip(values, steps, strict=True) if own == step]
    return sum(longest(chosen(work, step), chosen(owners, step)) for step in set(steps))


@dataclass(frozen=True)
class Step:
    """A mean step, of the busiest rank.

    Attributes:
        parts: seconds by part.
        sgd: seconds of a step of SGD.
        received: bytes.
        ordinary: bytes in a step that renews and inverts nothing.
        memory: bytes of inverses.
    """

    parts: dict[str, float]
    sgd: float
    received: float
    ordinary: float
    memory: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def workers_of(fraction: float, ranks: int) -> int:
    """How many ranks keep the inverses of a layer: the divisor of `ranks` nearest to the fraction, at least one."""
    divisors = [g for g in range(1, ranks + 1) if ranks % g == 0]
    return min(divisors, key=lambda g: abs(g - fraction * ranks))


def step(
    layers: Sequence[Layer], samples: int, ranks: int, fraction: float, costs: Costs, network: Network,
    by_turns: bool = False, eigen: bool = False,
) -> Step:  # fmt: skip
    """A step with so many samples on each rank.

    Args:
        fraction: of the ranks that keep the inverses of a layer.
        by_turns: the layers are inverted in different steps, not all after a renewal.
        eigen: decompositions are by eigenvalues.
    """
    total = lambda part, *rest: sum(part(layer, *rest) for layer in layers)
    backwards = total(backward, samples, costs)
    gradients, factors = (sum(getattr(layer, name) for layer in layers) for name in ("bytes", "statistics"))
    exposed = max(0.0, network.all_reduce(gradients, ranks) - backwards)
    with_factors = max(0.0, network.all_reduce(gradients + factors, ranks) - backwards)

    work = [inversion(layer, costs, eigen) for layer in layers]
    g = workers_of(fraction, ranks)
    groups, owners = placed(work, ranks, g)
    kept = longest([float(layer.inverses) for layer in layers], groups)
    away = _least_here([float(layer.bytes) for layer in layers], groups, ranks // g)
    sent = (g - 1) / g * kept  # to the other ranks of the group
    parts = {
        "forward and backward": total(forward, samples, costs) + backwards,
        "update": total(update, costs, KFAC_TOUCHES),
        "statistics": total(statistics, samples, costs) / EVERY,
        "inversions": inverting(work, owners, by_turns) / EVERY,
        "application": longest([application(layer, costs) for layer in layers], groups),
        "averages": exposed + (with_factors - exposed) / EVERY,
        "inverses sent": network.gather(sent, g) / EVERY,
        "gradients sent": network.gather(away, ranks // g),
    }
    sgd = parts["forward and backward"] + total(update, costs, SGD_TOUCHES) + exposed
    ordinary = reduced(gradients, ranks) + away
    return Step(parts, sgd, ordinary + (reduced(factors, ranks) + sent) / EVERY, ordinary, kept)


def _least_here(sizes: Sequence[float], groups: Sequence[int], count: int) -> float:
    """Bytes of the layers that are not kept, of the group that keeps the fewest bytes."""
    here = [0.0] * count
    for size, group in zip(sizes, groups, strict=True):
        here[group] += size
    return sum(sizes) - min(here)
