"""What frozen parameters cost: a transformer with low-rank adapters, all of it or the adapters alone.

    python tests/benchmarks/adapters.py [rounds]

CPU time of one thread, the least of the rounds, the ways in turn; and the most megabytes in tensors that a call adds to
what there was. "all": every parameter requires a gradient; "frozen": the adapters alone do; "chosen": every
parameter does, and the adapters are asked for by ``parameters=``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
from _networks import GPT
from _rows import peak_bytes
from torch import Tensor, nn

import curvature
import optimizers

LOSS = nn.CrossEntropyLoss()


class LoRA(nn.Module):
    """``z = W x + c + U D x`` (arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> tuple[nn.Module, list[str]]:
    """A GPT with adapters beside the linear layers of its attention, and the names of the adapters."""
    torch.manual_seed(0)
    model = GPT(d=256, layers=6)
    for block in model.blocks:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    found = [name for name, module in model.named_modules() if isinstance(module, LoRA)]
    return model, [f"{name}.{part}" for name in found for part in ("down", "up")]


def main() -> None:
    torch.set_num_threads(1)
    whole, names = adapted()
    frozen, _ = adapted()
    frozen.requires_grad_(False)
    for name in names:
        frozen.get_submodule(name).requires_grad_(True)
    x, y = torch.randint(256, (8, 64)), torch.randint(256, (8, 64))
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (whole, frozen)]
    print(
        f"| | all {sizes[0]:,} parameters | {sizes[1]:,} in adapters, others frozen | nothing frozen, adapters chosen |"
    )
    print("| --- | --- | --- | --- |")
    kfac = lambda model, **options: curvature.kfac(model, LOSS, (x, y), curvature.sampled(), **options)
    norms = lambda model, **options: curvature.per_sample_norms(model, LOSS, x, y, **options)
    product = lambda model, **options: _product(curvature.gauss_newton(model, LOSS, (x, y), **options))
    for label, call in (
        ("`kfac` with `sampled()`", kfac),
        ("`per_sample_norms`", norms),
        ("`gauss_newton(...) @ v`", product),
    ):
        ways: list[Callable[[], object]] = [
            lambda call=call: call(whole), lambda call=call: call(frozen),
            lambda call=call: call(whole, parameters=names),
        ]  # fmt: skip
        _report(label, ways)
    _report(
        "one of the first steps of `KFAC`", [_step(optimizers.KFAC(model), model, x, y) for model in (whole, frozen)]
    )
    for model in (whole, frozen):
        model.zero_grad()
    _report("forward and backward, to compare", [_backward(model, x, y) for model in (whole, frozen)])


def _product(G: curvature.MatrixFree) -> Tensor:
    return G @ torch.ones(G.space.size)


def _backward(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad()
        LOSS(model(x), y).backward()

    return run


def _step(opt: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    send_back = _backward(model, x, y)

    def run() -> None:
        send_back()
        opt.step()

    return run


def _report(label: str, ways: Sequence[Callable[[], object]]) -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for way in ways:
        way()
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for k, way in enumerate(ways):
            start = time.process_time()
            way()
            best[k] = min(best[k], time.process_time() - start)
    peaks = [peak_bytes(way, is_cuda=False) / 1e6 for way in ways]
    cells = [f"{seconds:.2f} s, {peak:.0f} MB" for seconds, peak in zip(best, peaks, strict=True)]
    print(f"| {label} | {' | '.join([*cells, '-'][:3])} |", flush=True)


if __name__ == "__main__":
    main()
