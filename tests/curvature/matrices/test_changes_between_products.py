"""Whatever changes between two products, the second is of the matrix as it is then, or it raises: none is outdated."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import DataLoader, Dataset

import curvature
from curvature.matrices.products import Repeated
from support.cases.case import seeded

BUILDERS = {
    "fisher": lambda *setting: curvature.fisher(*setting, curvature.exact()),
    "gauss_newton": curvature.gauss_newton,
    "empirical_fisher": curvature.empirical_fisher,
    "hessian": curvature.hessian,
}
Y = torch.tensor([0, 1, 1, 0, 2])
NUMBER = 1.0
NUMBERS = {"scale": [1.0]}
TEMPERATURE = 1.0
COMPUTED = 1.0
INNER = 1.0


@dataclass
class Settings:
    scale: float = 1.0
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(scale=1.0))


class Config:
    """With a number of the class, and one that is computed."""

    scale = 1.0

    @property
    def computed(self) -> float:
        return COMPUTED


class Straight(torch.autograd.Function):
    """The identity, whose gradient has a factor that only its backward pass reads."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * TEMPERATURE


def helper(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * NUMBER * scale


def damped(x: Tensor, scale: float = 1.0) -> Tensor:
    return x / scale


class Net(nn.Module):
    """Reads numbers from everywhere. The last layer is zero where the first may change unseen in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.drop = nn.Sequential(nn.Dropout(0.0), nn.Identity())
        self.register_buffer("factor", torch.ones(4, dtype=torch.float64))
        self.plain = torch.ones(4, dtype=torch.float64)
        self.listed = [torch.ones(4, dtype=torch.float64), 1.0]
        self.named: dict[str, Any] = {"deep": {"tensor": torch.ones(4, dtype=torch.float64), "layers": [nn.Tanh()]}}
        self.settings, self.config, self.scale = Settings(), Config(), 1.0
        self.function: Callable[[Tensor], Tensor] = torch.tanh
        self.partial = partial(helper, scale=1.0)
        self.is_cut = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.factor * self.plain * self.listed[0] * self.listed[1] * self.scale
        hidden = hidden * self.named["deep"]["tensor"] * self.settings.scale * self.settings.inner.scale
        hidden = hidden * self.config.scale * self.config.computed
        hidden = (
            self.named["deep"]["layers"][0](self.norm(hidden)) + self.partial(hidden) + damped(self.function(hidden))
        )
        hidden = Straight.apply(self.drop((lambda h: damped(h) * INNER)(hidden)))
        return self.last(hidden.detach() if self.is_cut else hidden)


class Loss(nn.Module):
    """Its own parts; and a scale from a global."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), reduction="sum")
        self.scales = {"own": torch.ones((), dtype=torch.float64)}
        self.reduction = "sum"

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return self.inner(output, y) * NUMBERS["scale"][0] * self.scales["own"]


class Items(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        return self.x[n], Y[n]


@dataclass
class Run:
    """A model, a loss and a batch; and what to undo at the end."""

    model: Any
    loss: Any
    x: Tensor
    y: Tensor
    undo: ExitStack

    def set(self, owner: Any, name: str, value: Any) -> None:
        patch = pytest.MonkeyPatch()
        self.undo.callback(patch.undo)
        patch.setattr(owner, name, value)

    def enter(self, context: Any) -> None:
        self.undo.enter_context(context)


def exchanged_memory(run: Run) -> None:
    run.model.first.weight.data = run.model.first.weight.data * 2


def copied_over(run: Run) -> None:
    run.model.first.weight.data.copy_(run.model.first.weight.data.flip(0).clone())


def rows_of_data(run: Run) -> None:
    weight = run.model.first.weight.data
    weight[[0, 1]] = weight[[1, 0]].clone()


def exchanged_and_the_old_memory_used(run: Run) -> None:
    old = run.model.first.weight.data
    run.model.first.weight.data = old.clone()
    old.mul_(7)
    run.loss.scales["own"].data.mul_(2)  # lest the fresh product is that of before


def in_place(run: Run) -> None:
    run.model.first.weight.detach().mul_(2)


def dropping(run: Run) -> None:
    run.model.drop[0].p = 0.9
    run.model.drop[0].train()


def another_parameter(run: Run) -> None:
    run.model.first.weight = nn.Parameter(run.model.first.weight.detach() * 2)


def permuted_weights_of_classes(run: Run) -> None:
    run.loss.inner.weight.numpy()[:] = [3.0, 2.0, 1.0]


def columns_of_the_batch(run: Run) -> None:
    run.x.numpy()[:, :2] = run.x.numpy()[:, 1::-1].copy()


def a_global(name: str) -> Callable[[Run], None]:
    return lambda run: run.set(sys.modules[__name__], name, 2.0)


def in_a_container(run: Run) -> None:
    numbers = NUMBERS["scale"]
    numbers[0] = 2.0
    run.undo.callback(numbers.__setitem__, 0, 1.0)


def parametrised(run: Run) -> None:
    register_parametrization(run.model.first, "weight", nn.Tanh())


def hooked_everywhere(run: Run) -> None:
    handle = register_module_forward_hook(lambda module, args, out: out * 2 if isinstance(module, nn.Tanh) else out)
    run.undo.callback(handle.remove)


def hooked(run: Run) -> None:
    run.model.first.register_forward_hook(lambda module, args, output: output * 2)


def a_method_of_the_object(run: Run) -> None:
    run.model.norm.forward = lambda x: 2 * x


def of_the_class(run: Run) -> None:
    run.set(nn.LayerNorm, "forward", lambda self, x: 2 * x)


def arguments_of_a_partial(run: Run) -> None:
    run.model.partial = partial(helper, scale=2.0)


def default_arguments(run: Run) -> None:
    run.set(damped, "__defaults__", (2.0,))


def put(path: str, value: Any) -> Callable[[Run], None]:
    """Give an attribute another value."""

    def change(run: Run) -> None:
        *owners, name = path.split(".")
        owner: Any = run
        for part in owners:
            owner = getattr(owner, part)
        run.set(owner, name, value)

    return change


def times_two(find: Callable[[Run], Tensor]) -> Callable[[Run], None]:
    """Unseen by autograd."""

    def change(run: Run) -> None:
        find(run).data.mul_(2)

    return change


CHANGES: dict[str, Callable[[Run], None]] = {
    "memory exchanged": exchanged_memory,
    "copied over": copied_over,
    "rows of data": rows_of_data,
    "old memory used": exchanged_and_the_old_memory_used,
    "another parameter": another_parameter,
    "parameter in place": in_place,
    "buffer unseen": times_two(lambda run: run.model.factor),
    "tensor of a module": times_two(lambda run: run.model.plain),
    "tensor in a list": times_two(lambda run: run.model.listed[0]),
    "number in a list": lambda run: run.model.listed.__setitem__(1, 2.0),
    "tensor in a dict": times_two(lambda run: run.model.named["deep"]["tensor"]),
    "layer in a list": lambda run: run.model.named["deep"]["layers"].__setitem__(0, nn.Softplus()),
    "dataclass": put("model.settings.scale", 2.0),
    "inside a dataclass": put("model.settings.inner.scale", 2.0),
    "number of a module": put("model.scale", 2.0),
    "number of a class": lambda run: run.set(Config, "scale", 2.0),
    "eps": put("model.norm.eps", 1.0),
    "dropout": dropping,
    "function of a module": put("model.function", torch.sin),
    "partial": arguments_of_a_partial,
    "default argument": default_arguments,
    "cut": put("model.is_cut", True),
    "global of a helper": a_global("NUMBER"),
    "global of a backward pass": a_global("TEMPERATURE"),
    "global of a property": a_global("COMPUTED"),
    "global of a function inside": a_global("INNER"),
    "global container": in_a_container,
    "hook": hooked,
    "hook of all modules": hooked_everywhere,
    "parametrisation": parametrised,
    "method of an object": a_method_of_the_object,
    "method of torch's class": of_the_class,
    "torch's function": lambda run: run.set(F, "layer_norm", lambda x, *rest: 2 * x),
    "weights of classes": permuted_weights_of_classes,
    "number of the loss": put("loss.inner.label_smoothing", 0.5),
    "tensor in a dict of the loss": times_two(lambda run: run.loss.scales["own"]),
    "columns of the batch": columns_of_the_batch,
    "targets": lambda run: run.y.numpy().__setitem__(slice(0, 2), [1, 0]),
    "autocast": lambda run: run.enter(torch.autocast("cpu", torch.bfloat16)),
}


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as undo:
        with seeded(0):
            model, x = Net().double(), torch.randn(5, 3, dtype=torch.float64)
        yield Run(model, Loss(), x, Y.clone(), undo)


def product(run: Run, build: str, V: Tensor) -> Tensor:
    found: Tensor = BUILDERS[build](run.model, run.loss, (run.x, run.y)) @ V
    return found


@pytest.mark.parametrize(("build", "columns"), [("gauss_newton", 1), ("hessian", 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, build: str, columns: int, run: Run) -> None:
    if change == "autocast":
        in_single_precision(run)
    operator = BUILDERS[build](run.model, run.loss, (run.x, run.y))
    V = operator.space.normal(columns)
    first = operator @ V
    assert passes_of(operator).kept.found, "what changes is to be seen, and not the reason why nothing is kept"
    torch.testing.assert_close(operator @ V, first)
    CHANGES[change](run)
    try:
        found = operator @ V
    except (RuntimeError, ValueError) as error:
        assert any(known in str(error) for known in ("has changed", "draws random numbers"))
        return
    expected = BUILDERS[build](run.model, run.loss, (run.x, run.y)) @ V
    assert not torch.allclose(expected, first, rtol=1e-5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("build", "columns"), [("fisher", 3), ("empirical_fisher", 1)])
def test_one_change_after_another(build: str, columns: int, run: Run) -> None:
    operator = BUILDERS[build](run.model, run.loss, (run.x, run.y))
    V = operator.space.normal(columns)
    found = [operator @ V]
    for change in ("rows of data", "tensor in a list", "global of a helper", "hook", "columns of the batch"):
        CHANGES[change](run)
        found.append(operator @ V)
        assert passes_of(operator).kept.found
        assert not torch.allclose(found[-1], found[-2])
        torch.testing.assert_close(found[-1], BUILDERS[build](run.model, run.loss, (run.x, run.y)) @ V)


def in_single_precision(run: Run) -> None:
    run.x = run.x.float()
    for part in (run.model.float(), run.loss.float()):
        vars(part).update({name: t.float() for name, t in vars(part).items() if isinstance(t, Tensor)})
    run.model.listed[0], run.loss.scales["own"] = run.model.listed[0].float(), run.loss.scales["own"].float()
    run.model.named["deep"]["tensor"] = run.model.named["deep"]["tensor"].float()


def passes_of(operator: Any) -> Repeated:
    found = operator._product.__self__.passes
    assert isinstance(found, Repeated)
    return found


@pytest.mark.parametrize("size", [2, 5])
def test_new_tensors_of_the_same_values(size: int, run: Run) -> None:
    """As a DataLoader gives them: kept, until their values are others, also where no sum shows it."""
    items = Items(run.x)
    operator = curvature.gauss_newton(run.model, run.loss, DataLoader(items, size))
    V = operator.space.normal(2)
    first = operator @ V
    assert len(passes_of(operator).kept.found) == math.ceil(5 / size)
    torch.testing.assert_close(operator @ V, first)
    items.x = items.x[:, [1, 0, 2]]
    found = operator @ V
    assert not torch.allclose(found, first)
    torch.testing.assert_close(found, curvature.gauss_newton(run.model, run.loss, DataLoader(items, size)) @ V)


def test_a_loss_that_is_a_function() -> None:
    """What it closes over is known: kept, until that changes."""
    with seeded(0):
        model, x = nn.Linear(3, 3).double(), torch.randn(5, 3, dtype=torch.float64)
    factors = [1.0]
    operator = curvature.gauss_newton(model, lambda output, y: factors[0] * F.cross_entropy(output, y), (x, Y))
    v = operator.space.normal(1)
    first = operator @ v
    assert passes_of(operator).kept.found
    factors[0] = 2.0
    torch.testing.assert_close(operator @ v, 2 * first)
