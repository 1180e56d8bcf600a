"""Autocast, GradScaler, parameters of low and double precision: factors are those of unscaled quantities."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.combinations import in_pairs
from support.training import assert_same, copied, curvature_of, task, train

Made = Callable[..., KFAC]
KINDS: dict[str, Made] = {
    "kfac": KFAC, "ekfac": EKFAC,
    **{s: lambda m, s=s, **o: NaturalGradient(m, solver=s, **o) for s in ("woodbury", "cg")},
}  # fmt: skip
INJECT = {"isotropic": curvature.isotropic(), "empirical": curvature.empirical()}


def small(device: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10))
    return model.to(device), *task("mlp", device, n=40)[1:]


def pair(name: str, inject: str, device: str) -> tuple[tuple[nn.Module, KFAC], tuple[nn.Module, KFAC], Any]:
    model, *batch = small(device)
    other = copy.deepcopy(model)
    one, same = (KINDS[name](m, inject=INJECT[inject]) for m in (model, other))
    return (model, one), (other, same), tuple(batch)


def scaled(
    model: nn.Module, opt: KFAC, batch: tuple[Any, Tensor, Tensor], scaler: torch.amp.GradScaler, steps: int = 1,
    low: torch.dtype | None = None, between: Callable[[], Any] = lambda: None,
) -> list[float]:  # fmt: skip
    loss, x, y = batch
    values = []
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast(y.device.type, low, enabled=low is not None):
            value = loss(model(x), y)
        scaler.scale(value).backward()
        between()
        scaler.step(opt)
        scaler.update()
        values.append(value.item())
    return values


@pytest.mark.parametrize("inject", INJECT)
@pytest.mark.parametrize("name", ["kfac", "woodbury", "cg"])
def test_scaled_micro_batches_of_several_sizes(name: str, inject: str, device: str):
    """Two passes before a step, of 30 and of 10 samples."""
    (model, one), (other, same), (loss, x, y) = pair(name, inject, device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    for _ in range(4):
        for m, opt, scale in ((model, one, scaler.scale), (other, same, lambda value: value)):
            opt.zero_grad()
            for part in (slice(30), slice(30, 40)):
                scale(loss(m(x[part]), y[part]) / 2).backward()
        scaler.step(one)
        scaler.update()
        same.step()
    torch.testing.assert_close(copied(model), copied(other))
    torch.testing.assert_close(curvature_of(one), curvature_of(same))


@pytest.mark.parametrize("name", KINDS)
def test_an_overflow_is_skipped_and_the_scale_falls(name: str, device: str):
    model, *batch = small(device)
    opt, scaler = KINDS[name](model), torch.amp.GradScaler(device, init_scale=2.0**12)
    scaled(model, opt, tuple(batch), scaler, 25)
    before = copied(model) | curvature_of(opt)
    spoil = lambda: next(model.parameters()).grad.view(-1)[:1].fill_(math.inf)  # type: ignore[union-attr]
    scaled(model, opt, tuple(batch), scaler, between=spoil)  # a second one undoes the last step
    assert_same(copied(model) | curvature_of(opt), before)
    assert (opt.skipped, opt.steps, scaler.get_scale()) == (1, 25, 2.0**11)
    assert all(map(math.isfinite, scaled(model, opt, tuple(batch), scaler, 3)))


def test_clipping_after_unscaling(device: str):
    """The recipe of torch; where the loss's own backprops are taken their scale is then unknown."""
    model, *batch = small(device)
    other = copy.deepcopy(model)
    opt, same, scaler = KFAC(model), KFAC(other), torch.amp.GradScaler(device, init_scale=2.0**12)
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    scaled(model, opt, tuple(batch), scaler, 4, between=lambda: (scaler.unscale_(opt), clip(model)))
    for _ in range(4):
        same.zero_grad()
        batch[0](other(batch[1]), batch[2]).backward()
        clip(other)
        same.step()
    assert_same(copied(model), copied(other))
    for made in (KFAC, NaturalGradient):
        model, *batch = small(device)
        opt, scaler = made(model, inject=curvature.empirical()), torch.amp.GradScaler(device)
        with pytest.raises(RuntimeError, match=r"unscale_.*isotropic\(\)"):
            scaled(model, opt, tuple(batch), scaler, between=lambda: scaler.unscale_(opt))  # noqa: B023


class OwnLoss(nn.Module):
    """Returns its loss alone, which no loss function of torch has made; or beside it what it is made of."""

    def __init__(self, model: nn.Module, beside: bool):
        super().__init__()
        self.model, self.beside = model, beside

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output = self.model(x)
        loss = (output - nn.functional.one_hot(y, 10)).square().mean()
        return {"loss": loss, "output": output} if self.beside else {"loss": loss}


@pytest.mark.parametrize("made", [KFAC, EKFAC])
def test_unscaling_beside_a_model_that_returns_its_loss_alone_asks_for_its_outputs(made: Made, device: str):
    for beside in (True, False):
        model, _, x, y = small(device)
        model, batch = OwnLoss(model, beside), (lambda output, _: output["loss"], (x, y), y)
        opt, scaler = made(model), torch.amp.GradScaler(device, init_scale=2.0**12)
        unscale = lambda: scaler.unscale_(opt)  # noqa: B023
        call = lambda *given: model(*given[0])  # noqa: B023
        if beside:
            scaled(call, opt, batch, scaler, 2, between=unscale)  # type: ignore[arg-type]
            assert opt.steps == 2
        else:
            match = r"unscale_ was called.*get_scale\(\), or let the model return its outputs"
            with pytest.raises(RuntimeError, match=match):
                scaled(call, opt, batch, scaler, between=unscale)  # type: ignore[arg-type]


def test_closures_are_refused_with_a_scaler(device: str):
    model, loss, x, y = small(device)
    opt, scaler = KFAC(model), torch.amp.GradScaler(device)
    scaler.scale(loss(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(opt, lambda: loss(model(x), y))


@pytest.mark.training_run
@in_pairs(low=[torch.bfloat16, torch.float16], inject=INJECT, name=KINDS)
def test_autocast(name: str, inject: str, low: torch.dtype, device: str):
    """The first curvature is that of single precision, but for the rounding of the passes; training goes on."""
    (model, one), (other, same), batch = pair(name, inject, device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12, enabled=low == torch.float16)
    values = scaled(model, one, batch, scaler, 1, low)
    train(other, same, *batch, 1)
    for k, expected in curvature_of(same).items():
        if k.endswith((" row_side", " column_side", " matrix")):
            found = curvature_of(one)[k]
            assert found.dtype == expected.dtype
            assert (found - expected).norm() < 0.05 * expected.norm(), k  # bfloat16 has an epsilon of 0.008
    values += scaled(model, one, batch, scaler, 14, low)
    assert all(map(math.isfinite, values)) and values[-1] < values[0] and one.skipped == 0


@pytest.mark.training_run
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_parameters_of_other_precisions(name: str, dtype: torch.dtype, device: str):
    """Factors are in single precision at least, in double where the parameters are."""
    model, loss, x, y = small(device)
    model = model.to(dtype)
    opt = KINDS[name](model, weight_decay=1e-3)
    values = train(model, opt, loss, x.to(dtype), y, 12)
    assert all(map(math.isfinite, values)) and values[-1] < values[0]
    assert {p.dtype for p in model.parameters()} == {dtype}
    factors = [t for t in curvature_of(opt).values() if t.is_floating_point()]
    wide = torch.promote_types(dtype, torch.float32)
    assert {t.dtype for t in factors} <= {wide, torch.float64}
