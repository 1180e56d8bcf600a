"""What torch's own tests ask of every optimizer in torch.optim, beside the habits of training loops.

Source: the contracts of test/test_optim.py, test/optim/test_lrscheduler.py and test/optim/test_swa_utils.py in the
PyTorch repository.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from optimizers import EKFAC, KFAC, NaturalGradient
from support.habits import X, Y, assert_same, flat, net, train

pytestmark = pytest.mark.parametrize("kind", [KFAC, EKFAC, NaturalGradient])
Kind = type[KFAC]
Schedule = Callable[[Any], Any]

SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.8),
    "StepLR": lambda o: schedulers.StepLR(o, 1),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 2], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.25, total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=1e9),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=8),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
}


def run_scheduled(model: nn.Module, opt: Any, schedule: Any, steps: int) -> list[tuple[float, float]]:
    """The rates and momenta of the steps."""
    seen = []
    for _ in range(steps):
        group = opt.param_groups[0]
        seen.append((float(group["lr"]), group["momentum"]))
        (loss,) = train(model, opt, 1)
        schedule.step(*[loss] * isinstance(schedule, schedulers.ReduceLROnPlateau))
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(kind: Kind, name: str) -> None:
    """What they set for SGD, used as if set by hand; a run that is saved with its scheduler goes on bitwise."""
    models = [net(), net()]
    opts = [kind(model, lr=0.5, momentum=0.9) for model in models]
    schedules = [SCHEDULES[name](opt) for opt in opts]
    seen = run_scheduled(models[0], opts[0], schedules[0], 5)
    plain = net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    assert seen == run_scheduled(plain, sgd, SCHEDULES[name](sgd), 5) and len(set(seen)) > 1
    for with_momentum in (True, False):
        by_hand = net()
        opt = kind(by_hand, lr=0.5, momentum=0.9)
        for lr, momentum in seen:
            opt.param_groups[0].update({"lr": lr, "momentum": momentum} if with_momentum else {"lr": lr})
            train(by_hand, opt, 1)
        sets_rates_alone = name not in ("CyclicLR", "OneCycleLR")
        assert torch.equal(flat(by_hand), flat(models[0])) == (with_momentum or sets_rates_alone)

    parts = (models[0], opts[0], schedules[0])
    for there, here in zip(parts, (models[1], opts[1], schedules[1]), strict=True):
        here.load_state_dict(copy.deepcopy(there.state_dict()))
    later = [run_scheduled(*run, 3) for run in zip(models, opts, schedules, strict=True)]
    assert later[0] == later[1]
    assert_same(*models)


def test_no_scheduler_is_left_out(kind: Kind) -> None:
    found = {name for name, part in vars(schedulers).items() if inspect.isclass(part) and name in schedulers.__all__}
    assert found - {"LRScheduler"} <= SCHEDULES.keys()


def test_groups(kind: Kind) -> None:
    """What torch refuses is refused, and nothing is changed; an empty group is none."""
    model, other = net(), net()
    opt = kind(model, lr=0.5)
    head = {"params": list(model[2].parameters())}
    same, twice, unordered = head, {"params": [*model[2].parameters()] * 2}, {"params": {*model[2].parameters()}}
    for bad in (same, twice, unordered, {"params": [X]}, [model[2].weight]):
        with pytest.raises((ValueError, TypeError)):
            opt.add_param_group(bad)
    for params in (net().parameters(), nn.Parameter(X), [("p", nn.Parameter(X))]):
        with pytest.raises(ValueError, match="is none of the model's"):
            opt.add_param_group({"params": params})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": []})
    train(model, opt)
    train(other, kind(other, lr=0.5))
    assert_same(model, other)


def test_defaults_that_change_later(kind: Kind) -> None:
    """Groups that are there keep theirs; one that is added takes the new ones."""
    model = net()
    opt = kind(model, lr=0.5)
    model.append(nn.Linear(3, 3))
    opt.defaults["lr"] = 0.25
    opt.add_param_group({"params": model[3].parameters()})
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25]
    assert [set(group) for group in opt.param_groups] == [{"params", *opt.defaults}] * 2


def test_states_are_data(kind: Kind) -> None:
    """Equal at every call, read with `weights_only`, in another order, and not shared with the run that goes on."""
    model, other = net(), net()
    opt, twin = kind(model), kind(other)
    train(model, opt)
    state, file = opt.state_dict(), io.BytesIO()
    assert str(state) == str(opt.state_dict())
    assert list(state) == ["state", "param_groups"] and state["param_groups"][0]["params"] == [0, 1, 2, 3]
    torch.save(state, file)
    before = copy.deepcopy(state)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    loaded["state"] = dict(reversed(loaded["state"].items()))
    twin.load_state_dict(loaded)
    train(other, twin)
    assert str(loaded["state"][0]) == str(before["state"][0])
    first, second = net(), net()
    for model, given in ((first, before), (second, loaded)):
        opt = kind(model)
        opt.load_state_dict(given)
        train(model, opt)
    assert_same(first, second)


def test_steps_have_a_name_in_profiles(kind: Kind) -> None:
    model = net()
    opt = kind(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, opt, 1)
    names = {event.name for event in profile.events()}
    assert {f"Optimizer.step#{kind.__name__}.step", f"Optimizer.zero_grad#{kind.__name__}.zero_grad"} <= names


def test_whose_backward_hooks_are_called_when(kind: Kind) -> None:
    """Of modules and activations also while a recorded pass returns; in `backward` with the loop's gradients."""
    model, seen = net(), dict[str, list[str]]()
    opt = kind(model)
    phase = ""
    note = lambda name: lambda *_: seen.setdefault(name, []).append(phase)
    model[2].register_full_backward_hook(note("module"))
    model[1].register_forward_hook(lambda m, x, out: (out.register_hook(note("activation")), None)[1])
    model[0].weight.register_post_accumulate_grad_hook(note("parameter"))
    for _ in range(3):
        opt.zero_grad()
        phase = "forward"
        loss = nn.functional.cross_entropy(model(X), Y)
        phase = "backward"
        loss.backward()
        phase = "step"
        opt.step()
    assert seen["parameter"] == ["backward"] * 3
    for name in ("module", "activation"):
        assert set(seen[name]) == {"forward", "backward"} and seen[name].count("backward") == 3
