"""The same run with and without random faults: final loss, and whether anything was ever not finite.

    python tests/benchmarks/faults.py [--steps 2000] [--faults 50] [--seeds 3]

Faults, drawn at random: NaN or inf in the inputs, in the gradients after the backward pass; eigh and Cholesky that
raise or return NaN, for one step; inputs times 1e6 and 1e-12; empty batches; an exception or a KeyboardInterrupt in
the forward pass. At each of these steps, and every 50, all that the run keeps is looked at. A fault's batch is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _report import options_of
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient

sys.path.insert(0, str(Path(__file__).parents[1]))  # after the import: there are folders of the packages' names, too

from support.training import cnn, curvature_of, digits

BATCH = 64
LOSS = nn.CrossEntropyLoss(label_smoothing=0.1)  # a loss that does not go to zero, so that 5 % of it mean something
OPTIMIZERS: dict[str, Callable[[nn.Module], KFAC]] = {
    "KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": lambda m: NaturalGradient(m, solver="woodbury"),
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)), "cnn": cnn,
}  # fmt: skip
Batch = tuple[Tensor, Tensor]
no_number = lambda found: tuple(x * math.nan if x.is_floating_point() else x for x in found)
inputs = lambda change: lambda model, opt, batch: plain(model, opt, (change(batch[0]), batch[1]))


def failing(how: Callable[[Any], Any]) -> Any:
    """No eigh and no Cholesky decomposition succeeds inside."""
    spoiled = lambda true: lambda *args, **kwargs: how(true(*args, **kwargs))
    return mock.patch.multiple(torch.linalg, **{k: spoiled(getattr(torch.linalg, k)) for k in ("eigh", "cholesky_ex")})


def raised(found: Any) -> Any:
    raise torch.linalg.LinAlgError("injected")


@contextlib.contextmanager
def interrupted(model: nn.Module, error: BaseException) -> Iterator[None]:
    """The forward pass ends in the middle."""

    def hook(*args: Any) -> None:
        raise error

    handle = list(model.modules())[-1].register_forward_hook(hook)
    try:
        yield
    except (ValueError, KeyboardInterrupt):
        pass
    finally:
        handle.remove()


def plain(model: nn.Module, opt: KFAC, batch: Batch, spoil: Callable[[], None] = lambda: None) -> None:
    x, y = batch
    opt.zero_grad()
    LOSS(model(x), y).backward()
    spoil()
    opt.step()


def gradients(value: float) -> Callable[[nn.Module, KFAC, Batch], None]:
    def fault(model: nn.Module, opt: KFAC, batch: Batch) -> None:
        last = list(model.parameters())[-1]
        plain(model, opt, batch, lambda: last.grad.view(-1)[0].fill_(value))  # type: ignore[union-attr]

    return fault


def decompositions(how: Callable[[Any], Any]) -> Callable[[nn.Module, KFAC, Batch], None]:
    def fault(model: nn.Module, opt: KFAC, batch: Batch) -> None:
        with failing(how):
            plain(model, opt, batch)

    return fault


def breaking(error: BaseException) -> Callable[[nn.Module, KFAC, Batch], None]:
    def fault(model: nn.Module, opt: KFAC, batch: Batch) -> None:
        with interrupted(model, error):
            plain(model, opt, batch)

    return fault


FAULTS: dict[str, Callable[[nn.Module, KFAC, Batch], None]] = {
    "nan in inputs": inputs(lambda x: x.clone().index_fill_(0, torch.tensor([1]), math.nan)),
    "inf in inputs": inputs(lambda x: x.clone().index_fill_(0, torch.tensor([1]), math.inf)),
    "nan in gradients": gradients(math.nan), "inf in gradients": gradients(-math.inf),
    "decompositions raise": decompositions(raised), "decompositions return nan": decompositions(no_number),
    "inputs times 1e6": inputs(lambda x: x * 1e6), "inputs times 1e-12": inputs(lambda x: x * 1e-12),
    "empty batch": lambda model, opt, batch: plain(model, opt, (batch[0][:0], batch[1][:0])),
    "exception": breaking(ValueError("injected")), "KeyboardInterrupt": breaking(KeyboardInterrupt()),
}  # fmt: skip


def not_finite(model: nn.Module, opt: KFAC) -> list[str]:
    own: dict[str, Tensor] = dict(model.named_parameters())
    own |= {f"state {k}": t for s in opt.state.values() for k, t in s.items() if isinstance(t, Tensor)}
    return [name for name, t in (own | curvature_of(opt)).items() if not t.isfinite().all()]


def run(make: Callable[[nn.Module], KFAC], model: nn.Module, steps: int, faults: int, seed: int) -> dict[str, Any]:
    """A run over random batches, some of which are faults. The statistics of a batch norm are kept where they were."""
    generator, kinds = torch.Generator().manual_seed(seed), tuple(FAULTS)
    x, y = digits()
    opt = make(model)
    order = torch.randperm(steps - 20, generator=generator)[:faults] + 10
    picks = torch.randint(len(kinds), (faults,), generator=generator)
    when = dict(zip(order.tolist(), [kinds[k] for k in picks.tolist()], strict=True))
    bad: list[str] = []
    start = time.perf_counter()
    for step in range(steps):
        index = torch.randint(len(x), (BATCH,), generator=generator)
        batch = x[index], y[index]
        if step in when:
            buffers = [b.clone() for b in model.buffers()]
            FAULTS[when[step]](model, opt, batch)
            with torch.no_grad():
                for b, before in zip(model.buffers(), buffers, strict=True):
                    b.copy_(before)
        else:
            plain(model, opt, batch)
        if step in when or step % 50 == 0:
            bad += [f"{step} {when.get(step)}: {name}" for name in not_finite(model, opt)]
    with torch.no_grad():
        model.eval()
        loss = LOSS(model(x), y).item()
    counts = {k: opt.stats()[k] for k in ("skipped", "retried", "kept", "diagonal")}
    return {"loss": loss, "bad": bad, "seconds": time.perf_counter() - start, **counts}


def main() -> None:
    options = options_of(__doc__, steps=2000, faults=50, seeds=3)
    for name, optimizer, seed in itertools.product(MODELS, OPTIMIZERS, range(options.seeds)):
        found = []
        for faults in (0, options.faults):
            torch.manual_seed(seed)
            found.append(run(OPTIMIZERS[optimizer], MODELS[name](), options.steps, faults, seed))
        clean, faulty = found
        print(
            f"{name} {optimizer} seed {seed}: {clean['loss']:.4g} without, {faulty['loss']:.4g} with faults; "
            + ", ".join(f"{k} {faulty[k]}" for k in ("skipped", "retried", "kept", "diagonal"))
            + f"; not finite: {faulty['bad'] or 'never'}; {clean['seconds']:.0f} and {faulty['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
