"""Models on a device that is not the current one, and on several devices."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.model_optimizer import require_one_device
from support.cases.case import seeded
from support.cases.several_devices import Split, ThereAndBack, Tied, data, loss_at_target
from support.plans import plans_of
from support.training import backward, closure_of, task, train_by_closure

pytestmark = pytest.mark.fast
LOSS = nn.CrossEntropyLoss()


@pytest.mark.parametrize("function", ["per_sample_gradients", "per_sample_norms", "per_sample_gram"])
def test_gradients_of_samples_are_where_their_layers_are(function: str, two_devices: tuple[str, str]) -> None:
    """What is joined over layers is with the first."""
    found, expected = (
        getattr(curvature, function)(Split(devices), LOSS, *data(devices)) for devices in (two_devices, ("cpu", "cpu"))
    )
    if isinstance(found, Tensor):
        found, expected = {"first": found}, {"first": expected}
    for name, g in found.items():
        assert g.device == torch.device(two_devices[not name.startswith("first")])
        torch.testing.assert_close(g.cpu(), expected[name], rtol=1e-9, atol=1e-11)


def test_gradients_over_several_devices_are_checked(two_devices: tuple[str, str]) -> None:
    model = Split(two_devices)
    curvature.check_gradients(model, LOSS, *data(two_devices))
    assert not any(plan.general for plan in plans_of(model))
    rows = curvature.residual_jacobian(model, lambda m, x: m(x).sum(1), data(two_devices)[0])
    assert {name: g.device for name, g in rows.items()} == {name: p.device for name, p in model.named_parameters()}


def trained(
    make: Callable[[nn.Module], Any], devices: tuple[str, str], steps: int, kind: type[nn.Module] = Split
) -> tuple[nn.Module, Any]:
    model, (x, y) = kind(devices), data(devices)
    opt = make(model)
    for step in range(steps):
        bad = step == 3  # a batch that is skipped
        backward(model, opt, LOSS, x * float("nan") if bad else x, y.to(devices[1]))
        opt.step()
    return model, opt


def assert_near(found: nn.Module, expected: nn.Module, rtol: float = 1e-6, atol: float = 1e-8) -> None:
    for own, p in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.cpu(), p.cpu(), rtol=rtol, atol=atol)


def with_a_group(opt: KFAC, parameters: list[nn.Parameter]) -> KFAC:
    for group in opt.param_groups:
        group["params"] = [p for p in group["params"] if p.ndim > 1]
    opt.add_param_group({"params": parameters, "lr": 0.5, "weight_decay": 0.0})
    return opt


MAKERS = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "damping, decay": lambda model: KFAC(model, damping=0.1, weight_decay=0.1),
    "groups": lambda model: with_a_group(KFAC(model, weight_decay=0.1), [p for p in model.parameters() if p.ndim == 1]),
    "empirical": lambda model: KFAC(model, inject=curvature.empirical()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_steps_over_several_devices_are_those_on_one(name: str, two_devices: tuple[str, str]) -> None:
    (found, opt), (expected, other) = (trained(MAKERS[name], devices, 12) for devices in (two_devices, ("cpu", "cpu")))
    assert opt.skipped == other.skipped == 1
    assert_near(found, expected)
    first, second = opt.store.blocks
    places = [block.row_side.entries.device for block in (first, second)]
    assert places == list(map(torch.device, two_devices))


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_weight_moved_to_the_other_device_is_one_with_itself(kind: type[KFAC], two_devices: tuple[str, str]) -> None:
    """It has the Kronecker factors that it has on one device."""
    (found, opt), (expected, other) = (trained(kind, devices, 12, Tied) for devices in (two_devices, ("cpu", "cpu")))
    assert_near(found, expected)
    assert [type(block) for block in opt.store.blocks] == [type(block) for block in other.store.blocks]


def test_checkpoints_over_several_devices_go_on(two_devices: tuple[str, str]) -> None:
    model, opt = trained(KFAC, two_devices, 8)
    copy, other = trained(KFAC, two_devices, 0)
    copy.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    x, y = data(two_devices)
    for _ in range(6):
        for m, o in ((model, opt), (copy, other)):
            backward(m, o, LOSS, x, y.to(two_devices[1]))
            o.step()
    assert_near(copy, model, 0, 0)


def closure_on_either(opt: Any, model: nn.Module, x: Tensor, y: Tensor, residuals: bool) -> Callable[[], Tensor]:
    def of_residuals() -> Tensor:
        output = model(x)
        return (output - nn.functional.one_hot(y.to(output.device), output.shape[1])).flatten()

    return of_residuals if residuals else closure_of(model, opt, loss_at_target, x, y)


CLOSURES: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "adaptive": (lambda model: EKFAC(model, adaptive=True, weight_decay=0.1), False),
    "residuals": (lambda model: KFAC(model, momentum=0.5, weight_decay=0.1), True),
    "natural gradient": (lambda model: NaturalGradient(model, momentum=0.5), False),
    "natural gradient, layerwise": (lambda model: NaturalGradient(model, layerwise=True), False),
    "line search": (lambda model: NaturalGradient(model, line_search=True), False),
    "cg": (lambda model: NaturalGradient(model, solver="cg"), False),
    "Gauss-Newton": (lambda model: NaturalGradient(model, momentum=0.5, damping=1e-3), True),
    "Levenberg-Marquardt": (lambda model: NaturalGradient(model, adaptive=True), True),
}


SPLIT = "adaptive", "residuals", "natural gradient"


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, ThereAndBack) for name in CLOSURES), *((name, Split) for name in SPLIT)]
)
def test_steps_with_closures(name: str, kind: type[nn.Module], two_devices: tuple[str, str]) -> None:
    """Loss and target are on the second device, and so is the output of one of the models; copies go on alike."""
    make, residuals = CLOSURES[name]
    found: list[nn.Module] = []
    for devices in (two_devices, ("cpu", "cpu")):
        model, (x, y) = kind(devices), data(devices)
        opt = make(model)
        closure = closure_on_either(opt, model, x, y, residuals)
        losses = [float(opt.step(closure).detach()) for _ in range(2)]
        assert losses[-1] < losses[0]
        found.append(model)
        copy = kind(devices)
        copy.load_state_dict(model.state_dict())
        other = make(copy)
        other.load_state_dict(opt.state_dict())
        opt.step(closure)
        other.step(closure_on_either(other, copy, x, y, residuals))
        assert_near(copy, model, 0, 0)
    # how far to go is a number in single precision; conjugate gradients make 1e-8 of a rounding error within one step
    tolerance = 1e-3 if name == "cg" else 1e-5
    assert_near(*found, tolerance, tolerance / 10)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_bad_batches_on_another_than_the_current_device(kind: type[KFAC], two_devices: tuple[str, str]) -> None:
    """Every one of them is skipped, the last included."""
    model, loss, x, y = task("mlp", two_devices[1])
    opt = kind(model)
    for step in range(40):
        bad = step > 20 and step % 4 == 0
        backward(model, opt, loss, x * float("nan") if bad else x, y)
        opt.step()
    assert opt.skipped == 4 and opt.steps == 36 and all(p.isfinite().all() for p in model.parameters())


def test_several_processes_refuse_several_devices_by_name(two_devices: tuple[str, str]) -> None:
    trained = dict(Split(two_devices).named_parameters())
    places = f"first.bias on {two_devices[0]}, second.bias on {two_devices[1]}"
    with pytest.raises(NotImplementedError, match=rf"{places}\), which several processes do not take"):
        require_one_device("KFAC", trained)


@pytest.mark.parametrize("is_first", [True, False])
def test_one_of_them_may_be_the_cpu(is_first: bool, two_devices: tuple[str, str]) -> None:
    test_steps_with_closures("adaptive", Split, ("cpu", two_devices[1]) if is_first else (two_devices[1], "cpu"))


# -- runs that are saved on one device and go on on another

ANYWHERE: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "adaptive": functools.partial(KFAC, adaptive=True),
    **{s: functools.partial(NaturalGradient, solver=s) for s in ("woodbury", "cg")},
}
TOLERANCE = 1e-10  # of kernels that add up in other orders; the simulated device has the CPU's


def started(name: str, device: str) -> tuple[nn.Module, Any]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(device)
    return model, ANYWHERE[name](model)


def go_on(model: nn.Module, opt: Any, steps: int) -> None:
    with seeded(1):
        x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
    x, y = (t.to(next(model.parameters()).device) for t in (x, y))
    train_by_closure(model, opt, F.cross_entropy, x, y, steps)


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("places", [(0, "cpu"), ("cpu", 0), (0, 1)], ids=["to the CPU", "from the CPU", "between two"])
def test_a_run_goes_on_elsewhere(name: str, places: tuple[Any, Any], two_devices: tuple[str, str]) -> None:
    """Tensors that are loaded to where they were saved go to the parameters.

    The vectors that a generator draws are those of its device: where these differ, steps are only alike.
    """
    here, there = (place if place == "cpu" else two_devices[place] for place in places)
    model, opt = started(name, here)
    go_on(model, opt, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, resumed = started(name, there)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["opt"])
    assert resumed.steps == 3
    go_on(model, opt, 3)
    go_on(other, resumed, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert q.device == torch.device(there)
        if two_devices[0].startswith("sim"):
            torch.testing.assert_close(q.cpu(), p.cpu(), rtol=TOLERANCE, atol=TOLERANCE)
        assert q.isfinite().all()
    tensors = [t for entry in resumed.state.values() for t in entry.values() if isinstance(t, Tensor) and t.ndim]
    assert all(t.device == torch.device(there) for t in tensors)
