"""Ways to compute the same faster: ``J v`` with dual numbers where that is right, and vectors in smaller chunks."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.attempts import log_once
from curvature.gradients import Linearised
from curvature.matrices import passes
from curvature.matrices.jacobians import ForwardMode, right_way
from support.cases.case import Raw, seeded
from support.oracles import brute_force as oracle


class WithoutJvp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g * ctx.saved_tensors[0]


class WrongJvp(WithoutJvp):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return 2.01 * t * ctx.saved_tensors[0]


def convolution() -> nn.Module:
    """With a norm, whose backward pass takes long to differentiate."""
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2))


def past_its_convolution() -> nn.Module:
    head = nn.Linear(8, 3)
    run = lambda m, x: torch.tanh(m.layer(x)).flatten(1) @ reads[0].T + m.head.bias
    reads = [head.weight]
    return Raw(run, layer=convolution(), head=head)


def convolved(square: type[WithoutJvp]) -> nn.Module:
    run = lambda m, x: m.b(square.apply(m.a(x)).flatten(1))
    return Raw(run, a=convolution(), b=nn.Linear(8, 3))


norms = lambda: nn.Sequential(convolution(), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
CONVOLVED: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "right": (norms, True),
    "no forward derivative": (lambda: convolved(WithoutJvp), False),
    "a wrong forward derivative": (lambda: convolved(WrongJvp), False),
    "read past the module": (past_its_convolution, False),
}


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("name", CONVOLVED)
def test_columns_through_norms(name: str, columns: int, at_once: int, caplog: Any, monkeypatch: Any) -> None:
    """Columns are right whatever forward mode gives, one by one and together, in batches of unlike sizes."""
    monkeypatch.setattr("curvature.matrices.jacobians.CACHED_ENTRIES", at_once)
    make, is_right = CONVOLVED[name]
    with seeded(0):
        model, x = make().double(), torch.randn(5, 1, 3, 3, dtype=torch.float64)
    y, loss = torch.tensor([0, 1, 1, 0, 2]), nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0]).double())
    caplog.set_level(logging.INFO, logger="curvature")
    log_once.cache_clear()
    kinds = ways_taken(monkeypatch)
    operator = curvature.gauss_newton(model, loss, [(x[:3], y[:3]), (x[3:], y[3:])])
    V = operator.space.normal(columns)
    expected = oracle.Matrices(model, loss, (x, y)).gauss_newton @ V
    for _ in range(2):
        torch.testing.assert_close(operator @ V, expected, rtol=1e-10, atol=1e-12)
    assert ("J v takes two backward passes" in caplog.text) != (is_right or at_once == 1)
    assert kinds == [ForwardMode if is_right and at_once > 1 else Linearised] * 4


def test_rounding_hides_no_wrong_derivative(monkeypatch: Any) -> None:
    """In bfloat16 a layer that is off by half is within a hundred roundings: forward mode is not taken there."""
    kinds = ways_taken(monkeypatch)
    with seeded(0):
        model, x = convolved(WrongJvp).bfloat16(), torch.randn(5, 1, 3, 3).bfloat16()
    operator = curvature.gauss_newton(model, nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 1, 0, 2])))
    _ = operator @ operator.space.normal(2)
    assert kinds == [Linearised]


def test_columns_elsewhere_take_two_backward_passes(monkeypatch: Any) -> None:
    """Forward mode is not faster without norms."""
    kinds = ways_taken(monkeypatch)
    model, x = nn.Linear(3, 3).double(), torch.randn(4, 3).double()
    operator = curvature.gauss_newton(model, nn.MSELoss(), (x, x))
    expected = oracle.Matrices(model, nn.MSELoss(), (x, x)).gauss_newton
    torch.testing.assert_close(operator @ torch.eye(12).double(), expected)
    assert kinds == [Linearised]


def test_other_functions_at_a_known_shape_are_compared_anew(monkeypatch: Any) -> None:
    """A branch that the first batch does not take has a wrong forward derivative."""
    with seeded(0):
        a, x = nn.Linear(3, 3).double(), torch.randn(6, 3, dtype=torch.float64).abs()
    norm = nn.GroupNorm(1, 3).double()
    model = Raw(lambda m, x: m.norm(WrongJvp.apply(m.a(x)) if x[0, 0] < 0 else m.a(x)), a=a, norm=norm)
    x[3:] *= -1
    y, loss = torch.tensor([0, 1, 2] * 2), nn.CrossEntropyLoss()
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    kinds = ways_taken(monkeypatch)
    operator = curvature.gauss_newton(model, loss, data)
    v = operator.space.normal(1)[:, 0]
    expected = sum(oracle.Matrices(model, loss, batch).gauss_newton @ v for batch in data) / 2
    torch.testing.assert_close(operator @ v, expected, rtol=1e-10, atol=1e-12)
    assert kinds == [ForwardMode, Linearised]


def ways_taken(monkeypatch: Any) -> list[type]:
    """The kinds of ways that are found from here on."""
    kinds: list[type] = []

    def noted(*arguments: Any) -> Any:
        way = right_way(*arguments)
        kinds.append(type(way))
        return way

    monkeypatch.setattr("curvature.matrices.products.right_way", noted)
    return kinds


@pytest.mark.parametrize("build", [curvature.fisher_blocks, curvature.kfac, curvature.ekfac])
def test_vectors_sent_back_one_by_one(build: Any, monkeypatch: Any) -> None:
    """As where the backprops of one vector are large; with samples of unequal masses."""
    with seeded(0):
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).double()
        x, weight = torch.randn(5, 2, 3, 3, dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0, 3.0]).double()
    data, loss = (x, torch.tensor([0, 1, 2, 3, 0])), nn.CrossEntropyLoss(weight)
    together = build(model, loss, data).to_dense()
    diagonal = curvature.fisher_diagonal(model, loss, data)
    monkeypatch.setattr(passes, "CACHED_ELEMENTS", 1)
    monkeypatch.setattr(passes, "BATCHED_ELEMENTS", 1)
    torch.testing.assert_close(build(model, loss, data).to_dense(), together)
    torch.testing.assert_close(curvature.fisher_diagonal(model, loss, data), diagonal)
