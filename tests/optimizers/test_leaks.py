"""What a long run keeps does not grow, and nothing outlives the optimizer."""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvature
import support.odd.losses
import support.odd.parameters  # noqa: F401
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.odd.table import ODD
from support.training import task, train

MADE: dict[str, Callable[[nn.Module], KFAC]] = {
    "kfac": KFAC, "ekfac": EKFAC, "natural": NaturalGradient,
    "kfac empirical": lambda m: KFAC(m, inject=curvature.empirical()),
    "natural empirical": lambda m: NaturalGradient(m, inject=curvature.empirical()),
}  # fmt: skip


def small() -> tuple[nn.Module, KFAC, tuple[Tensor, Tensor]]:
    with seeded(0):
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(8, 5), torch.randn(8, 3)  # type: ignore[return-value]


ODD_ONES = ["weight_norm", "exponential_weight", "parameter_tanh", "parameter_itself", "own_function", "keeps_own_loss"]


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("name", MADE)
def test_memory_is_flat(name: str):
    """Also with forward passes under gradients that no backward pass follows."""
    model, x, y = small()
    opt = MADE[name](model)  # type: ignore[arg-type]

    def steps(number: int) -> tuple[int, int, int]:
        for _ in range(number):
            model(x).sum()  # type: ignore[operator]
            opt.zero_grad()
            (model(x) - y).square().mean().backward()  # type: ignore[operator]
            opt.step()
        opt.monitor.entries.clear()  # 10,000 are kept on purpose
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return tensors(), len(gc.get_objects()), kilobytes

    steps(100)
    before, after = steps(20), steps(300)
    assert after[0] <= before[0] and after[1] < before[1] + 500 and after[2] < before[2] + 4_000, (before, after)


@pytest.mark.parametrize("case", [*ODD_ONES, "returns_torch_loss"])
@pytest.mark.parametrize("name", ["kfac", "kfac empirical", "natural empirical"])
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


@pytest.mark.parametrize("name", ["kfac empirical"])
def test_passes_without_a_backward_one_are_not_kept(name: str):
    model, x, y = small()
    opt = MADE[name](model)  # type: ignore[arg-type]
    for _ in range(2):
        (model(x) - y).square().mean().backward()  # type: ignore[operator]
        opt.step()
    model(x)  # type: ignore[operator]
    before = tensors()
    for _ in range(20):
        model(x)  # type: ignore[operator]
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
    call = CALLS.get(name) or step_of(name, model)  # type: ignore[arg-type]
    for _ in range(2):
        call(model, x, y)  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call(model, x, y)  # type: ignore[arg-type]
        gc.collect()
        assert not [type(found) for found in gc.garbage if isinstance(found, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
