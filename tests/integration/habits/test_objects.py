"""Habits with the optimizer as an object: groups, hooks, copies, pickles, and what is left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import curvature
from support.habits import (
    MAKERS,
    QUIET,
    Make,
    X,
    Y,
    assert_same,
    backward,
    copied,
    every_optimizer,
    flat,
    here,
    moved,
    net,
    reference,
    started,
    train,
    without_closure,
)

pytestmark = QUIET


@without_closure
def test_half_the_rate_of_a_group_is_half_its_step(make: Make) -> None:
    steps = []
    for rate in (1.0, 0.5, 0.0):
        model = net().double()
        opt, before = make(model), copied(model)
        split(opt, lr=rate)
        train(model, opt, 1, X.double())
        steps.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    for name in ("2.weight", "2.bias"):
        torch.testing.assert_close(steps[1][name], steps[0][name] / 2, rtol=1e-3, atol=1e-7)
        assert steps[0][name].any() and not steps[2][name].any()
    # to rounding: norms of layers in several groups are summed in another order
    torch.testing.assert_close(steps[2]["0.weight"], steps[0]["0.weight"], rtol=1e-5, atol=1e-8)


def split(opt: torch.optim.Optimizer, **options: float) -> None:
    """The last layer in a group of its own."""
    (group,) = opt.param_groups
    head = {"params": group["params"][2:]} | options
    group["params"] = group["params"][:2]
    opt.add_param_group(head)


@without_closure
def test_much_damping_of_a_group_leaves_its_gradients_direction(make: Make) -> None:
    model = net().double()
    opt, before = make(model, weight_decay=0.0), copied(model)
    split(opt, damping=1e6)
    if make is MAKERS["NaturalGradient"]:
        with pytest.raises(ValueError, match=r"damping: .*found \[None, 1000000.0\]"):
            train(model, opt, 1, X.double())
        assert not moved(model, before)
        return
    train(model, opt, 1, X.double())
    cosines = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        cosines[name] = F.cosine_similarity((before[name] - p.detach()).flatten(), p.grad.flatten(), dim=0)
    assert cosines["2.weight"] > 0.9999 > 0.99 > cosines["0.weight"]


@every_optimizer
def test_groups_are_as_in_torch(make: Make) -> None:
    model, opt = started(make, lr=0.5, weight_decay=0.1)
    assert isinstance(opt, torch.optim.Optimizer) and len(opt.param_groups) == 1
    assert {"lr": 0.5, "weight_decay": 0.1}.items() <= opt.defaults.items()
    assert {"momentum", "damping"} <= opt.defaults.keys() == opt.param_groups[0].keys() - {"params"}
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert "Parameter Group 0" in repr(opt) and "lr: 0.5" in repr(opt) and len(repr(opt)) < 300
    with pytest.raises(TypeError, match="foreach"):
        make(model, foreach=True)


@every_optimizer
def test_frozen_layers_stay_and_thawed_ones_move(make: Make) -> None:
    model, opt = started(make)
    train(model, opt, 2)
    before = copied(model)
    model[0].requires_grad_(False)
    train(model, opt, 2)
    assert moved(model, before) == {"2.weight", "2.bias"}
    model[0].requires_grad_(True)
    before = copied(model)
    train(model, opt, 1)
    assert moved(model, before) == set(before)


@every_optimizer
def test_layers_that_come_later_are_named_and_trained_once_they_are_in_a_group(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once, the report at any time."""
    model, opt = started(make)
    train(model, opt, 2)
    model.append(here(nn.Linear(3, 3)))
    before = copied(model)
    train(model, opt, 3)
    assert moved(model, before) == {name for name in before if name[0] != "3"}
    (message,) = [record.message for record in caplog.records if "not trained" in record.message]
    assert "3.bias, 3.weight" in message and "add_param_group" in message
    assert "in no parameter group" in opt.report()
    opt.add_param_group({"params": model[3].parameters()})
    train(model, opt, 1)
    assert moved(model, before) == set(before) and "in no parameter group" not in opt.report()


@every_optimizer
@pytest.mark.parametrize("keeps_old", [False, True], ids=["replaced", "beside the old ones"])
def test_parameters_that_are_put_into_groups_by_hand_are_trained(make: Make, keeps_old: bool) -> None:
    """A new layer takes the names of an old one, whose parameters may stay in their groups."""
    model = net()
    opt = make(model, groups=[{"params": [p for p in model.parameters() if p.ndim == 1]}])
    weights, biases = opt.param_groups
    train(model, opt, 2)
    model[2] = here(nn.Linear(6, 3))
    if keeps_old:  # a name is then in two groups
        weights["params"] += model[2].parameters()
    else:
        weights["params"][:] = [p for p in model.parameters() if p.ndim == 2]
        biases["params"][:] = [p for p in model.parameters() if p.ndim == 1]
    before = copied(model)
    train(model, opt, 2)
    assert moved(model, before) == set(before) and "in no parameter group" not in opt.report()


@every_optimizer
def test_a_parameter_of_no_model_in_a_group_raises(make: Make) -> None:
    model, opt = started(make)
    opt.param_groups[0]["params"].append(nn.Parameter(here(torch.ones(3, 2))))
    with pytest.raises(ValueError, match=r"shape \(3, 2\) is none of the model's"):
        train(model, opt, 1)


@every_optimizer
def test_parameters_whose_name_changes_are_trained_on(make: Make) -> None:
    model, opt = started(make)
    train(model, opt, 2)
    prune.l1_unstructured(model[0], "weight", 0.5)
    before = copied(model)
    train(model, opt, 2)
    assert "0.weight_orig" in before and moved(model, before) == set(before)
    assert int((model[0].weight == 0).sum()) == 24 and "0.weight_orig" in opt.report()


@every_optimizer
def test_hooks_of_steps_are_called_once_before_and_after(make: Make) -> None:
    model, seen = net(), []
    opt = make(model)
    note = lambda *_: seen.append(flat(model))
    opt.register_step_pre_hook(note), opt.register_step_post_hook(note)
    handle = register_optimizer_step_pre_hook(note)
    try:
        train(model, opt, 2)
    finally:
        handle.remove()
    moves = [not torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False)]
    assert moves == [False, True, False, False, True]


@every_optimizer
def test_hooks_may_write_in_states(make: Make) -> None:
    """As those of torch's own tests: beside the parameters, in the optimizer, in a copy of what is loaded."""
    model, opt = started(make)
    train(model, opt, 1)
    opt.register_state_dict_pre_hook(lambda o: o.state.update(note=1))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "epoch": 3})
    opt.register_load_state_dict_pre_hook(lambda o, state: state["param_groups"][0].update(lr=0.25))
    opt.register_load_state_dict_pre_hook(lambda o, state: copy.deepcopy(state))
    opt.register_load_state_dict_post_hook(lambda o: o.state.update(loaded=True))
    state = opt.state_dict()
    assert state["state"]["note"] == 1 and state["epoch"] == 3
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.25 and opt.state["loaded"] and opt.state["note"] == 1
    before = copied(model)
    train(model, opt, 1)
    assert moved(model, before) == set(before)


@every_optimizer
def test_rates_of_groups_may_be_tensors_that_a_schedule_changes(make: Make) -> None:
    """Of one entry or no axis, in the constructor and in groups, which a schedule changes in place; names, too."""
    models = [net(), net()]
    for model, made in zip(models, (lambda rate: rate[0], torch.tensor), strict=True):
        opt = make(model, lr=made([0.5]))
        (group,) = opt.param_groups
        group["params"] = group["params"][:2]
        no_axis = {"lr": made([0.25])} if made is not torch.tensor else {"lr": torch.tensor(0.25)}
        opt.add_param_group({"params": list(model.named_parameters())[2:]} | no_axis)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for _ in range(2):
            train(model, opt, 1)
            schedule.step()
    assert_same(*models)


@every_optimizer
def test_a_step_without_any_gradient_is_none(make: Make) -> None:
    """A step is then none, as in torch.optim: before the first one, after it, and where all is frozen."""
    model, opt = started(make)
    other = torch.ones(3, device=X.device, requires_grad=True)

    def elsewhere() -> torch.Tensor:
        opt.zero_grad()
        loss = other.square().sum()
        loss.backward()
        return loss

    for steps in (0, 2):
        train(model, opt, steps)
        before = flat(model)
        opt.zero_grad()
        for frozen in (False, True):
            model.requires_grad_(not frozen)
            assert opt.rule.needs_closure or opt.step() is None
            assert opt.step(elsewhere).item() == 3
            assert not frozen or opt.step(lambda: F.cross_entropy(model(X), Y)) > 0
        model.requires_grad_(True)
        assert torch.equal(flat(model), before) and opt.steps == steps
    train(model, opt, 1)
    assert not torch.equal(flat(model), before)


@every_optimizer
def test_averaged_models_are_left_alone(make: Make) -> None:
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    opt = make(model)
    expected = flat(model)
    for step in range(3):
        if step == 1:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # once there are hooks to copy
            expected = flat(model)
        F.cross_entropy(average(100 * X), Y).backward()
        train(model, opt, 1)
        average.update_parameters(model)
        expected = flat(model) if step < 2 else (expected + flat(model)) / 2
    assert_same(model, reference(make))
    assert torch.allclose(flat(average.module), expected)


@every_optimizer
def test_copies_and_pickles_go_on_alike(make: Make) -> None:
    """Of the model and the optimizer together, of the optimizer alone, which then has a model of its own; pickles."""
    model, opt = started(make)
    train(model, opt, 2)
    alone, public = copy.deepcopy(opt), lambda o: {name for name in vars(o) if not name.startswith("_")}
    pairs = [copy.deepcopy((model, opt)), copy.deepcopy((opt, model))[::-1], (alone.model, alone)]
    pairs.append(pickle.loads(pickle.dumps((model, opt))))
    file = io.BytesIO()
    torch.save({"model": model, "opt": opt}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    pairs.append((loaded["model"], loaded["opt"]))
    before = flat(model)
    for other, own in pairs:
        assert own.model is other and own.param_groups[0]["params"][0] is other[0].weight is not model[0].weight
        assert public(own) == public(opt) and opt.defaults.items() <= own.defaults.items()
        train(other, own, 2)
    assert torch.equal(flat(model), before)
    train(model, opt, 2)
    for other, _ in pairs:
        assert_same(model, other)


@every_optimizer
def test_a_model_that_is_copied_or_pickled_alone_is_a_plain_model(make: Make) -> None:
    for options in ({}, {"inject": curvature.empirical()}):
        model, opt = started(make, **options)
        train(model, opt, 1)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_same(again, model)
            F.cross_entropy(again(X), Y).backward()
            train(again, make(again), 2)
        opt.zero_grad()
        train(model, opt, 2)
        assert_same(model, reference(make, **options))


@every_optimizer
def test_an_optimizer_that_is_gone_leaves_nothing(make: Make) -> None:
    model = net()
    start = copy.deepcopy(model.state_dict())
    for _ in range(2):
        model.load_state_dict(start)
        opt = make(model)
        train(model, opt)
        del opt
        gc.collect()
        assert not model._forward_hooks and not model._forward_pre_hooks
        assert_same(model, reference(make))
        model.zero_grad()


class Interrupted(nn.Tanh):
    now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.now:
            raise KeyboardInterrupt
        return super().forward(x)


@without_closure
def test_an_interrupted_forward_pass_leaves_no_trace(make: Make) -> None:
    inner = Interrupted()
    model = net(inner=inner)
    opt = make(model)
    train(model, opt, 1)
    inner.now = True
    with pytest.raises(KeyboardInterrupt):
        backward(model, opt)
    inner.now = False
    opt.zero_grad()
    assert torch._C._len_torch_function_stack() == 0
    train(model, opt, 2)
    assert_same(model, reference(make))


@every_optimizer
def test_training_in_another_thread_is_the_same(make: Make) -> None:
    model, errors = net(), []
    opt = make(model)

    def run() -> None:
        try:
            train(model, opt)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert_same(model, reference(make))


@without_closure
def test_sgd_may_train_a_part_of_the_model(make: Make) -> None:
    model, opt = started(make)
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][2:]
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.0)
    before = copied(model)
    for _ in range(3):
        backward(model, opt)
        opt.step(), sgd.step()
    assert moved(model, before) == {"2.weight", "2.bias"}
    frozen = net()
    frozen[0].requires_grad_(False)
    same = make(frozen)
    train(frozen, same)
    assert_same(model, frozen)
    assert "requires_grad is False" in same.report()
