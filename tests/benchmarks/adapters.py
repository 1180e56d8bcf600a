"""What frozen parameters cost: a transformer with low-rank adapters, all of it or the adapters alone.

    python tests/benchmarks/adapters.py

CPU time of one thread, the least of the rounds, the ways in turn; and the most megabytes in tensors that a call adds to
what there was. "all": every parameter requires a gradient; "frozen": the adapters alone do; "chosen": every
parameter does, and the adapters are asked for by ``parameters=``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from _networks import GPT, ClassesSecond
from _report import options_of, printed
from _rows import in_turns, peak_bytes, timed
from torch import Tensor, nn

import curvature
import optimizers

LOSS = nn.CrossEntropyLoss()
ROUNDS = 5


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
    model = nn.Sequential(GPT(256, 64, 256, 6), ClassesSecond())
    for block in model[0].blocks:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    found = [name for name, module in model.named_modules() if isinstance(module, LoRA)]
    return model, [f"{name}.{part}" for name in found for part in ("down", "up")]


def main() -> None:
    options_of(__doc__)
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
    printed(head, ([label, *cells(ways), "-"][:4] for label, ways in rows(whole, frozen, names)))


def rows(whole: nn.Module, frozen: nn.Module, names: list[str]) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """What is done, and the ways to do it."""
    x, y = torch.randint(256, (8, 64)), torch.randint(256, (8, 64))
    kfac = lambda model, **chosen: curvature.kfac(model, LOSS, (x, y), curvature.sampled(), **chosen)
    norms = lambda model, **chosen: curvature.per_sample_norms(model, LOSS, x, y, **chosen)
    product = lambda model, **chosen: (
        (G := curvature.gauss_newton(model, LOSS, (x, y), **chosen)) @ torch.ones(G.shape[0])
    )
    calls = {"`kfac` with `sampled()`": kfac, "`per_sample_norms`": norms, "`gauss_newton(...) @ v`": product}
    for label, call in calls.items():
        yield label, [partial(call, whole), partial(call, frozen), partial(call, whole, parameters=names)]
    send_back = lambda model: (model.zero_grad(), LOSS(model(x), y).backward())
    step = lambda model, opt: (send_back(model), opt.step())
    yield "one of the first steps of `KFAC`", [partial(step, m, optimizers.KFAC(m)) for m in (whole, frozen)]
    for model in (whole, frozen):
        model.zero_grad()
    yield "forward and backward, to compare", [partial(send_back, model) for model in (whole, frozen)]


def cells(ways: Sequence[Callable[[], object]]) -> Iterator[str]:
    for way in ways:
        way()
    times = in_turns({str(k): lambda way=way: timed(way)[1] for k, way in enumerate(ways)}, range(ROUNDS))
    for way, seconds in zip(ways, times.values(), strict=True):
        yield f"{min(seconds):.2f} s, {peak_bytes(way, is_cuda=False) / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
