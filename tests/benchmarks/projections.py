"""Projected per-sample gradients against building the gradients and multiplying them by the map.

    python tests/benchmarks/projections.py [--only gpt kronecker]

"gradients, then map" applies the same projection to the rows of `per_sample_gradients`; "gradients @ map" multiplies
them by a matrix that was drawn before and is kept whole. Each is checked against gradients of samples that ran alone,
and timed in turn with the others: ratios to the plain batch gradient, and in brackets the most megabytes in tensors
that a call adds to what there was. A dagger marks the fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from _networks import LOSS, PER_SAMPLE, Workload, workloads
from _peers import one_by_one
from _report import options_of
from _rows import OPTIONS, PLAIN, Method, Named, Plain, Row, chosen, peak_bytes, report, worst_error
from torch import Tensor, nn

import curvature
from curvature.uses.projections import Projection

PROJECTIONS: dict[str, Projection] = {
    "kronecker": curvature.KroneckerProjection(16),
    "signs": curvature.SignProjection(256),
    "normal": curvature.NormalProjection(256),
}


class Projected(Method):
    """`curvature.per_sample_projections`."""

    def __init__(self, projection: Projection, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__(model, loss, x, y)
        self.projection = projection

    def run(self) -> Named:
        found = curvature.per_sample_projections(self.model, self.loss, self.x, self.y, self.projection)
        return {"projections": found}

    def wanted(self, rows: Named) -> Named:
        """The result, from the gradients of all samples."""
        return {"projections": self.projection(rows)}


class ThenMap(Projected):
    """The gradients of all samples, then the projection of them."""

    def run(self) -> Named:
        return self.wanted(curvature.per_sample_gradients(self.model, self.loss, self.x, self.y))


class WholeMap(ThenMap):
    """The gradients of all samples, then one product for each parameter with its part of a map that is kept."""

    def __init__(self, projection: Projection, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__(projection, model, loss, x, y)
        self.maps = {name: torch.randn(p.numel(), 256, device=p.device) / 16 for name, p in self.parameters.items()}

    def wanted(self, rows: Named) -> Named:
        first, *others = (g.flatten(1) @ self.maps[name] for name, g in rows.items())
        return {"projections": sum(others, first)}


METHODS: dict[str, type[Projected]] = {
    "per_sample_projections": Projected, "gradients, then map": ThenMap,
}  # fmt: skip
WHOLE = "gradients @ map"


class Measured(Row):
    """A row whose cells name the peak, too."""

    def measure(self, options: argparse.Namespace) -> None:
        is_cuda = options.device.startswith("cuda")
        self.peaks = {name: peak_bytes(method.run, is_cuda) / 1e6 for name, method in self.methods.items()}
        self.labels = [*self.labels, f"{self.peaks[PLAIN]:.1f}"]
        for method in self.methods.values():
            method.clear()
        super().measure(options)

    def cells(self, columns: Sequence[str]) -> list[str]:
        found = super().cells(columns)
        for place, name in enumerate(columns, len(found) - len(columns)):
            found[place] += f" ({self.peaks[name]:.0f})" if name in self.peaks else ""
        return found


def row(kind: str, workload: Workload, rows: Named) -> Row:
    projection, setting = PROJECTIONS[kind], (workload.model, LOSS, workload.x, workload.y)
    whole = {} if kind == "kronecker" else {WHOLE: WholeMap}
    makers = {name: partial(made, projection, *setting) for name, made in (METHODS | whole).items()}
    columns = max(part.stop for part in projection.columns(workload.model).values())
    error = lambda method: worst_error(method.run(), method.wanted(rows))
    return Measured([workload.name, kind, f"{columns:,}"], partial(Plain, *setting), makers, error)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for _, workload in workloads(options, PER_SAMPLE):
        reference = one_by_one(workload.model, LOSS, workload.x, workload.y)
        yield from [row(kind, workload, reference) for kind in chosen(options, PROJECTIONS)]


def main() -> None:
    options = options_of(__doc__, only=[*PER_SAMPLE, *PROJECTIONS], **OPTIONS)
    report(["model", "projection", "columns", "plain, MB"], [*METHODS, WHOLE], rows(options), options)


if __name__ == "__main__":
    main()
