"""What a step costs beside the model's own passes: launches, memory passes, waits of the host; and its price in SGD's.

    python tests/benchmarks/step_overhead.py [--only tanh gpt6] [--steps 100] [--places]
    python tests/benchmarks/step_overhead.py --families [softmax siren ...] [--optimizer ekfac] [--steps 300]

Launches are operators that start a kernel on a GPU, where a call for a list of tensors is one. Passes are the bytes
that these read and write, as a multiple of the bytes of the parameters. Waits are counted on the simulated device,
which takes a C++ compiler. CPU time is that of one thread.

`--families` compares whole steps of the families of generality.py with SGD's, which take turns with them: the mean
from the first step on, medians of each kind, and the parts of a mean step, all in SGD's median step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _contest import Run
from _generality_families import FAMILIES
from _generality_models import LSTM, normalised
from _problems import token_loss
from _race_problems import GPT, deep
from _race_rivals import ENTRIES
from torch import Tensor, nn

from optimizers import KFAC

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for support
Loss = Callable[[Tensor, Tensor], Tensor]
KINDS = "ordinary", "inverting", "renewing"  # the last inverts, too


def characters() -> tuple[Tensor, Tensor]:
    x = torch.randint(50, (8, 33))
    return x[:, :-1], x[:, 1:].contiguous()


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor], Loss]]] = {
    "tanh": lambda: (
        deep(32, 12),
        (torch.randn(32, 64), torch.randint(10, (32,))),
        F.cross_entropy,
    ),
    "cnn": lambda: (normalised(8, 16, 16), (torch.randn(16, 1, 28, 28), torch.randint(10, (16,))), F.cross_entropy),
    "gpt2": lambda: (GPT(50, 32, 32, 2, 4), characters(), token_loss),
    "gpt6": lambda: (GPT(50, 32, 32, 6, 4), characters(), token_loss),
    "lstm": lambda: (LSTM(50, 48), characters(), token_loss),
}


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def kind_of(opt: Any) -> str:
    entry = opt.monitor.entries[-1] if isinstance(opt, KFAC) else {"renewed": False, "inverted": 0}
    return "renewing" if entry["renewed"] else "inverting" if entry["inverted"] else "ordinary"


class Seen:
    """Numbers of steps, by kind."""

    def __init__(self) -> None:
        self.launches: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.passes: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.milliseconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.waits: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.places: Counter[Any] = Counter()

    @property
    def mean_waits(self) -> float:
        return statistics.fmean(itertools.chain(*self.waits.values()))


def measured(name: str, make: Callable[[nn.Module], Any], steps: int, simdev: Any) -> Seen:
    """Launches and milliseconds on the CPU, then waits on the simulated device, if there is one."""
    from support.launches import Launches

    seen = Seen()
    for device in ("cpu", *(("sim",) if simdev else ())):
        torch.manual_seed(0)
        model, batch, loss = CASES[name]()
        x, y = (part.to(device) for part in batch)
        opt = make(model.to(device))
        for k in range(steps):
            if device == "sim":
                with simdev.syncs() as found:
                    loss(model(x), y).backward()
                    opt.step()
                seen.waits[kind_of(opt)].append(found.count + found.uploads)
                seen.places += found.places("/curvature/", "/optimizers/")
            else:
                loss(model(x), y).backward()
                start = time.thread_time()
                if k % 2:  # to count takes time
                    with Launches() as launches:
                        opt.step()
                    seen.launches[kind_of(opt)].append(launches.count)
                    seen.passes[kind_of(opt)].append(launches.bytes / bytes_of(model))
                else:
                    opt.step()
                    seen.milliseconds[kind_of(opt)].append(1e3 * (time.thread_time() - start))
            opt.zero_grad()
    return seen


def row(name: str, optimizer: str, seen: Seen) -> str:
    cells = [name, optimizer]
    for kind in KINDS:
        each = seen.launches[kind], seen.passes[kind], seen.milliseconds[kind], seen.waits[kind]
        forms = ".0f", ".1f", ".2f", ".1f"
        cells += [f"{statistics.median(own):{form}}" if own else "-" for form, own in zip(forms, each, strict=True)]
    return " | ".join([*cells, f"{seen.mean_waits:.2f}" if any(seen.waits.values()) else "-"])


PARTS = "capture", "factors", "inverses", "direction"  # of an optimizer's own clock; the last is in ordinary steps, too


def prices(name: str, optimizer: str, steps: int) -> str:
    """CPU time of whole steps, forward and backward pass included, in SGD's median step; the two take turns."""
    family = FAMILIES[name]()
    plain, ours = (
        Run(family, ENTRIES[entry], setting, seed=0) for entry, setting in (("sgd", {"lr": 1e-3}), (optimizer, {}))
    )
    kinds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(steps):
        plain.step()
        ours.step()
        kinds[kind_of(ours.optimizers[0])].append(ours.durations[-1])
    unit = statistics.median(plain.durations)
    cells = [f"{1e3 * unit:.2f}", f"{statistics.fmean(ours.durations) / unit:.2f}"]
    cells += [f"{statistics.median(own) / unit:.2f} x {len(own)}" if own else "-" for own in kinds.values()]
    seconds = Counter[str]()
    for own in ours.optimizers:
        seconds.update(own.monitor.seconds)
    cells += [f"{seconds[part] / steps / unit:.2f}" for part in PARTS]
    return " | ".join([name, *cells])


def simulated_device() -> Any:
    try:
        from support.simulated_device import simdev
    except ImportError as error:
        print(f"waits are not counted: {error}")
        return None
    return simdev


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--places", action="store_true", help="where the host waits, in all steps together")
    parser.add_argument(
        "--families", nargs="*", choices=FAMILIES, help="prices on these families of generality.py instead"
    )
    parser.add_argument("--optimizer", choices=["kfac", "ekfac"], default="kfac", help="for --families")
    chosen = parser.parse_args(args)
    torch.set_num_threads(1)
    if chosen.families is not None:
        print("family | SGD, ms | mean", *KINDS, *PARTS, sep=" | ")
        print(*["---"] * (3 + len(KINDS) + len(PARTS)), sep=" | ")
        for name in chosen.families or FAMILIES:
            print(prices(name, chosen.optimizer, chosen.steps), flush=True)
        return
    simdev = simulated_device()
    print(
        "model | optimizer",
        *(f"{kind}: launches | passes | ms | waits" for kind in KINDS),
        "waits of a step",
        sep=" | ",
    )
    for name in chosen.only:
        for optimizer, make in {"SGD": sgd, "KFAC": KFAC}.items():
            seen = measured(name, make, chosen.steps, simdev)
            print(row(name, optimizer, seen), flush=True)
            if chosen.places:
                for place, count in seen.places.most_common():
                    print("   ", f"{count / chosen.steps:.2f}", *place)


if __name__ == "__main__":
    main()
