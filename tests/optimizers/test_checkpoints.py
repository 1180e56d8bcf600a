"""Checkpoints: resumed runs are the uninterrupted ones, to the last bit; what does not fit is refused beforehand."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import placed, seeded
from support.combinations import in_turn
from support.habits import flat as weights
from support.training import assert_same, closure_of, task, train_by_closure

with seeded(0):
    X, Y = torch.randn(16, 4), torch.randint(3, (16,))

LOSS = nn.CrossEntropyLoss()
CHOICES: dict[str, tuple[type[KFAC], dict[str, Any]]] = {
    "KFAC": (KFAC, {}),
    "KFAC sampled": (KFAC, {"loss": LOSS, "inject": curvature.propagated(2), "factor_every": 3}),
    "KFAC empirical": (KFAC, {"inject": curvature.empirical(), "weight_decay": 0.1, "damping": 0.1}),
    "KFAC damped": (KFAC, {"damping": 0.1, "momentum": 0.5}),
    "KFAC reduce": (KFAC, {"sharing": "reduce"}),
    "KFAC adaptive": (KFAC, {"adaptive": True}),
    "KFAC residuals": (KFAC, {}),
    "EKFAC": (EKFAC, {}),
    "EKFAC adaptive": (EKFAC, {"adaptive": True}),
    "woodbury": (NaturalGradient, {"momentum": 0.5}),
    "woodbury adaptive": (NaturalGradient, {"adaptive": True}),
    "woodbury residuals": (NaturalGradient, {"momentum": 0.5}),
    "adaptive residuals": (NaturalGradient, {"adaptive": True}),
    "layerwise": (NaturalGradient, {"layerwise": True, "momentum": 0.5}),
    "search": (NaturalGradient, {"line_search": True}),
    "cg": (NaturalGradient, {"solver": "cg"}),
}


@pytest.fixture(autouse=True)
def data_there(device: str) -> Iterator[None]:
    with placed(device, X, Y):
        yield


def network(width: int = 5) -> nn.Sequential:
    with seeded(1):
        layers = nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers).to(X.device)


def made(name: str, model: nn.Module | None = None) -> tuple[nn.Module, KFAC]:
    kind, options = CHOICES[name]
    model = network() if model is None else model
    return model, kind(model, **options)


def train(name: str, model: nn.Module, opt: KFAC, steps: int) -> list[float]:
    first = next(model.parameters())
    x, y = X.to(first), Y.to(first.device)
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    if "residuals" in name:
        closure = lambda: (model(x) - F.one_hot(y)).flatten() / 4
    return [opt.step(closure).item() for _ in range(steps)]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for x in value.values():
            yield from leaves(x)
    elif isinstance(value, list | tuple):
        for x in value:
            yield from leaves(x)
    else:
        yield value


def read(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


@pytest.mark.parametrize("name", CHOICES)
def test_resumed_runs_are_the_uninterrupted_ones(name: str):
    """At any step, from files of plain tensors and numbers; the vectors of renewals are drawn on."""
    model, opt = made(name)
    is_batch = isinstance(opt, NaturalGradient) or "residuals" in name  # what is solved with is of one batch
    whole, stops = (5, (0, 3)) if is_batch else (12, (0, 4, 11))
    states = {}
    for step in range(whole):
        if step in stops:
            states[step] = read({"model": model.state_dict(), "opt": opt.state_dict()}, map_location="cpu")
            assert {type(x) for x in leaves(states[step])} <= {Tensor, int, float, str, bool, type(None)}
        train(name, model, opt, 1)
    for step, state in states.items():
        again, resumed = made(name)
        again.load_state_dict(state["model"])
        resumed.load_state_dict(state["opt"])
        assert resumed.steps == step
        train(name, again, resumed, whole - step)
        assert torch.equal(weights(again), weights(model)), step


OPTIONS = [{}, {"damping": 0.1, "weight_decay": 0.01}, {"inject": curvature.empirical()}, {"adaptive": True}]


@in_turn(options=OPTIONS, optimizer=[KFAC, EKFAC])
def test_convolutions_resume_bitwise(options: dict[str, Any], optimizer: type[KFAC], device: str):
    """From a checkpoint that was read to the CPU, as is usual, and to the device."""
    model, loss, x, y = task("cnn", device)
    opt = optimizer(model, **options)
    train_by_closure(model, opt, loss, x, y, 13)
    saved = {"model": model.state_dict(), "opt": opt.state_dict()}
    states = [read(saved, map_location=place) for place in {"cpu", device}]
    train_by_closure(model, opt, loss, x, y, 8)
    for state in states:
        again, *_ = task("cnn", device)
        resumed = optimizer(again, **options)
        again.load_state_dict(state["model"])
        resumed.load_state_dict(state["opt"])
        train_by_closure(again, resumed, loss, x, y, 8)
        assert resumed.steps == 21
        assert_same(model.state_dict(), again.state_dict())


@pytest.mark.parametrize("name", ["KFAC", "KFAC empirical", "EKFAC", "KFAC adaptive", "cg", "KFAC residuals"])
def test_going_back(name: str):
    """A state is read in the middle of another run, a forward pass seen and not stepped; it stays as it was."""
    model, opt = made(name)
    train(name, model, opt, 3)
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    shown = str(saved)
    ends = []
    for _ in range(2):
        train(name, model, opt, 9)
        ends.append(weights(model))
        F.cross_entropy(model(9 * X), Y).backward()
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        assert str(saved) == shown
        assert not opt.recorder.has_measured and opt.recorder.passes.last is None  # nothing of the pass that was seen
    assert torch.equal(*ends)
    fresh = made(name)[1].state_dict()
    opt.load_state_dict(fresh)
    model.load_state_dict(network().state_dict())
    other, alone = made(name)
    train(name, model, opt, 4), train(name, other, alone, 4)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "name, whole",
    [("KFAC", True), ("KFAC", False), ("EKFAC", True), ("KFAC adaptive", False), ("woodbury", True), ("cg", False)],
)
def test_distributed_checkpoints(name: str, whole: bool, tmp_path: Any):
    """One process; into an optimizer that has seen nothing, a frozen parameter among those of the model."""
    state_of = get_optimizer_state_dict if whole else lambda model, opt: opt.state_dict()
    model, opt = made(name, network())
    model[1].bias.requires_grad_(False)
    train(name, model, opt, 5)
    state = {"model": model.state_dict(), "optim": state_of(model, opt)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    again, resumed = made(name)
    again[1].bias.requires_grad_(False)
    found = {"model": again.state_dict(), "optim": state_of(again, resumed)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict(found["model"])
    if whole:
        set_optimizer_state_dict(again, resumed, found["optim"])
    else:
        resumed.load_state_dict(found["optim"])
    train(name, model, opt, 7), train(name, again, resumed, 7)
    assert resumed.steps == 12 and torch.equal(weights(again), weights(model))


# -- refused, and nothing changed


def whole_of(state: dict[str, Any]) -> dict[str, Any]:
    return state["state"][0]["kfac"][0]


NAN = float("nan")
of = lambda s, name: whole_of(s)["curvature"][name]
group = lambda s: s["param_groups"][0]
mean = "momentum_buffer"
DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "newer": (lambda s: whole_of(s).update(version=6), "of version 6, saved by newer code; this reads version 5"),
    "no version": (lambda s: whole_of(s).pop("version"), "expected version 5, found None"),
    "version of text": (lambda s: whole_of(s).update(version="5"), "expected version 5, found '5'"),
    "older": (lambda s: whole_of(s).update(version=4), "of version 4, saved by code from before the first release"),
    "no curvature": (lambda s: s["state"][0].pop("kfac"), "not of KFAC.*found .'displacement', 'momentum_buffer'"),
    "no state": (lambda s: s.pop("state"), r"found the keys \['param_groups'\]"),
    "no steps": (lambda s: whole_of(s)["monitor"].pop("steps"), "it has no 'steps'"),
    "no rows": (lambda s: of(s, "0.weight").pop("row_side"), "the curvature of 0.weight is .*row_side"),
    "unknown structure": (lambda s: of(s, "3.weight").update(structure="round"), "the curvature of 3.weight is"),
    "a method": (lambda s: of(s, "0.weight").update(solve=0), "the curvature of 0.weight is .*has no 'solve'"),
    "foreign flag": (lambda s: of(s, "0.weight").update(weight=X[0]), "of 0.weight is .*has no 'weight'"),
    "other names": (lambda s: of(s, "3.weight").update(names=("3.weight", "x")), "the curvature of 3.weight is"),
    "nan in a factor": (lambda s: of(s, "3.weight")["row_side"].fill_(NAN), "curvature of 3.weight is not finite"),
    "nan in a mean": (lambda s: s["state"][4][mean].fill_(NAN), "momentum_buffer of 3.weight is not finite"),
    "no mean": (lambda s: s["state"][4].pop(mean), "3.weight has no 'momentum_buffer'"),
    "shape": (lambda s: s["state"][4].update({mean: X[0]}), r"of 3.weight has shape \[4\], expected \[3, 5\]"),
    "no rate": (lambda s: group(s).pop("lr"), "a parameter group has no 'lr'"),
    "rate": (lambda s: group(s).update(lr=NAN), "lr: expected"),
    "sizes": (lambda s: group(s)["params"].pop(), r"groups have \[5\] parameters, those here \[6\]"),
    "groups": (lambda s: s["param_groups"].append(group(s)), r"have \[6, 6\] parameters, those here \[6\]"),
}


@in_turn(damage=DAMAGED, kind=[KFAC, EKFAC])
def test_damaged_states(kind: type[KFAC], damage: str):
    name = kind.__name__
    model, opt = made(name)
    train(name, model, opt, 3)
    state, (spoil, text) = copy.deepcopy(opt.state_dict()), DAMAGED[damage]
    spoil(state)
    again, other = made(name)
    train(name, again, other, 2)
    before = str(other.state_dict())
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    assert str(other.state_dict()) == before


def test_no_state_at_all():
    opt = made("KFAC")[1]
    with pytest.raises(TypeError, match="state_dict: expected a dict, found list"):
        opt.load_state_dict([])  # type: ignore[arg-type]
    sgd = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not of KFAC, EKFAC or NaturalGradient"):
        opt.load_state_dict(sgd.state_dict())


DIFFERENT = ["KFAC", "EKFAC", "KFAC adaptive", "KFAC reduce", "woodbury", "cg", "layerwise", "woodbury adaptive"]


@pytest.mark.parametrize("there", DIFFERENT)
def test_states_of_other_optimizers(there: str):
    """The kind of curvature, `adaptive`, `sharing` and `solver` are to be the same."""
    model, opt = made(there)
    train(there, model, opt, 2)
    state = opt.state_dict()
    for here in DIFFERENT:
        again, other = made(here)
        if here == there:
            other.load_state_dict(state)
            assert other.steps == 2
            continue
        with pytest.raises(ValueError, match="state_dict: of an optimizer with (curvature|layerwise|adaptive|sharing)"):
            other.load_state_dict(state)
        assert other.steps == 0 and not other.store.blocks


@pytest.mark.fast
@pytest.mark.parametrize("name", ["KFAC", "EKFAC", "woodbury"])
def test_states_of_another_model(name: str):
    model, opt = made(name)
    train(name, model, opt, 1)
    deeper = nn.Sequential(*network(), nn.Linear(3, 3)).to(X.device)
    shapes = r"0\.weight has shape \[5, 4\] there and \[7, 4\] here"
    for other, text in ((network(7), shapes), (deeper, r"4\.weight .*nowhere")):
        twin = made(name, other)[1]
        before = str(twin.state_dict())
        with pytest.raises(ValueError, match=text):
            twin.load_state_dict(opt.state_dict())
        assert str(twin.state_dict()) == before


# -- parameters that change their precision or device in place, as by `model.double()`: all state follows

MOVED = ["KFAC", "KFAC damped", "EKFAC", "KFAC adaptive", "woodbury", "cg", "KFAC residuals"]
MOVED += ["woodbury residuals"]


@in_turn(name=MOVED, steps=[0, 3, 11])
def test_a_model_in_double_precision_goes_on_as_from_a_state(name: str, steps: int) -> None:
    """Of the run in single precision, loaded into an optimizer of a model in double precision."""
    model, opt = made(name)
    losses = train(name, model, opt, steps)
    other, resumed = made(name, copy.deepcopy(model).double())
    resumed.load_state_dict(opt.state_dict())
    model.double()
    losses += train(name, model, opt, 4)
    train(name, other, resumed, 4)
    assert {p.dtype for p in model.parameters()} == {torch.float64} and torch.equal(weights(model), weights(other))
    assert losses[-1] < losses[0]
    kept = [x for x in leaves(opt.state_dict()["state"]) if isinstance(x, Tensor) and x.is_floating_point()]
    assert all(x.dtype == torch.float64 for x in kept if x.ndim)


@in_turn(name=[name for name in MOVED if "residuals" not in name], dtype=[torch.bfloat16, torch.float16])
def test_low_precision_and_back(name: str, dtype: torch.dtype) -> None:
    model, opt = made(name)
    losses = train(name, model, opt, 3)
    train(name, model.to(dtype), opt, 2)
    assert all(p.dtype == dtype == s["momentum_buffer"].dtype for p, s in opt.state.items() if "momentum_buffer" in s)
    losses += train(name, model.float(), opt, 4)
    assert losses[-1] < losses[0] and torch.isfinite(weights(model)).all()


@in_turn(name=MOVED, steps=[0, 3])
def test_another_device(name: str, steps: int, device: str) -> None:
    model, opt = made(name, network().cpu())
    losses = train(name, model, opt, steps)
    losses += train(name, model.to(device), opt, 4)
    assert losses[-1] < losses[0] and {p.device.type for p in model.parameters()} == {device}
    losses += train(name, model.cpu(), opt, 2)
    assert losses[-1] < losses[0]
