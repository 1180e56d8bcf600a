"""Pruning and rounding of a network on MNIST's first 5,000 digits: times and losses beside magnitude pruning.

    python tests/benchmarks/compression.py

Losses are those of the 4,000 training digits, accuracies those of the 1,000 others; seconds are of one thread's
processor time. The magnitude rows are `torch.nn.utils.prune.global_unstructured` and, for bits, the
nearest level. Ours contain the time of `kfac`. No training follows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from _networks import mlp
from _problems import fit, mnist, split
from _report import options_of, printed
from _rows import timed
from torch import Tensor, nn
from torch.nn.utils import prune

import curvature
from curvature import Diagonal, Space

LOSS = nn.CrossEntropyLoss()
Parameters = dict[str, Tensor]
Data = tuple[Tensor, Tensor]


def trained(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = mlp(784, 128, 64, 10)
    batches = (torch.randint(len(x), (100,)) for _ in range(600))
    loss = lambda batch: LOSS(model(x[batch]), y[batch])
    return fit(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, batches)


def by_magnitude(model: nn.Module, sparsity: float) -> Parameters:
    pruned = copy.deepcopy(model)
    layers = [(module, "weight") for module in pruned.modules() if isinstance(module, nn.Linear)]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=sparsity)
    for layer, name in layers:
        prune.remove(layer, name)
    return dict(pruned.named_parameters())


def by_diagonal(model: nn.Module, data: Data, sparsity: float) -> Parameters:
    found = curvature.fisher_diagonal(model, LOSS, data)
    space = Space.of(found)
    return curvature.prune(Diagonal(space, space.flatten(found)), model, sparsity, rounds=1)[0]


def nearest(model: nn.Module, bits: int) -> Parameters:
    named = dict(model.named_parameters())
    space = Space.of(named)
    return curvature.quantize(Diagonal(space, torch.ones(space.size, device=space.device)), model, bits)


def tasks(model: nn.Module, data: Data) -> dict[tuple[str, str], Callable[[], Parameters]]:
    factors = lambda: curvature.kfac(model, LOSS, data)
    found: dict[tuple[str, str], Callable[[], Parameters]] = {("-", "as trained"): lambda: {}}
    for s in (0.8, 0.9):
        what = f"{s:.0%} zeros"
        found[what, "magnitude (torch.nn.utils.prune)"] = lambda s=s: by_magnitude(model, s)
        found[what, "prune, diagonal"] = lambda s=s: by_diagonal(model, data, s)
        found[what, "prune, kfac, 1 round"] = lambda s=s: curvature.prune(factors(), model, s, rounds=1)[0]
        found[what, "prune, kfac"] = lambda s=s: curvature.prune(factors(), model, s)[0]
    for bits in (2, 3):
        what = f"{bits} bits"
        found[what, "nearest level"] = lambda bits=bits: nearest(model, bits)
        found[what, "quantize, kfac"] = lambda bits=bits: curvature.quantize(factors(), model, bits)
    return found


@torch.no_grad()
def judged(model: nn.Module, parameters: Parameters, data: Data, unseen: Data) -> tuple[float, float]:
    outputs = [torch.func.functional_call(model, parameters, (x,)) for x, _ in (data, unseen)]
    return LOSS(outputs[0], data[1]).item(), 100 * (outputs[1].argmax(1) == unseen[1]).float().mean().item()


def main() -> None:
    options_of(__doc__)
    data, unseen = split(*mnist(), 4000)
    model = trained(*data)

    def row(name: tuple[str, str], run: Callable[[], Parameters]) -> list[str]:
        parameters, seconds = timed(run)
        loss, accuracy = judged(model, parameters, data, unseen)
        return [*name, f"{loss:.3f}", f"{accuracy:.1f}", f"{seconds:.2f}"]

    head = ["", "method", "training loss", "accuracy, % ↑", "seconds"]
    printed(head, (row(*task) for task in tasks(model, data).items()))


if __name__ == "__main__":
    main()
