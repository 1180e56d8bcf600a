"""Injections that are written outside of the package work in optimizers and builders as those inside do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.training import train

pytestmark = pytest.mark.fast

WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


class Signs(curvature.Injection):
    """Random signs, as in docs/guides/choosing.md."""

    is_random = is_isotropic = True

    def _vector_source(self, batch: Any) -> Any:
        source = batch.source(0)
        scale = 1.0 if batch.loss is None else batch.masses(strict=False).sqrt()
        return 1, lambda start, stop: scale * batch.signs(stop - start, source)


class Heads(curvature.Injection):
    """One vector, not random, which weighs the outputs; says nothing of itself."""

    def _vector_source(self, batch: Any) -> Any:
        return 1, lambda start, stop: WEIGHTS.to(batch.output).expand(stop - start, *batch.output.shape)


class Ones(curvature.Injection):
    """One vector for outputs of any size."""

    def _vector_source(self, batch: Any) -> Any:
        return 1, lambda start, stop: torch.ones(stop - start, *batch.output.shape)


class Halved(Signs):
    """What needs the loss and says so."""

    is_isotropic, needs_loss = False, True


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


X, Y = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()], ids=["none", "loss"])
@pytest.mark.parametrize("inject", [Signs(), Heads()], ids=repr)
def test_optimizers_train_with_them(make: type[KFAC], loss: Any, inject: curvature.Injection) -> None:
    model = network()
    opt = make(model, inject=inject, loss=loss)
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    values = train(model, opt, F.cross_entropy, x, y, 20)
    assert values[-1] < 0.9 * values[0] and not opt.recorder.substitute
    # the size of outputs is that of their entries, or in the metric
    assert opt.recorder.outputs.entries_per_sample == (3 if inject.is_isotropic else 1)
    assert copy.deepcopy(opt).steps == 20


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
def test_what_needs_the_loss_is_refused_without(make: type[KFAC]) -> None:
    with pytest.raises(ValueError, match=r"loss: halved\(\) needs the loss module"):
        make(network(), inject=Halved())
    assert make(network(), inject=Halved(), loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()], ids=["none", "loss"])
def test_several_outputs_beside_a_loss_of_one(loss: Any) -> None:
    """Isotropic vectors need no loss, whoever has made them; others are replaced, and the report says so."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value = network(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Any:
            return self.body(x), self.value(x)

    for inject, is_replaced in ((Signs(), False), (curvature.isotropic(2), False), (Ones(), True)):
        model = Two()
        opt = KFAC(model, inject=inject, loss=loss)
        for _ in range(2):
            opt.zero_grad()
            logits, value = model(X)
            (F.cross_entropy(logits, Y) + value.square().mean()).backward()
            opt.step()
        assert bool(opt.recorder.substitute) == (is_replaced and loss is not None), inject


def test_residuals_take_vectors_in_units_of_the_outputs() -> None:
    for inject, is_refused in ((Signs(), False), (Heads(), True)):
        model = network()
        opt = KFAC(model, inject=inject)
        residuals = lambda model=model: (model(X) - 1).flatten()
        if is_refused:
            with pytest.raises(ValueError, match="inject: nothing is sent back but the residuals"):
                opt.step(residuals)
        else:
            opt.step(residuals)
