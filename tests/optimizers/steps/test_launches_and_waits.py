"""How much a plain step asks of host and device: launches do not grow with the layers, and the host waits once."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
import optimizers
from optimizers import EKFAC, KFAC
from optimizers.steps.rule import layout_of_step
from support.cases.case import Raw, seeded
from support.launches import Launches

LAUNCHES = 24  # of an ordinary step, that do not depend on the model
PER_FAMILY = {KFAC: 8, EKFAC: 11}  # for layers of one form: a basis takes two products more, and a scaling
RENEWAL_LAUNCHES = 160  # of a step that renews and inverts everything, however many layers of one form there are
DEVICE_LAUNCHES = 24  # more on a device: transfers, and triangular solves in place of a Cholesky inverse
CALLS, CALLS_PER_LAYER = 300, 18  # of Python functions in an ordinary step with two hidden layers
OURS = tuple(str(Path(package.__path__[0])) for package in (curvature, optimizers))
# Waits of a renewal: whether gradients are finite, and what was measured; whether the last step went far too far; how
# far averages have moved; whether decompositions have succeeded, or the small matrices that the host decomposes for
# EKFAC; the size of the outputs.
RENEWAL = {KFAC: 6, EKFAC: 6}


def perceptron(depth: int) -> tuple[nn.Module, Tensor, Tensor]:
    """All hidden layers but the first have one form."""
    widths = [7, *[12] * depth]
    hidden = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(12, 3)), torch.randn(8, 7), torch.randint(3, (8,))


def block(d: int) -> nn.Module:
    run = lambda m, x: x + m.down(torch.tanh(m.up(m.norm(x))))
    return Raw(run, norm=nn.LayerNorm(d), up=nn.Linear(d, 2 * d), down=nn.Linear(2 * d, d))


def residual(depth: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Blocks with a norm, whose two parameters have diagonals."""
    blocks = [block(6) for _ in range(depth)]
    return nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 3)), torch.randn(8, 5), torch.randint(3, (8,))


def convolutional(depth: int) -> tuple[nn.Module, Tensor, Tensor]:
    layers = [layer for _ in range(depth) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return (nn.Sequential(nn.Conv2d(1, 4, 3), *layers, *head), torch.randn(8, 1, 6, 6), torch.randint(3, (8,)))


def recurrent(depth: int) -> tuple[nn.Module, Tensor, Tensor]:
    run = lambda m, x: m.out(m.recurrent(m.embed(x))[0]).transpose(1, 2)
    parts = {"embed": nn.Embedding(9, 6), "recurrent": nn.LSTM(6, 8, batch_first=True), "out": nn.Linear(8, 9)}
    return Raw(run, **parts), torch.randint(9, (4, 5)), torch.randint(9, (4, 5))


Made = Callable[[int], tuple[nn.Module, Tensor, Tensor]]
MODELS: dict[str, Made] = {"mlp": perceptron, "residual": residual, "cnn": convolutional, "lstm": recurrent}


class Run:
    """Training of a model with a number of layers."""

    def __init__(self, optimizer: type[KFAC], make: Made, depth: int, device: str) -> None:
        with seeded(0):
            self.model, self.x, self.y = (part.to(device) for part in make(depth))
        self.opt = optimizer(self.model, weight_decay=0.01)

    def backward(self) -> None:
        self.opt.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()

    def step(self) -> str:
        """Returns the kind of the step."""
        self.opt.step()
        entry = self.opt.monitor.entries[-1]
        return "renewing" if entry["renewed"] else "inverting" if entry["inverted"] else "ordinary"

    def is_long(self) -> bool:
        """Whether the gradient will be clipped: then a step solves, and waits, twice."""
        rule: Any = self.opt.rule
        norms = [p.grad.norm().cpu() for p in self.model.parameters() if p.grad is not None]
        return bool(rule.state and torch.stack(norms).norm() > rule.constants.most * rule.state.norm)

    def ordinary_launches(self) -> int:
        """Of a step that renews nothing, and does not undo the last one."""
        while True:
            self.backward()
            is_long, undone = self.is_long(), self.opt.monitor.counts["overshoots"]
            with Launches() as launches:
                kind = self.step()
            if kind == "ordinary" and not is_long and self.opt.monitor.counts["overshoots"] == undone:
                return launches.count

    @property
    def families(self) -> int:
        context = self.opt._context(None)
        return len(layout_of_step(context, context.gradients()).families)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lstm"])
@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_launches_do_not_grow_with_the_number_of_layers(optimizer: type[KFAC], name: str, device: str) -> None:
    few, many = (Run(optimizer, MODELS[name], depth, device) for depth in (3, 9))
    assert few.ordinary_launches() == many.ordinary_launches()
    assert few.families == many.families


@pytest.mark.parametrize("name", ["mlp", "residual", "cnn"])
def test_launches_of_a_renewal_do_not_grow_either(name: str, device: str) -> None:
    """Layers of one form are averaged, compared and inverted together. The second step renews and inverts all."""
    launches = {}
    for depth in (3, 9):
        run = Run(KFAC, MODELS[name], depth, device)
        for _ in range(2):
            run.backward()
            with Launches() as launched:
                assert run.step() == "renewing"
        launches[depth] = launched.count
    print(f"{name}: {launches}")
    assert launches[9] <= launches[3] <= RENEWAL_LAUNCHES + DEVICE_LAUNCHES * (device != "cpu")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_an_ordinary_step_takes_few_launches(optimizer: type[KFAC], name: str, device: str) -> None:
    run = Run(optimizer, MODELS[name], 4, device)
    found = run.ordinary_launches()
    print(f"{optimizer.__name__}, {name}: {found} launches, {run.families} families")
    assert found <= LAUNCHES + PER_FAMILY[optimizer] * run.families


def test_an_ordinary_step_takes_few_calls() -> None:
    """Of Python functions of ours: few are called for each layer.

    The fewest of some steps: one before a pass to record attaches hooks, one whose gradient is long reads twice.
    """
    fewest = {}
    for depth in (2, 5):
        run, calls, ordinary = Run(KFAC, perceptron, depth, "cpu"), 0, []

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

        while len(ordinary) < 10:
            run.backward()
            calls = 0
            sys.setprofile(count)
            try:
                run.opt.step()
            finally:
                sys.setprofile(None)
            if not run.opt.history[-1]["renewed"] and not run.opt.history[-1]["inverted"]:
                ordinary.append(calls)
        fewest[depth] = min(ordinary)
    assert fewest[2] <= CALLS and fewest[5] <= CALLS + 3 * CALLS_PER_LAYER


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_launches_on_diagonal_blocks_do_not_grow_either(optimizer: type[KFAC], device: str) -> None:
    """Of the 12 rows of a side, 8 and 4 are blocks."""
    made: Any = functools.partial(optimizer, block_size=8)
    few, many = (Run(made, perceptron, depth, device) for depth in (3, 9))
    assert many.ordinary_launches() == few.ordinary_launches()
    assert any(len(side.sizes) > 1 for block in many.opt.store.blocks for side in block.sides)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_the_host_waits_once(optimizer: type[KFAC], name: str, device: str) -> None:
    """In a step and the forward pass before it, for the facts of the step; a renewal waits `RENEWAL` times more.

    So does a gradient that is clipped: once, for the facts of its own.
    """
    if device != "sim":
        pytest.skip("waits are counted on the simulated device: make test-device")
    simdev: Any = importlib.import_module("support.simulated_device.simdev")
    run, counts = Run(optimizer, MODELS[name], 4, device), {"ordinary": set(), "renewing": set()}
    for k in range(40):
        with simdev.syncs() as found:
            run.backward()
            asked = len(found.all)
            is_long = run.is_long()
            del found.all[asked:]
            kind = run.step()
        # `torch.linalg.eigh` itself asks for its error codes
        waits = sum(s.kind != "event" and s.operator != "aten::_linalg_eigh" for s in found.all) - is_long
        if k > 1:
            counts[kind].add(waits)
            bound = 1 + RENEWAL[optimizer] * (kind == "renewing")
            assert waits <= bound, (k, kind, found.places("/curvature/", "/optimizers/"))
    assert counts["ordinary"] == {1} and counts["renewing"]
