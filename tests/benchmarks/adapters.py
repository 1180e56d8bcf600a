"""What frozen parameters cost: a transformer with low-rank adapters, all of it or the adapters alone.

    python tests/benchmarks/adapters.py [rounds]

CPU time of one thread, the least of the rounds, the ways in turn; and the most megabytes in tensors that a call adds to
what there was. "all": every parameter requires a gradient; "frozen": the adapters alone do; "chosen": every
parameter does, and the adapters are asked for by ``parameters=``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from _networks import GPT
from _report import printed
from _rows import in_turns, peak_bytes, timed
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
    sizes = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (whole, frozen)]
    head = [
        "", f"all {sizes[0]:,} parameters", f"{sizes[1]:,} in adapters, others frozen",
        "nothing frozen, adapters chosen",
    ]  # fmt: skip
    printed(head, "l", ([label, *cells(ways), "-"][:4] for label, ways in rows(whole, frozen, names)))


def rows(whole: nn.Module, frozen: nn.Module, names: list[str]) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """What is done, and the ways to do it."""
    x, y = torch.randint(256, (8, 64)), torch.randint(256, (8, 64))
    calls: dict[str, Callable[..., object]] = {
        "`kfac` with `sampled()`": lambda model, **options: curvature.kfac(
            model, LOSS, (x, y), curvature.sampled(), **options
        ),
        "`per_sample_norms`": lambda model, **options: curvature.per_sample_norms(model, LOSS, x, y, **options),
        "`gauss_newton(...) @ v`": lambda model, **options: _product(
            curvature.gauss_newton(model, LOSS, (x, y), **options)
        ),
    }
    for label, call in calls.items():
        yield label, [partial(call, whole), partial(call, frozen), partial(call, whole, parameters=names)]
    models = whole, frozen
    yield "one of the first steps of `KFAC`", [_step(optimizers.KFAC(model), model, x, y) for model in models]
    for model in models:
        model.zero_grad()
    yield "forward and backward, to compare", [_backward(model, x, y) for model in models]


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


def cells(ways: Sequence[Callable[[], object]]) -> Iterator[str]:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for way in ways:
        way()
    times = in_turns({str(k): lambda way=way: timed(way)[1] for k, way in enumerate(ways)}, range(rounds))
    for way, seconds in zip(ways, times.values(), strict=True):
        yield f"{min(seconds):.2f} s, {peak_bytes(way, is_cuda=False) / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
