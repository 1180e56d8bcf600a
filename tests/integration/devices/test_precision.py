"""TF32, on by default for convolutions, and devices without double precision: what is learnt depends on neither."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.linalg.devices import widest
from curvature.operators import Kronecker
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded, token_loss
from support.cases.models import GPT
from support.plans import plans_of
from support.training import closure_of, task, train_by_closure

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
    assert plans_of(model) and not any(plan.general for plan in plans_of(model))


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
    assert exact & set(seen) and not any(plan.general for plan in plans_of(model))


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


LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def single(device: str) -> Iterator[str]:
    if device != "sim":
        pytest.skip("the simulated device can do without float64: make test-device")
    simdev = importlib.import_module("support.simulated_device.simdev")
    widest.cache_clear()
    with simdev.without_float64():
        yield device
    widest.cache_clear()


def test_the_device_refuses_float64(single: str) -> None:
    for make in (lambda: torch.ones(2, device=single).double(), lambda: torch.zeros(2, dtype=torch.float64).to(single)):
        with pytest.raises(TypeError, match="float64"):
            make()


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": KFAC,
    "KFAC damped": functools.partial(KFAC, damping=0.1, weight_decay=0.1),
    "KFAC adaptive": functools.partial(KFAC, adaptive=True),
    "EKFAC": EKFAC,
    "line search": functools.partial(NaturalGradient, line_search=True),
    **{s: functools.partial(NaturalGradient, solver=s) for s in ("woodbury", "cg")},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, single: str) -> None:
    model, loss, x, y = task("mlp", single, n=16)
    opt = OPTIMIZERS[name](model)
    losses = train_by_closure(model, opt, loss, x, y, 6)
    assert losses[-1] < losses[0] and opt.stats()["failures"] == 0


def test_residuals(single: str) -> None:
    model, _, x, y = task("mlp", single, n=8)
    for opt in (KFAC(model), NaturalGradient(model)):
        losses = [float(opt.step(lambda: (model(x) - F.one_hot(y, 10)).flatten() / 8)) for _ in range(3)]
        assert losses[-1] < losses[0]


BUILDERS = "fisher", "gauss_newton", "empirical_fisher", "hessian", "kfac", "ekfac", "fisher_blocks"


@pytest.mark.parametrize("name", BUILDERS)
def test_matrices(name: str, single: str) -> None:
    model, _, x, y = task("mlp", single, n=8)
    plain, loss, here, there = task("mlp", n=8)
    found = getattr(curvature, name)(model, LOSS, (x, y))
    expected = getattr(curvature, name)(plain, LOSS, (here, there))
    v = torch.randn(found.shape[0], 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((found @ v.to(single)).cpu(), expected @ v, rtol=1e-3, atol=1e-5)
    if name != "hessian":
        torch.testing.assert_close(found.solve(v.to(single), 0.1).cpu(), expected.solve(v, 0.1), rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(found.diagonal().cpu(), expected.diagonal(), rtol=1e-3, atol=1e-5)


def test_gradients_and_layouts(single: str) -> None:
    model, _, x, y = task("cnn", single, n=8)
    model.eval()
    curvature.check_gradients(model, LOSS, x, y)
    diagonal = curvature.fisher_diagonal(model, LOSS, (x, y))
    assert all(d.isfinite().all() for d in diagonal.values())
    with curvature.capture(model) as tape:
        output = model(x)
    assert all(layout is not None for layout in curvature.sample_layouts(tape, output))


def test_a_wide_last_layer(single: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 200)).to(single)
    data = torch.randn(6, 4).to(single), torch.randint(200, (6,)).to(single)
    found = curvature.fisher_diagonal(model, LOSS, data)
    expected = curvature.fisher_diagonal(model.cpu(), LOSS, (data[0].cpu(), data[1].cpu()))
    for name, d in expected.items():
        torch.testing.assert_close(found[name].cpu(), d, rtol=1e-3, atol=1e-6)
