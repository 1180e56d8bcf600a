"""`curvature.kept`: products that share the graphs of the first one."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import curvature
from support.cases.case import Raw, seeded

BUILDERS: dict[str, Callable[..., curvature.MatrixFree]] = {
    "fisher": lambda *setting: curvature.fisher(*setting, curvature.sampled(2)),
    "gauss_newton": curvature.gauss_newton,
    "empirical_fisher": curvature.empirical_fisher,
    "hessian": curvature.hessian,
}


def net() -> nn.Module:
    """Counts its forward passes."""

    def run(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.last(torch.tanh(m.factor * m.first(x)))

    model = Raw(run, first=nn.Linear(3, 4), last=nn.Linear(4, 3), factor=torch.ones(4))
    model.calls = 0
    return model


class Setting:
    def __init__(self) -> None:
        with seeded(0):
            self.model, self.x = net().double().eval(), torch.randn(5, 3, dtype=torch.float64)
        self.y, self.loss = torch.tensor([0, 1, 1, 0, 2]), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double())
        self.data: Any = [(self.x[:3], self.y[:3]), (self.x[3:], self.y[3:])]

    def operator(self, build: str = "gauss_newton") -> curvature.MatrixFree:
        return BUILDERS[build](self.model, self.loss, self.data)


@pytest.fixture
def setting() -> Setting:
    return Setting()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("build", BUILDERS)
def test_products_are_those_of_outside(build: str, loaded: bool, setting: Setting) -> None:
    if loaded:
        setting.data = DataLoader(TensorDataset(setting.x, setting.y), 2)
    operator = setting.operator(build)
    V = operator.space.normal(4)
    expected = [operator @ V, operator @ V[:, 0]]
    with curvature.kept(operator):
        _ = operator @ V[:, 0]
        calls = setting.model.calls
        torch.testing.assert_close([operator @ V, operator @ V[:, 0]], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((2 * operator) @ V, 2 * expected[0], rtol=1e-12, atol=1e-14)
        assert setting.model.calls == calls
        torch.testing.assert_close(operator.to_dense() @ V, expected[0])
    assert not operator.passes.kept  # type: ignore[union-attr]
    torch.testing.assert_close(operator @ V, expected[0], rtol=0, atol=0)
    assert setting.model.calls > calls


WEIGHT = "first.weight"
CHANGES: dict[str, tuple[Callable[[Setting], object], str]] = {
    "weights in place": (lambda s: s.model.first.weight.detach().mul_(2), f"model: {WEIGHT}"),
    "memory exchanged": (lambda s: setattr(s.model.first.weight, "data", s.model.first.weight * 2), f"model: {WEIGHT}"),
    "another parameter": (
        lambda s: setattr(s.model.first, "weight", nn.Parameter(s.model.first.weight * 2)), f"model: {WEIGHT}"
    ),
    "buffer in place": (lambda s: s.model.factor.mul_(2), "model: factor"),
    "no buffer": (lambda s: delattr(s.model, "factor"), "model: factor"),
    "training mode": (lambda s: s.model.last.train(), "model: its training mode"),
    "weights of classes": (lambda s: s.loss.weight.index_fill_(0, torch.tensor(0), 3.0), "loss: weight"),
    "samples": (lambda s: s.x.mul_(2), "data: tensor 0"),
    "one batch less": (lambda s: s.data.pop(), "data: the number of batches"),
}  # fmt: skip


@pytest.mark.parametrize("build", ["gauss_newton", "hessian"])
@pytest.mark.parametrize("name", [*CHANGES, "autocast"])
def test_a_change_inside_is_named(name: str, build: str, setting: Setting) -> None:
    operator = setting.operator(build)
    v = operator.space.normal(1)
    change, what = CHANGES.get(name, (lambda _: None, "autocast"))
    with curvature.kept(operator):
        _ = operator @ v
        change(setting)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast")
        with autocast, pytest.raises(RuntimeError, match=f"{what} has changed inside"):
            operator @ v


def test_a_change_before_the_first_product(setting: Setting) -> None:
    operator = setting.operator()
    with curvature.kept(operator):
        assert setting.loss.weight is not None
        setting.loss.weight[0] = 3.0
        V = operator.space.normal(2)
        _ = operator @ V
        torch.testing.assert_close(operator @ V, setting.operator() @ V)


def test_nothing_is_kept_after_a_pass_that_fails(setting: Setting) -> None:
    operator = setting.operator()
    v = operator.space.normal(1)
    expected = operator @ v
    setting.data.append((setting.x[:, :2], setting.y))
    with curvature.kept(operator):
        with pytest.raises(RuntimeError):
            operator @ v
        setting.data.pop()
        torch.testing.assert_close(operator @ v, expected)


def test_blocks_in_each_other(setting: Setting) -> None:
    operator = setting.operator()
    v = operator.space.normal(1)
    with curvature.kept(operator):
        with curvature.kept(operator):
            _ = operator @ v
        calls = setting.model.calls
        _ = operator @ v
        assert setting.model.calls == calls


def test_copies_make_graphs_of_their_own(setting: Setting) -> None:
    operator = setting.operator()
    V = operator.space.normal(2)
    with curvature.kept(operator):
        first = operator @ V
        other = copy.deepcopy(operator)
    setting.model.first.weight.data.mul_(2)
    torch.testing.assert_close(other @ V, first)
    assert not torch.allclose(operator @ V, first)


def test_other_operators_keep_nothing() -> None:
    space = curvature.Space.of({"w": nn.Parameter(torch.zeros(2))})
    with pytest.raises(TypeError, match="expected what gauss_newton"), curvature.kept(curvature.MatrixFree(space, abs)):
        pass
    with pytest.raises(TypeError, match="found Diagonal"), curvature.kept(curvature.Diagonal(space, torch.ones(2))):  # type: ignore[arg-type]
        pass


def solve(operator: curvature.MatrixFree, preconditioner: Any = None) -> None:
    v = operator.space.normal(1)
    curvature.conjugate_gradient(operator, v, damping=1.0, preconditioner=preconditioner)


CALLS: dict[str, Callable[[curvature.MatrixFree], Any]] = {
    "conjugate gradients": solve,
    "preconditioned": lambda G: solve(G, curvature.Diagonal(G.space, torch.ones(G.space.size).double())),
    "eigenvalues": lambda G: curvature.lanczos_eigenvalues(-G, 2),
    "density": lambda G: curvature.spectral_density(G.damped(1.0), 2, 4),
    "logdet": lambda G: curvature.lanczos_logdet(G, 1.0, 2, 4),
}


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    before, found = model.calls, [0]
    yield found
    found[0] = model.calls - before


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_many_products_keep_the_graph_of_a_single_batch(name: str, setting: Setting) -> None:
    operators = [
        BUILDERS["gauss_newton"](setting.model, setting.loss, data) for data in (setting.data, setting.data[0])
    ]
    for operator in operators:
        CALLS[name](operator)  # the first pass at a shape makes others
    with counted(setting.model) as of_two_batches:
        CALLS[name](operators[0])
    with counted(setting.model) as of_one:
        CALLS[name](operators[1])
    assert of_one == [1] and of_two_batches[0] > 2


class Operations(TorchDispatchMode):
    """Counts what torch is called for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("build", BUILDERS)
def test_the_checks_of_a_first_product_are_not_repeated(build: str, columns: int, setting: Setting) -> None:
    counts = []
    for is_first_inside in (False, True):
        operator = setting.operator(build)
        V = operator.space.normal(columns)
        if not is_first_inside:
            _ = operator @ V
        with curvature.kept(operator):
            _ = operator @ V
            with Operations() as seen:
                _ = operator @ V
        counts.append(seen.count)
    assert counts[0] == counts[1] > 0


def test_a_sparse_buffer() -> None:
    """A tensor without a place in memory is known by its version alone."""
    with seeded(0):
        forward = lambda m, x: torch.sparse.mm(m.near, m.layer(x))
        model, x = Raw(forward, layer=nn.Linear(3, 3), near=torch.eye(5).to_sparse()), torch.randn(5, 3)
    operator = curvature.gauss_newton(model, nn.MSELoss(), (x, x))
    v = operator.space.normal(1)
    expected = operator @ v
    with curvature.kept(operator):
        for _ in range(2):
            torch.testing.assert_close(operator @ v, expected)


def test_code_of_the_user_between_products_keeps_nothing(setting: Setting) -> None:
    setting.data = setting.data[0]
    operator = setting.operator()
    with counted(setting.model) as calls:
        solve(operator, lambda V: V)
    assert calls[0] > 2
