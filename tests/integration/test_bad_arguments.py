"""Arguments of the wrong type or out of range: refused by name, saying what is accepted, with nothing registered."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.training import backward

pytestmark = pytest.mark.fast

MAKERS: dict[str, Callable[..., KFAC]] = {
    "KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient,
    "KFAC-adaptive": functools.partial(KFAC, adaptive=True),
}  # fmt: skip
X, Y = torch.ones(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
POINTS = torch.eye(6, 4) + X

NO_NUMBERS = ["1", [1.0], {}, True, 1j, torch.ones(2), torch.tensor(1), np.ones(2), np.bool_(True), object()]
NO_WHOLE = ["1", 1.5, 1.0, True, [1], torch.tensor(1), math.nan]
NO_RANGE = [-1, -1e-9, math.nan, math.inf, -math.inf, torch.tensor(math.nan), np.float64(-1.0), 10**400]
NO_FLAG = [None, 0, 1, "yes", torch.tensor(True), np.bool_(True)]
BAD: dict[str, list[Any]] = {
    "lr": [None, *NO_NUMBERS, *NO_RANGE],
    "damping": [*NO_NUMBERS, *NO_RANGE],
    "momentum": [*NO_NUMBERS, *NO_RANGE, 1, 1.5],
    "weight_decay": [*NO_NUMBERS, *NO_RANGE],
    "factor_decay": [None, *NO_NUMBERS, *NO_RANGE, 1.0],
    "loss": ["mse", 3, nn.MSELoss, torch.ones(())],
    "inject": ["isotropic", 3, curvature.isotropic, curvature.exact],
    "seed": [None, *NO_WHOLE, 2**64],
    "adaptive": NO_FLAG,
}
LAYERS = {
    "sharing": [None, 3, "both", ["expand"], True],
    "factor_every": [*NO_WHOLE, 0, -1],
    "decompose_every": [*NO_WHOLE, 0, -1],
}
WHOLE = {"solver": [None, 3, "lu", ["cg"], True], "line_search": NO_FLAG}
WHOLE |= {name: [None, *BAD[name]] for name in ("momentum", "weight_decay")}  # None means something to KFAC alone
OWN = {
    "KFAC": BAD | LAYERS,
    "EKFAC": BAD | LAYERS,
    "NaturalGradient": BAD | WHOLE,
}
CELLS = [(maker, name) for maker, table in OWN.items() for name in table]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def assert_untouched(model: nn.Module) -> None:
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("maker, name", CELLS)
def test_arguments(maker: str, name: str):
    model = network()
    for value in OWN[maker][name]:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*(expected|choose|needs)") as found:
            MAKERS[maker](model, **{name: value})
        assert "found" in str(found.value) or "choose" in str(found.value) or "needs" in str(found.value)
        assert_untouched(model)


GOOD: dict[str, list[Any]] = {
    "lr": [0, 1, 0.5, np.float64(0.5), np.float32(0.5), np.int64(1), torch.tensor(0.5), torch.tensor([0.5])],
    "damping": [None, 0.0, 1, np.float32(0.1)],
    "momentum": [0, 0.99, np.float64(0.5)],
    "weight_decay": [0, 0.0, 0.1, np.float64(0.5)],
    "seed": [0, -1, np.int64(3), 2**63],
    "loss": [None, nn.CrossEntropyLoss(), F.cross_entropy],
}


@pytest.mark.parametrize("maker", OWN)
def test_arguments_that_are_accepted(maker: str):
    for name, values in GOOD.items():
        for value in values:
            model = network()
            if maker == "NaturalGradient" and name == "damping" and value == 0:
                continue  # which residuals may have alone
            opt = MAKERS[maker](model, **{name: value, **({"inject": curvature.isotropic()} if name == "loss" else {})})
            backward(model, opt, F.cross_entropy, X, Y)
            opt.step()
            assert opt.steps > 0


@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_no_model(maker: str):
    model = network()
    no_models = [model.parameters(), list(model.parameters()), dict(model.named_parameters()), model.forward, None]
    for value in [*no_models, model.state_dict(), model.named_parameters(), nn.Linear, "model"]:
        with pytest.raises(TypeError, match="model: pass the model itself, not its parameters"):
            MAKERS[maker](value)
    with pytest.raises(TypeError, match=r"\(found the class Linear, no instance of it\)"):
        MAKERS[maker](nn.Linear)
    with pytest.raises(TypeError, match=r"found function: curvature.FunctionModel makes a module"):
        MAKERS[maker](lambda x: x)
    with pytest.raises(TypeError, match=r"^inject: .*found isotropic itself: call it, isotropic\(\)"):
        MAKERS[maker](model, inject=curvature.isotropic)
    assert_untouched(model)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("given", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_arguments_of_other_optimizers(maker: str, given: Any):
    """Say what has their place, and which word is near to one that nobody knows."""
    model, known = network(), inspect.signature(getattr(MAKERS[maker], "func", MAKERS[maker])).parameters
    for name in inspect.signature(given).parameters.keys() - known.keys() - {"params"}:
        with pytest.raises(TypeError, match=rf"^{name}: \w+ has no {name}: (see|leave)"):
            MAKERS[maker](model, **{name: None})
    with pytest.raises(TypeError, match="betas: .*see momentum"):
        MAKERS[maker](model, betas=(0.9, 0.999))
    name = getattr(MAKERS[maker], "func", MAKERS[maker]).__name__
    for wrong, instead in {"learning_rate": "see lr", "dampin": "see damping", "xyz": f"see help({name})"}.items():
        with pytest.raises(TypeError, match=re.escape(f"{wrong}: {name} has no {wrong}: {instead}")):
            MAKERS[maker](model, **{wrong: 0.1})
    with pytest.raises(TypeError, match=f"^{name}: "):
        MAKERS[maker](model, 0.1, 0.2)
    with pytest.raises(TypeError, match=f"^{name}: .*'model'"):
        MAKERS[maker]()
    assert_untouched(model)


@pytest.mark.parametrize("options", [{"adaptive": True, "line_search": True}, {"inject": curvature.exact()}], ids=str)
def test_arguments_that_do_not_go_together(options: dict[str, Any]):
    model = network()
    with pytest.raises(ValueError, match=r"line_search: .* choose one of the two|loss: .* needs the loss module"):
        NaturalGradient(model, **options)
    assert_untouched(model)


@pytest.mark.parametrize("maker", MAKERS)
def test_parameter_groups(maker: str):
    """Bad options are refused when a group is added; those that a scheduler sets, before anything is changed."""
    model = network()
    opt = MAKERS[maker](model)
    model.append(nn.Linear(3, 3))
    params = list(model[3].parameters())
    for name in ("lr", "damping", "momentum", "weight_decay"):
        for value in [*NO_NUMBERS, *NO_RANGE]:
            with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
                opt.add_param_group({"params": params, name: value})
    for group in ([params], {"lr": 0.1}, None, params[0]):
        with pytest.raises(TypeError, match='param_group: expected a dict with "params"'):
            opt.add_param_group(group)  # type: ignore[arg-type]
    assert len(opt.param_groups) == 1
    before = [p.detach().clone() for p in model.parameters()]
    closure = lambda: F.cross_entropy(model(X), Y)
    for name in ("lr", "damping", "momentum", "weight_decay"):
        kept = opt.param_groups[0][name]
        for value in ["1", math.nan, -1.0, math.inf, torch.ones(2)]:
            opt.param_groups[0][name] = value
            with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
                opt.step(closure)
        opt.param_groups[0][name] = kept
    if maker == "NaturalGradient":  # whose steps are of all parameters together
        opt.param_groups[0]["weight_decay"] = None
        with pytest.raises(TypeError, match="^weight_decay: expected a number, found None"):
            opt.step(closure)
    assert opt.steps == 0 and all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def loss_of(model: nn.Module, opt: torch.optim.Optimizer, *, sends_back: bool = True) -> torch.Tensor:
    opt.zero_grad()
    loss = F.cross_entropy(model(POINTS), Y)
    if sends_back:
        loss.backward()
    return loss


def of_slopes(model: nn.Module, opt: torch.optim.Optimizer, *, sends_back: bool = True) -> torch.Tensor:
    """A loss that differentiates the model, as one writes it for `torch.optim.LBFGS`."""
    opt.zero_grad()
    x = POINTS.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (slope - 1).square().mean()
    if sends_back:
        loss.backward()
    return loss


# What a closure may not return, and what the message says of it.
WRONG_CLOSURES: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda m, o: (loss_of(m, o), None)[1], "None: return the loss"),
    "a tuple": (lambda m, o: (loss_of(m, o), 3), "a tuple of 2: return the loss alone"),
    "a list": (lambda m, o: [m(X)[:, 0], m(X)[:, 1]], r"a list of 2: .*torch\.cat"),
    "a number": (lambda m, o: loss_of(m, o).item(), r"\(float\): return the loss itself"),
    "a string": (lambda m, o: "loss", r"'loss' \(str\)"),
    "a matrix": (lambda m, o: m(X), r"shape \(6, 3\)"),
    "a loss that differentiates": (of_slopes, r"return the residuals r \(M,\)"),
    "the same before its gradient": (functools.partial(of_slopes, sends_back=False), "return the residuals r"),
}


@pytest.mark.parametrize("maker", ["KFAC", "EKFAC", "NaturalGradient"])
def test_closures_without_backward(maker: str):
    """Refused, also where there are gradients of an earlier step; not if the backward pass was before the step."""
    model = network()
    opt, before = MAKERS[maker](model), [p.detach().clone() for p in model.parameters()]
    for forget in (lambda: loss_of(model, opt, sends_back=False), lambda: F.cross_entropy(model(X), Y)):
        with pytest.raises(RuntimeError, match=r"^closure: it returned a loss \(.*call loss\.backward\(\)"):
            opt.step(forget)
        assert opt.steps == 0 and all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        loss_of(model, opt)
    loss = loss_of(model, opt)
    assert opt.step(lambda: loss) is loss and opt.steps == 1


@pytest.mark.parametrize("maker", MAKERS)
def test_closures_that_are_accepted(maker: str):
    """A loss of one entry, in whatever shape; a backward pass by function."""

    def by_function(model: nn.Module, opt: torch.optim.Optimizer) -> torch.Tensor:
        loss = loss_of(model, opt, sends_back=False)
        torch.autograd.backward([loss])
        return loss

    model = network()
    opt = MAKERS[maker](model)
    for closure in (lambda: loss_of(model, opt)[None], lambda: by_function(model, opt)):
        values = [opt.step(closure).item() for _ in range(3)]
        assert values[-1] < values[0] and opt.residual_rule is None


@pytest.mark.parametrize("maker", ["KFAC", "NaturalGradient"])
def test_a_loss_given_to_step_residuals(maker: str):
    """Refused, and then a loss is what the optimizer takes, as before; likewise residuals without a graph."""
    model = network()
    opt = MAKERS[maker](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"closure: expected the residuals \(M,\), found shape \(\), .* a loss"):
            opt.step_residuals(lambda: loss_of(model, opt))
        with pytest.raises(ValueError, match="without gradients"):
            opt.step(lambda: torch.ones(3))
        assert opt.residual_rule is None and opt.steps == 0
    values = [opt.step(lambda: loss_of(model, opt)).item() for _ in range(3)]
    assert values[-1] < values[0] and opt.store.blocks
    with pytest.raises(TypeError, match="residuals, and a loss before"):
        opt.step_residuals(lambda: model(X)[:, 0])
    assert opt.residual_rule is None


@pytest.mark.parametrize("maker", MAKERS)
def test_closures(maker: str):
    model = network()
    opt = MAKERS[maker](model)
    for value in (3, torch.ones(()), "loss"):
        with pytest.raises(TypeError, match="closure: expected a function that computes the loss, found"):
            opt.step(value)  # type: ignore[arg-type]
    for closure, found in WRONG_CLOSURES.values():
        with pytest.raises((TypeError, RuntimeError), match=rf"^closure: .*{found}"):
            opt.step(functools.partial(closure, model, opt))
    assert opt.steps == 0 and torch._C._len_torch_function_stack() == 0


def test_closures_of_adaptive_steps():
    model = network()
    opt = KFAC(model, adaptive=True)
    with pytest.raises(TypeError, match="pass a closure"):
        opt.step()
    with pytest.raises(TypeError, match=r"without a graph; return the loss itself, not loss\.detach"):
        opt.step(lambda: loss_of(model, opt).detach())


def squares_of_own(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - y).square().mean()


@pytest.mark.parametrize("name", ["kfac", "fisher_diagonal", "KFAC"])
@pytest.mark.parametrize("loss", [nn.HuberLoss(), squares_of_own], ids=["HuberLoss", "squares_of_own"])
def test_sampled_of_a_loss_without_a_likelihood(name: str, loss: Any, request: pytest.FixtureRequest):
    """Names the loss, those that have one, and the injections that do without."""
    model, target = network(), torch.ones(6, 3)
    with pytest.raises(ValueError, match=r"loss: sampled\(\) draws labels") as refused:
        if name == "KFAC":
            backward(model, KFAC(model, loss=loss, inject=curvature.sampled()), loss, X, target)
        else:
            getattr(curvature, name)(model, loss, (X, target), inject=curvature.sampled())
    known = "CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss, BCELoss, MSELoss, PoissonNLLLoss, GaussianNLLLoss"
    others = "isotropic(), which needs no loss, or, in a function that takes the targets, exact() or propagated()"
    named = request.node.callspec.id.split("-")[0]
    assert all(part in str(refused.value) for part in (f"and {named} has none", known, others)), refused.value


@pytest.mark.parametrize("wrong", [[nn.Linear(2, 2)], None, nn.Linear, "model"], ids=str)
def test_capture(wrong: object):
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, found"), curvature.capture(wrong):  # type: ignore[arg-type]
        pass


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda o, y: o.square()], ids=["torch's", "own"])
def test_models_that_return_one_number(loss: Any) -> None:
    """The Hessian needs no output of each sample."""
    model, data = ReturnsItsLoss(), (POINTS, torch.zeros(6))
    for call in (
        lambda: curvature.gauss_newton(model, loss, data) @ torch.ones(15),
        lambda: curvature.fisher_diagonal(model, loss, data),
        lambda: curvature.kfac(model, loss, data),
    ):
        with pytest.raises(ValueError, match="model: it returns one number for all samples"):
            call()
    with pytest.raises(ValueError, match=r"the shape of the output is \(\)"):
        curvature.per_sample_jacobians(model, POINTS)
    assert (curvature.hessian(model, loss, data) @ torch.ones(15)).isfinite().all()


def test_an_error_of_the_model_is_raised_at_once():
    class Odd(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Odd.calls += 1
            return self.missing(x)

    with pytest.raises(AttributeError, match="missing"):
        curvature.per_sample_gradients(Odd(X.shape[1], 3), nn.CrossEntropyLoss(), X, Y)
    assert Odd.calls == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 2), lambda: nn.LayerNorm(3), Scaled])
def test_nested_tensors(make: type, build: Callable[[], nn.Module]):
    model = build()
    opt = make(model)
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"weight: read beside a nested tensor.*to_padded_tensor"):
        model(x)
    del opt
