"""Fisher diagonals, Kronecker factors and products with curvature matrices against BackPACK, curvlinops and nngeometry.

    pip install -e ".[bench]"                                                     (or `make bench`)
    pip install --no-deps backpack-for-pytorch curvlinops-for-pytorch nngeometry
    python tests/benchmarks/matrices.py                                           # all rows
    python tests/benchmarks/matrices.py --only mlp kfac --seconds 10

All of mean cross-entropy over one batch. Every method is checked first (`_matrix_peers.py`); what is wrong or
unsupported is named and not timed. Diagonals and factors from sampled labels are checked by their mean over many draws,
Kronecker factors by what ``kron(B, A)`` makes of random vectors. Then methods run in turn, as in `per_sample.py`, and
the table shows medians of ratios to the plain batch gradient.

A run is one call from the model and the batch to the result. For the products ``G V`` and ``H V``, with 1, 10 and 32
columns, it is the product alone: operators are made beforehand, without checks of the peer that can be turned off,
and a first product, where ours tests the Hessian for symmetry, has gone before. Ours are made inside `curvature.kept`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import _matrix_peers as peers
from _matrix_peers import PROBES, Kinds, Matrix
from _networks import LOSS, MATRICES, Workload, workloads
from _report import options_of
from _rows import OPTIONS, Named, Plain, Row, chosen, report, worst_error
from torch import nn

COLUMNS = ["curvature", "curvlinops", "BackPACK", "nngeometry"]
DRAWS = 300  # over which a random quantity is averaged
NEAR = 0.1  # relative distance of that mean from the exact quantity, per parameter
exact_error = lambda method, reference: worst_error(method.named(method.run()), reference)
_factors = lambda workload: peers.kronecker(workload, peers.vectors(workload.model, PROBES))


def mean_error(method: Matrix, reference: Named) -> float:
    """In units of `NEAR`."""
    total = {name: wanted.new_zeros(wanted.shape) for name, wanted in reference.items()}
    for _ in range(DRAWS):
        for name, found in method.named(method.run()).items():
            total[name] += found / DRAWS
        method.clear()
    return peers.distance(total, reference) / NEAR


@dataclass(frozen=True)
class Quantity:
    """What a row is of.

    Attributes:
        label: in the table.
        kinds: the methods.
        reference: of a workload.
        error: of a method, given the reference, in units of the tolerance.
        models: those that the reference, or most peers, can do it for.
        counts: numbers of columns to multiply with, a row each; none where it is no product.
        affine: whether linear layers and convolutions alone are trained: peers have no factors of others.
    """

    label: str
    kinds: Kinds
    reference: Callable[..., Named]
    error: Callable[[Matrix, Named], float] = exact_error
    models: tuple[str, ...] = ("mlp", "cnn")
    counts: tuple[int, ...] = ()
    affine: bool = False

    def rows(self, workload: Workload) -> Iterator[Row]:
        if self.affine:
            workload = replace(workload, model=_affine_layers(workload.model))
        if not self.counts:
            yield self.row(workload, self.label, self.reference(workload))
        for count in self.counts:
            reference = self.reference(workload, peers.vectors(workload.model, count))
            yield self.row(workload, f"{self.label}, {count}", reference, count=count)

    def row(self, workload: Workload, label: str, reference: Named, **options: int) -> Row:
        setting = workload.model, LOSS, workload.x, workload.y
        makers = {name: partial(kind, *setting, **options) for name, kind in self.kinds.items()}
        return Row([workload.name, label], partial(Plain, *setting), makers, partial(self.error, reference=reference))


def _affine_layers(model: nn.Module) -> nn.Module:
    """A copy in which nothing else is trained."""
    model = copy.deepcopy(model).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.requires_grad_(True)
    return model


ALL = ("mlp", "cnn", "gpt", "resnet")
IMAGES = ("mlp", "cnn", "resnet")  # of a GPT, exact ones would take a vector for each of 64 tokens and 256 words
QUANTITIES = {
    "diagonal": Quantity("diagonal, exact", peers.DIAGONAL, peers.diagonal, models=IMAGES),
    "sampled-diagonal": Quantity(
        "diagonal, one sample", peers.SAMPLED_DIAGONAL, peers.diagonal, mean_error, models=IMAGES
    ),
    "kfac": Quantity("K-FAC, exact", peers.FACTORS, _factors, models=IMAGES, affine=True),
    "sampled-kfac": Quantity("K-FAC, one sample", peers.SAMPLED_FACTORS, _factors, mean_error, IMAGES, affine=True),
    "gauss-newton": Quantity("G V", peers.GAUSS_NEWTON, peers.gauss_newton, models=ALL, counts=(1, 10, 32)),
    "hessian": Quantity("H V", peers.HESSIAN, peers.hessian, models=ALL, counts=(1, 10, 32)),
}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for model, workload in workloads(options, MATRICES):
        for name in chosen(options, QUANTITIES):
            if model in QUANTITIES[name].models:
                yield from QUANTITIES[name].rows(workload)


def main() -> None:
    options = options_of(__doc__, only=[*MATRICES, *QUANTITIES], **OPTIONS)
    report(["model", "quantity"], COLUMNS, rows(options), options)


if __name__ == "__main__":
    main()
