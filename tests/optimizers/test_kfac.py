"""KFAC in place of SGD: in training loops that stay as they are."""

from __future__ import annotations

import copy
import functools
import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import KFAC
from support.cases.case import Raw, seeded
from support.cases.shared import Doubled
from support.training import TASKS, Loss, assert_same, backward, copied, curvature_of, digits, mlp, task, train


def trained(name: str = "mlp", steps: int = 3, **options: Any) -> tuple[nn.Module, KFAC, tuple[Loss, Tensor, Tensor]]:
    model, loss, x, y = task(name)
    opt = KFAC(model, **options)
    train(model, opt, loss, x, y, steps)
    return model, opt, (loss, x, y)


@pytest.mark.training_run
@pytest.mark.parametrize("name", TASKS)
def test_lowers_the_loss(name: str, device):
    model, loss, x, y = task(name, device)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    with seeded(1):
        values = train(model, KFAC(model), loss, x, y, 25)
    assert all(map(math.isfinite, values)) and sum(values[-3:]) / 3 < 0.8 * values[0], values
    moved = {k: not torch.equal(p, before[k]) for k, p in model.named_parameters() if p.grad is not None}
    assert all(moved.values()), moved


@pytest.mark.training_run
@pytest.mark.parametrize("name", ["mlp", "autoencoder"])
def test_ahead_of_sgd(name: str, steps: int = 200):
    """After the number of steps that the README speaks of; in the first dozens the trust region holds KFAC back."""
    model, loss, x, y = task(name, n=512)
    other = copy.deepcopy(model)
    kfac = train(model, KFAC(model), loss, x, y, steps)
    sgd = train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), loss, x, y, steps)
    assert kfac[-1] < sgd[-1]


EVERY = [curvature.empirical(), curvature.sampled(2), curvature.exact(), curvature.propagated(), curvature.isotropic(3)]


@pytest.mark.training_run
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("inject", EVERY, ids=repr)
@pytest.mark.parametrize("name", ["mlp", "cnn", "regression"])
def test_injections(name: str, inject: curvature.Injection, sharing: str):
    model, loss, x, y = task(name)
    module = nn.MSELoss() if name == "regression" else nn.CrossEntropyLoss()
    opt = KFAC(model, loss=module, inject=inject, sharing=sharing)
    values = train(model, opt, loss, x, y, 12)
    assert all(map(math.isfinite, values)) and values[-1] < values[0] and "kronecker" in opt.report()


def test_a_loss_that_adds_gives_the_same_steps():
    (one, opt, (_, x, y)), (two, same, _) = trained("mlp", 0), trained("mlp", 0)
    train(one, opt, F.cross_entropy, x, y, 10)
    train(two, same, functools.partial(F.cross_entropy, reduction="sum"), x, y, 10)
    ends = [nn.utils.parameters_to_vector(model.parameters()) for model in (one, two)]
    assert (ends[0] - ends[1]).norm() < 1e-3 * ends[0].norm()


def test_runs_are_repeatable_and_leave_the_random_state_alone():
    runs = []
    for optimizer in (KFAC, KFAC, lambda model: torch.optim.SGD(model.parameters())):
        model, loss, x, y = task("transformer")  # its dropout draws from the global state
        with seeded(3):
            train(model, optimizer(model), loss, x, y, 3)
            runs.append((copied(model), torch.get_rng_state()))
    assert_same(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[2][1])


def test_deepcopy_of_model_and_optimizer_together():
    """As for any optimizer: the copies go on by themselves, and in the same way."""
    model, opt, batch = trained()
    again, resumed = copy.deepcopy((model, opt))
    assert train(again, resumed, *batch, 3) == train(model, opt, *batch, 3)
    assert_same(copied(again), copied(model))


@pytest.mark.parametrize("steps", [0, 10])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_batch_that_is_not_finite_is_left_out(name: str, steps: int):
    """Neither parameters nor curvature are touched, it is counted, and training goes on as if it had not been."""
    (model, opt, batch), (other, same, _) = trained(name, steps), trained(name, steps)
    model.eval(), other.eval()  # the running statistics of a batch norm are the model's own business
    train(model, opt, batch[0], batch[1] * math.nan, batch[2], 1)
    assert (opt.skipped, same.skipped) == (1, 0)
    assert_same(curvature_of(opt) | copied(model), curvature_of(same) | copied(other))
    if opt.recorder.generator is not None:  # where it is now, the vectors of the bad batch drawn
        same.recorder.generator = torch.Generator()
        same.recorder.generator.set_state(opt.recorder.generator.get_state())
    train(model, opt, *batch, 1)
    train(other, same, *batch, 1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_same(curvature_of(opt) | copied(model), curvature_of(same) | copied(other))


def test_frozen_parameters_stay():
    model, loss, x, y = task("cnn")
    model[0].requires_grad_(False)
    opt, before = KFAC(model), copied(model)
    train(model, opt, loss, x, y, 3)
    middle = copied(model)
    model[4].weight.requires_grad_(False)  # later on
    train(model, opt, loss, x, y, 3)
    assert torch.equal(before["0.weight"], model[0].weight) and torch.equal(before["0.bias"], model[0].bias)
    assert torch.equal(middle["4.weight"], model[4].weight) and not torch.equal(before["4.weight"], model[4].weight)
    assert "requires_grad is False" in opt.report()


def test_parameters_without_a_gradient_at_some_steps():
    """Two heads in turn. The one that is used later has the same curvature in the end."""
    run = lambda m, x, k: (m.one, m.two)[k](m.inner(x.flatten(1)).tanh())
    model = Raw(run, inner=nn.Linear(64, 16), one=nn.Linear(16, 10), two=nn.Linear(16, 10))
    (x, y), opt = digits(), KFAC(model)
    for step in range(8):
        opt.zero_grad()
        before = copied(model)
        F.cross_entropy(model(x[:64], step % 2), y[:64]).backward()
        opt.step()
        moved = [not torch.equal(before[k], copied(model)[k]) for k in ("one.weight", "two.weight")]
        assert moved == [step % 2 == 0, step % 2 == 1]
    lines = {line.split()[0].strip(","): line for line in opt.report().splitlines()}
    for name in ("one.weight", "two.weight"):
        assert "kronecker" in lines[name] and "not used" not in lines[name]


def test_parameter_groups_and_schedulers():
    model, opt, batch = trained("mlp", 0, weight_decay=0.1)
    (group,) = opt.param_groups
    head = {**group, "params": group["params"][2:], "lr": 0.0}
    opt.param_groups[:] = [{**group, "params": group["params"][:2]}, head]
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0 if step == 2 else 0.5)
    moved = []
    for _ in range(4):
        before = copied(model)
        train(model, opt, *batch, 1)
        scheduler.step()
        moved.append([not torch.equal(p, before[k]) for k, p in model.named_parameters()])
    assert moved == [[True, True, False, False], [True, True, False, False], [False] * 4, [True, True, False, False]]


def test_clipped_and_accumulated_gradients():
    """Two halves before a step are the whole batch: the same gradient, curvature from both."""
    model, opt, (loss, x, y) = trained("mlp", 3, factor_every=1)
    opt.zero_grad()
    for part, target in zip(x.split(32), y.split(32), strict=True):
        (loss(model(part), target) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = copied(model)
    opt.step()
    assert norm > 1e-3 and not torch.equal(before["1.weight"], model[1].weight)
    assert [block.updates for block in opt.store.blocks] == [4, 4]


@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn", "lstm"])
def test_batches_of_all_sizes(name: str):
    """A last batch may have one sample, or as many as a layer has features."""
    model, opt, (loss, x, y) = trained(name, 1)
    values = [train(model.eval(), opt, loss, x[:size], y[:size], 1)[0] for size in (10, 8, 6, 1, 32, 12)]
    assert all(map(math.isfinite, values))


@pytest.mark.parametrize("inject", EVERY[::4], ids=repr)
def test_mixed_precision(inject: curvature.Injection, device):
    """The loop of torch's own recipe, with its scaler."""
    model, loss, x, y = task("mlp", device)
    opt, scaler = KFAC(model, inject=inject), torch.amp.GradScaler(device, init_scale=128.0)
    values = []
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            values.append(loss(model(x), y))
        scaler.scale(values[-1]).backward()
        scaler.step(opt)
        scaler.update()
    assert values[-1] < values[0]


def test_closure():
    (model, opt, batch), (other, same, _) = trained("mlp", 1), trained("mlp", 1)
    value = opt.step(lambda: backward(model, opt, *batch))
    assert isinstance(value, Tensor) and [value.item()] == train(other, same, *batch, 1)
    assert_same(copied(model), copied(other))
    opt.zero_grad()
    assert opt.step() is None


def test_evaluation_between_steps_changes_nothing():
    runs = []
    for modes in ((), (torch.no_grad, torch.inference_mode)):
        model, opt, (loss, x, y) = trained("cnn", 0)
        for _ in range(4):
            train(model.train(), opt, loss, x, y, 1)
            for mode in modes:
                with mode():
                    model.eval()(x[:5])
        runs.append(copied(model))
    assert_same(*runs)


def test_a_forward_pass_that_is_not_followed_by_a_backward_one():
    """As when shapes are looked at first; the vectors of `empirical` then never come."""
    runs = []
    for looks in (0, 2):
        model, opt, (loss, x, y) = trained("mlp", 0, inject=curvature.empirical())
        for _ in range(3):
            for _ in range(looks):
                model(100 * x)
            train(model, opt, loss, x, y, 1)
        assert {block.structure for block in opt.store.blocks} == {"kronecker"}
        runs.append(copied(model) | {"scale": torch.tensor(opt.recorder.outputs.rms)})
    assert_same(*runs)


def test_other_models_and_copies_are_not_recorded():
    alone, _, (loss, x, y) = trained("mlp", 4)
    pair = [trained("mlp", 0), trained("cnn", 0)]
    for _ in range(4):
        for model, opt, batch in pair:
            loss(copy.deepcopy(model)(x * math.nan), y).backward()
            train(model, opt, *batch, 1)
    assert_same(copied(pair[0][0]), copied(alone))


def test_deleting_the_optimizer_removes_its_hooks():
    model, opt, _ = trained("mlp", 2)
    seen = weakref.ref(opt)
    del opt
    gc.collect()
    assert seen() is None and not model._forward_hooks and not model._forward_pre_hooks


WRONG: dict[type[Exception], dict[str, list[Any]]] = {
    TypeError: {"lr": ["1"], "damping": ["x"], "inject": [3, curvature.isotropic]},
    ValueError: {"lr": [-1, math.nan], "momentum": [1.5, 1], "damping": [-0.1], "sharing": ["x"], "factor_every": [0]},
}


@pytest.mark.parametrize("error", WRONG)
def test_wrong_arguments(error: type[Exception]):
    model = mlp()
    for name, value in [(name, value) for name, values in WRONG[error].items() for value in values]:
        with pytest.raises(error, match=name):
            KFAC(model, **{name: value})
    with pytest.raises(TypeError, match="model.*pass the model"):
        KFAC(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model"):
        KFAC(mlp().requires_grad_(False))
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_errors_that_show_later():
    """An injection that needs the target leaves nothing active."""
    model, _, _ = trained("mlp", 0)
    with pytest.raises(ValueError, match="loss"):
        KFAC(model, inject=curvature.exact())
    needy = KFAC(model, loss=nn.CrossEntropyLoss(weight=torch.ones(10)), inject=curvature.exact())
    with pytest.raises(ValueError, match="weight"):
        needy.model(digits()[0][:4])
    assert torch._C._len_torch_function_stack() == 0


def test_a_layer_first_used_between_decompositions():
    """Its block must be ready at once, not at the next decomposition."""
    model, _, batch = trained("mlp", 0)
    model.late = nn.Parameter(torch.zeros(10))
    opt, forward = KFAC(model, factor_every=1, decompose_every=50), model.forward
    train(model, opt, *batch, 15)
    model.forward = lambda x: forward(x) + model.late
    train(model, opt, *batch, 1)
    assert all(block.is_ready for block in opt.preconditioner.blocks)
    assert all(map(math.isfinite, train(model, opt, *batch, 2))) and model.late.any()


def test_report_says_what_it_cannot_look_into():
    model = Raw(lambda m, x: Doubled.apply(m.layer(x), m.scale), layer=nn.Linear(4, 3), scale=(3,))
    opt = KFAC(model)
    model(torch.randn(6, 4))
    assert "torch does not show what uses it (an autograd.Function or the like)" in opt.report()


def test_report_names_every_parameter():
    model, opt, batch = trained("cnn", 0)
    names = [name for name, _ in model.named_parameters()]
    assert all(name in opt.report() and "first forward pass" in opt.report() for name in names)
    train(model, opt, *batch, 1)
    lines = opt.report().splitlines()
    assert all(sum(name in line for line in lines) == 1 for name in names)
    assert lines[-2].startswith("in all") and "batch_norm" in lines[-1]
    for line in lines[1:-3]:
        assert ("diagonal [1]" if line.startswith(("1.", "5.")) else "kronecker") in line, line
