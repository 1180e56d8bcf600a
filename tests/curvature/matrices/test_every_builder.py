"""Every builder and injection on one small network, against brute force, and in low precision."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.recording import warn_once
from support.builders import BUILDERS as OPERATORS
from support.builders import evaluated
from support.cases.case import seeded
from support.combinations import in_pairs
from support.comparisons import matches
from support.moments import within_five_errors
from support.oracles import brute_force as oracle
from support.oracles.brute_force import Matrices
from support.oracles.kronecker import affine_layers, kronecker

pytestmark = pytest.mark.fast

LOSS = nn.CrossEntropyLoss()


def layers(of: Matrices, matrix: Tensor) -> Tensor:
    """`matrix` without what is between the two layers."""
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    return oracle.blocks(of.model, matrix, groups)


BUILDERS: dict[str, Callable[[Matrices], Tensor]] = {
    "fisher": lambda of: of.fisher,
    "fisher_diagonal": lambda of: of.fisher.diagonal(),
    "fisher_blocks": lambda of: layers(of, of.fisher),
    "gauss_newton": lambda of: of.gauss_newton,
    "empirical_fisher": lambda of: of.empirical_fisher,
    "hessian": lambda of: of.hessian,
    "kfac": lambda of: kronecker(affine_layers(of)),
    "ekfac": lambda of: torch.stack([layer.rescaled(of.fisher) for layer in affine_layers(of)]).sum(0),
}


def network(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double().to(device)
        return model, (torch.randn(5, 2).double().to(device), torch.randint(3, (5,)).to(device))


def build(name: str, device: str, **options: object) -> Tensor:
    """The matrix or its diagonal, computed on the device; what is expected comes from the CPU."""
    dense = entries(getattr(curvature, name)(*problem(device), **options))
    assert dense.device.type == torch.device(device).type
    return dense.cpu()


def problem(device: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    model, data = network(device)
    return model, LOSS, data


def entries(found: Any) -> Tensor:
    return torch.cat([part.flatten() for part in found.values()]) if isinstance(found, dict) else found.to_dense()


@pytest.mark.parametrize("builder", BUILDERS)
def test_builder(builder: str, device: str) -> None:
    model, data = network()
    matches(build(builder, device), BUILDERS[builder](Matrices(model, LOSS, data)), 1e-8)


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_default_device_elsewhere(builder: str, device: str) -> None:
    """What a builder makes is where the model is, whatever `torch.set_default_device` says."""
    given = problem(device)
    with torch.device("meta"):
        found = getattr(curvature, builder)(*given)
        again = entries(found)
        if isinstance(found, curvature.Operator):
            v = again.sum(1, keepdim=True)
            torch.testing.assert_close(found @ v, again @ v)
            assert found.sample(damping=10.0).device == v.device
    assert torch.equal(again.cpu(), build(builder, device))


INJECTIONS: dict[str, Callable[[Matrices], Tensor]] = {
    "exact": lambda of: of.fisher,
    "empirical": lambda of: of.empirical_fisher,
    "sampled": lambda of: of.fisher,
    "propagated": lambda of: of.fisher,
    "isotropic": lambda of: of.isotropic,
}


@pytest.mark.parametrize("inject", INJECTIONS)
def test_injection(inject: str, device: str) -> None:
    """Random ones on average."""
    model, data = network()
    expected = INJECTIONS[inject](Matrices(model, LOSS, data))
    injection = getattr(curvature, inject)()
    if inject in ("exact", "empirical"):
        matches(build("fisher", device, inject=injection), expected)
        return
    generator = torch.Generator(device).manual_seed(3)
    found = [build("fisher", device, inject=injection, generator=generator) for _ in range(60)]
    within_five_errors(torch.stack(found), expected)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_that_is_active_is_named(training: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)).train(training)
    curvature.fisher_diagonal(model, LOSS, (torch.randn(5, 3), torch.randint(2, (5,))))
    assert ("draws random numbers" in caplog.text) == training


LOW = {torch.bfloat16: 2e-2, torch.float16: 2e-3}  # a few roundings of each, in the numbers that are squared


@in_pairs(builder=[*OPERATORS, "fisher_blocks", "kfac", "ekfac"], dtype=LOW, autocast=[False, True])
def test_low_precision(builder: str, dtype: torch.dtype, autocast: bool):
    """Models in half precision have matrices in single precision; autocast ends where the model does."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        x, y = torch.randn(8, 5), torch.randint(3, (8,))
    build = functools.partial(evaluated, builder)
    expected = build(model, nn.CrossEntropyLoss(), (x, y))
    if not autocast:
        model, x = model.to(dtype), x.to(dtype)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype, enabled=autocast):
        warnings.simplefilter("error")  # rounding is not taken for another loss
        found = build(model, nn.CrossEntropyLoss(), (x, y))
    assert found.dtype == torch.float32
    assert (found - expected).norm() < LOW[dtype] * expected.norm()


@pytest.mark.parametrize("builder", ["fisher_diagonal", "kfac", "ekfac"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 60), nn.Conv1d(1, 15, 1), nn.Embedding(9, 15)], ids=str)
def test_many_vectors_in_low_precision(layer: nn.Module, builder: str):
    """Sums over vectors are in single precision: hundreds of them would be lost in eight bits."""
    with seeded(0):
        shape = (8, 1, 4) if isinstance(layer, nn.Conv1d) else (8, 4)
        x = torch.randint(9, shape) if isinstance(layer, nn.Embedding) else torch.randn(shape)
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(60, 300))
    trace = lambda found: sum(d.sum() for d in found.values()) if isinstance(found, dict) else found.trace()

    def build(dtype: torch.dtype) -> Tensor:
        target = torch.zeros(8, 300, dtype=dtype)
        inputs = x if isinstance(layer, nn.Embedding) else x.bfloat16().to(dtype)
        return trace(getattr(curvature, builder)(model.to(dtype), nn.MSELoss(), (inputs, target)))

    found = build(torch.bfloat16)
    expected = build(torch.float32)  # of the weights and inputs as rounded
    assert (found - expected).abs() < 2**-8 * expected  # a rounding of the activations
