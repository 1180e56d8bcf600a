"""Outputs of a model: their forms, the layer that makes them, their size in units of the curvature, their classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import curvature
from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.habits import flat
from support.running_blocks import rows_of
from support.training import train


@dataclass
class Output:
    value: Any
    note: str = ""


class LogitsAndValue(NamedTuple):
    logits: Tensor
    value: Tensor


OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda mean, scale: (mean, scale), lambda out: out),
    "normal": (distributions.Normal, lambda out: (out.loc, out.scale)),
    "independent": (
        lambda mean, scale: distributions.Independent(distributions.Normal(mean, scale), 1),
        lambda out: (out.base_dist.loc, out.base_dist.scale),
    ),
    "beside another": (
        lambda mean, scale: (distributions.Normal(mean, scale), mean.detach()),
        lambda out: (out[0].loc, out[0].scale),
    ),
    "object": (lambda mean, scale: SimpleNamespace(mean=mean, scale=scale), lambda out: (out.mean, out.scale)),
    "logits": (
        lambda mean, scale: SimpleNamespace(twice=2 * mean, value=scale, logits=mean, loss=scale.sum()),
        lambda out: (out.logits, out.value),
    ),
    "logits by name": (LogitsAndValue, lambda out: (out.logits, out.value)),
    "dict": (lambda mean, scale: {"mean": mean, "n": 1, "scale": scale}, lambda out: (out["mean"], out["scale"])),
    "nested": (
        lambda mean, scale: Output(Output({"mean": mean, "rest": [None, {"scale": scale}]})),
        lambda out: (out.value.value["mean"], out.value.value["rest"][1]["scale"]),
    ),
}

with seeded(0):
    X, Y = torch.randn(12, 5).double(), torch.randn(12, 2).double()


def policy(form: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    with seeded(1):
        parts = {"body": nn.Linear(5, 4), "mean": nn.Linear(4, 2), "scale": nn.Linear(4, 2)}
    run = lambda m, x: form(m.mean(h := m.body(x).tanh()), m.scale(h).exp())
    return Raw(run, **parts).double()


def perceptron(end: Callable[[Tensor], Tensor], *layers: nn.Module) -> nn.Module:
    return Raw(lambda m, x: end(m.body(x)), body=nn.Sequential(nn.Linear(5, 4), nn.Tanh(), *layers)).double()


@OPTIMIZERS
@pytest.mark.parametrize("form", [name for name in FORMS if name != "tuple"])
def test_tensors_of_an_object_are_outputs(optimizer: Any, form: str) -> None:
    """Without them parameters moved along their gradients, or those behind the distribution did."""
    ends = []
    for name in ("tuple", form):
        make, parts = FORMS[name]
        model = policy(make)
        opt = optimizer(model)
        for _ in range(4):
            opt.zero_grad()
            mean, scale = parts(model(X))
            (-distributions.Normal(mean, scale).log_prob(Y).sum(1).mean()).backward()
            opt.step()
        assert "mean of others" not in opt.report()
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@OPTIMIZERS
def test_a_parameter_beside_logits_is_an_output(optimizer: Any) -> None:
    """As in a tuple, where it is returned as it is: it moved along its gradient."""
    ends = []
    for form in (lambda mean, scale: (mean, scale), lambda mean, scale: SimpleNamespace(logits=mean, scale=scale)):
        with seeded(1):
            model = Raw(lambda m, x: form(m.mean(x), m.scale), mean=nn.Linear(5, 2), scale=(2,)).double()  # noqa: B023
        opt = optimizer(model)
        for _ in range(4):
            opt.zero_grad()
            out = model(X)
            mean, scale = out if isinstance(out, tuple) else (out.logits, out.scale)
            ((mean - Y).square().mean() + (scale - 1).square().sum()).backward()
            opt.step()
        assert "mean of others" not in opt.report()
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@OPTIMIZERS
@pytest.mark.parametrize("inject", [curvature.isotropic(), curvature.exact(), curvature.empirical()], ids=repr)
@pytest.mark.parametrize("sizes", [(8, 1), (1,), (1, 1)], ids=str)
def test_a_squeezed_output_of_one_sample_is_an_output(optimizer: Any, inject: Any, sizes: tuple[int, ...]) -> None:
    """The last batch of an epoch may have one sample, and `squeeze()` leaves no axis: it was taken for a loss."""
    ends = []
    for squeeze in (lambda z: z[:, 0], lambda z: z.squeeze()):
        with seeded(1):
            model = perceptron(squeeze, nn.Linear(4, 1))
        opt = optimizer(model, loss=nn.MSELoss(), inject=inject)
        for step in range(6):
            opt.zero_grad()
            for size in sizes:
                x, y = X[step : step + size], Y[step : step + size, 0]
                (model(x).reshape(-1) - y).square().mean().backward()
            opt.step()
        ends.append(flat(model))
        assert "its loss" not in opt.report()
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


is_diagonal = lambda side: side.ndim == 2  # (groups, rows), of a whole one (groups, rows, rows)


def made(head: nn.Module, end: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A body of 3 outputs, a head of 4, and what the model makes of them."""
    return Raw(lambda m, x: end(m.head(h := m.body(x).tanh()), h), body=nn.Linear(2, 3), head=head)


def row_side(model: nn.Module, **settings: object) -> Tensor:
    """Of the head, after a renewal."""
    torch.manual_seed(0)
    x = torch.randn(50, 2)
    opt = KFAC(model, **settings)
    model(x).square().mean().backward()
    opt.step()
    (found,) = [rows_of(block) for block in opt.store.blocks if block.names[0] == "head.weight"]
    return found


DIRECT = {
    "as it is": lambda out, body: out,
    "reshaped": lambda out, body: out.view(-1, 2, 2),
    "in another precision": lambda out, body: out.double(),
    "beside others": lambda out, body: torch.cat([out, body], 1),
}
INDIRECT = {
    "summed": lambda out, body: out.sum(1, keepdim=True),  # all backprops of a sample are one number
    "summed over halves": lambda out, body: out.view(-1, 2, 2).sum(1),
    "used twice": lambda out, body: torch.cat([out, out.flip(1)], 1),
    "in another precision, and used again": lambda out, body: out.double() + 0 * out.flip(1).double(),
    "twice as large": lambda out, body: 2 * out,
    "flipped, in another precision": lambda out, body: (out + out.flip(1)).double(),
    "cut out": lambda out, body: out[:, 1:3],  # a diagonal, too, which nobody tells
}


@pytest.mark.parametrize("end", DIRECT.values(), ids=DIRECT)
def test_the_output_layer_has_a_diagonal(end):
    side = row_side(made(nn.Linear(3, 4), end))
    assert is_diagonal(side)
    torch.testing.assert_close(side, torch.ones(1, 4), rtol=0, atol=0.9)  # means of 50 squared normal numbers


def test_nothing_is_compared_to_know_the_output_of_an_autocast_region(monkeypatch: pytest.MonkeyPatch):
    """What is known where a copy is made need not be found again at every renewal."""
    same, compared = torch.equal, []
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a.shape) or same(a, b))

    def in_half(out: Tensor, body: Tensor) -> Tensor:
        assert out.dtype is torch.bfloat16
        return out.float()

    with torch.autocast("cpu", torch.bfloat16):
        side = row_side(made(nn.Linear(3, 4), in_half))
    assert (50, 4) not in compared and (200,) not in compared
    assert is_diagonal(side)


class Grows(nn.Module):
    """Returns what its body does, then that of a head on it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.is_whole = nn.Linear(3, 4), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) if self.is_whole else self.body(x)


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_layer_that_is_the_output_no_more_is_named(kind: type[KFAC], caplog: pytest.LogCaptureFixture) -> None:
    """All entries of its factor count now, and the diagonal is kept alone."""
    warn_once.cache_clear()
    torch.manual_seed(0)
    model, x = Grows(), torch.randn(50, 3)
    opt, said = kind(model), []
    for model.is_whole in (False, False, True, True):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        said.append(
            [record.message.split(": it")[0] for record in caplog.records if "diagonal of its" in record.message]
        )
    assert said == [[], [], ["body.weight"], ["body.weight"]]


def test_two_outputs_in_other_precisions_add_up():
    """The noise of both arrives as one sum, which is none of them."""
    model = made(nn.Linear(3, 4), lambda out, body: (out.double(), out.to(torch.float64)))
    torch.manual_seed(0)
    opt = KFAC(model)
    one, other = model(torch.randn(50, 2))
    (one.square().mean() + other.square().mean()).backward()
    opt.step()
    (side,) = [rows_of(block) for block in opt.store.blocks if block.names[0] == "head.weight"]
    torch.testing.assert_close(side.diagonal(dim1=1, dim2=2), torch.full((1, 4), 2.0), rtol=0, atol=1.6)
    assert not is_diagonal(side)


@pytest.mark.parametrize("end", INDIRECT.values(), ids=INDIRECT)
def test_what_is_not_the_output_itself_has_none(end):
    assert not is_diagonal(row_side(made(nn.Linear(3, 4), end)))


def classes() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(7, 5), torch.randint(3, (7,))


def scale_after(opt: Any, loss: Tensor) -> Any:
    """The optimizer's output scale, after one step."""
    opt.zero_grad()
    loss.backward()
    opt.step()
    return opt.recorder.outputs


@pytest.mark.parametrize("kind", [KFAC, NaturalGradient])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_empirical_fisher_measures_outputs_by_the_gradient_of_the_loss(kind: Any, scale: float):
    model, x, y = classes()
    f = model(x).detach()
    expected = ((f.softmax(1) - F.one_hot(y, 3)) * f).sum(1).square().mean().sqrt()
    opt, scaler = kind(model, inject=curvature.empirical()), torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(opt)
    assert opt.recorder.outputs.rms == pytest.approx(float(expected), rel=1e-5)
    assert opt.recorder.outputs.entries_per_sample == 1


def test_isotropic_curvature_measures_entries():
    model, x, y = classes()
    expected = model(x).detach().square().mean().sqrt()
    found = scale_after(KFAC(model), F.cross_entropy(model(x), y))
    assert found.rms == pytest.approx(float(expected), rel=1e-5)
    assert found.entries_per_sample == 3


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_gradients_that_are_zeroed_last_still_tell_the_curvature(kind: Any):
    """As where the loop combines gradients of several losses itself, and writes them back."""
    model, x, y = classes()
    opt = kind(model, inject=curvature.empirical(), factor_every=1)
    F.cross_entropy(model(x), y).backward()
    kept = [p.grad.clone() for p in model.parameters()]
    opt.zero_grad()
    for p, g in zip(model.parameters(), kept, strict=True):
        p.grad = g
    opt.step()
    assert opt.recorder.outputs.rms > 0


with seeded(0):
    PLACES, LABELS = torch.randn(8, 4, 5), torch.randint(3, (8, 4))


def tokens(axis: int = 1) -> nn.Module:
    with seeded(1):
        return Raw(lambda m, x: m.head(x).movedim(-1, axis), head=nn.Linear(5, 3))


def entropy(out: torch.Tensor, y: torch.Tensor = LABELS) -> torch.Tensor:
    """Of classes on either axis."""
    return F.cross_entropy(out, y) if out.shape[1] == 3 else F.cross_entropy(out.flatten(0, 1), y.flatten())


def by_classes(axis: int) -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.class_axis = axis
    return loss


@OPTIMIZERS
def test_classes_on_the_last_axis_have_the_same_curvature(optimizer: Any) -> None:
    """Steps are those of a model that has its classes on axis 1."""
    ends = []
    for axis in (1, -1):
        model = tokens(axis).double()
        opt = optimizer(model, loss=by_classes(axis), inject=curvature.exact())
        train(model, opt, entropy, PLACES.double(), LABELS, 6)
        ends.append(flat(model))
    torch.testing.assert_close(*ends)


@OPTIMIZERS
@pytest.mark.parametrize("axis", [1, -1])
def test_classes_on_an_axis_that_the_loss_does_not_say_are_refused(optimizer: Any, axis: int) -> None:
    """By the gradient; one of zero does not say."""
    model = tokens(axis)
    opt = optimizer(model, loss=by_classes(-axis) if axis == 1 else F.cross_entropy, inject=curvature.exact())
    (0 * entropy(model(PLACES))).backward()
    opt.step()
    with pytest.raises(RuntimeError, match=rf"loss.class_axis = {axis} "):
        entropy(model(PLACES)).backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    model = perceptron(lambda z: torch.nested.as_nested_tensor([z[:5], z[5:]]), nn.Linear(4, 2))
    opt = KFAC(model)
    with pytest.raises(RuntimeError, match="nested tensor"):
        model(X)
    assert not opt.steps
