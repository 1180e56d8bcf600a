"""Habits around the loop of `torch.optim.SGD`: parameters in other places, changes in place, data, chance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.cases.case import seeded
from support.habits import (
    QUIET,
    Make,
    X,
    Y,
    assert_same,
    every_optimizer,
    flat,
    net,
    reference,
    started,
    train,
    without_closure,
)

pytestmark = QUIET


@without_closure
def test_functional_calls_with_the_parameters_or_copies_train_as_the_model(make: Make) -> None:
    """With the parameters, or others in their place."""
    plain = reference(make, 12)
    for stand_in in (lambda p: p, torch.clone):
        model = net()
        call = lambda x, f=stand_in, m=model: torch.func.functional_call(
            m, {k: f(p) for k, p in m.named_parameters()}, (x,)
        )
        train(model, make(model), 12, call=call)
        assert_same(model, plain)


@without_closure
def test_gradients_by_torch_func_may_be_assigned_by_hand(make: Make) -> None:
    """By torch.func.grad, assigned by hand."""
    model, opt = started(make)
    for _ in range(12):
        loss = lambda p: F.cross_entropy(torch.func.functional_call(model, p, (X,)), Y)
        for name, g in torch.func.grad(loss)(dict(model.named_parameters())).items():
            model.get_parameter(name).grad = g
        opt.step()
    assert_same(model, reference(make, 12))


@without_closure
def test_a_penalty_on_a_gradient_is_followed(make: Make) -> None:
    """A penalty on the gradient by the input: it is in `.grad`, and the step follows that."""
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
    """Parameters changed between steps stay so."""
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
