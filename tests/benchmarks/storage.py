"""Errors of matrices that are kept in few bits: relative, of `solve` for the gradient of 50 digits, against float64.

python tests/benchmarks/storage.py
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from _networks import mlp
from _problems import fit, sklearn_digits
from _report import options_of, printed
from torch import Tensor, nn

import curvature
from curvature.operators import Operator

LOSS = nn.CrossEntropyLoss()
DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    images, labels = sklearn_digits()
    torch.manual_seed(0)
    model = mlp(64, 96, 32, 10, activation=nn.Tanh)
    batches = (torch.randint(1500, (100,)) for _ in range(300))
    loss = lambda batch: LOSS(model(images[batch]), labels[batch])
    fit(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, batches)
    return model, images, labels


def rounded_factors(K: curvature.BlockDiagonal) -> Operator:
    """The factors themselves in 16 bits, in place of their eigenbasis."""
    half = lambda side: side.bfloat16().float()
    blocks = [curvature.Kronecker(b.space, b.arrangement, half(b.rows), half(b.columns)) for b in K.blocks.values()]
    return curvature.BlockDiagonal(K.space, blocks)


def main() -> None:
    options_of(__doc__)
    model, images, labels = trained()
    precise = copy.deepcopy(model).double()
    g = torch.autograd.grad(LOSS(model(images[:50]), labels[:50]), list(model.parameters()))
    flat = torch.cat([part.flatten() for part in g])
    exact = {name: getattr(curvature, name)(precise, LOSS, (images.double(), labels)) for name in ("kfac", "ekfac")}
    kept: dict[str, tuple[str, Operator]] = {}
    for name, K in exact.items():
        single = K.to(torch.float32)
        kept[f"{name}, float32"] = name, single
        kept[f"{name}, bfloat16"] = name, single.to(torch.bfloat16)
    kept["kfac, factors in bfloat16"] = "kfac", rounded_factors(exact["kfac"].to(torch.float32))
    print("largest eigenvalue", f"{float(exact['kfac'].eigenvalues(1)):.2g}")

    def row(label: str, name: str, K: Operator) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            K.save(path := Path(folder, "K.pt"))
            size = f"{path.stat().st_size / 1000:.0f} kB"
        return [label, *(_error(K, exact[name], flat, damping) for damping in DAMPINGS), size]

    head = ["", *(f"damping {damping:g}" for damping in DAMPINGS), "file"]
    printed(head, (row(label, *given) for label, given in kept.items()))


def _error(K: Operator, exact: Operator, v: Tensor, damping: float) -> str:
    expected = exact.solve(v.double(), damping)
    try:
        found = K.solve(v, damping).double()
    except ValueError:
        return "indefinite"
    return f"{float((found - expected).norm() / expected.norm()):.1e}"


if __name__ == "__main__":
    main()
