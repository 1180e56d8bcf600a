"""The size of the outputs is in the units of the curvature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.habits import flat


def batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(7, 5), torch.randint(3, (7,))


def step(opt: Any, loss: Tensor) -> Any:
    """The optimizer's output scale, after one step."""
    opt.zero_grad()
    loss.backward()
    opt.step()
    return opt.recorder.outputs


@pytest.mark.parametrize("kind", [KFAC, NaturalGradient])
def test_fisher_measures_outputs_by_the_hessian_of_the_loss(kind: Any):
    model, x, y = batch()
    f = model(x).detach()
    p = f.softmax(1)
    expected = (torch.einsum("nc,nc->n", p, f.square()) - (p * f).sum(1).square()).mean().sqrt()
    found = step(kind(model, loss=nn.CrossEntropyLoss(), inject=curvature.exact()), F.cross_entropy(model(x), y))
    assert found.rms == pytest.approx(float(expected), rel=1e-5)
    assert found.entries_per_sample == 1


@pytest.mark.parametrize("kind", [KFAC, NaturalGradient])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_empirical_fisher_measures_outputs_by_the_gradient_of_the_loss(kind: Any, scale: float):
    model, x, y = batch()
    f = model(x).detach()
    expected = ((f.softmax(1) - F.one_hot(y, 3)) * f).sum(1).square().mean().sqrt()
    opt, scaler = kind(model, inject=curvature.empirical()), torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(opt)
    assert opt.recorder.outputs.rms == pytest.approx(float(expected), rel=1e-5)
    assert opt.recorder.outputs.entries_per_sample == 1


def test_isotropic_curvature_measures_entries():
    model, x, y = batch()
    expected = model(x).detach().square().mean().sqrt()
    found = step(KFAC(model), F.cross_entropy(model(x), y))
    assert found.rms == pytest.approx(float(expected), rel=1e-5)
    assert found.entries_per_sample == 3


@pytest.mark.parametrize("weight", [None, torch.tensor([0.2, 1.0, 3.0])], ids=["alike", "weighted"])
@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("kind", [KFAC, EKFAC, NaturalGradient])
def test_a_backward_pass_whose_gradients_are_zeroed_counts_for_nothing(kind: Any, retained: bool, weight: Any):
    """Nor does it where its graph is sent back once more, for the gradients that count."""

    def run(discarded: bool) -> tuple[list[float], Tensor]:
        model, x, y = batch()
        opt = kind(model, inject=curvature.empirical(), momentum=0.9)
        scales = []
        for n in range(3):
            loss = F.cross_entropy(model(x + n), y, weight=weight)
            if discarded and n == 1:
                (loss if retained else model(x).sum()).backward(retain_graph=retained)
                opt.zero_grad()
            step_loss = loss if retained or not discarded else F.cross_entropy(model(x + n), y, weight=weight)
            opt.zero_grad()
            step_loss.backward()
            opt.step()
            scales.append(opt.recorder.outputs.rms)
        return scales, flat(model)

    (expected, parameters), (found, others) = run(False), run(True)
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(others, parameters)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_gradients_that_are_zeroed_last_still_tell_the_curvature(kind: Any):
    """As where the loop combines gradients of several losses itself, and writes them back."""
    model, x, y = batch()
    opt = kind(model, inject=curvature.empirical(), factor_every=1)
    F.cross_entropy(model(x), y).backward()
    kept = [p.grad.clone() for p in model.parameters()]
    opt.zero_grad()
    for p, g in zip(model.parameters(), kept, strict=True):
        p.grad = g
    opt.step()
    assert opt.recorder.outputs.rms > 0
