"""Models that return only their loss, in whatever form: trained as those that return their outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.preconditioners import SquaredChange
from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.recording import model_outputs
from optimizers.recording.model_outputs import OutputScale
from support.cases.case import Raw, seeded
from support.training import copied, natural_matrix

OPTIMIZERS = [KFAC, EKFAC, NaturalGradient]
entropy = F.cross_entropy


def network() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(k: int, size: int = 12) -> tuple[Tensor, Tensor]:
    with seeded(k):
        return torch.randn(size, 5, dtype=torch.float64), torch.randint(3, (size,))


@dataclass
class Inner:
    value: Any


@dataclass
class Outer:
    name: str
    inner: Inner


def kept(m: nn.Module, loss: Tensor) -> None:
    m.__dict__["loss"] = loss


# What a model makes of its loss, and how the loop finds it again.
FORMS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], Callable[[nn.Module, Any], Tensor]]] = {
    "scalar": (lambda m, loss: loss, lambda m, out: out),
    "dict": (lambda m, loss: {"loss": loss, "n": 3}, lambda m, out: out["loss"]),
    "tuple": (lambda m, loss: (loss, None), lambda m, out: out[0]),
    "dataclass": (lambda m, loss: Outer("", Inner(loss)), lambda m, out: out.inner.value),
    "attribute": (kept, lambda m, out: m.__dict__["loss"]),
}


def with_loss(inner: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], form: str) -> tuple[nn.Module, Any]:
    made, found = FORMS[form]
    model = Raw(lambda m, x, y: made(m, loss(m.inner(x), y)), inner=inner)
    return model, lambda x, y: found(model, model(x, y))


def train(opt: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor], steps: int = 8) -> list[float]:
    values = []
    for k in range(steps):
        opt.zero_grad()
        value = loss(*batch(k))
        value.backward()
        opt.step()
        values.append(value.item())
    return values


def trained(optimizer: Any, criterion: Callable[[Tensor, Tensor], Tensor], **options: Any) -> list[float]:
    """The run of a model that returns its outputs."""
    model = network()
    return train(optimizer(model, **options), lambda x, y: criterion(model(x), y))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_same_steps_as_with_outputs(form: str, optimizer: Any):
    model, loss = with_loss(network(), entropy, form)
    assert train(optimizer(model), loss) == trained(optimizer, entropy)


EVERY = [curvature.exact(), curvature.sampled(), curvature.propagated(), curvature.isotropic(2), curvature.empirical()]


def test_the_target_counts_where_the_model_knows_it():
    """What is ignored sends nothing back: the curvature is that of the other samples."""
    module = nn.CrossEntropyLoss(ignore_index=2)
    x, y = batch(0)
    counted = y != 2
    model, loss = with_loss(network(), module, "scalar")
    opt, other = NaturalGradient(model, loss=module), network()
    same = NaturalGradient(other, loss=module)
    loss(x, y).backward(), opt.step()
    module(other(x[counted]), y[counted]).backward(), same.step()
    torch.testing.assert_close(natural_matrix(opt) * len(x), natural_matrix(same) * int(counted.sum()))
    assert 0 < counted.sum() < len(x)


def words(k: int) -> tuple[Tensor, Tensor]:
    with seeded(k):
        return torch.randint(7, (6, 4)), torch.randint(3, (6, 4))


def tokens(form: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    with seeded(0):
        parts = {"embed": nn.Embedding(7, 5), "mix": nn.GRU(5, 5, batch_first=True), "head": nn.Linear(5, 3)}
        return Raw(lambda m, x, y: form(m.head(m.mix(m.embed(x))[0]), y), **parts).double()


@pytest.mark.parametrize("inject", [curvature.exact(), curvature.empirical()], ids=repr)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_tokens_that_are_flattened_for_the_loss(optimizer: Any, inject: curvature.Injection):
    """Samples are those of the input, as for a model that returns (N, C, T)."""
    flat = tokens(lambda z, y: F.cross_entropy(z.reshape(-1, 3), y.reshape(-1)))
    plain = tokens(lambda z, y: z.movedim(-1, 1))
    ends = []
    for model, loss in ((flat, lambda out, y: out), (plain, F.cross_entropy)):
        # with empirical() the size of the output, which sets that of the step, is one of each sample or of each token
        opt = optimizer(model, lr=float(repr(inject) == "exact()"), loss=nn.CrossEntropyLoss(), inject=inject)
        for k in range(5):
            opt.zero_grad()
            x, y = words(k)
            loss(model(x, y), y).backward()
            opt.step()
        sides = [side.diagonal() for block in opt.store.blocks for side in getattr(block, "sides", ())]
        ends.append([*copied(model).values(), *sides])
    for value, other in zip(*ends, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-8)


def test_several_loss_functions_and_what_is_no_output():
    """All that the losses receive; not a penalty on the parameters, nor what is computed without gradients."""

    def run(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = m.inner(x)
        with torch.no_grad():
            F.mse_loss(z, z + 1)
        return F.cross_entropy(z, y) + F.mse_loss(m.inner[0](x), x[:, :1].expand(-1, 6)) + F.l1_loss(m.scale, x[0, :2])

    model = Raw(run, inner=network(), scale=(2,)).double()
    with curvature.capture(model) as tape:
        out = model(*batch(0))
    outputs = model_outputs.find_outputs(tape, out)
    assert [tuple(x.shape) for x in outputs.tensors] == [(12, 3), (12, 6)] and outputs.count == 12
    values = train(KFAC(model), model, 12)
    assert values[-1] < values[0]


own = lambda output, y: (output.logsumexp(1) - output.gather(1, y[:, None])[:, 0]).mean()


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", [KFAC, EKFAC], ids=lambda o: o.__name__)
def test_without_a_loss_function_it_is_empirical(optimizer: Any, caplog: pytest.LogCaptureFixture):
    """As the model that returns its outputs, with empirical(), but for the unit of the first step."""
    warn_once.cache_clear()
    (model, loss), other = with_loss(network(), own, "scalar"), network()
    opt, same = optimizer(model), optimizer(other, inject=curvature.empirical())
    with caplog.at_level(logging.WARNING, "optimizers"):
        loss(*batch(0)).backward()
        opt.step()
    entropy(other(batch(0)[0]), batch(0)[1]).backward()
    same.step()
    assert "empirical" in caplog.text and "empirical" in opt.report().splitlines()[-1]
    for one, two in zip(opt.store.blocks, same.store.blocks, strict=True):
        torch.testing.assert_close(one.mean_eigenvalue, two.mean_eigenvalue)
    values = []
    for _ in range(30):  # one batch: those of random labels differ by more than training changes
        opt.zero_grad()
        values.append(loss(*batch(0)))
        values[-1].backward()
        opt.step()
    assert values[-1] < 0.9 * values[0]


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC], ids=lambda o: o.__name__)
@pytest.mark.parametrize("inject", EVERY, ids=repr)
def test_what_cannot_be_sent_back_is_replaced_by_empirical(optimizer: Any, inject: curvature.Injection):
    """Which the report says, unless it was asked for."""
    runs = []
    for each in (inject, curvature.empirical()):
        model, loss = with_loss(network(), own, "scalar")
        opt = optimizer(model, loss=nn.CrossEntropyLoss(), inject=each)
        runs.append((opt, train(opt, loss)))
    (opt, values), (_, expected) = runs
    assert values == expected and opt.store.blocks
    assert ("empirical()" in opt.report()) == (inject != curvature.empirical())


def test_rows_of_a_loss_that_no_function_of_torch_made_are_refused():
    model, loss = with_loss(network(), own, "scalar")
    opt = NaturalGradient(model)
    with pytest.raises(RuntimeError, match="return the outputs"):
        loss(*batch(0))
    assert opt.steps == 0


def test_outputs_that_are_masked_do_not_count_in_their_size():
    """Logits of -inf are no part of the root mean square, and say nothing of how far a step may go."""
    scale = OutputScale()
    scale.update(OutputScale.of([torch.tensor([[3.0, -torch.inf], [4.0, torch.nan]])]), SquaredChange())
    assert scale.rms is not None and float(scale.rms) == pytest.approx(12.5**0.5) and scale.entries_per_sample == 1
    scale.update(OutputScale.of([torch.full((2, 3), torch.inf)]), SquaredChange())  # nothing to be learnt
    assert float(scale.rms) == pytest.approx(12.5**0.5) and scale.entries_per_sample == 1


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC], ids=lambda o: o.__name__)
@pytest.mark.parametrize("adds", [False, True])
def test_a_hand_written_loss_is_that_of_the_outputs(optimizer: Any, adds: bool):
    """The gradient of each sample's own loss: of a sum not N times that, as `loss` says."""
    squares = lambda output, y: (output - 1).square().sum() / (1 if adds else len(output))
    (model, loss), other = with_loss(network(), squares, "scalar"), network()
    options = {"inject": curvature.empirical(), "loss": nn.MSELoss(reduction="sum" if adds else "mean")}
    opt, same = (optimizer(each, **options) for each in (model, other))
    x, y = batch(0)
    loss(x, y).backward()
    squares(other(x), y).backward()
    opt.step()
    same.step()
    for one, two in zip(opt.store.blocks, same.store.blocks, strict=True):
        torch.testing.assert_close(one.mean_eigenvalue, two.mean_eigenvalue)


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_a_loss_between_zeroed_and_other_gradients_leaves_the_former_out(optimizer: Any) -> None:
    """One call returns outputs, another its loss."""

    def run(zeroed: bool) -> dict[str, Tensor]:
        net = network()
        model = Raw(lambda m, x, y=None: m.net(x) if y is None else (m.net(x) - y).square().mean(), net=net).double()
        opt = optimizer(model, inject=curvature.empirical())
        if zeroed:
            entropy(model(5 * batch(0)[0]), batch(0)[1]).backward()
            opt.zero_grad()
        model(batch(1)[0], batch(2)[0][:, :3]).backward()
        entropy(model(batch(3)[0]), batch(3)[1]).backward()
        opt.step()
        return copied(model)

    torch.testing.assert_close(run(True), run(False))
