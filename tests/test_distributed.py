"""Several processes train one model: all alike, and as one process on the whole batch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import seeded
from processes import on_processes
from test_kfac import digits, mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import curvature
from optimizers import EKFAC, KFAC, Distributed, NaturalGradient

EACH = 48  # samples of a process: enough that no eigenspace of a factor is arbitrary


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(32, 10)
    )


def wide() -> nn.Module:
    """A side that is kept by few directions."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2100), nn.Tanh(), nn.Linear(2100, 10))


def part(rank: int, size: int, sizes: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """A process's part of the batch, all that are not of one size at its end."""
    x, y = digits()
    ends = torch.tensor([0, *(sizes or [EACH] * size)]).cumsum(0).tolist()
    return x[ends[rank] : ends[rank + 1]], y[ends[rank] : ends[rank + 1]]


def average(model: nn.Module, size: int) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if size > 1:
            dist.all_reduce(p.grad)
            p.grad /= size


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def parallel(rank: int, size: int, *, kind: Any = KFAC, make: Any = mlp, steps: int = 13, **options: Any) -> Tensor:
    """DistributedDataParallel, the optimizer given the wrapped model; without it in one process."""
    with seeded(0):
        model = make().double()
    x, y = part(0, 1, [EACH * WHOLE]) if size == 1 else part(rank, size)
    used = DistributedDataParallel(model) if size > 1 else model
    opt = kind(used, **options)
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(used(x.double()), y).backward()
        opt.step()
    return flat(model)


def by_hand(rank: int, size: int, *, kind: Any = KFAC, **options: Any) -> Tensor:
    """Gradients averaged by the training loop, and accumulated over two passes."""
    with seeded(0):
        model = mlp().double()
    x, y = part(0, 1, [EACH * WHOLE]) if size == 1 else part(rank, size)
    halves = 2 if size > 1 else 2 * WHOLE
    opt = kind(model, inject=curvature.exact(), loss=nn.CrossEntropyLoss(), **options)
    for _ in range(6):
        opt.zero_grad()
        for u, v in zip(x.double().chunk(halves), y.chunk(halves), strict=True):
            (F.cross_entropy(model(u), v) / halves).backward()
        average(model, size)
        opt.step()
    return flat(model)


def uneven(rank: int, size: int, *, kind: Any = KFAC, skips: bool = False, **options: Any) -> Tensor:
    """The last process has fewer samples, none at every second step (then it calls the model only if not `skips`)."""
    with seeded(0):
        model = mlp().double()
    opt = kind(model, inject=curvature.exact(), loss=nn.CrossEntropyLoss(), **options)
    for step in range(6):
        sizes = [EACH] * (max(size, WHOLE) - 1) + [0 if step % 2 == 0 else 5]
        x, y = part(0, 1, [sum(sizes)]) if size == 1 else part(rank, size, sizes)
        opt.zero_grad()
        if len(x) or not skips:
            (F.cross_entropy(model(x.double()), y, reduction="sum") * max(size, 1) / sum(sizes)).backward()
        average(model, size)
        opt.step()
    return flat(model)


def by_closure(rank: int, size: int, *, kind: Any = KFAC, **options: Any) -> Tensor:
    with seeded(0):
        model = mlp().double()
    x, y = part(0, 1, [EACH * WHOLE]) if size == 1 else part(rank, size)
    used = DistributedDataParallel(model) if size > 1 else model
    opt = kind(used, **options)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(used(x.double()), y)
        loss.backward()
        return loss

    for _ in range(5):
        opt.step(closure)
    return flat(model)


def by_residuals(rank: int, size: int, *, kind: Any = KFAC, **options: Any) -> Tensor:
    with seeded(0):
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    whole = torch.linspace(0, 1, EACH * WHOLE, dtype=torch.float64)[:, None]
    points = whole if size == 1 else whole[rank * EACH : (rank + 1) * EACH]
    opt = kind(model, **options)

    def closure() -> Tensor:
        x = points.clone().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([(slope - torch.cos(3 * x))[:, 0], model(points[::8] - 1)[:, 0]])

    for _ in range(4):
        opt.step(closure)
    return flat(model)


WHOLE = 2  # processes that share the batch, also in the run on one
run = functools.partial
ENTROPY = {"loss": nn.CrossEntropyLoss()}
SAME: dict[str, Callable[..., Tensor]] = {
    "KFAC": parallel,
    "EKFAC": run(parallel, kind=EKFAC),
    "convolution": run(parallel, make=convolutional),
    "sketch": run(parallel, make=wide, steps=3),
    "exact": run(parallel, inject=curvature.exact(), **ENTROPY),
    "sampled": run(parallel, inject=curvature.sampled(2), **ENTROPY),
    "propagated": run(parallel, inject=curvature.propagated(), **ENTROPY),
    "empirical": run(parallel, inject=curvature.empirical()),
    "damping": run(parallel, damping=0.01, momentum=0.5, weight_decay=0.01),
    "own inverses": run(parallel, distributed=Distributed(gradient_worker_fraction=0.0)),
    "half of the inverses": run(parallel, distributed=Distributed(gradient_worker_fraction=0.5)),
    "accumulated": by_hand,
    "accumulated EKFAC": run(by_hand, kind=EKFAC),
    "accumulated natural": run(by_hand, kind=NaturalGradient),
    "uneven": uneven,
    "uneven EKFAC": run(uneven, kind=EKFAC),
    "uneven natural": run(uneven, kind=NaturalGradient),
    "without a pass": run(uneven, skips=True),
    "without a pass natural": run(uneven, kind=NaturalGradient, skips=True),
    "natural": run(parallel, kind=NaturalGradient, steps=4),
    "natural cg": run(parallel, kind=NaturalGradient, steps=4, solver="cg"),
    "natural dense": run(parallel, kind=NaturalGradient, steps=4, solver="dense", make=convolutional),
    "natural diagonal": run(parallel, kind=NaturalGradient, steps=4, solver="diagonal"),
    "adaptive": run(by_closure, adaptive=True),
    "adaptive EKFAC": run(by_closure, kind=EKFAC, adaptive=True),
    "line search": run(by_closure, kind=NaturalGradient, line_search=True),
    "residuals": by_residuals,
    # without damping the least eigenvalues are rounding, and so is what their inverses make of it
    "residuals natural": run(by_residuals, kind=NaturalGradient, damping=1e-4),
}
OF = {2: list(SAME), 3: ["KFAC", "EKFAC", "uneven", "natural"], 4: ["KFAC", "own inverses", "half of the inverses"]}


def one_of_many(name: str, rank: int, size: int) -> Tensor:
    globals()["WHOLE"] = size
    return SAME[name](rank, size)


@functools.cache
def results(size: int) -> list[dict[str, Any]]:
    scenarios = [run(one_of_many, name) for name in OF[size]]
    return on_processes(size, dict(zip(OF[size], scenarios, strict=True)), seconds=20)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in OF.items() for name in names])
def test_as_one_process_on_the_whole_batch(size: int, name: str, monkeypatch):
    found = [result.get(name, "it did not come so far") for result in results(size)]
    assert all(isinstance(x, Tensor) for x in found), next(x for x in found if not isinstance(x, Tensor))
    assert all(torch.equal(x, found[0]) for x in found)
    monkeypatch.setattr(sys.modules[__name__], "WHOLE", size)
    torch.testing.assert_close(SAME[name](0, 1), found[0], rtol=1e-6, atol=1e-7)
