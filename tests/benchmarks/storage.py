"""Errors of matrices that are kept in few bits, and memory of those that are mapped from a file.

    python tests/benchmarks/storage.py

Errors are relative, of `solve` for the gradient of 50 digits, against float64. Memory is what the process holds
(resident, Linux) beyond what it held before, for 24 layers of 1024 x 1024.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from _networks import mlp
from _problems import fit, sklearn_digits
from _report import printed
from torch import Tensor, nn

import curvature
from curvature.operators import Operator, Space
from curvature.terms import AffineLayout

LOSS = nn.CrossEntropyLoss()
DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
LAYERS, SIDE = 24, 1024


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


def errors() -> None:
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
    printed(head, "l", (row(label, *given) for label, given in kept.items()))


def _error(K: Operator, exact: Operator, v: Tensor, damping: float) -> str:
    expected = exact.solve(v.double(), damping)
    try:
        found = K.solve(v, damping).double()
    except ValueError:
        return "indefinite"
    return f"{float((found - expected).norm() / expected.norm()):.1e}"


def make(path: str) -> None:
    torch.manual_seed(0)
    blocks: list[Operator] = []
    definite: Callable[[], Tensor] = lambda: (x := torch.randn(1, SIDE, 2 * SIDE)) @ x.mT / (2 * SIDE)
    for k in range(LAYERS):
        space = Space((f"{k}.weight",), ((SIDE, SIDE),))
        blocks.append(curvature.Kronecker(space, AffineLayout(space.shapes, 1, SIDE), definite(), definite()))
    names, shapes = [b.space.names[0] for b in blocks], [b.space.shapes[0] for b in blocks]
    curvature.BlockDiagonal(Space(tuple(names), tuple(shapes)), blocks).save(path)


def memory(path: str, lazily: bool) -> None:
    """In a process of its own."""
    v = torch.randn(SIDE * SIDE)
    before = _resident()
    K = curvature.load(path, lazily=lazily)
    loaded = _resident()
    K["5"] @ v  # type: ignore[index]
    print(f"lazily={lazily}: loading {loaded - before:.0f} MB, a product with one layer {_resident() - loaded:.0f} MB")


def _resident() -> float:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


def main() -> None:
    if len(sys.argv) > 1:
        memory(sys.argv[1], sys.argv[2] == "lazily")
        return
    errors()
    with tempfile.TemporaryDirectory() as folder:
        make(path := f"{folder}/K.pt")
        print(f"{Path(path).stat().st_size / 1e6:.0f} MB")
        for how in ("at once", "lazily"):
            subprocess.run([sys.executable, __file__, path, how], check=True)


if __name__ == "__main__":
    main()
