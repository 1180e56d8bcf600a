"""What the simulation of scaling is fed with, and what it is checked against: operations, and one or two processes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _scaling_model as model
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _scaling_model import EVERY, Costs, Curve, Layer, Network, assigned, longest
from _scaling_networks import mlp
from torch import Tensor, nn

import optimizers.monitor
from curvature.linalg.decompositions import symmetric_eigh, try_spd_inverse
from curvature.preconditioners import invert
from optimizers import KFAC

PRODUCTS = (1, 4, 16, 64, 256, 1024)
ROWS = (16, 64, 256, 512, 1024, 2048)
SIDE = 1024  # the other dimensions of a product
SHARE = 0.05  # damping of an inversion, as KFAC has it
WARM = 9  # steps
SMALL, BIG = 4_000, 32_000_000  # bytes that gloo's latency and bandwidth are fitted to


def seconds(call: Callable[[], Any], rounds: int = 7, budget: float = 3.0, device: str = "cpu") -> float:
    """The median; no new round after `budget` seconds."""
    cuda = device.startswith("cuda")
    sync = torch.cuda.synchronize if cuda else lambda: None
    clock = time.perf_counter if cuda else time.process_time  # one thread: the same, whatever else the machine does
    call()
    found: list[float] = []
    while len(found) < rounds and sum(found) < budget:
        sync()
        start = clock()
        call()
        sync()
        found.append(clock() - start)
    return statistics.median(found)


def definite(rows: int, device: str) -> Tensor:
    a = torch.randn(1, rows, rows, device=device)
    return a @ a.mT / rows + torch.eye(rows, device=device)


def measured(
    device: str = "cpu", products: Sequence[int] = PRODUCTS, rows: Sequence[int] = ROWS, side: int = SIDE
) -> Costs:
    """Costs of single operations, in single precision without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    other = torch.randn(side, side, device=device)
    by_size = []
    for size in products:
        left = torch.randn(size, side, device=device)
        by_size.append(seconds(lambda left=left: left @ other, device=device) / (size * side**2))  # type: ignore[misc]
    matrices = [definite(d, device) for d in rows]
    inverses = [seconds(lambda m=m: bool(try_spd_inverse(m)[1]), device=device) for m in matrices]  # type: ignore[misc]
    eigen = [seconds(lambda m=m: symmetric_eigh(m), device=device) for m in matrices]  # type: ignore[misc]
    large, small = torch.ones(1 << 22, device=device), torch.ones(1, device=device)
    touch = seconds(lambda: large.add_(large), device=device) / (2 * large.numel())
    call = seconds(lambda: [small.add_(1) for _ in range(100)], device=device) / 100
    curve = lambda sizes, found: Curve(tuple(map(float, sizes)), tuple(found))
    return Costs(curve(products, by_size), curve(rows, inverses), curve(rows, eigen), touch, call)


# -- one and two processes


def check(depth: int, width: int, samples: int, rounds: int = 3) -> dict[int, dict[str, float]]:
    """Measured seconds of what the simulation models, for an MLP on one and on two processes, each with one thread.

    Work is in processor time; what gloo sums is in wall time, the quickest of several, since other work may share the
    machine.

    Returns:
        {number of processes: {piece: seconds of the slowest process}}. What gloo takes for 4 kB and for 32 MB is under
        "small" and "large".
    """
    found = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, folder, depth, width, samples, rounds)
            mp.spawn(_worker, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
            each = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
        found[ranks] = {name: max(own[name] for own in each) for name in each[0]}
    return found


def _worker(rank: int, ranks: int, folder: str, depth: int, width: int, samples: int, rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    optimizers.monitor.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(_pieces(rank, ranks, depth, width, samples, rounds), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def _pieces(rank: int, ranks: int, depth: int, width: int, samples: int, rounds: int) -> dict[str, float]:
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())]
    net, x = nn.Sequential(*parts), torch.randn(samples, width)
    y = torch.randn(samples, width)
    opt = KFAC(net, lr=1e-2)

    def pair() -> None:
        opt.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()

    def train() -> None:
        pair()
        opt.step()

    for _ in range(WARM):
        train()
    found = {name: [] for name in ("statistics", "application and update", "forward and backward")}
    for _ in range(rounds):
        opt.monitor.steps += 10 * EVERY  # a renewal; all later ones are ordinary
        for number in range(3):
            dist.barrier()
            before, start = dict(opt.monitor.seconds), time.process_time()
            train()
            whole = time.process_time() - start
            spent = {k: v - before.get(k, 0.0) for k, v in opt.monitor.seconds.items()}
            if number == 0:
                found["statistics"].append(spent["capture"] + spent["factors"])
            else:
                found["application and update"].append(spent["direction"])
                found["forward and backward"].append(whole - sum(spent.values()))
    result = {name: statistics.median(values) for name, values in found.items()}
    return result | _inverted(opt, rank, ranks, rounds) | _reduced(mlp(depth, width), rounds)


def _inverted(opt: KFAC, rank: int, ranks: int, rounds: int) -> dict[str, float]:
    """All pairs, split over the ranks: by Cholesky as modelled, and as `KFAC` does it."""
    blocks = [b for b in opt.store.blocks if b.structure == "kronecker"]
    own = [b for b, owner in zip(blocks, assigned([b.cost for b in blocks], ranks), strict=True) if owner == rank]

    def by_cholesky() -> None:
        for block in own:
            for side in block.sides:
                try_spd_inverse(side.dense() + SHARE * torch.eye(side.size))

    return {
        "inversions": seconds(by_cholesky, rounds),
        "inversions, as KFAC": seconds(lambda: invert(own, SHARE), rounds),
    }


def _reduced(layers: Sequence[Layer], rounds: int) -> dict[str, float]:
    """Of all ranks together."""
    sizes = {"averages": sum(layer.statistics for layer in layers), "small": SMALL, "large": BIG}
    found = {}
    for name, size in sizes.items():
        buffer, times = torch.zeros(size // 4), []
        for _ in range(5 * rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            times.append(time.perf_counter() - start)
        found[name] = min(times)
    return found


def gloo(found: dict[str, float]) -> Network:
    """Latency and bandwidth of two processes, from the small and the large sum; each is a round there and back."""
    return Network(found["small"] / 2, BIG / max(found["large"] - found["small"], 1e-9))


def predicted(depth: int, width: int, samples: int, ranks: int, costs: Costs, network: Network) -> dict[str, float]:
    """What the model says of the pieces of `check`."""
    layers = mlp(depth, width)
    work = [model.inversion(layer, costs) for layer in layers]
    total = lambda part, *rest: sum(part(layer, *rest) for layer in layers)
    return {
        "forward and backward": total(model.forward, samples, costs) + total(model.backward, samples, costs),
        "statistics": total(model.statistics, samples, costs),
        "application and update": total(model.application, costs) + total(model.update, costs, model.KFAC_TOUCHES),
        "inversions": longest(work, assigned(work, ranks)),
        "averages": network.all_reduce(sum(layer.statistics for layer in layers), ranks),
    }
