"""What the operators of `curvature` do, and what can be learnt of them from products."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_models import MODELS, Entries, drawn, tanh_net
from torch import Tensor, nn

import curvature
from curvature import estimators
from support.cases.case import Case, classes, floats

DAMPING = 0.05


def cases() -> dict[str, Callable[[], Entries]]:
    of_methods = {f"operators/{name}": functools.partial(methods, make) for name, make in OPERATORS.items()}
    of_estimators = {f"estimators/{name}": functools.partial(estimates, OPERATORS[name]) for name in ESTIMATED}
    return of_methods | of_estimators | {"operators/algebra": algebra, "operators/layers": layers}


def of(build: Callable[..., Any], name: str, samples: int = 40, **options: Any) -> Callable[[], Any]:
    """The matrix of a model of the table."""
    problem = MODELS.get(name, SMALL)

    def make() -> Any:
        model, loss = problem.build()
        return build(model, loss, problem.batch(model, samples), **options)

    return make


def free() -> Any:
    """Of products that are given."""
    space = curvature.Space.of({"a": drawn(3, 2), "b": drawn(4)})
    root = drawn(space.size, space.size)
    return curvature.MatrixFree(space, lambda V: root @ (root.mT @ V) + V)


def diagonal() -> Any:
    return curvature.Diagonal(curvature.Space.of({"a": drawn(3, 2)}), drawn(6).square())


SMALL = Case("small", functools.partial(tanh_net, 5, 6, 3), floats(5), nn.CrossEntropyLoss(), classes)
OPERATORS: dict[str, Callable[[], Any]] = {
    "kfac": of(curvature.kfac, "small"),
    "ekfac": of(curvature.ekfac, "small"),
    "fisher_blocks": of(curvature.fisher_blocks, "small"),
    "fisher": of(curvature.fisher, "small"),
    "hessian": of(curvature.hessian, "small"),
    "convolutions": of(curvature.kfac, "resnet", inject=curvature.empirical()),
    "convolutions ekfac": of(curvature.ekfac, "resnet"),
    "tied": of(curvature.kfac, "gpt"),
    "attention": of(curvature.kfac, "attention_cross_batch_first"),
    "attention ekfac": of(curvature.ekfac, "attention_cross_batch_first"),
    "vit": of(curvature.kfac, "vit", structure={"head": "dense"}),
    "dense": lambda: OPERATORS["fisher"]().materialise(),
    "diagonal": diagonal,
    "free": free,
    "scaled": lambda: 2.5 * OPERATORS["kfac"](),
    "damped": lambda: OPERATORS["ekfac"]().damped(0.3),
    "factored": lambda: OPERATORS["kfac"]().factored_damping(0.3),
    "inverse": lambda: OPERATORS["kfac"]().inverse(DAMPING),
    "sum": lambda: OPERATORS["kfac"]() + OPERATORS["fisher_blocks"](),
}
METHODS: dict[str, Callable[[Any, Tensor], Any]] = {
    "repr": lambda M, v: repr(M),
    "shape": lambda M, v: M.shape,
    "names": lambda M, v: M.space.names,
    "product": lambda M, v: M @ v,
    "product of a vector": lambda M, v: M @ v[:, 0],
    "product of a dict": lambda M, v: M @ M.space.split(v[:, 0]),
    "solve": lambda M, v: M.solve(v, DAMPING),
    "solve of a dict": lambda M, v: M.solve(M.space.split(v[:, 0]), 2 * DAMPING),
    "solve without damping": lambda M, v: M.solve(v),
    "inverse": lambda M, v: M.inverse(DAMPING) @ v,
    "to_dense": lambda M, v: M.to_dense() @ v,
    "diagonal": lambda M, v: M.diagonal(),
    "trace": lambda M, v: M.trace(),
    "eigenvalues": lambda M, v: M.eigenvalues(),
    "logdet": lambda M, v: M.logdet(DAMPING),
    "sample": lambda M, v: [M.sample(damping=DAMPING), M.sample(2, damping=DAMPING)],
    "sample of a generator": lambda M, v: M.sample(2, damping=1.0, generator=torch.Generator().manual_seed(4)),
    "damped": lambda M, v: M.damped(0.2) @ v,
    "factored_damping": lambda M, v: M.factored_damping(0.2).solve(v),
    "scaled": lambda M, v: (-2 * M / 3) @ v,
    "materialise": lambda M, v: M.materialise().solve(v, DAMPING),
    "to_dict": lambda M, v: M.to_dict(v[:, 0]),
    "to_scipy": lambda M, v: torch.from_numpy(M.to_scipy() @ v.numpy()),
    "saved": lambda M, v: saved(M).solve(v, DAMPING),
}
ESTIMATED = "fisher", "free", "dense", "convolutions"
ESTIMATES: dict[str, Callable[[Any, Tensor], Any]] = {
    "conjugate_gradient": lambda M, v: estimators.conjugate_gradient(M, v, DAMPING),
    "conjugate_gradient loosely": lambda M, v: estimators.conjugate_gradient(M, v[:, 0], DAMPING, rtol=1e-3),
    "conjugate_gradient that ends": lambda M, v: estimators.conjugate_gradient(M, v, 1e-6, max_iter=3),
    "preconditioned": lambda M, v: estimators.conjugate_gradient(
        M, v, DAMPING, preconditioner=curvature.Diagonal(M.space, 1 / (M.diagonal() + DAMPING))
    ),
    "xtrace": lambda M, v: estimators.xtrace(M, 8),
    "xdiag": lambda M, v: estimators.xdiag(M, 8),
    "lanczos": lambda M, v: estimators.lanczos(M, 4, v[:, 0]),
    "lanczos_eigenvalues": lambda M, v: estimators.lanczos_eigenvalues(M, 3),
    "lanczos_eigenvalues, the least": lambda M, v: -estimators.lanczos_eigenvalues(-M.damped(DAMPING), 1),
    "lanczos_eigenpairs": lambda M, v: estimators.lanczos_eigenpairs(M, 2),
    "lanczos_logdet": lambda M, v: estimators.lanczos_logdet(M, DAMPING, k=3, steps=12),
    "spectral_density": lambda M, v: estimators.spectral_density(M, vectors=3, steps=6),
    "too few": lambda M, v: estimators.xtrace(M, 2),
}


def saved(matrix: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.pt"
        matrix.save(path)
        return curvature.load(path)


def methods(make: Callable[[], Any]) -> Entries:
    matrix = make()
    v = drawn(matrix.space.size, 2)
    for name, method in METHODS.items():
        yield name, functools.partial(method, matrix, v)


def estimates(make: Callable[[], Any]) -> Entries:
    matrix = make()
    v = drawn(matrix.space.size, 2)
    for name, estimate in ESTIMATES.items():
        yield name, functools.partial(estimate, matrix, v)


def algebra() -> Entries:
    """Of several matrices together."""
    K, E, F = (OPERATORS[name]() for name in ("kfac", "ekfac", "fisher"))
    v = drawn(K.space.size, 2)
    yield "sum", (K + E) @ v
    yield "difference", (K - F).eigenvalues()
    yield "solution", (K + 0.5 * F).solve(v, DAMPING)
    yield "preconditioned", curvature.conjugate_gradient(F, v, DAMPING, preconditioner=K.inverse(DAMPING))
    yield "refused", lambda: K + OPERATORS["diagonal"]()
    yield "indefinite", lambda: (F - 2 * K).solve(v)
    yield "singular", lambda: F.solve(v)
    yield "names", lambda: K @ {"0.weight": v}
    yield "unknown", lambda: K["1"]


def layers() -> Entries:
    """The blocks by name, and the factors of Kronecker products."""
    for name in ("kfac", "ekfac", "convolutions", "tied", "attention"):
        for key, block in OPERATORS[name]().blocks.items():
            yield f"{name}/{key}/repr", repr(block)
            for factor in ("A", "B", "values"):
                yield f"{name}/{key}/{factor}", getattr(block, factor, None)
    yield "by module", repr(OPERATORS["kfac"]()["2"])
