"""Private training against clipping in a loop over samples, and against Opacus."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizers
from curvature.recording import warn_once
from support.cases.case import Raw, seeded
from support.cases.models import attending
from support.training import train

LOSS = nn.CrossEntropyLoss()
SHAPE = (6, 4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention and LayerNorm": attending,
    "lstm": lambda: Raw(lambda m, x: m.lstm(x)[0].mean(1), lstm=nn.LSTM(4, 3, batch_first=True)),
    "GroupNorm": lambda: nn.Sequential(nn.Conv1d(6, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(12, 3)),
}


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = MODELS[name]().double()
        return model, torch.randn(7, *SHAPE).double() * torch.linspace(0.2, 3, 7)[:, None, None], torch.arange(7) % 3


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, max_norm: float, alone: Any = None, each: int = 1) -> Any:
    """Sample by sample, whose loss is given by `alone`, and which has so many rows of the target."""
    alone = alone or (lambda model, x, y: LOSS(model(x), y))
    parameters, total = list(model.parameters()), [torch.zeros_like(p) for p in model.parameters()]
    for n in range(len(x)):
        own = alone(model, x[n : n + 1], y[n * each : (n + 1) * each])
        found = torch.autograd.grad(own, parameters, materialize_grads=True)
        norm = float(sum((g.square().sum() for g in found), torch.zeros(())).sqrt())
        total = [t + g * min(1.0, max_norm / max(norm, 1e-30)) for t, g in zip(total, found, strict=True)]
    return total


def private(model: nn.Module, noise: float = 0.0, **options: Any) -> optimizers.Private:
    opt = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    return optimizers.Private(opt, model, LOSS, max_norm=0.5, noise=noise, expected_batch_size=4, **options)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_with_the_clipped_sum(name: str) -> None:
    """Batches of several sizes, one of them empty, divided by the same number; a mask; microbatches."""
    model, x, y = made(name)
    other = copy.deepcopy(model)
    plain = torch.optim.SGD(other.parameters(), 0.3, momentum=0.9)
    opt = private(model, microbatch=2)
    every = torch.arange(7)
    for drawn in (every[:5], every[:0], every[4:]):
        for p, g in zip(other.parameters(), clipped_sum(other, x[drawn], y[drawn], 0.5), strict=True):
            p.grad = g / 4
        plain.step()
        opt.step(x[drawn], y[drawn])
    for p, g in zip(other.parameters(), clipped_sum(other, x[1:3], y[1:3], 0.5), strict=True):
        p.grad = g / 4
    plain.step()
    opt.step(x, y, mask=(every == 1) | (every == 2))
    assert opt.steps == 4
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))


W = torch.tensor([0.1, 1.0, 4.0]).double()


def taken(model: nn.Module, x: Tensor, y: Tensor, loss: Any, max_norm: float, **options: Any) -> list[Tensor]:
    """What one step left in ``.grad``."""
    opt = torch.optim.SGD(model.parameters(), 0.0)
    given = {"max_norm": max_norm, "noise": 0.0, "expected_batch_size": 4}
    optimizers.Private(opt, model, loss, **given, **options).step(x, y)
    return [p.grad.clone() for p in model.parameters()]


def words() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Tanh()).double()
        x, y = torch.randint(9, (7, 5)), torch.randint(3, (7, 5))
        y[torch.rand(7, 5) < 0.4] = -100
        y[1] = -100
    return model, x, y


def folded(output: Tensor, y: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, 3), y.reshape(-1), **options)


# Losses with weights or tokens that count, and the contribution of a sample alone.
def weighed() -> list[Any]:
    model, x, y = made("GroupNorm")
    alone = lambda model, x, y: nn.functional.cross_entropy(model(x), y, weight=W, reduction="sum")
    by_hand = lambda o, y: (W[y] * nn.functional.cross_entropy(o, y, reduction="none")).mean()
    tokens = words()
    over_classes = Raw(lambda m, x: m.model(x).flatten(0, 1), model=tokens[0])  # as many rows of the target as tokens
    rows = over_classes, tokens[1], tokens[2].flatten()
    places = lambda model, x, y: folded(model(x), y, weight=W, reduction="sum") / 5
    return [
        pytest.param((model, x, y), nn.CrossEntropyLoss(W), alone, 1, id="class weights"),
        pytest.param((model, x, y), by_hand, alone, 1, id="class weights by hand"),
        pytest.param((model, x, y), nn.CrossEntropyLoss(W, reduction="sum"), alone, 1, id="a sum"),
        pytest.param(rows, nn.CrossEntropyLoss(W), places, 5, id="tokens"),
    ]


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize(("batch", "loss", "alone", "each"), weighed())
def test_weights_count_before_clipping(batch: Any, loss: Any, alone: Any, each: int, max_norm: float, microbatch: Any):
    """Against a loop over samples, and without clipping along the gradient of the batch."""
    model, x, y = batch
    found = taken(model, x, y, loss, max_norm, microbatch=microbatch)
    torch.testing.assert_close(found, [t / 4 for t in clipped_sum(model, x, y, max_norm, alone, each)])
    if max_norm > 1:
        whole = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
        flat = [torch.cat([g.flatten() for g in side]) for side in (found, whole)]
        torch.testing.assert_close(torch.cosine_similarity(*flat, dim=0), torch.ones(()).double())


def test_weights_of_the_whole_batch_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model, x, y = made("GroupNorm")
    taken(model, x, y, LOSS, 1.0)
    taken(model, x, y, lambda o, y: (W[y] * nn.functional.cross_entropy(o, y, reduction="none")).mean(), 1.0)
    assert not caplog.records
    weighted = lambda o, y: nn.functional.cross_entropy(o, y, weight=W)
    for case in ((model, x, y, weighted), (*words(), folded)):
        warn_once.cache_clear()
        caplog.clear()
        taken(*case, 1.0)
        assert "clipped gradients: samples count differently in" in caplog.text
    taken(model, x, y, nn.CrossEntropyLoss(W), 1.0)
    assert "Private: CrossEntropyLoss has class weights" in caplog.text


def test_a_step_without_samples_is_noise_of_the_size_that_the_accountant_is_told() -> None:
    model = nn.Linear(300, 100)
    before = model.weight.detach().clone()
    opt = torch.optim.SGD(model.parameters(), 1.0)
    wrapped = optimizers.Private(opt, model, LOSS, max_norm=0.5, noise=3.0, expected_batch_size=10)
    with seeded(0):
        wrapped.step(torch.zeros(0, 300), torch.zeros(0, dtype=torch.long))
    change = model.weight.detach() - before
    assert abs(float(change.std()) / (3.0 * 0.5 / 10) - 1) < 0.02 and abs(float(change.mean())) < 0.005


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    model, x, y = made("GroupNorm")
    opt = private(model, noise=1.0, generator=torch.Generator().manual_seed(3))
    scheduler = torch.optim.lr_scheduler.StepLR(opt.optimizer, 1, 0.5)
    opt.step(x, y), scheduler.step()
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    opt.step(x, y)
    again, _, _ = made("GroupNorm")
    resumed = private(again, noise=1.0, generator=torch.Generator().manual_seed(99))
    again.load_state_dict(saved[0]), resumed.load_state_dict(saved[1])
    assert resumed.steps == 1 and resumed.param_groups[0]["lr"] == 0.15
    resumed.step(x, y)
    torch.testing.assert_close(list(again.parameters()), list(model.parameters()), rtol=0, atol=0)
    with pytest.raises(ValueError, match="saved with a generator; make Private with a generator"):
        private(again).load_state_dict(saved[1])
    with pytest.raises(ValueError, match="not one of Private, it has state, param_groups"):
        resumed.load_state_dict(opt.optimizer.state_dict())


def test_what_is_refused() -> None:
    model, x, y = made("GroupNorm")
    batchnorm = nn.Sequential(nn.Conv1d(6, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 3)).double()
    before = copy.deepcopy(batchnorm.state_dict())
    for microbatch in (None, 1):
        with pytest.raises(ValueError, match="1: BatchNorm in training mode"):
            private(batchnorm, microbatch=microbatch).step(x, y)
    torch.testing.assert_close(batchnorm.state_dict(), before)
    sgd = lambda params: torch.optim.SGD(params, 0.1)
    stranger, whole = nn.Parameter(torch.zeros(2, 2)), sgd(model.parameters())
    refused: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "max_norm", whole, {"max_norm": 0.0}),
        (ValueError, "noise", whole, {"noise": -1.0}),
        (ValueError, "expected_batch_size", whole, {"expected_batch_size": 0}),
        (ValueError, r"optimizer: it lacks 1\.weight", sgd(model[0].parameters()), {}),
        (ValueError, r"shape \(2, 2\) that is not the model's", sgd([*model.parameters(), stranger]), {}),
        (TypeError, "KFAC looks at the batch itself", optimizers.KFAC(model), {}),
        (TypeError, "LBFGS asks for the loss several times", torch.optim.LBFGS(model.parameters()), {}),
        (TypeError, "expected a torch.optim.Optimizer, found a Sequential", model, {}),
    ]
    given: dict[str, Any] = {"max_norm": 1.0, "noise": 1.0, "expected_batch_size": 4}
    for error, text, optimizer, options in refused:
        with pytest.raises(error, match=text):
            optimizers.Private(optimizer, model, LOSS, **given | options)


@pytest.mark.filterwarnings("ignore")
def test_opacus_takes_the_same_steps_and_counts_them_alike() -> None:
    """Its DPOptimizer, and epsilon from its accountant's own hook and from `steps`."""
    peer = pytest.importorskip("opacus", reason="opacus is not installed (make bench installs it)")
    from opacus.accountants import RDPAccountant

    model, x, y = made("GroupNorm")
    theirs = peer.GradSampleModule(copy.deepcopy(model))
    own = torch.optim.SGD(theirs.parameters(), 0.3, momentum=0.9)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "expected_batch_size": 4}
    dp = peer.optimizers.DPOptimizer(own, **options)
    opt = private(model)
    counted, told = RDPAccountant(), RDPAccountant()
    dp.attach_step_hook(counted.get_optimizer_hook_fn(sample_rate=0.01))
    for _ in range(3):
        train(theirs, dp, LOSS, x, y, 1)
        opt.step(x, y)
    torch.testing.assert_close(list(model.parameters()), list(theirs.parameters()), rtol=1e-5, atol=1e-5)
    dp.noise_multiplier = opt.noise = 1.1
    for _ in range(20):
        train(theirs, dp, LOSS, x, y, 1)
        opt.step(x, y)
        told.step(noise_multiplier=opt.noise, sample_rate=0.01)
    assert opt.steps == 23
    counted.history = counted.history[1:]  # without noise nothing is private
    assert counted.get_epsilon(1e-5) == pytest.approx(told.get_epsilon(1e-5))
