"""Losses that keep something, in a closure, a global, an object or a module: our calls leave no trace in them."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw
from support.comparisons import right_rows
from support.oracles import brute_force as oracle

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
Kept = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Any]]  # a loss, and what it keeps now
HISTORY: list[Any] = []
AVERAGE = 0.5


def appends_to_a_list() -> Kept:
    history: list[Tensor] = [torch.zeros(3)]

    def loss(o: Tensor, y: Tensor) -> Tensor:
        history.append(o.detach().mean(0))
        return F.cross_entropy(o - 0.3 * history[0] - 0.1 * len(history), y) * (1 + 0.01 * len(history))

    return loss, lambda: history


def rebinds_a_number() -> Kept:
    average = 0.5

    def loss(o: Tensor, y: Tensor) -> Tensor:
        nonlocal average
        value = F.cross_entropy(o, y)
        value, average = value / average, 0.9 * average + 0.1 * value.detach()
        return value

    return loss, lambda: average


def moves_a_tensor_in_place() -> Kept:
    centre, others = torch.zeros(3), torch.ones(3)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(2 * (o - centre.clone()) * others, y)
        centre.mul_(0.9).add_(0.1 * o.detach().mean(0))
        return value

    return loss, lambda: centre


def fills_a_dict_of_lists() -> Kept:
    log: dict[str, Any] = {"values": [], "calls": 1.0, "queue": deque(maxlen=3), "by": defaultdict(list)}

    def loss(o: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(o, y)
        log["values"].append(value.detach())
        log["queue"].append(value.detach())
        log["by"]["value"].append(value.detach())
        log["calls"] += 1
        return value * log["calls"]

    return loss, lambda: log


def uses_globals() -> Kept:
    return of_globals, lambda: (HISTORY, AVERAGE)


def of_globals(o: Tensor, y: Tensor) -> Tensor:
    global AVERAGE
    value = F.cross_entropy(o, y)
    HISTORY.append(value.detach())
    value, AVERAGE = value / AVERAGE, 0.9 * AVERAGE + 0.1 * value.detach()
    return value


def calls_one_that_uses_globals() -> Kept:
    return lambda o, y: 2 * of_globals(o, y), lambda: (HISTORY, AVERAGE)


def is_decorated() -> Kept:
    inner, kept = rebinds_a_number()

    @wraps(inner)
    def loss(*args: Any) -> Tensor:
        return inner(*args)

    return loss, kept


def is_partial() -> Kept:
    inner, kept = appends_to_a_list()
    return partial(lambda scale, o, y: scale * inner(o, y), 2.0), kept


class Hidden:
    """What is kept where nobody looks."""

    def __init__(self) -> None:
        self.inner = [type("Inner", (), {"calls": 0})]


class Trainer:
    def __init__(self) -> None:
        self.history: list[Tensor] = []
        self.average: Any = 0.5

    def loss(self, o: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(o, y)
        result = value / self.average
        self.note(value.detach())
        return result

    def note(self, value: Tensor) -> None:
        self.last = value
        self.history.append(value)
        self.average = 0.9 * self.average + 0.1 * value

    __call__ = loss


def is_an_object() -> Kept:
    trainer = Trainer()
    return trainer, lambda: {k: v for k, v in vars(trainer).items() if k != "last"}


def is_a_method() -> Kept:
    trainer, kept = is_an_object()
    return trainer.loss, kept


def is_compiled() -> Kept:
    history: list[float] = []

    def loss(o: Tensor, y: Tensor) -> Tensor:
        history.append(1.0)
        return F.cross_entropy(o, y) * (1 + 0.1 * len(history))

    return torch.compile(loss, backend="eager"), lambda: history


def calls_a_module() -> Kept:
    criterion = Centred(False)
    return lambda o, y: criterion(o, y), lambda: dict(criterion.named_buffers())


LOSSES = [
    appends_to_a_list, rebinds_a_number, moves_a_tensor_in_place, fills_a_dict_of_lists, uses_globals,
    calls_one_that_uses_globals, is_decorated, is_partial, is_a_method, is_compiled, is_an_object, calls_a_module,
]  # fmt: skip
CALLS: dict[str, Any] = {
    "per_sample_gradients": curvature.per_sample_gradients,
    "per_sample_norms": curvature.per_sample_norms,
    "check_gradients": curvature.check_gradients,
    "gauss_newton": lambda *a: curvature.gauss_newton(*a) @ torch.ones(15),
    "hessian": lambda *a: curvature.hessian(*a) @ torch.ones(15),
    "kfac": curvature.kfac,
    "empirical_fisher": lambda *a: curvature.empirical_fisher(*a).to_dense(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", LOSSES)
def test_functions_that_keep_something(make: Callable[[], Kept], name: str) -> None:
    (loss, kept), model = make(), nn.Linear(4, 3)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    loss(model(x), y)
    before = copy.deepcopy(kept())
    vars(getattr(loss, "__self__", None) or Hidden()).pop("last", None)
    found = [CALLS[name](model, loss, x, y) for _ in range(2)]
    assert "last" not in vars(getattr(loss, "__self__", None) or Hidden())
    torch.testing.assert_close(kept(), before, rtol=0, atol=0)
    if name in ("gauss_newton", "hessian", "empirical_fisher", "per_sample_norms"):
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    loss(model(x), y).backward()


@pytest.mark.parametrize("make", LOSSES)
def test_every_sample_is_alone_with_what_a_function_kept_before(make: Callable[[], Kept]) -> None:
    """The oracle makes the function anew for every sample, with the same history."""
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))

    def fresh() -> Callable[[Tensor, Tensor], Tensor]:
        global AVERAGE
        HISTORY.clear()
        AVERAGE = 0.5
        loss, _ = make()
        loss(model(x), y)
        return loss

    found = curvature.per_sample_gradients(model, fresh(), x, y)["weight"]
    for n in range(5):
        (expected,) = torch.autograd.grad(fresh()(model(x[n : n + 1]), y[n : n + 1]), model.weight)
        torch.testing.assert_close(found[n], expected)


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_loss_that_changes_from_call_to_call_is_refused(size: float) -> None:
    hidden, model = Hidden(), nn.Linear(4, 3)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        hidden.inner[0].calls += 1
        return F.cross_entropy(o, y) * (1 + size * 1e-4 * hidden.inner[0].calls)

    with pytest.raises(ValueError, match="two calls with the same arguments differ.*nn.Module"):
        curvature.per_sample_gradients(model, loss, torch.randn(5, 4), torch.randint(3, (5,)))


LOSSES_OF_CHANCE = {
    "noise on the output": lambda o, y: F.cross_entropy(o + 0.1 * torch.randn_like(o), y),
    "weights": lambda o, y: (F.cross_entropy(o, y, reduction="none") * torch.rand(len(o))).mean(),
    "and samples that meet": lambda o, y: F.cross_entropy(o + torch.randn(()), y).sqrt() * torch.rand(()),
}


@pytest.mark.parametrize("name", ["gauss_newton", "hessian", "fisher", "empirical_fisher"])
@pytest.mark.parametrize("loss", LOSSES_OF_CHANCE)
def test_a_loss_that_draws_random_numbers_has_no_matrix(loss: str, name: str) -> None:
    """Also where the matrix of the whole batch needs nothing of samples."""
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    operator = getattr(curvature, name)(model, LOSSES_OF_CHANCE[loss], x, y)
    for form in (lambda: operator @ torch.ones(15), operator.to_dense):
        with pytest.raises(ValueError, match="two calls with the same arguments differ: it draws random numbers"):
            form()


def test_a_loss_of_a_tuple_that_draws_random_numbers_is_refused() -> None:
    model = Raw(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    loss = lambda o, y: F.cross_entropy(o[0] + o[1] * torch.rand(()), y)
    with pytest.raises(ValueError, match="two calls with the same arguments differ: it draws random numbers"):
        curvature.per_sample_gradients(model, loss, torch.randn(5, 4), torch.randint(3, (5,)))


TABLE = torch.randn(1000, 3, dtype=torch.float64)
CONFIG = {"scale": 2.0, "names": ["a", "b"]}


def of_a_table(o: Tensor, y: Tensor) -> Tensor:
    return CONFIG["scale"] * (o - TABLE[y]).square().mean()


def test_what_a_function_only_reads_is_copied_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y, copied = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,)), []
    expected = oracle.per_sample_gradients(model, of_a_table, x, y)
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda t, **k: copied.append(t.shape) or clone(t, **k))
    for k in range(2):
        copied.clear()
        torch.testing.assert_close(curvature.per_sample_gradients(model, of_a_table, x, y), expected)
        assert (TABLE.shape in copied) == (k == 0)


def test_functions_that_read_parameters() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    weight = model.weight
    loss = lambda o, y: F.cross_entropy(o, y) + 0.1 * weight.square().sum() + 0.1 * model.bias.square().sum()
    right_rows(model, loss, x, y)


class Logged(nn.Module):
    """Keeps its parts, as for a log; `history` and `seen` are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.seen = [torch.zeros(3)], torch.zeros(())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(o, y)
        self.last = loss.detach()
        self.history.append(o.detach())
        self.seen += 1
        self.calls += 1
        return loss


class Centred(nn.Module):
    """With the moving mean of all outputs, in place or not: at each call from where it is."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(2 * (o - self.centre.clone()), y)
        if self.in_place:
            self.centre.mul_(0.9).add_(0.1 * o.detach().mean(0))
        else:
            self.centre = 0.9 * self.centre + 0.1 * o.detach().mean(0)
        return loss


def state_of(loss: nn.Module) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in vars(loss).items() if k[0] != "_"} | copy.deepcopy(dict(loss._buffers))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", [Logged, lambda: Centred(True), lambda: Centred(False)])
def test_modules_that_keep_something(make: Any, name: str) -> None:
    """They are left as they were, objects and values, and every sample is alone with what they kept before."""
    model, loss, x, y = nn.Linear(4, 3), make(), torch.randn(5, 4), torch.randint(3, (5,))
    loss(model(x), y)
    before = vars(loss) | loss._buffers
    values = state_of(loss)
    for _ in range(2):
        found = CALLS[name](model, loss, x, y)
        now = vars(loss) | loss._buffers
        assert now.keys() == before.keys() and all(now[k] is before[k] for k in now)
        torch.testing.assert_close(state_of(loss), values, rtol=0, atol=0)
        if name == "per_sample_gradients":
            for n in range(5):
                (expected,) = torch.autograd.grad(copy.deepcopy(loss)(model(x[n : n + 1]), y[n : n + 1]), model.weight)
                torch.testing.assert_close(found["weight"][n], expected)
    loss(model(x), y).backward()


def test_a_loss_that_keeps_something_is_copied_with_its_operator() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    G = curvature.gauss_newton(model, Centred(True), (x, y))
    v = torch.ones(15)
    torch.testing.assert_close(pickle.loads(pickle.dumps(G)) @ v, G @ v)
    torch.testing.assert_close(copy.deepcopy(G) @ v, G @ v)
