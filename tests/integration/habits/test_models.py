"""Habits with models that `torch.optim.SGD` trains: what they are made of and what they return.

That odd ones are trained at all is in tests/optimizers/test_odd_models.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from optimizers import NaturalGradient
from support.cases.case import Raw, seeded
from support.habits import (
    QUIET,
    Make,
    X,
    assert_close,
    assert_same,
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


def words() -> Tensor:
    return torch.arange(80, device=X.device).reshape(16, 5) % 7


def reader(sparse: bool = False) -> nn.Module:
    run = lambda m, i: m.head(m.words(i).mean(1))
    with seeded(1):
        return here(Raw(run, words=nn.Embedding(7, 4, sparse=sparse), head=nn.Linear(4, 3)))


@without_closure
def test_sparse_embeddings_train_as_dense_ones(make: Make, device: str) -> None:
    if device == "sim":
        pytest.skip("the simulated device has no sparse tensors")
    models = [reader(True), reader(False)]
    for model in models:
        train(model, make(model), x=words())
    assert models[0].words.weight.grad.is_sparse
    # on CUDA the two kinds of gradients add up the places of a word in different orders
    assert_close(*models, 1e-5) if device.startswith("cuda") else assert_same(*models)


@every_optimizer
def test_statistics_of_batch_norm_are_those_of_sgd(make: Make) -> None:
    models = [net(inner=nn.BatchNorm1d(6)) for _ in range(2)]
    train(models[0], make(models[0], lr=0.0), 4)
    train(models[1], torch.optim.SGD(models[1].parameters(), lr=0.0), 4)
    one, other = (dict(model.named_buffers()) for model in models)
    assert one["1.num_batches_tracked"] == 4 and all(torch.equal(b, other[k]) for k, b in one.items())


@without_closure
def test_sequences_of_all_lengths_count(make: Make) -> None:
    run = lambda m, x: m.head(m.layer(x)[0][:, -1])
    model = here(Raw(run, layer=nn.GRU(4, 5, batch_first=True), head=nn.Linear(5, 3)))
    opt = make(model)
    opt.preconditioner.schedule.factor_every = 1
    for length in (2, 3, 5, 2):
        before = copied(model)
        train(model, opt, 1, X.view(16, 2, 4).repeat(1, 3, 1)[:, :length])
        assert moved(model, before) == set(before)
    assert {b.updates for b in opt.store.blocks} == {4}


@without_closure
def test_activation_checkpointing_gives_the_same_run(make: Make) -> None:
    """Equal to the model without, in both of its ways; also where recorded and other steps alternate."""
    plain = reference(make, 13)
    for reentrant in (False, True):
        model = Raw(lambda m, x, r=reentrant: checkpoint(m.net, x, use_reentrant=r), net=net())
        train(model, make(model), 13, X.clone().requires_grad_())
        assert_close(model, plain, 1e-5)
        assert checkpoints.CheckpointFunction is CheckpointFunction
    model = Raw(lambda m, x: CheckpointFunction.apply(m.net, True, x), net=net())
    with pytest.raises(RuntimeError, match=r"net.0.weight is read within checkpoint.*use_reentrant=False"):
        train(model, make(model), x=X.clone().requires_grad_())
    assert torch._C._len_torch_function_stack() == 0


@without_closure
def test_a_checkpoint_around_the_model_gives_the_same_run_or_is_refused(make: Make) -> None:
    """Rows of single samples are looked for within the call; they were those of another vector."""
    model, opt = started(make)
    call = functools.partial(checkpoint, model, use_reentrant=False)
    if make is NaturalGradient:
        with pytest.raises(RuntimeError, match=r"within checkpoint\(...\); call checkpoint within its forward"):
            train(model, opt, 1, call=call)
    else:
        train(model, opt, 3, call=call)
        assert_same(model, reference(make))


@every_optimizer
def test_lazy_layers_are_trained_once_they_have_shapes(make: Make) -> None:
    model = here(nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3)))
    opt = make(model)
    losses = train(model, opt, 8)
    assert losses[-1] < 0.9 * losses[0] and opt.steps == 8 and "0.weight" in opt.report()


@every_optimizer
def test_whole_numbers_stay_and_single_numbers_are_trained(make: Make) -> None:
    """Whole-numbered parameters and buffers stay; one number is a parameter; no layer has to be linear."""
    run = lambda m, x: m.size * (x * m.scale)[:, :3] + m.shift
    model = Raw(run, size=(), scale=(8,), shift=(3,))
    model.size.data.fill_(1.0), model.scale.data.fill_(1.0)
    model.kept = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    model.register_buffer("table", torch.arange(3))
    before = copied(here(model))
    losses = train(model, make(model), 8)
    assert moved(model, before) == {"size", "scale", "shift"} and losses[-1] < losses[0]


@without_closure
def test_layers_that_are_never_used_stay(make: Make) -> None:
    model = Raw(lambda m, x: m.net(x), net=net(), spare=nn.Linear(3, 3))
    before = copied(here(model))
    opt = make(model)
    train(model, opt)
    assert moved(model, before) == {name for name in before if name.startswith("net")}
    assert torch.equal(flat(model.net), flat(reference(make)))
    assert "spare.weight" in opt.report()


@without_closure
def test_layers_unused_at_times_move_when_used(make: Make) -> None:
    run = lambda m, x: (m.one if m.turn % 2 else m.two)(m.inner(x).tanh())
    model = Raw(run, inner=nn.Linear(8, 6), one=nn.Linear(6, 3), two=nn.Linear(6, 3))
    opt = make(here(model))
    for model.turn in range(6):
        before = copied(model)
        train(model, opt, 1)
        used = "one" if model.turn % 2 else "two"
        assert moved(model, before) == {f"{layer}.{kind}" for layer in ("inner", used) for kind in ("weight", "bias")}
    assert "not used" not in opt.report()


@without_closure
def test_data_parallel_is_the_module_itself(make: Make, device: str) -> None:
    """Which is the module itself where there is no GPU; the optimizer of the wrapper, or of what it wraps."""
    if device == "sim":
        pytest.skip("the simulated device has no copies of a model, as torch makes them for several CUDA devices")
    for outer in (True, False):
        model = net()
        wrapped = nn.DataParallel(model)
        train(wrapped, make(wrapped if outer else model))
        assert_same(model, reference(make))


@without_closure
def test_scripted_models_are_refused(make: Make) -> None:
    for whole in (torch.jit.script(net()), torch.jit.trace(net(), X)):
        with pytest.raises(TypeError, match=r"model: .*scripted or traced"):
            make(whole)
        assert not whole._forward_hooks


@every_optimizer
def test_a_model_with_nothing_to_train_is_refused(make: Make) -> None:
    model = net().requires_grad_(False)
    with pytest.raises(ValueError, match="model: no parameter requires a gradient"):
        make(model)
    assert not model._forward_hooks and not model._forward_pre_hooks
