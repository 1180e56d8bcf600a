"""Habits in the loop of `torch.optim.SGD` and around it: gradients, batches, schedules, looks in between, chance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.cases.case import seeded
from support.habits import (
    EXACT,
    MAKERS,
    QUIET,
    Make,
    X,
    Y,
    assert_close,
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

ACCUMULATED = {"halves": [(0, 8), (8, 16)], "uneven": [(0, 3), (3, 4), (4, 16)]}


@without_closure
def test_accumulated_gradients_are_those_of_the_big_batch(make: Make) -> None:
    x = X.double()
    whole = net().double()
    train(whole, make(whole, **EXACT), 4, x)
    for pieces in ACCUMULATED.values():
        model = net().double()
        opt = make(model, **EXACT)
        for _ in range(4):
            opt.zero_grad()
            for a, b in pieces:
                backward(model, opt, x[a:b], Y[a:b], zero=False, part=(b - a) / 16)
            opt.step()
        assert_close(model, whole, 1e-12)


@without_closure
def test_clipped_norms_are_those_of_the_step(make: Make) -> None:
    """The step is that of the clipped gradient, and no longer than the trust region has it."""
    model, other = net(), net()
    opt, same = make(model), make(other)
    for step in range(4):
        backward(model, opt), backward(other, same)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3 * 10**step)
        for p in other.parameters():
            assert p.grad is not None
            p.grad = p.grad * (1e-3 * 10**step / (norm + 1e-6)).clamp(max=1.0)
        before = copied(model)
        opt.step(), same.step()
        for name in ("0.weight", "2.weight"):
            length = (model.get_parameter(name) - before[name]).norm()
            assert 0 < length <= 0.21 * before[name].norm().clamp(min=1) * 2**0.5  # weight and bias have one length
    assert_same(model, other)
    assert not torch.equal(flat(model), flat(reference(make, 4)))


def gradients_set_to_zeros(model: nn.Module, opt: Any) -> None:
    opt.zero_grad(set_to_none=False)
    assert opt.steps == 0 or all(p.grad is not None and not p.grad.any() for p in model.parameters())
    backward(model, opt, zero=False)
    opt.step()


def gradients_assigned_by_hand(model: nn.Module, opt: Any) -> None:
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(F.cross_entropy(model(X), Y), parameters), strict=True):
        p.grad = g
    opt.step()


def gradients_of_torch_func(model: nn.Module, opt: Any) -> None:
    loss = lambda p: F.cross_entropy(torch.func.functional_call(model, p, (X,)), Y)
    for name, g in torch.func.grad(loss)(dict(model.named_parameters())).items():
        model.get_parameter(name).grad = g
    opt.step()


def zero_grad_just_before_backward(model: nn.Module, opt: Any) -> None:
    loss = F.cross_entropy(model(X), Y)
    opt.zero_grad()
    loss.backward()
    opt.step()


def steps_within_no_grad(model: nn.Module, opt: Any) -> None:
    backward(model, opt)
    with torch.no_grad():
        opt.step()


WAYS = [gradients_set_to_zeros, gradients_assigned_by_hand, gradients_of_torch_func, zero_grad_just_before_backward]
WAYS += [steps_within_no_grad]


@without_closure
@pytest.mark.parametrize("step", WAYS, ids=lambda step: step.__name__)
def test_steps_that_are_written_in_another_way_are_the_same(make: Make, step: Callable[[nn.Module, Any], None]) -> None:
    model, opt = started(make)
    for _ in range(12):
        step(model, opt)
    assert_same(model, reference(make, 12))


@without_closure
def test_parameters_without_a_gradient_stay(make: Make) -> None:
    model, opt = started(make)
    train(model, opt, 2)
    before = copied(model)
    backward(model, opt)
    model[0].weight.grad = None
    opt.step()
    assert moved(model, before) == {"0.bias", "2.weight", "2.bias"}
    opt.zero_grad()
    opt.step()  # nothing to do
    assert moved(model, before) == {"0.bias", "2.weight", "2.bias"} and opt.steps == 3


@without_closure
def test_evaluation_between_steps_changes_nothing(make: Make, device: str) -> None:
    """In all modes, with gradients and without; nothing that is not sent back counts."""
    if device == "sim":
        pytest.skip("the simulated device has no views in inference mode")
    model, opt = started(make, **EXACT)
    for step in range(12):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad)[: step + 1]:
            model.eval()
            with mode():
                F.cross_entropy(model(100 * X[:5]), Y[:5])
            model.train()
        train(model, opt, 1)
    assert_same(model, reference(make, 12, **EXACT))


@every_optimizer
def test_evaluation_without_gradients_changes_nothing(make: Make) -> None:
    model, opt = started(make)
    for _ in range(3):
        with torch.no_grad():
            model.eval()(100 * X)
        train(model.train(), opt, 1)
    assert_same(model, reference(make))


@without_closure
def test_several_forwards_and_one_backward_are_the_big_batch(make: Make) -> None:
    model, other = net().double(), net().double()
    opt, same = make(model, **EXACT), make(other, **EXACT)
    x = X.double()
    for _ in range(4):
        opt.zero_grad()
        ((F.cross_entropy(model(x[:8]), Y[:8]) + F.cross_entropy(model(x[8:]), Y[8:])) / 2).backward()
        opt.step()
    train(other, same, 4, x)
    assert_close(model, other, 1e-12)


@without_closure
def test_several_backwards_add_up(make: Make) -> None:
    model, opt = started(make)
    for _ in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(model(X), Y) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        opt.step()
    assert_close(model, reference(make), 1e-6)


@without_closure
def test_two_models_of_a_gan_do_not_disturb_each_other(make: Make) -> None:
    options: dict[str, Any] = EXACT | {"loss": nn.BCEWithLogitsLoss()}
    ends, judge = [], nn.functional.binary_cross_entropy_with_logits
    for with_steps in (True, False):
        d, g = net(2), net(3)
        d[2], g[2] = here(nn.Linear(6, 1)), here(nn.Linear(6, 8))
        d.load_state_dict({k: v * 0 + 0.1 for k, v in d.state_dict().items()})
        g.load_state_dict({k: v * 0 + 0.2 for k, v in g.state_dict().items()})
        opt, own = make(d, **options), make(g, lr=0.0)
        real, made = (torch.full((16, 1), value, device=X.device) for value in (1.0, 0.0))
        for k in range(3):
            fake = g(X + k)
            opt.zero_grad()
            (judge(d(X), real) + judge(d(fake.detach()), made)).backward()
            opt.step()
            if with_steps:
                own.zero_grad()
                judge(d(fake), real).backward()
                own.step()
                assert own.steps == k + 1
        ends.append(d)
    assert_same(*ends)


def set_to_none(model: nn.Module, opt: Any) -> None:
    for p in model.parameters():
        p.grad = None


def set_to_zero(model: nn.Module, opt: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


ZEROED: dict[str, Callable[[nn.Module, Any], None]] = {
    "None by hand": set_to_none,
    "zeros by hand": set_to_zero,
    "None by the model": lambda model, opt: model.zero_grad(),
    "zeros by the model": lambda model, opt: model.zero_grad(set_to_none=False),
    "None by the optimizer": lambda model, opt: opt.zero_grad(),
    "zeros by the optimizer": lambda model, opt: opt.zero_grad(set_to_none=False),
}


@without_closure
@pytest.mark.parametrize("zeroed", ZEROED.values(), ids=ZEROED)
def test_passes_whose_gradients_are_zeroed_do_not_count(make: Make, zeroed: Callable[[nn.Module, Any], None]) -> None:
    """Those of a generator's turn, say, or of a batch that is thought better of."""
    model, opt = started(make, **EXACT)
    for _ in range(4):
        backward(model, opt, 10 * X[:5], Y[:5], zero=False)
        zeroed(model, opt)
        backward(model, opt, zero=False)
        opt.step()
        zeroed(model, opt)
    assert_same(model, reference(make, 4, **EXACT))


@without_closure
def test_a_model_within_another_has_an_optimizer_of_its_own(make: Make) -> None:
    whole = here(nn.Sequential(net(), nn.Linear(3, 3)))
    opts = [make(whole[0]), make(whole[1])]
    before = copied(whole)
    for _ in range(3):
        whole.zero_grad()
        backward(whole, opts[0], zero=False)
        for opt in opts:
            opt.step()
    assert moved(whole, before) == set(before) and [opt.steps for opt in opts] == [3, 3]


@every_optimizer
def test_closures_return_the_loss_before_the_step(make: Make) -> None:
    """They are called with gradients enabled, once where once is enough."""
    model, opt = started(make)
    calls: list[bool] = []
    with torch.no_grad():
        values = [opt.step(lambda: (calls.append(torch.is_grad_enabled()), backward(model, opt))[1]) for _ in range(3)]
    assert opt.rule.needs_closure or calls == [True] * 3
    assert all(isinstance(v, torch.Tensor) and v.ndim == 0 for v in values)
    assert values[0] == F.cross_entropy(net()(X), Y) and values[2] < values[0]
    assert_same(model, reference(make))


@every_optimizer
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_train_as_dense_ones(make: Make, layout: torch.layout, device: str) -> None:
    if device == "sim":
        pytest.skip("the simulated device has no sparse tensors")
    x, ends = X.double().relu(), []
    for given in (x, x.to_sparse(layout=layout)):
        model = net().double()
        losses = train(model, make(model), 4, given)
        ends.append(model)
    if make is MAKERS["KFAC-adaptive"]:  # which measures some samples of those that it can cut out
        assert losses[-1] < losses[0]
    else:
        assert_close(*ends)


@without_closure
def test_batches_of_all_sizes_count(make: Make) -> None:
    model = net()
    opt, before = make(model), copied(model)
    opt.preconditioner.schedule.factor_every = 1
    for size in (16, 5, 1, 16, 3):
        train(model, opt, 1, X[:size], Y[:size])
        assert moved(model, before) == set(before)
        before = copied(model)
    assert opt.steps == 5 and opt.skipped == 0 and {b.updates for b in opt.store.blocks} == {5}


@without_closure
def test_the_first_gradient_that_is_not_zero_makes_a_step(make: Make) -> None:
    model = net()
    opt, before = make(model), copied(model)
    for weight in (0.0, 0.0, 1.0):
        assert not moved(model, before)
        opt.zero_grad()
        (weight * F.cross_entropy(model(X), Y)).backward()
        opt.step()
    assert moved(model, before) == set(before)


@contextlib.contextmanager
def switched(switch: Callable[[Any], None], on: Any, off: Any) -> Iterator[None]:
    switch(on)
    try:
        yield
    finally:
        switch(off)


@every_optimizer
def test_settings_of_torch_change_nothing(make: Make) -> None:
    """Anomaly mode, deterministic algorithms, a default device: what the optimizer makes is where parameters are."""
    for setting in (
        torch.autograd.set_detect_anomaly(True),
        switched(torch.use_deterministic_algorithms, True, False),
        switched(torch.set_default_device, "meta", None),
    ):
        model = net()
        with setting:
            train(model, make(model))
        assert_same(model, reference(make))


@without_closure
def test_functional_calls_with_the_parameters_or_copies_train_as_the_model(make: Make) -> None:
    plain = reference(make, 12)
    for stand_in in (lambda p: p, torch.clone):
        model = net()
        call = lambda x, f=stand_in, m=model: torch.func.functional_call(
            m, {k: f(p) for k, p in m.named_parameters()}, (x,)
        )
        train(model, make(model), 12, call=call)
        assert_same(model, plain)


@without_closure
def test_a_penalty_on_a_gradient_is_followed(make: Make) -> None:
    ends = []
    for strength in (0.0, 10.0):
        model, x = net(), X.clone().requires_grad_()
        opt = make(model)
        for _ in range(3):
            opt.zero_grad()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (F.cross_entropy(output, Y) + strength * slope.square().mean()).backward()
            opt.step()
        ends.append(float(slope.detach().square().mean()))
    assert ends[1] < ends[0]


@every_optimizer
def test_parameters_changed_between_steps_stay_so(make: Make) -> None:
    model = net()
    opt, before = make(model, lr=0.0), flat(model)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5)
        train(model, opt, 1)
    assert torch.allclose(flat(model), before + 1.5)


@without_closure
def test_loaders_with_workers_give_the_same_run(make: Make) -> None:
    ends = []
    for workers in (0, 1):
        model, opt = started(make)
        for x, y in DataLoader(TensorDataset(X.cpu(), Y.cpu()), batch_size=5, num_workers=workers):
            train(model, opt, 1, x.to(X.device), y.to(Y.device))
        ends.append(model)
        assert opt.steps == 4
    assert_same(*ends)


@every_optimizer
def test_random_numbers_are_the_models_own(make: Make) -> None:
    """With dropout the losses at rate zero are those of SGD."""
    losses, states = [], []
    for build in (make, torch.optim.SGD):
        model = net(inner=nn.Dropout(0.5))
        opt = build(model if build is make else model.parameters(), lr=0.0)
        with seeded(3):
            losses.append(train(model, opt, 6))
            states.append((float(torch.rand(())), float(torch.rand((), device=X.device))))
    assert losses[0] == losses[1] and len(set(losses[0])) == 6 and states[0] == states[1]
