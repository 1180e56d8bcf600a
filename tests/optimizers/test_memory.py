"""What a long run keeps does not grow, nothing outlives the optimizer, and the peaks of renewals are bounded."""

from __future__ import annotations

import gc
import itertools
import resource
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
import support.odd.losses
import support.odd.parameters  # noqa: F401
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.memory import peak_bytes
from support.odd.table import ODD
from support.training import task, train

MADE: dict[str, Callable[[nn.Module], KFAC]] = {
    "kfac": KFAC, "ekfac": EKFAC, "natural": NaturalGradient,
    "kfac empirical": lambda m: KFAC(m, inject=curvature.empirical()),
    "natural empirical": lambda m: NaturalGradient(m, inject=curvature.empirical()),
}  # fmt: skip


def small() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(8, 5), torch.randn(8, 3)


ODD_ONES = ["weight_norm", "exponential_weight", "parameter_tanh", "parameter_itself", "own_function", "keeps_own_loss"]


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("name", MADE)
def test_memory_is_flat(name: str):
    """Also with forward passes under gradients that no backward pass follows."""
    model, x, y = small()
    opt = MADE[name](model)
    # all sides are inverted together: otherwise rounding would decide which share their memory
    opt.preconditioner.schedule.decompose_every = 5

    def steps(number: int) -> tuple[int, int, int]:
        for _ in range(number):
            model(x).sum()
            opt.zero_grad()
            (model(x) - y).square().mean().backward()
            opt.step()
        opt.monitor.entries.clear()  # 10,000 are kept on purpose
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return tensors(), len(gc.get_objects()), kilobytes

    steps(100)
    before, after = steps(20), steps(300)
    assert after[0] <= before[0] and after[1] < before[1] + 500 and after[2] < before[2] + 4_000, (before, after)


# a model of many samples that returns a loss of its own has no rows: NaturalGradient refuses it
REFUSED = ("natural empirical", "keeps_own_loss")
EVERY_ODD_ONE = itertools.product(["kfac", "kfac empirical", "natural empirical"], [*ODD_ONES, "returns_torch_loss"])


@pytest.mark.parametrize(("name", "case"), [both for both in EVERY_ODD_ONE if both != REFUSED])
def test_passes_of_odd_models_are_not_kept(name: str, case: str):
    """Neither with a backward pass nor without; nor are hooks on the parameters."""
    model = ODD[case].make()
    opt = MADE[name](model)
    opt.preconditioner.schedule.factor_every = 1  # the model itself keeps the graph of its last pass

    def steps(number: int) -> tuple[int, int]:
        for _ in range(number):
            ODD[case].loss(model)
            opt.zero_grad()
            ODD[case].loss(model).backward()
            opt.step()
        opt.monitor.entries.clear()
        return tensors(), sum(len(p._backward_hooks or ()) for p in model.parameters())

    steps(3)
    before, after = steps(1), steps(4)
    assert after == before and not after[1]


def test_passes_without_a_backward_one_are_not_kept():
    model, x, y = small()
    opt = MADE["kfac empirical"](model)
    for _ in range(2):
        (model(x) - y).square().mean().backward()
        opt.step()
    model(x)
    before = tensors()
    for _ in range(20):
        model(x)
    assert tensors() <= before + 2


class LastState(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(5, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("name", MADE)
def test_passes_of_recurrent_layers_are_not_kept(name: str, kind: type[nn.RNNBase]):
    """Their products are functions of Python, which an edge of the graph holds twice."""
    with seeded(0):
        model, x, y = LastState(kind), torch.randn(6, 4, 5), torch.randn(6, 3)
    step = step_of(name, model)
    for _ in range(3):
        step(model, x, y)
    before = tensors()
    for _ in range(10):
        step(model, x, y)
    assert tensors() <= before + 2


@pytest.mark.parametrize("name", MADE)
def test_deleting_the_optimizer_frees_what_it_held(name: str):
    model, loss, x, y = task("mlp", n=16)
    opt = MADE[name](model)
    train(model, opt, loss, x, y, 12)
    held = [weakref.ref(t) for s in opt.state.values() for t in s.values() if isinstance(t, Tensor)]
    held.append(weakref.ref(opt))
    del opt
    gc.collect()
    assert not [ref for ref in held if ref() is not None]
    assert not model._forward_hooks and not model._forward_pre_hooks


CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {
    "kfac of data": lambda m, x, y: curvature.kfac(m, nn.MSELoss(), (x, y)),
    "gauss_newton times a vector": lambda m, x, y: curvature.gauss_newton(m, nn.MSELoss(), (x, y)).diagonal(),
    "per_sample_norms": lambda m, x, y: curvature.per_sample_norms(m, nn.MSELoss(), x, y),
    "capture": lambda m, x, y: captured(m, x),
}


def captured(model: nn.Module, x: Tensor) -> object:
    with curvature.capture(model) as tape:
        output = model(x)
    return tape.backprops(output, torch.randn(1, *output.shape))


def step_of(name: str, model: nn.Module) -> Callable[[nn.Module, Tensor, Tensor], object]:
    opt = MADE[name](model)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()

    return step


@pytest.mark.parametrize("name", [*MADE, *CALLS])
def test_a_pass_goes_as_soon_as_it_has_been_used(name: str):
    """Python's collector counts objects, not bytes: what waits for it fills the memory of an accelerator."""
    model, x, y = small()
    call = CALLS.get(name) or step_of(name, model)
    for _ in range(2):
        call(model, x, y)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call(model, x, y)
        gc.collect()
        assert not [type(found) for found in gc.garbage if isinstance(found, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


WIDTH, LAYERS = 32, 6
SIDE = 9 * WIDTH  # rows of the factor of a layer's inputs
WHOLE = 4 * SIDE**2  # bytes of such a side


class Stepping:
    """A net of convolutions whose factors are much larger than all else.

    Pictures are nearly constant and their borders meet, so a few eigenvalues of each factor stand far above the others.
    These are what inverses keep, on every processor. Of noise they would keep all that are not zero. Then rounding says
    whether the mean of the rest is below zero, which takes the whole inverse.
    """

    def __init__(self, make: Any, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        layer = lambda: nn.Conv2d(width, width, 3, padding=1, padding_mode="circular", bias=False)
        self.model = nn.Sequential(*(layer() for _ in range(LAYERS)))
        self.x = torch.randn(2, width, 1, 1) + 0.05 * torch.randn(2, width, 4, 4)
        self.opt, self.loss = make(self.model), torch.zeros(())

    def forward(self) -> None:
        self.opt.zero_grad()
        self.loss = self.model(self.x).square().mean()

    def finish(self) -> None:
        self.loss.backward()
        self.opt.step()
        self.loss = torch.zeros(())


@pytest.mark.parametrize(
    ("make", "kept", "forward", "finish"),
    [
        (KFAC, 3.5, 4.5, 7.0),  # of 6 averages as triangles, inverses by few eigenvalues
        # and of squares in the basis; all blocks are inverted in one step, one by one
        (EKFAC, 10.6, 5.0, 11.5),
    ],
    ids=["KFAC", "EKFAC"],
)
def test_renewals(make: Any, kept: float, forward: float, finish: float):
    """In sides: what stays, what a recorded pass takes (statistics of all layers, as triangles), and a step.

    The profiler takes off what is released only if an earlier profile has seen it allocated: all steps are profiled.
    """
    run = Stepping(make)
    for _ in range(4):
        peak_bytes(run.forward)
        peak_bytes(run.finish)
    assert sum(block.bytes for block in run.opt.store.blocks) <= kept * WHOLE
    assert peak_bytes(run.forward) <= forward * WHOLE
    assert peak_bytes(run.finish) <= finish * WHOLE
