"""Matrices of models whose layers are on several devices: those on one, with the blocks where their layers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.several_devices import MODELS, Split, data, loss_at_output, loss_at_target
from support.combinations import in_pairs

pytestmark = pytest.mark.fast
ONE = "cpu", "cpu"
LOSSES = {"module": nn.CrossEntropyLoss(), "at output": loss_at_output, "at target": loss_at_target}
BUILDERS = "fisher_diagonal", "fisher_blocks", "kfac", "ekfac", "fisher", "hessian"


def is_near(found: Any, expected: Any, where: dict[str, torch.device] | None = None) -> None:
    """Tensors, or dicts of them, which are where their parameters are."""
    if isinstance(found, Tensor):
        return torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert where is None or own.device == where[name]
        torch.testing.assert_close(own.cpu(), expected[name], rtol=1e-8, atol=1e-10)
    return None


def built(builder: str, kind: str, loss: str, devices: tuple[str, str]) -> Any:
    model = MODELS[kind](devices)
    x, y = data(devices)
    if loss == "module":
        y = y.to(model(x).device)
    return model, getattr(curvature, builder)(model, LOSSES[loss], (x, y))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("builder", BUILDERS)
def test_builders(builder: str, kind: str, two_devices: tuple[str, str]) -> None:
    (model, found), (_, expected) = (built(builder, kind, "module", devices) for devices in (two_devices, ONE))
    where = {name: p.device for name, p in model.named_parameters()}
    if isinstance(found, dict):
        return is_near(found, expected, where)
    is_near(found.to_dense(), expected.to_dense())
    is_near(found.diagonal(), expected.diagonal())
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    is_near(found @ vector, expected @ {name: v.cpu() for name, v in vector.items()}, where)
    columns = torch.ones(found.space.size, 3, dtype=torch.float64).cumsum(0)
    is_near(found @ columns.to(two_devices[0]), expected @ columns)
    for block in getattr(found, "blocks", {}).values():
        assert block.diagonal().device == where[block.space.names[0]]
    return None


@in_pairs(loss=["at output", "at target"], kind=["Split", "ThereAndBack"], builder=["kfac", "gauss_newton"])
def test_losses_and_targets_on_either_device(builder: str, kind: str, loss: str, two_devices: tuple[str, str]) -> None:
    (_, found), (_, expected) = (built(builder, kind, loss, devices) for devices in (two_devices, ONE))
    is_near(found.to_dense(), expected.to_dense())


def inverted(K: Any) -> dict[str, Tensor]:
    """What there is to ask of an operator, as flat vectors and numbers."""
    generator = torch.Generator("cpu").manual_seed(0)
    v = torch.linspace(-1, 1, K.space.size, dtype=torch.float64).to(K.space.device)
    Z = K.space.normal(2, torch.Generator("cpu").manual_seed(1))
    return {
        "solve": K.solve(v, 0.1), "columns": K.solve(Z, 0.1), "by name": K.space.flatten(K.solve(K.to_dict(v), 0.1)),
        "inverse": K.inverse(0.1) @ v, "logdet": K.logdet(0.1), "trace": K.trace(), "norm": K.frobenius_norm(),
        "eigenvalues": K.eigenvalues(), "largest": K.eigenvalues(3), "damped": K.damped(0.1) @ v,
        "sum": (K + 2 * K) @ v, "draws": K.sample(2, damping=0.1, generator=generator),
        "rounded": K.materialise().to(torch.float32).trace(),
    }  # fmt: skip


@pytest.mark.parametrize("builder", ["fisher_blocks", "kfac", "ekfac", "fisher"])
def test_what_operators_are_asked(builder: str, two_devices: tuple[str, str]) -> None:
    """Answers are on the device of flat vectors, and those after a file, too."""
    (model, K), (_, expected) = (built(builder, "Split", "module", devices) for devices in (two_devices, ONE))
    found = inverted(K)
    assert {own.device for own in found.values()} == {torch.device(two_devices[0])}
    is_near(found, inverted(expected))


@pytest.mark.parametrize("builder", ["kfac", "fisher"])
def test_files(builder: str, two_devices: tuple[str, str], tmp_path: Path) -> None:
    """Matrices come back where they were, or where they are wanted."""
    _, K = built(builder, "Split", "module", two_devices)
    K = K.materialise() if builder == "fisher" else K
    K.save(tmp_path / "K.pt")
    for lazily in (False, True):
        again = curvature.load(tmp_path / "K.pt", lazily=lazily)
        assert again.space == K.space
        is_near(again.to_dense(), K.to_dense().cpu())
        whole = curvature.load(tmp_path / "K.pt", "cpu", lazily=lazily)
        assert set(whole.space.devices.values()) == {torch.device("cpu")}
        is_near(whole.to_dense(), K.to_dense().cpu())


@pytest.mark.parametrize(
    "inject", [curvature.sampled(), curvature.sampled(5), curvature.propagated(), curvature.isotropic()], ids=repr
)
def test_random_vectors_are_drawn_at_the_output(inject: curvature.Injection, two_devices: tuple[str, str]) -> None:
    """The generator is on another device; every call draws the same."""
    first, again = (
        curvature.kfac(Split(two_devices), nn.CrossEntropyLoss(), data(two_devices), inject).to_dense()
        for _ in range(2)
    )
    assert torch.equal(first, again) and first.isfinite().all()


def influence(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return curvature.influence(model, loss_at_output, (x, y), (x[:3], y[:3]), **options)


def laplace(model: nn.Module, x: Tensor, y: Tensor, structure: str) -> Any:
    posterior = curvature.laplace(model, nn.CrossEntropyLoss(), (x, y), structure)
    posterior = posterior.optimize_prior(per_layer=True, steps=3)
    return dict(zip(("mean", "variance"), posterior.predict(x), strict=True)) | {
        "evidence": posterior.log_marginal_likelihood(), "prior": posterior.prior,
    }  # fmt: skip


def compressed(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    K = curvature.kfac(model, loss_at_output, (x, y))
    pruned, masks = curvature.prune(K, model, 0.3)
    return curvature.quantize(K, pruned, 4) | {f"mask of {name}": own.double() for name, own in masks.items()}


USES: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "per_sample_fisher_diagonals": lambda m, x, y: curvature.per_sample_fisher_diagonals(m, loss_at_output, x, y),
    "per_sample_hessian_diagonals": lambda m, x, y: curvature.per_sample_hessian_diagonals(m, loss_at_output, x, y),
    "per_sample_jacobians": lambda m, x, y: curvature.per_sample_jacobians(m, x),
    "influence": lambda m, x, y: influence(m, x, y, query_rank=2),
    "laplace, kfac": lambda m, x, y: laplace(m, x, y, "kfac"),
    "laplace, last layer": lambda m, x, y: laplace(m, x, y, "last_layer"),
    "compression": compressed,
    "trace": lambda m, x, y: (
        curvature.xtrace(
            curvature.fisher(m, loss_at_output, (x, y)), 4, generator=torch.Generator("cpu").manual_seed(0)
        ).value
    ),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_made_of_matrices(use: str, two_devices: tuple[str, str]) -> None:
    found, expected = (USES[use](Split(devices), *data(devices)) for devices in (two_devices, ONE))
    is_near(found, expected)
