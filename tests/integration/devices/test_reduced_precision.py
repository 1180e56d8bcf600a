"""TF32, on by default for convolutions: what is learnt about a model does not depend on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.gradients.plans import PLANS
from curvature.operators import Kronecker
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded, token_loss
from support.cases.models import GPT
from support.training import closure_of

pytestmark = pytest.mark.fast

Problem = tuple[nn.Module, Callable[..., Tensor], Tensor, Tensor]


def cnn(device: str) -> Problem:
    with seeded(0):
        first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2)
        layers = first, nn.ReLU(), second, nn.GroupNorm(4, 16), nn.ReLU()
        model = nn.Sequential(*layers, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
        x, y = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    return model.to(device), nn.CrossEntropyLoss(), x.to(device), y.to(device)


def gpt(device: str) -> Problem:
    with seeded(0):
        model, words = GPT(), torch.randint(7, (8, 7))
    return model.to(device), token_loss, words[:, :-1].to(device), words[:, 1:].to(device)


PROBLEMS = {"cnn": cnn, "gpt": gpt}


@pytest.fixture(params=["default", "high", "full"])
def precision(request: pytest.FixtureRequest, accelerator: str) -> Iterator[str]:
    """Torch's own setting, TF32 for products too, none."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if request.param == "high":
        torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = request.param != "full"
    yield request.param
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[k].cpu() - g.cpu()).norm() / g.norm().cpu()) for k, g in expected.items())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_layers_are_explained_by_their_rules(problem: str, precision: str, accelerator: str) -> None:
    """At the first call and at those after it; the numbers are those in full precision, up to that in force."""
    error = 1e-5 if precision == "full" else 0.05
    expected = curvature.per_sample_gradients(*PROBLEMS[problem]("cpu"))
    model, loss, x, y = PROBLEMS[problem](accelerator)
    for _ in range(2):
        found = curvature.per_sample_gradients(model, loss, x, y)
        assert relative(found, expected) < error
    assert PLANS[model] and not any(plan.general for plan in PLANS[model].values())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_gradients_are_checked_without_a_false_alarm(problem: str, precision: str, accelerator: str) -> None:
    curvature.check_gradients(*PROBLEMS[problem](accelerator))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_matrices_have_the_blocks_that_they_have_on_the_cpu(problem: str, precision: str, accelerator: str) -> None:
    kinds, diagonals = [], []
    for device in ("cpu", accelerator):
        model, loss, x, y = PROBLEMS[problem](device)
        matrix = curvature.kfac(model, loss, (x, y))
        kinds.append([type(block) for block in matrix.blocks.values()])
        diagonals.append(curvature.fisher_diagonal(model, loss, (x, y)))
    assert kinds[0] == kinds[1] and Kronecker in kinds[0]
    assert relative(diagonals[1], diagonals[0]) < (1e-4 if precision == "full" else 0.1)


def test_a_plan_learnt_anew_is_learnt_in_full_precision(precision: str, accelerator: str) -> None:
    """The model has other functions than last time, which shows after the forward pass."""
    model, loss, x, y = cnn(accelerator)
    curvature.per_sample_gradients(model, loss, x, y)
    seen: list[tuple[int, str]] = []

    def forward(h: Tensor) -> Tensor:
        seen.append((len(h), torch.backends.cudnn.conv.fp32_precision))
        return nn.functional.conv2d(h * 1.0, model[2].weight * 1.0, model[2].bias, stride=2)

    model[2].forward = forward
    curvature.per_sample_gradients(model, loss, x, y)
    exact = {(len(x), "ieee")} | ({(len(x), "none")} if precision == "full" else set())  # nothing to switch
    assert exact & set(seen) and not any(plan.general for plan in PLANS[model].values())


@pytest.mark.parametrize("problem", PROBLEMS)
def test_hessians_are_symmetric(problem: str, precision: str, accelerator: str) -> None:
    model, loss, x, y = PROBLEMS[problem](accelerator)
    H = curvature.hessian(model, loss, (x, y))
    with seeded(0):
        v = torch.randn(H.shape[0], 1).to(accelerator)
    assert (H @ v).isfinite().all()


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("kind", [KFAC, EKFAC, NaturalGradient])
@pytest.mark.parametrize("adaptive", [False, True])
def test_optimizers_find_nothing_wrong(
    kind: type[KFAC], adaptive: bool, problem: str, precision: str, accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model, loss, x, y = PROBLEMS[problem](accelerator)
    opt = kind(model, adaptive=adaptive)
    closure = closure_of(model, opt, loss, x, y)
    losses = [float(opt.step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0] and not caplog.records
