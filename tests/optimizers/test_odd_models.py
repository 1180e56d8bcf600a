"""Whatever `torch.optim.SGD` trains is trained: odd models, by every optimizer, with every kind of injection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
import support.odd.losses
import support.odd.networks
import support.odd.parameters  # noqa: F401
from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import placed, seeded
from support.habits import copied, moved
from support.odd.table import DATA, ODD, Odd

STEPS = 4
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    **{f"NaturalGradient-{s}": functools.partial(NaturalGradient, solver=s) for s in ("woodbury", "cg")},
    "KFAC-adaptive": functools.partial(KFAC, adaptive=True),
    "NaturalGradient-adaptive": functools.partial(NaturalGradient, adaptive=True),
    "NaturalGradient-search": functools.partial(NaturalGradient, line_search=True),
}
INJECTIONS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "default": lambda criterion: {},
    "empirical": lambda criterion: {"inject": curvature.empirical()},
    "exact": lambda criterion: {"inject": curvature.exact(), "loss": criterion},
    "sampled": lambda criterion: {"inject": curvature.sampled(), "loss": criterion},
}
QUIET = ["ignore:.*torch.jit", "ignore:.*weight_norm", "ignore:Initializing zero-element", "ignore:Converting a tensor"]


@pytest.fixture(autouse=True)
def data_there(device: str, name: str) -> Iterator[None]:
    if device == "sim" and name in ("graph", "sparse_embedding"):
        pytest.skip("the simulated device has no sparse tensors")
    with placed(device, *DATA):
        yield


def step(opt: Any, model: nn.Module, case: Odd) -> Tensor:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = case.loss(model)
        loss.backward()
        return loss

    if getattr(opt, "rule", None) is not None and opt.rule.needs_closure:
        return opt.step(closure)
    loss = closure()
    opt.step()
    return loss


def with_gradient(model: nn.Module) -> set[str]:
    """The parameters whose gradient is more than rounding."""
    found = {name: float(p.grad.to_dense().norm()) for name, p in model.named_parameters() if p.grad is not None}
    return {name for name, size in found.items() if size > 1e-6 * max(found.values())}


def assert_trains(case: Odd, make: Callable[..., Any], **options: Any) -> None:
    """The loss falls, all that has a gradient moves, and the report has a line for it."""
    model = case.make()
    opt, before = make(model, **options), copied(model)
    losses, used = [], set()
    with seeded(0):
        for _ in range(STEPS):
            losses.append(float(step(opt, model, case)))
            used |= with_gradient(model)
        losses.append(float(case.loss(model)))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert used <= moved(model, before), used - moved(model, before)
    assert not used or min(losses[1:]) < losses[0], losses
    assert all(name.removeprefix("_orig_mod.") in opt.report() for name in before)


# Every model with these two, which record unlike things, ...
EACH = [("KFAC", "default"), ("NaturalGradient-woodbury", "default")]
# ... and with one of these, which take turns: what they vary is the same for every model.
IN_TURN = [(maker, inject) for maker in ("KFAC", "NaturalGradient-woodbury") for inject in INJECTIONS]
IN_TURN += [(maker, "default") for maker in OPTIMIZERS]
IN_TURN = [cell for cell in dict.fromkeys(IN_TURN) if cell not in EACH]


def cells(number: int, name: str) -> list[tuple[str, str, str]]:
    fitting = [cell for cell in IN_TURN if ODD[name].closes or not cell[0].endswith(("adaptive", "search"))]
    return [(name, *cell) for cell in (*EACH, fitting[number % len(fitting)])]


# the order of the table is that in which its modules were imported
CELLS = [cell for number, name in enumerate(sorted(ODD)) for cell in cells(number, name)]


# Models with batches that give no outputs, only a loss that no function of torch made: rows of samples are refused.
WITH_OUTPUTS = {"torch_loss", "torch_loss_and_penalty", "loss_beside_output", "one_entry"}
LOSSES_ALONE = {name for name in ODD if name.startswith("returns_")} - {f"returns_{name}" for name in WITH_OUTPUTS}
LOSSES_ALONE |= {"keeps_own_loss", "variational", "contrastive", "scalar_output", "scalars_added_up"}


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize("name, maker, inject", CELLS, ids=map("-".join, CELLS))
def test_odd_model(name: str, maker: str, inject: str, caplog: pytest.LogCaptureFixture):
    case = ODD[name]
    warn_once.cache_clear()
    train = functools.partial(assert_trains, case, OPTIMIZERS[maker], **INJECTIONS[inject](case.criterion))
    if maker.startswith("NaturalGradient") and name in LOSSES_ALONE:
        with pytest.raises(RuntimeError, match="return the outputs"):
            train()
    else:
        train()
    assert "rule failed" not in caplog.text
