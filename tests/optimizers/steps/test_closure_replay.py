"""A batch played again: the same numbers as the first time, and nothing left behind, however the closure is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.recording import warn_once
from optimizers import KFAC, NaturalGradient
from optimizers.steps.closures import Replay
from support.cases.case import Raw, seeded
from support.training import assert_same, closure_of, copied

pytestmark = pytest.mark.fast


def small(width: int = 3) -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, width)).double()


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def along(model: nn.Module, seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        k: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for k, p in model.named_parameters()
    }


def curvature(model: nn.Module, closure: Callable[[], Tensor], stride: int = 2) -> float:
    replay = Replay(model, closure)
    replay.first()
    return replay.curvatures([along(model)], stride).item()


def sequences() -> nn.Module:
    with seeded(0):
        return Raw(lambda m, x: m.net(x)[0], net=nn.RNN(4, 3)).double()


MANY, ONE = data(1, 4).expand(8, 4), data(1, 4, seed=3)
CUT: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    # the first is cut to half of its samples, the second has one: each is scaled by what was cut of it
    "calls of different sizes": (small, lambda m: m(MANY).square().mean() + m(ONE).square().mean()),
    "samples that count at one end alone": (small, lambda m: m(MANY)[4:].square().mean()),
    # sequence first: a recurrent net over every second token is another net
    "an axis that holds no samples": (sequences, lambda m: m(data(6, 5, 4)).square().mean()),
}


@pytest.mark.parametrize("name", CUT)
def test_some_samples_say_what_all_do(name: str):
    make, loss = CUT[name]
    model = make()
    found = [curvature(model, lambda: loss(model), stride) for stride in (2, 1)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_a_model_that_is_not_repeatable_is_refused():
    model, x, calls = small(), data(8, 4), iter(range(100))
    model[0].register_forward_hook(lambda m, args, out: out + next(calls))
    with pytest.raises(RuntimeError, match="another output"):
        curvature(model, lambda: model(x).square().mean())


def test_attention_may_drop_others_out_where_it_has_second_derivatives():
    """As fused attention does on CUDA. The curvature is that of the model without them, times their mean square."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        kept = torch.rand(2, len(x), 1).to(x) > 0.5
        return m.net(x) * 2 * kept[int(torch.backends.cuda.flash_sdp_enabled())]

    model, x, y = Raw(forward, net=small()), data(64, 4), data(64, 3, seed=2)
    whole = curvature(model.net, lambda: F.mse_loss(model.net(x), y), 1)
    with seeded(0):
        found = [curvature(model, lambda: F.mse_loss(model(x), y), 1) for _ in range(30)]
    assert len(set(found)) > 1
    assert sum(found) / 30 == pytest.approx(2 * whole, rel=0.1)


MAKERS: dict[str, Callable[[nn.Module], KFAC]] = {
    "KFAC": lambda model: KFAC(model, adaptive=True),
    "NaturalGradient": lambda model: NaturalGradient(model, adaptive=True),
    "line search": lambda model: NaturalGradient(model, line_search=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_error_in_a_replay_leaves_the_parameters(make: Callable[[nn.Module], KFAC]):
    model, x = small(), data(8, 4)
    opt, before = make(model), copied(model)

    def closure() -> Tensor:
        loss = model(x).square().mean()
        if not torch.is_grad_enabled():
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert_same(copied(model), before)


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_makes_the_loss_worse_is_rolled_back(name: str):
    """A loss that rises wherever the parameters go: nothing is changed, and it is counted."""
    model, x = small(), data(8, 4)
    opt, before = MAKERS[name](model), copied(model)
    moved = lambda: sum((p - before[name]).abs().sum() for name, p in model.named_parameters())
    opt.step(closure_of(model, opt, lambda out, _: out.square().mean() + 1e9 * moved(), x, x))
    assert_same(copied(model), before)
    stats = opt.stats()
    assert stats["failures"] == 1 and not stats["accepted"]
    assert stats["step_size"] == 0 if name == "line search" else stats["rollbacks"] > 0


def test_curvature_that_is_not_finite_is_a_failure_not_an_error():
    """The second derivative of |f|^1.5 at 0 is infinite."""
    model, x = small(), data(8, 4)
    opt = KFAC(model, adaptive=True)
    opt.step(lambda: model(x).square().mean())
    before = copied(model)
    target = model(x).detach()

    def closure() -> Tensor:
        out = model(x)
        return out.square().mean() + (out - target).abs().pow(1.5).sum()

    opt.step(closure)
    assert_same(copied(model), before)
    assert opt.stats()["failures"] == 1 and math.isfinite(opt.rule.first.damping)


def hessian_along(model: nn.Module, closure: Callable[[], Tensor]) -> float:
    """d^T H d by differences of the loss."""
    d, eps = along(model), 1e-4

    def at(t: float) -> float:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(t * d[name])
        found = closure().item()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(t * d[name])
        return found

    return (at(eps) - 2 * at(0.0) + at(-eps)) / eps**2


Y = torch.tensor([0, 1, 2, 1, 0, 2, 1, 1])
entropy_of = lambda z: (z.logsumexp(1) - z.gather(1, Y[:, None])[:, 0]).mean()


# Models whose outputs do not show the curvature of the loss.
HESSIANS: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Tensor]]] = {
    "log-probabilities": (lambda m, x: m.net(x).log_softmax(1), lambda m, out: F.nll_loss(out, Y)),
    "a loss": (lambda m, x: entropy_of(m.net(x)), lambda m, out: out),
    "a complex output": (lambda m, x: torch.fft.fft(m.net(x)), lambda m, out: out.abs().square().mean()),
    "a function": (lambda m, x: lambda: m.net(x), lambda m, out: out().square().mean()),
    "hidden": (lambda m, x: (setattr(m, "kept", m.net[:2](x)), m.net(x))[1], lambda m, out: m.kept.square().mean()),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_the_hessian_stands_in_where_outputs_show_no_curvature(name: str):
    run, loss = HESSIANS[name]
    model, x = Raw(run, net=small()), data(8, 4)
    closure = lambda: loss(model, model(x))
    assert curvature(model, closure) == pytest.approx(hessian_along(model, closure), rel=1e-4)


def test_without_second_derivatives_there_is_no_curvature(caplog: pytest.LogCaptureFixture):
    """Steps then go by slopes, which the log says, and the loss falls all the same."""
    warn_once.cache_clear()
    with seeded(0):
        model = nn.Sequential(nn.EmbeddingBag(5, 4, scale_grad_by_freq=True), nn.Linear(4, 3)).double()
    words = torch.arange(24).reshape(8, 3) % 5
    assert curvature(model, lambda: F.cross_entropy(model(words), Y)) == 0
    assert "go by slopes alone" in caplog.text and "is not implemented" in caplog.text
    opt = KFAC(model, adaptive=True)
    values = [opt.step(lambda: F.cross_entropy(model(words), Y)).item() for _ in range(8)]
    assert values == sorted(values, reverse=True) and values[-1] < 0.9 * values[0]


def test_a_closure_that_differentiates_the_model_is_refused():
    model, x = small(1), data(8, 4).requires_grad_()
    opt, before = KFAC(model, adaptive=True), copied(model)

    def closure() -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    with pytest.raises(TypeError, match="its loss differentiates the model .*return the residuals"):
        opt.step(closure)
    assert_same(copied(model), before)
