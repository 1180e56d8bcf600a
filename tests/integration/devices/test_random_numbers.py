"""Masks of dropout are those of the pass, and random numbers of an accelerator are the model's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.oracles import brute_force as oracle
from support.training import train_by_closure

N, T, D, C = 6, 5, 16, 3
ENTROPY = nn.CrossEntropyLoss()


def attention() -> nn.Module:
    """Heads of eight numbers, for which there are fused kernels."""
    layer = nn.TransformerEncoderLayer(D, 2, 24, dropout=0.2, batch_first=True)
    return Raw(lambda m, x: m.head(m.layer(x)[:, 0]), layer=layer, head=nn.Linear(D, C))


def recurrent() -> nn.Module:
    net = nn.LSTM(D, 8, num_layers=2, dropout=0.3, batch_first=True)
    return Raw(lambda m, x: m.head(m.net(x)[0][:, -1]), net=net, head=nn.Linear(8, C))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv1d(T, 8, 3), nn.RReLU(), nn.Dropout1d(0.3), nn.Flatten(), nn.Linear(8 * (D - 2), C))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(T * D, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, C))


MODELS = {own.__name__: own for own in (attention, recurrent, convolutional, plain)}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def prepared(make: Callable[[], nn.Module], device: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model, x, y = make().to(device), torch.randn(N, T, D), torch.randint(C, (N,))
    return model, x.to(device), y.to(device)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=1e-3, atol=1e-4 * g.abs().max().item(), msg=name)


@each_model
def test_rows_add_up_to_the_gradient_of_the_same_masks(make: Callable[[], nn.Module], device: str, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds the loop, too
    if make is recurrent and device.startswith("cuda"):
        pytest.skip("cuDNN's recurrent layers draw random numbers of their own, which no state of torch brings back")
    model, x, y = prepared(make, device)
    for seed in (1, 2):  # what the first call has learnt serves the second
        with seeded(seed):
            rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
            norms = curvature.per_sample_norms(model, ENTROPY, x, y)
            model.zero_grad()
            with oracle.forked():
                ENTROPY(model(x), y).backward()
        close({name: own.mean(0) for name, own in rows.items()}, {n: p.grad for n, p in model.named_parameters()})
        torch.testing.assert_close(norms, oracle.norms(rows), rtol=1e-3, atol=1e-5)


@each_model
def test_the_diagonal_is_that_of_the_rows(make: Callable[[], nn.Module], device: str):
    if make is attention and device.startswith("cuda"):
        pytest.skip("matrices have attention without fused kernels, which drops out other weights there")
    model, x, y = prepared(make, device)
    with seeded(1):
        rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
        found = curvature.fisher_diagonal(model, ENTROPY, (x, y), inject=curvature.empirical(), progress=False)
    close(found, {name: own.square().mean(0) for name, own in rows.items()})


@each_model
@pytest.mark.parametrize("build", [curvature.kfac, curvature.fisher_diagonal])
def test_matrices_of_training_mode(build: Callable[..., Any], make: Callable[[], nn.Module], device: str):
    model, x, y = prepared(make, device)
    with seeded(1):
        found = build(model, ENTROPY, (x, y), inject=curvature.exact(), progress=False)
    tensors = found.values() if isinstance(found, dict) else [found.trace()]
    assert all((t >= 0).all() and t.isfinite().all() and t.any() for t in tensors)


OPTIMIZERS = {
    "KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient,
    "KFAC-adaptive": functools.partial(KFAC, adaptive=True),
    "NaturalGradient-adaptive": functools.partial(NaturalGradient, adaptive=True),
}  # fmt: skip


@pytest.mark.training_run
@each_model
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_train(name: str, make: Callable[[], nn.Module], device: str):
    model, x, y = prepared(make, device)
    opt, losses = OPTIMIZERS[name](model), []
    for steps in (20, 0):
        with torch.no_grad():
            losses.append(ENTROPY(model.eval()(x), y))
        with seeded(1):
            train_by_closure(model.train(), opt, ENTROPY, x, y, steps)
    assert losses[1] < 0.7 * losses[0] and opt.skipped == 0


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "adaptive": functools.partial(KFAC, adaptive=True),
    "line search": functools.partial(NaturalGradient, line_search=True),
    "plain": KFAC,
}


def problem(device: str, drop: float = 0.5) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(drop), nn.Linear(32, 3))
        x, y = torch.randn(32, 6), torch.randint(3, (32,))
    return model.to(device), x.to(device), y.to(device)


def run(maker: Callable[[nn.Module], Any], device: str, steps: int = 5) -> list[float]:
    model, x, y = problem(device)
    with seeded(3):
        found = train_by_closure(model, maker(model), F.cross_entropy, x, y, steps)
        return [*found, float(torch.rand((), device=device))]  # where the random numbers are now


@pytest.mark.fast
@pytest.mark.parametrize("name", MAKERS)
def test_dropout_is_that_of_the_same_run_on_the_cpu(name: str, device: str) -> None:
    """Each loss is evaluated with one mask, whatever is evaluated of it beside. (The simulated device and the CPU draw
    the same numbers.)"""
    if device == "cuda":
        pytest.skip("CUDA's random numbers are not the CPU's")
    found = run(MAKERS[name], device)
    assert found == pytest.approx(run(MAKERS[name], "cpu"), rel=1e-3)


@pytest.mark.fast
@pytest.mark.parametrize("which", [0, 1])
def test_nothing_public_moves_them(which: int, two_devices: tuple[str, str]) -> None:
    model, x, y = problem(two_devices[which])
    module = torch.get_device_module(two_devices[which])
    generator = torch.Generator(two_devices[which]).manual_seed(0)
    before = module.get_rng_state(two_devices[which])
    curvature.per_sample_gradients(model, ENTROPY, x, y)
    curvature.fisher_diagonal(model, ENTROPY, (x, y), inject=curvature.sampled(), generator=generator)
    curvature.laplacian(model, x)
    assert torch.equal(module.get_rng_state(two_devices[which]), before)
    with pytest.raises(ValueError, match="random numbers"):
        curvature.check_gradients(model, ENTROPY, x, y)
