"""Runs of training on several processes that end where a run on one with the whole batch does."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.training import closure_of, digits, mlp

EACH = 48  # samples of a process: enough that no eigenspace of a factor is arbitrary


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(32, 10)
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 10))


def wide() -> nn.Module:
    """A side that is kept by few directions."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2100), nn.Tanh(), nn.Linear(2100, 10))


class CrossAttention(nn.Module):
    """Queries from the upper rows of an image, keys and values from the lower: ranges of one weight are read apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        upper, lower = x.reshape(-1, 8, 8).split(4, 1)
        return self.head(self.attention(upper, lower, lower)[0].mean(1))


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


def parallel(
    rank: int, size: int, *, kind: Any = KFAC, make: Any = mlp, steps: int = 13, reloads: bool = False,
    closes: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """DistributedDataParallel, the optimizer given the wrapped model; without it in one process."""
    with seeded(0):
        model = make().double()
    x, y = part(0, 1, [EACH * WHOLE]) if size == 1 else part(rank, size)
    used = DistributedDataParallel(model) if size > 1 else model
    opt = kind(used, **options)
    closure = closure_of(used, opt, F.cross_entropy, x.double(), y)
    for step in range(steps):
        if reloads and size > 1 and step == steps - 3:
            states = [opt.state_dict()]
            dist.broadcast_object_list(states)  # what the first process knows
            opt.load_state_dict(states[0])
        if closes:
            opt.step(closure)
        else:
            closure()
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


def uneven(
    rank: int, size: int, *, kind: Any = KFAC, make: Any = mlp, skips: bool = False, is_troubled: bool = False,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The last process has fewer samples, none at every second step (then it calls the model only if not `skips`).

    Troubled: a batch is not finite, and the first process zeroes the gradients of a pass.
    """
    with seeded(0):
        model = make().double()
    opt = kind(model, inject=curvature.exact(), loss=nn.CrossEntropyLoss(), **options)
    for step in range(6):
        sizes = [EACH] * (max(size, WHOLE) - 1) + [0 if step % 2 == 0 else 5]
        x, y = part(0, 1, [sum(sizes)]) if size == 1 else part(rank, size, sizes)
        if is_troubled and rank == 0:
            F.cross_entropy(model(3 * x[:30].double()), y[:30]).backward()
        opt.zero_grad()
        if len(x) or not skips:
            (F.cross_entropy(model(x.double()), y, reduction="sum") * max(size, 1) / sum(sizes)).backward()
        average(model, size)
        if is_troubled and step == 2:
            model[1].bias.grad.fill_(math.nan)
        opt.step()
    assert opt.skipped == is_troubled
    return flat(model)


def of_parts(rank: int, size: int, *, kind: Any = KFAC, **options: Any) -> Tensor:
    """Parts of different sizes, the gradient being the mean of theirs: each is a batch of its own."""
    with seeded(0):
        model = mlp().double()
    opt = kind(model, **options)
    for _ in range(4):
        opt.zero_grad()
        for own in (rank,) if size > 1 else range(WHOLE):
            x, y = part(own, WHOLE, [EACH - 8, EACH + 8])
            F.cross_entropy(model(x.double()), y).backward()
        average(model, size)
        for p in model.parameters() if size == 1 else ():
            p.grad /= WHOLE
        opt.step()
    return flat(model)


def partly_sharded(rank: int, size: int) -> Tensor:
    """FSDP2 for some layers, the gradients of others averaged by hand; once a shard is not finite."""
    from torch.distributed.fsdp import fully_shard

    with seeded(0):
        model = mlp().double()
    last = model[-1]
    if size > 1:
        fully_shard(last)
    x, y = part(0, 1, [EACH * WHOLE]) if size == 1 else part(rank, size)
    opt = KFAC(model, inject=curvature.exact(), loss=nn.CrossEntropyLoss())
    for step in range(6):
        opt.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        average(model[:-1], size)
        if step == 3 and rank == size - 1:
            (last.bias.grad.to_local() if size > 1 else last.bias.grad).fill_(math.nan)
        opt.step()
    assert opt.skipped == 1
    return torch.cat(
        [
            (p.full_tensor() if p in set(last.parameters()) and size > 1 else p).detach().flatten()
            for p in model.parameters()
        ]
    )


def fully_sharded(rank: int, size: int, *, kind: Any = KFAC, make: Any = mlp, **options: Any) -> Tensor:
    """FSDP2: every layer for itself, and what is left."""
    from torch.distributed.fsdp import fully_shard  # these take long to import, for every process

    with seeded(0):
        model = make().double()
    if size > 1:
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    x, y = part(0, 1, [EACH * WHOLE]) if size == 1 else part(rank, size)
    opt = kind(model, **options)
    for _ in range(13):
        opt.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        opt.step()
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()]) if size > 1 else flat(model)


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
    "cross attention": run(parallel, make=CrossAttention),
    "cross attention EKFAC": run(parallel, kind=EKFAC, make=CrossAttention),
    "sketch": run(parallel, make=wide, steps=3),
    "structures": run(parallel, make=normed, structure={"4": "dense", "1": "diagonal"}),
    "structures with one that is reloaded": run(parallel, make=normed, structure={"4.weight": "dense"}, reloads=True),
    "exact": run(parallel, inject=curvature.exact(), **ENTROPY),
    "sampled": run(parallel, inject=curvature.sampled(2), **ENTROPY),
    "propagated": run(parallel, inject=curvature.propagated(), **ENTROPY),
    "empirical": run(parallel, inject=curvature.empirical()),
    "damping": run(parallel, damping=0.01, momentum=0.5, weight_decay=0.01),
    "reloaded": run(parallel, reloads=True),
    # at step 12; steps 11 and 13 renew and invert everything
    "reloaded between renewals": run(parallel, reloads=True, steps=15, factor_every=2, decompose_every=1),
    "accumulated": by_hand,
    "accumulated EKFAC": run(by_hand, kind=EKFAC),
    "accumulated natural": run(by_hand, kind=NaturalGradient),
    "uneven": uneven,
    "uneven EKFAC": run(uneven, kind=EKFAC),
    "uneven natural": run(uneven, kind=NaturalGradient),
    "without a pass": run(uneven, skips=True),
    "troubled": run(uneven, skips=True, is_troubled=True),
    "troubled EKFAC": run(uneven, kind=EKFAC, skips=True, is_troubled=True),
    "troubled natural": run(uneven, kind=NaturalGradient, skips=True, is_troubled=True),
    "empirical of parts": run(of_parts, inject=curvature.empirical()),
    "empirical of parts natural": run(of_parts, kind=NaturalGradient, inject=curvature.empirical()),
    "without a pass natural": run(uneven, kind=NaturalGradient, skips=True),
    "natural": run(parallel, kind=NaturalGradient, steps=4),
    "natural norms": run(parallel, kind=NaturalGradient, steps=4, make=normed),
    "layerwise": run(parallel, kind=NaturalGradient, steps=4, layerwise=True),
    "without a pass layerwise": run(uneven, kind=NaturalGradient, skips=True, layerwise=True),
    "layerwise cg": run(parallel, kind=NaturalGradient, steps=4, layerwise=True, solver="cg"),
    "natural cg": run(parallel, kind=NaturalGradient, steps=4, solver="cg"),
    "sharded": fully_sharded,
    "partly sharded": partly_sharded,
    "sharded EKFAC": run(fully_sharded, kind=EKFAC, make=convolutional),
    "sharded empirical": run(fully_sharded, inject=curvature.empirical(), damping=0.01, weight_decay=0.01),
    "adaptive": run(parallel, steps=5, closes=True, adaptive=True),
    "adaptive EKFAC": run(parallel, steps=5, closes=True, kind=EKFAC, adaptive=True),
    "line search": run(parallel, steps=5, closes=True, kind=NaturalGradient, line_search=True),
    "residuals": by_residuals,
    # without damping the least eigenvalues are rounding, and so is what their inverses make of it
    "residuals natural": run(by_residuals, kind=NaturalGradient, damping=1e-4),
}
# rounding grows: a condition of 1e5, and iterations that end early
ILL = {"residuals natural", "natural cg", "layerwise cg"}
OF = {2: list(SAME), 3: ["EKFAC", "uneven"]}


def one_of_many(name: str, rank: int, size: int) -> Tensor:
    globals()["WHOLE"] = size
    return SAME[name](rank, size)
