"""Calls that are refused: the types and the texts of the exceptions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from results_models import TRAINED, Entries
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, Distributed, NaturalGradient
from support.cases.case import Raw

ENTROPY = nn.CrossEntropyLoss()
EVERY = {"KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient}

# By argument; every optimizer is given each of them.
WRONG: dict[str, list[Any]] = {
    "lr": [-1.0, None, "1"],
    "damping": [-1.0, math.nan],
    "momentum": [1.0, True],
    "weight_decay": [math.inf],
    "factor_decay": [1.5],
    "loss": ["mse", nn.MSELoss],
    "inject": [curvature.exact, curvature.exact()],
    "seed": [1.5],
    "adaptive": ["yes"],
    "distributed": [2],
    "sharing": ["both"],
    "factor_every": [0],
    "solver": ["lu"],
    "line_search": [1],
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(curvature, name)
    for name in ("per_sample_gradients", "check_gradients", "fisher_diagonal", "fisher", "kfac", "gauss_newton")
}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 24).view(6, 4).cos(), torch.arange(6) % 3


def cases() -> dict[str, Callable[[], Entries]]:
    return {"refused/arguments": arguments, "refused/functions": functions, "refused/calls": calls}


def arguments() -> Entries:
    for name, kind in EVERY.items():
        for argument, values in WRONG.items():
            for k, value in enumerate(values):
                yield f"{name}/{argument}/{k}", functools.partial(refused, kind, network(), **{argument: value})
        yield f"{name}/parameters", functools.partial(refused, kind, network().parameters())
        yield f"{name}/frozen", functools.partial(refused, kind, network().requires_grad_(False))


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Its exception, or that there was none."""
    function(*args, **kwargs)
    return "accepted"


def functions() -> Entries:
    """Wrong models, losses and data."""
    model, (x, y) = network(), batch()
    normed = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    frozen = network().requires_grad_(False)
    for name, function in FUNCTIONS.items():
        wrong = {
            "model": (None, ENTROPY, x, y),
            "frozen": (frozen, ENTROPY, x, y),
            "batch norm": (normed, ENTROPY, x, y),
            "loss": (model, "mse", x, y),
            "reduction": (model, nn.CrossEntropyLoss(reduction="none"), x, y),
            "sizes": (model, ENTROPY, x, y[:4]),
            "empty": (model, ENTROPY, x[:0], y[:0]),
            "shapes": (model, ENTROPY, x[:, :3], y),
        }
        for what, given in wrong.items():
            arguments = given if "gradients" in name else (*given[:2], given[2:])
            yield f"{name}/{what}", functools.partial(used, function, *arguments)


def used(function: Callable[..., Any], *args: Any) -> Any:
    """Matrices that are known by their products look at their arguments only when they are used."""
    result = function(*args)
    return result.trace() if isinstance(result, curvature.Operator) else result


def calls() -> Entries:
    for name, call in CALLS.items():
        yield name, functools.partial(refused, call)


def stepped(kind: Any, closure: Any = None, **options: Any) -> Any:
    """An optimizer that has made a step, in a loop or with a closure of the model's output."""
    model, (x, y) = network(), batch()
    opt = kind(model, **options)
    if closure is None:
        F.cross_entropy(model(x), y).backward()
    opt.step(closure if closure is None or not callable(closure) else lambda: closure(model(x)))
    return opt


def loaded(kind: Any, other: Any, **options: Any) -> None:
    """The state of one optimizer given to another."""
    other(network(), **options).load_state_dict(stepped(kind).state_dict())


def unseen(kind: Any) -> None:
    """Gradients, and no pass of the model."""
    model = network()
    opt = kind(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


def differentiated(output: Tensor, target: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return slope.square().mean()


def of_gradients() -> Any:
    model, (x, y) = network(), batch()
    x.requires_grad_()
    return curvature.per_sample_gradients(model, functools.partial(differentiated, x=x), x, y)


def of_branches() -> None:
    """The values of the whole batch decide."""
    model = Raw(lambda m, x: m.layer(x) * (2 if x.sum() > 0 else 1), layer=nn.Linear(4, 3))
    x = torch.ones(6, 4)
    x[2] = -0.5
    curvature.check_gradients(model, ENTROPY, x, torch.arange(6) % 3)


def captured(model: Any, vectors: Any = None) -> None:
    with curvature.capture(model) as tape:
        output = model(batch()[0])
    tape.backprops(output, vectors)


def space() -> Any:
    return curvature.Space.of(dict(network().named_parameters()))


def empirical_of_outputs() -> None:
    problem = TRAINED["two_outputs"]
    model, loss = problem.build()
    x, y = problem.batch(model, 6)
    opt = NaturalGradient(model, inject=curvature.empirical())
    loss(model(x), y).backward()
    opt.step()


FIRST = lambda output: output[:, 0]
ROWS = lambda model, x: model(x)
CALLS: dict[str, Callable[[], Any]] = {
    "no pass": lambda: unseen(KFAC),
    "no closure": lambda: stepped(KFAC, adaptive=True),
    "no closure to search": lambda: stepped(NaturalGradient, line_search=True),
    "closure is a number": lambda: stepped(KFAC, 3),
    "closure of a matrix": lambda: stepped(KFAC, lambda out: out),
    "closure of a string": lambda: stepped(NaturalGradient, lambda out: "loss", line_search=True),
    "residuals of EKFAC": lambda: stepped(EKFAC, FIRST),
    "residuals and a loss": lambda: stepped(KFAC, FIRST, loss=ENTROPY),
    "residuals and another solver": lambda: stepped(NaturalGradient, FIRST, solver="cg"),
    "residuals reduced": lambda: stepped(KFAC, FIRST, sharing="reduce"),
    "adaptive and search": lambda: NaturalGradient(network(), adaptive=True, line_search=True),
    "complex": lambda: KFAC(nn.Linear(2, 2, dtype=torch.complex64)),
    "scripted": lambda: KFAC(torch.jit.trace(network(), torch.ones(2, 4))),
    "group of others": lambda: KFAC(network()).add_param_group({"params": nn.Linear(2, 2).parameters()}),
    "group is no dict": lambda: KFAC(network()).add_param_group([1]),
    "state of another kind": lambda: loaded(KFAC, EKFAC),
    "state of another choice": lambda: loaded(KFAC, KFAC, sharing="reduce"),
    "state of another solver": lambda: loaded(NaturalGradient, NaturalGradient, solver="cg"),
    "state of another model": lambda: KFAC(nn.Linear(4, 3)).load_state_dict(stepped(KFAC).state_dict()),
    "state is no dict": lambda: KFAC(network()).load_state_dict([]),
    "state is empty": lambda: KFAC(network()).load_state_dict({}),
    "process group": lambda: Distributed(group="all"),
    "empirical of two outputs": empirical_of_outputs,
    "vectors": lambda: captured(network(), torch.ones(1, 6, 4)),
    "capture of no model": lambda: captured("model"),
    "number of vectors": lambda: curvature.sampled(0),
    "loss that differentiates": of_gradients,
    "branches": of_branches,
    "sharing": lambda: curvature.kfac(network(), ENTROPY, batch(), sharing="both"),
    "structure": lambda: curvature.kfac(network(), ENTROPY, batch(), structure={"0": "sparse"}),
    "unknown layer": lambda: curvature.kfac(network(), ENTROPY, batch(), structure={"head": "dense"}),
    "injection": lambda: curvature.kfac(network(), ENTROPY, batch(), inject="exact"),
    "no data": lambda: curvature.fisher_diagonal(network(), ENTROPY, []),
    "laplacian of integers": lambda: curvature.laplacian(network(), torch.ones(2, 4).long()),
    "laplacian of weights": lambda: curvature.laplacian(network(), torch.ones(2, 4), torch.ones(3)),
    "laplacian of a batch": lambda: curvature.laplacian(lambda x: x - x.mean(0), torch.rand(3, 2)),
    "residuals of a shape": lambda: curvature.residual_jacobian(network(), ROWS, batch()[0]),
    "residuals of lengths": lambda: curvature.residual_jacobian(network(), ROWS, torch.ones(6, 4), torch.ones(2)),
    "matrix of a shape": lambda: curvature.Dense(space(), torch.ones(3, 3)),
    "matrix not symmetric": lambda: curvature.Dense(space(), torch.arange(43.0 * 43).view(43, 43)),
    "matrix not finite": lambda: curvature.Diagonal(space(), torch.full((43,), math.nan)),
    "blocks missing": lambda: curvature.BlockDiagonal(space(), []),
}  # fmt: skip
