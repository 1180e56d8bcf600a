"""Logits of tokens, whose classes are on the axis that cross-entropy takes or on the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.habits import flat
from support.training import train

OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
INJECTIONS = pytest.mark.parametrize("inject", [curvature.exact(), curvature.sampled()], ids=repr)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

with seeded(0):
    X, Y = torch.randn(8, 4, 5), torch.randint(3, (8, 4))


def tokens(axis: int = 1) -> nn.Module:
    with seeded(1):
        return Raw(lambda m, x: m.head(x).movedim(-1, axis), head=nn.Linear(5, 3))


def entropy(out: torch.Tensor, y: torch.Tensor = Y) -> torch.Tensor:
    """Of classes on either axis."""
    return F.cross_entropy(out, y) if out.shape[1] == 3 else F.cross_entropy(out.flatten(0, 1), y.flatten())


@OPTIMIZERS
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy], ids=["module", "function"])
def test_classes_on_the_last_axis_have_the_same_curvature(optimizer: Any, loss: Any) -> None:
    """Steps are those of a model that has its classes on axis 1."""
    ends = []
    for axis in (1, -1):
        model = tokens(axis).double()
        opt = optimizer(model, loss=loss, inject=curvature.exact())
        train(model, opt, entropy, X.double(), Y, 6)
        ends.append(flat(model))
    torch.testing.assert_close(*ends)


def test_the_axis_of_classes_is_part_of_a_checkpoint() -> None:
    models = [tokens(-1).double() for _ in range(2)]
    opts = [KFAC(model, loss=nn.CrossEntropyLoss(), inject=curvature.sampled()) for model in models]
    for k in range(8):
        if k == 4:
            models[1].load_state_dict(models[0].state_dict())
            opts[1].load_state_dict(opts[0].state_dict())
        for model, opt in list(zip(models, opts, strict=True))[: 1 if k < 4 else 2]:
            train(model, opt, entropy, X.double(), Y, 1)
    assert torch.equal(*map(flat, models))


@OPTIMIZERS
@INJECTIONS
@DTYPES
def test_classes_on_axis_1_and_other_losses_train(optimizer: Any, inject: Any, dtype: torch.dtype) -> None:
    for loss in (
        lambda z: F.cross_entropy(z.float(), Y),
        lambda z: F.cross_entropy(z.float(), Y) + 0.1 * z.float().square().mean(),
        lambda z: z.float().square().mean(),
    ):
        model = tokens().to(dtype)
        opt = optimizer(model, loss=nn.CrossEntropyLoss(), inject=inject)
        loss(model(X.to(dtype))).backward()
        before = model.head.weight.detach().clone()
        opt.step()
        assert not torch.equal(before, model.head.weight)


@pytest.mark.parametrize("axis", [1, -1])
def test_both_axes_take_one_seed(axis: int) -> None:
    """Processes of which one knows the axis before another go on to draw the same vectors."""
    model = tokens(axis)
    opt = KFAC(model, loss=nn.CrossEntropyLoss(), inject=curvature.sampled(), seed=5)
    model(X)
    expected = torch.Generator().manual_seed(5)
    torch.randint(1 << 62, (), generator=expected)
    assert torch.equal(opt.recorder.generator.get_state(), expected.get_state())


@OPTIMIZERS
@pytest.mark.parametrize("first", ["zero", "ignored", "penalty"])
def test_gradients_of_zero_do_not_tell_the_axis_and_do_not_count(optimizer: Any, first: str) -> None:
    """The next ones are asked, and steps are those of a model that has its classes on axis 1."""
    ends = []
    for axis in (1, -1):
        model = tokens(axis).double()
        opt = optimizer(model, loss=nn.CrossEntropyLoss(), inject=curvature.exact())
        for k in range(5):
            opt.zero_grad()
            value = entropy(model(X.double()), torch.full_like(Y, -100) if first == "ignored" and k < 2 else Y)
            value = value.nan_to_num(0.0) if first == "ignored" else value * (k >= 2)
            (value + 0.01 * flat(model).square().sum() * (first == "penalty")).backward()
            opt.step()
            # KFAC and EKFAC renew their curvature at the first steps alone, then at intervals
            assert opt.recorder.class_axis in ((0,) if k < 2 else (0, axis) if k == 2 else (axis,))
        ends.append(flat(model))
    if first != "penalty" or optimizer is not NaturalGradient:  # whose rows of such a step are those for axis 1
        torch.testing.assert_close(*ends)
