"""Batches that are not finite or say nothing change nothing and are counted; what follows is learnt as by SGD."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from statistics import fmean, geometric_mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.training import Loss, assert_same, backward, copied, curvature_of, task, train, train_by_closure


def everything(opt: KFAC, model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a checkpoint, the random generator's apart, and the numbers that go with them."""
    state = opt.state_dict()
    joint = next(entry.pop("kfac")[0] for entry in state["state"].values() if "kfac" in entry)
    own = {f"{part} {k}": v for part in ("monitor", "recorder", "rule") for k, v in joint[part].items()}
    own = {k: torch.as_tensor(v) for k, v in own.items() if isinstance(v, Tensor | int | float)}
    per = {f"{k} {n}": torch.as_tensor(v) for k, entry in state["state"].items() for n, v in entry.items()}
    # a pass that renews the factors says anew how large outputs are, whatever becomes of its step
    assert math.isfinite(own["recorder output_scale"])
    changing = ("recorder generator", "recorder output_scale", "monitor skipped")
    own = {k: v for k, v in own.items() if k not in changing}
    return copied(model) | curvature_of(opt) | per | own


def spoiled_step(model: nn.Module, opt: KFAC, batch: tuple[Callable[..., Tensor], Tensor, Tensor], kind: str) -> None:
    """One value of the input is no number, or one of a gradient is that of `kind`."""
    loss, x, y = batch
    x = x.index_fill(0, torch.tensor([3]), math.nan) if kind == "input" else x
    backward(model, opt, loss, x, y)
    if kind != "input":
        list(model.parameters())[-1].grad.view(-1)[0] = float(kind)  # type: ignore[union-attr]
    opt.step()


def pair(optimizer: type[KFAC], name: str, steps: int, **options: Any) -> tuple[Any, Any, Any]:
    model, loss, x, y = task(name)
    other = copy.deepcopy(model)
    one, same = optimizer(model, **options), optimizer(other, **options)
    for m, o in ((model, one), (other, same)):
        train(m, o, loss, x, y, steps)
        m.eval()  # the running statistics of a batch norm are the model's own business
    return (model, one), (other, same), (loss, x, y)


@pytest.mark.parametrize(
    "optimizer, name, kind",
    [(KFAC, "mlp", "nan"), (KFAC, "cnn", "input"), (EKFAC, "mlp", "-inf"), (EKFAC, "cnn", "nan")],
)
def test_a_bad_batch_changes_nothing_at_any_kind_of_step(optimizer: type[KFAC], name: str, kind: str):
    """Steps that renew, that invert, and that do neither; decay, momentum and trust region included."""
    (model, opt), (other, same), batch = pair(optimizer, name, 29, weight_decay=0.01, factor_every=5, decompose_every=5)
    kinds = set()
    for k in range(8):
        spoiled_step(model, opt, batch, kind)
        if opt.recorder.generator is not None and same.recorder.generator is not None:
            # the vectors of a bad batch are drawn
            same.recorder.generator.set_state(opt.recorder.generator.get_state())
        assert_same(everything(opt, model), everything(same, other))
        assert opt.skipped == k + 1 and same.skipped == 0 and opt.steps == 29 + k
        assert opt.history[-1] == {"step": 29 + k, "accepted": False}
        for m, o in ((model, opt), (other, same)):
            train(m, o, *batch, 1)
        kinds.add((opt.history[-1]["renewed"], opt.history[-1]["inverted"] > 0))
    assert kinds >= {(False, False), (True, True)}


@pytest.mark.parametrize(
    "optimizer, steps, reduction",
    [(KFAC, 0, "mean"), (EKFAC, 0, "sum"), (NaturalGradient, 3, "mean"), (KFAC, 29, "sum")],
)
def test_empty_batches(optimizer: type[KFAC], steps: int, reduction: str):
    """Their gradients are zero, also those of a mean, which is no number: momentum goes on, no factor changes."""
    model, _, x, y = task("mlp")
    opt, loss = optimizer(model), functools.partial(F.cross_entropy, reduction=reduction)
    train(model, opt, loss, x, y, steps)
    for _ in range(2):
        factors, before = curvature_of(opt), copied(model)
        train(model, opt, loss, x[:0], y[:0], 1)
        same = curvature_of(opt)
        assert all(torch.equal(t, same[k]) for k, t in factors.items() if k.endswith((" row_side", " column_side")))
        if not steps:
            assert_same(copied(model), before)
    assert opt.skipped == (0 if steps else 2)
    values = train(model, opt, loss, x, y, 5)
    assert all(map(math.isfinite, values)) and values[-1] < values[0]


@pytest.mark.parametrize("options", [{"adaptive": True}, {"adaptive": False}])
def test_empty_batches_of_a_closure(options: dict[str, bool]):
    model, _, x, y = task("mlp")
    opt = KFAC(model, **options)
    values = []
    for size in (0, 64, 0, 64, 0, 64):
        summed = functools.partial(F.cross_entropy, reduction="sum")
        values += train_by_closure(model, opt, summed, x[:size], y[:size], 1)
    assert all(map(math.isfinite, values)) and values[5] < values[3] < values[1]


@pytest.mark.parametrize("optimizer, name", [(KFAC, "mlp"), (EKFAC, "cnn")])
def test_a_batch_far_out_of_scale_stays_out_of_the_averages(optimizer: type[KFAC], name: str):
    """At a step that renews the factors: once. What comes again is how the data are now."""
    (model, opt), (other, same), (loss, x, y) = pair(optimizer, name, 20)
    before = curvature_of(opt)
    spans = lambda state: {k: float(t.norm()) for k, t in state.items() if k.endswith((" row_side", " column_side"))}
    for m, o, scale in ((model, opt, 1e6), (other, same, 1.0)):
        while not o.preconditioner.schedule.renews(o.steps):
            train(m, o, loss, x, y, 1)
        before = spans(curvature_of(o))
        train(m, o, loss, x * scale, y, 1)
        assert all(norm < 3 * before[k] for k, norm in spans(curvature_of(o)).items()), scale
    # where the last step is undone, all that was measured stays out
    kept_out = lambda o: o.stats()["outliers"] + o.stats()["overshoots"]
    assert kept_out(opt) >= 1 and same.stats()["outliers"] == 0
    train(model, opt, loss, x * 1e6, y, 12)  # some of these renew
    assert any(norm > 1e6 * before[k] for k, norm in spans(curvature_of(opt)).items())
    assert all(t.isfinite().all() for t in everything(opt, model).values())


@pytest.mark.parametrize("optimizer, seed", [(KFAC, 0), (EKFAC, 1)])
def test_gradients_far_out_of_scale_move_nothing_far(optimizer: type[KFAC], seed: int):
    """Two in a row, a thousand times as long as those of fitted targets: this is no other scale of the loss."""
    with seeded(seed):
        x, model = torch.randn(512, 10), nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
        y = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))(x).detach()
        opt, losses = optimizer(model), []
        for step in range(700):
            rows = torch.randint(512, (64,))
            noise = 3 * torch.randn(64, 1) if step in (500, 501, 600, 601) else 0
            opt.zero_grad()
            F.mse_loss(model(x[rows]), y[rows] + noise).backward()
            opt.step()
            losses.append(F.mse_loss(model(x), y).item())
    assert max(losses[500:]) < 3 * losses[499]


with seeded(0):
    X = torch.randn(128, 8)
    Y = (X @ torch.randn(8, 3)).argmax(1)


def network(seed: int = 1) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def usual(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> list[float]:
    return train(model, opt, F.cross_entropy, X, Y, steps)


def silence(output: Tensor, y: Tensor) -> Tensor:
    return output.sum() * 0


def one_class(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.zeros_like(y))


@pytest.mark.parametrize("optimizer, pause", [(EKFAC, silence), (KFAC, one_class)])
def test_a_signal_after_a_long_pause_is_learnt(optimizer: type[KFAC], pause: Loss) -> None:
    """Gradients were clipped to twice their mean, which follows by 3 % a step: no loss fell for thousands of steps.

    After the pause of one class the logits are about 30 and wrong; rounding decides single runs: the mean of several.
    """
    ends = []
    for seed in range(1, 2 if pause is silence else 6):
        model = network(seed)
        opt = optimizer(model)
        usual(model, opt, 12)
        train(model, opt, pause, X, Y, 800)
        ends.append(fmean(usual(model, opt, 160)[-5:]))  # the least movement of step 800 is a quarter of the first
    assert geometric_mean(ends) < (0.01 if pause is silence else 0.5)  # at chance 1.1


LARGE = 2.0**12  # times the loss, so that a scale overflows which is a number in single precision


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient])
def test_the_curvature_of_a_place_that_is_left_again_is_not_averaged(optimizer: type[KFAC]) -> None:
    """A step whose successor renews went far too far: it is undone, and the renewal follows."""
    model = network()
    opt = optimizer(model)
    usual(model, opt, 20)
    while not opt.preconditioner.schedule.renews(opt.steps):
        usual(model, opt, 1)
    for p in model.parameters():
        back = -100 * opt.state[p]["displacement"]
        p.data.add_(back)
        opt.state[p]["displacement"] = back
    opt.rule.last = None  # type: ignore[union-attr]
    before = curvature_of(opt)
    usual(model, opt, 1)
    assert opt.stats()["overshoots"] == 1
    assert_same(curvature_of(opt), before)
    usual(model, opt, 1)
    assert opt.history[-1]["renewed"] and not opt.history[-2]["renewed"]


def scaled_run(make: Any, scales: dict[int, float], steps: int = 40, growth: int = 10**6, ruin: int = -1) -> KFAC:
    """Train on one batch, with a new scaler at the steps that `scales` has; step `ruin` is far too long."""
    model = network()
    opt, scaler = make(model), torch.amp.GradScaler("cpu", enabled=False)
    for k in range(steps):
        if k in scales:
            scaler = torch.amp.GradScaler("cpu", init_scale=scales[k], growth_interval=growth)
        opt.zero_grad()
        scaler.scale(LARGE * F.cross_entropy(model(X), Y)).backward()
        scaler.step(opt)
        scaler.update()
        if k == ruin:
            for p in model.parameters():
                far = torch.full_like(p, 3e38)
                p.data.add_(far)
                opt.state[p]["displacement"] = far
            opt.rule.last = None  # type: ignore[union-attr]
    assert all(p.isfinite().all() for p in model.parameters())
    return opt


@pytest.mark.parametrize(
    "optimizer, scales", [(KFAC, {}), (EKFAC, {0: 1.0}), (NaturalGradient, {0: 2.0**16}), (KFAC, {0: 2.0**127})]
)
def test_a_step_that_ruins_the_model_is_undone_beside_a_scaler(optimizer: type[KFAC], scales: dict[int, float]) -> None:
    """As without one, at the second bad batch in a row."""
    opt = scaled_run(optimizer, scales, ruin=24)
    assert opt.stats()["overshoots"] == 1
    assert [entry.get("accepted") for entry in opt.history[25:28]] == [False, False, True]


@pytest.mark.parametrize("optimizer, start", [(KFAC, {}), (EKFAC, {0: 2.0**10}), (NaturalGradient, {0: 2.0**10})])
def test_a_scaler_that_looks_for_its_scale_undoes_nothing(optimizer: type[KFAC], start: dict[int, float]) -> None:
    """At the start of a run, and where a run goes on with a new scaler."""
    opt = scaled_run(optimizer, start | {len(start) * 6: 2.0**127})
    assert opt.skipped >= 3 and max(entry.get("overshoots", 0) for entry in opt.history) == 0
