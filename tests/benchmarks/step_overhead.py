"""What a step costs: launches, memory passes and waits of the host; or the price of whole steps in SGD's.

    python tests/benchmarks/step_overhead.py [--only tanh gpt6] [--steps 100]
    python tests/benchmarks/step_overhead.py --families [--only softmax siren] [--steps 300]

Launches are operators that start a kernel on a GPU, where a call for a list of tensors is one. Passes are the bytes
that these read and write, as a multiple of the bytes of the parameters. Waits of the host, of forward and backward pass
too, are counted on the simulated device, which `make kernels` compiles. The second table has the waits of other steps,
of an MLP of two layers.

`--families` compares whole steps of the families of generality.py with SGD's, which take turns with them: the means
of all steps and of the first 20, 50 and 100, medians of each kind, and the parts of a mean step, all in SGD's median
step. CPU time is that of one thread.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _contest import Run
from _contest_report import NAMES
from _generality_families import FAMILIES
from _networks import GPT, LSTM, normalised
from _problems import deep, token_loss
from _race_rivals import ENTRIES
from _report import options_of, printed
from torch import Tensor, nn

from optimizers import KFAC, NaturalGradient

Loss = Callable[[Tensor, Tensor], Tensor]
KINDS = "ordinary", "inverting", "renewing"  # the last inverts, too
SHOWN = "ordinary", "renewing"
FIRST = 20, 50, 100  # steps, of which the mean is shown beside that of all: first steps renew often
PARTS = "capture", "factors", "inverses", "direction"  # of an optimizer's own clock; the last is in ordinary steps, too


def characters() -> tuple[Tensor, Tensor]:
    x = torch.randint(50, (8, 33))
    return x[:, :-1], x[:, 1:].contiguous()


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor], Loss]]] = {
    "tanh": lambda: (deep(32, 12), (torch.randn(32, 64), torch.randint(10, (32,))), F.cross_entropy),
    "cnn": lambda: (normalised(8, 16, 16), (torch.randn(16, 1, 28, 28), torch.randint(10, (16,))), F.cross_entropy),
    "gpt2": lambda: (GPT(50, 32, 32, 2, tied=True), characters(), token_loss),
    "gpt6": lambda: (GPT(50, 32, 32, 6, tied=True), characters(), token_loss),
    "lstm": lambda: (LSTM(50, 48, 50), characters(), token_loss),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "KFAC": KFAC,
}


def kind_of(opt: Any) -> str:
    entry = opt.monitor.entries[-1] if isinstance(opt, KFAC) else {"renewed": False, "inverted": 0}
    return "renewing" if entry["renewed"] else "inverting" if entry["inverted"] else "ordinary"


def simulated_device() -> Any:
    try:
        from support.simulated_device import simdev
    except ImportError as error:
        print(f"waits are not counted: {error}")
        return None
    return simdev


def overhead(name: str, optimizer: str, steps: int, simdev: Any) -> list[str]:
    """Launches and memory passes on the CPU, then waits on the simulated device, if there is one."""
    from support.launches import Launches

    seen: defaultdict[Any, list[float]] = defaultdict(list)
    for device in ("cpu", *(("sim",) if simdev else ())):
        torch.manual_seed(0)
        model, batch, loss = CASES[name]()
        x, y = (part.to(device) for part in batch)
        opt = OPTIMIZERS[optimizer](model.to(device))
        for _ in range(steps):
            opt.zero_grad()
            with simdev.syncs() if device == "sim" else Launches() as found:
                loss(model(x), y).backward()
                before = None if device == "sim" else (found.count, found.bytes)
                opt.step()
            if before is None:
                seen["waits", kind_of(opt)].append(found.count + found.uploads)
            else:
                seen["launches", kind_of(opt)].append(found.count - before[0])
                seen["passes", kind_of(opt)].append(
                    (found.bytes - before[1]) / sum(p.nbytes for p in model.parameters())
                )
    forms = {"launches": ".0f", "passes": ".1f", "waits": ".0f"}
    median = lambda key, form: f"{statistics.median(seen[key]):{form}}" if key in seen else "-"
    cells = [median((what, kind), form) for kind in SHOWN for what, form in forms.items()]
    waits = list(itertools.chain(*(seen["waits", kind] for kind in KINDS)))
    return [name, optimizer, *cells, f"{statistics.fmean(waits):.2f}" if waits else "-"]


LOOPS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("`KFAC`", KFAC, {}, "plain, first 40 steps"),
    ("`KFAC(adaptive=True)`", KFAC, {"adaptive": True}, "closure"),
    ("`NaturalGradient`", NaturalGradient, {}, "plain"),
    ('`NaturalGradient(solver="cg")`', NaturalGradient, {"solver": "cg"}, "plain"),
    ("`NaturalGradient(adaptive=True)`", NaturalGradient, {"adaptive": True}, "closure"),
    ("`KFAC`", KFAC, {}, "residuals"),
    ("`NaturalGradient`", NaturalGradient, {}, "residuals"),
]


def waits(make: Callable[..., Any], options: dict[str, Any], loop: str, simdev: Any) -> float:
    """Of a mean step, from the seventh of 20 on, since the first ones invert each time; or from the first of 40 on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to("sim")
    x, y = torch.randn(64, 8).to("sim"), torch.randn(64, 4).to("sim")
    opt, counts = make(model, **options), []

    def closure() -> Tensor:
        if loop == "residuals":
            return (model(x) - y).flatten()
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    is_plain = loop.startswith("plain")
    for _ in range(40 if "40" in loop else 20):
        if is_plain:
            closure()
        with simdev.syncs() as found:
            opt.step(*([] if is_plain else [closure]))
        counts.append(found.count)
    return statistics.fmean(counts if "40" in loop else counts[6:])


def prices(name: str, steps: int) -> list[str]:
    """CPU time of whole steps, forward and backward pass included, in SGD's median step; the two take turns."""
    family = FAMILIES[name]()
    plain, ours = (
        Run(family, ENTRIES[entry], setting, seed=0) for entry, setting in (("sgd", {"lr": 1e-3}), ("kfac", {}))
    )
    kinds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(steps):
        plain.step()
        ours.step()
        kinds[kind_of(ours.optimizers[0])].append(ours.durations[-1])
    unit = statistics.median(plain.durations)
    means = [statistics.fmean(ours.durations[:count]) / unit for count in (steps, *FIRST)]
    cells = [f"{1e3 * unit:.2f}", *(f"{mean:.2f}" for mean in means)]
    cells += [f"{statistics.median(own) / unit:.2f} x {len(own)}" if own else "-" for own in kinds.values()]
    seconds = Counter[str]()
    for own in ours.optimizers:
        seconds.update(own.monitor.seconds)
    return [NAMES[name], *cells, *(f"{seconds[part] / steps / unit:.2f}" for part in PARTS)]


def main(args: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, args, only=list(CASES | FAMILIES), steps=100, families=False)
    if options.families:
        head = ["family", "SGD, ms", "mean", *(f"first {count}" for count in FIRST), *KINDS, *PARTS]
        return printed(head, (prices(name, options.steps) for name in FAMILIES if name in options.only))
    simdev = simulated_device()
    head = ["model", "optimizer", *(f"{kind}: {what}" for kind in SHOWN for what in ("launches", "passes", "waits"))]
    pairs = itertools.product([name for name in CASES if name in options.only], OPTIMIZERS)
    printed([*head, "waits of a mean step"], (overhead(*pair, options.steps, simdev) for pair in pairs))
    if simdev:
        print()
        rows = ([title, loop, f"{waits(make, own, loop, simdev):.1f}"] for title, make, own, loop in LOOPS)
        printed(["optimizer", "loop", "waits of a mean step"], rows)
    return None


if __name__ == "__main__":
    main()
