"""Natural-gradient steps in a training loop, against dense algebra on the Jacobians of single samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import empirical, exact, isotropic, sampled
from optimizers import NaturalGradient
from support.cases.case import Raw, randomise, seeded
from support.combinations import in_turn
from support.habits import flat
from support.oracles import brute_force as oracle
from support.plans import plans_of
from support.training import backward, closure_of

pytestmark = pytest.mark.fast

N, C, DAMPING = 6, 3, 0.05
along = lambda direction: -direction / direction.norm()
damped = lambda matrix, damping=DAMPING: matrix + damping * torch.eye(len(matrix)).double()


def attend(m: nn.Module, tokens: Tensor) -> Tensor:
    h = m.table(tokens) + m.place
    h = m.norm(h + m.mix(h, h, h, need_weights=False)[0])
    return (h @ m.table.weight.T).mean(1)[:, :C]


def attention() -> nn.Module:
    mix = {"mix": nn.MultiheadAttention(4, 2, batch_first=True), "norm": nn.LayerNorm(4)}
    return Raw(attend, table=nn.Embedding(7, 4), place=nn.Parameter(torch.zeros(5, 4)), **mix)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "few parameters": (lambda: nn.Linear(2, C), lambda: torch.randn(N, 2)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, C)), lambda: torch.randn(N, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten(),
            nn.Linear(27, C),
        ),
        lambda: torch.randn(N, 2, 4, 4),
    ),
    "attention": (attention, lambda: torch.randint(7, (N, 5))),
    "a raw parameter": (
        lambda: Raw(lambda m, x: m.out((x * m.scale).sin()), scale=nn.Parameter(torch.ones(4)), out=nn.Linear(4, C)),
        lambda: torch.randn(N, 4),
    ),
}  # fmt: skip
ENTROPY = nn.CrossEntropyLoss()
INJECTIONS = {"exact": exact(), "sampled": sampled(2), "isotropic": isotropic(3), "empirical": empirical()}


def case(name: str, device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
    make, inputs = MODELS[name]
    with seeded(1):
        model, x, y = make(), inputs(), torch.randint(C, (N,))
        randomise(model)
    x = x.double() if x.is_floating_point() else x
    return model.double().to(device), x.to(device), y.to(device)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def started(model: nn.Module, **options: Any) -> NaturalGradient:
    return NaturalGradient(model, **{"damping": DAMPING, "loss": ENTROPY, **options})


def train(opt: NaturalGradient, model: nn.Module, x: Any, y: Tensor, loss: Any = ENTROPY) -> Tensor:
    """One step of a training loop; the direction that it took, of length one."""
    before = flat(model)
    backward(model, opt, loss, x, y)
    opt.step()
    moved = flat(model) - before
    return moved / moved.norm()


def rows_of(model: nn.Module, x: Tensor, vectors: Tensor) -> Tensor:
    """(k * n, P): v^T J for every vector (k, n, ...) and sample."""
    jacobians = [oracle.jacobian(model, x[n : n + 1])[1] for n in range(len(x))]
    return torch.stack([v[n].flatten() @ jacobians[n] for v in vectors for n in range(len(x))])


def fisher_of(model: nn.Module, inject: Any, x: Tensor, y: Tensor, seed: int = 0) -> Tensor:
    """Of the mean cross-entropy, with the vectors that an injection draws."""
    if inject == empirical():
        return oracle.Matrices(model, ENTROPY, (x, y)).empirical_fisher
    if inject == exact():
        return oracle.Matrices(model, ENTROPY, (x, y)).fisher
    output = model(x).detach()
    own = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(seed)))  # of the first pass
    vectors = inject.vectors(output, ENTROPY, generator=torch.Generator().manual_seed(own))
    rows = rows_of(model, x, vectors)
    return rows.T @ rows / len(x)


def assert_natural(found: Tensor, model: nn.Module, matrix: Tensor, **tolerances: float) -> None:
    """The direction is that of the model's gradients, preconditioned with the matrix."""
    expected = along(torch.linalg.solve(damped(matrix), gradient_of(model)))
    torch.testing.assert_close(found, expected, **tolerances)


@pytest.mark.parametrize("inject", INJECTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_direction_is_the_natural_gradient(name: str, inject: str):
    model, x, y = case(name)
    matrix = fisher_of(model, INJECTIONS[inject], x, y)
    opt = started(model, inject=INJECTIONS[inject])
    assert_natural(train(opt, model, x, y), model, matrix)
    assert not any(plan.general for plan in plans_of(model))
    block = opt.store.blocks[0]
    assert "woodbury" in opt.report() and block.bytes >= 8 * len(block.problem.matrix) ** 2 + 8 * N


@pytest.mark.parametrize("name", ["few parameters", "perceptron", "attention"])
def test_conjugate_gradients(name: str):
    """They end early: their progress is what is asked for."""
    model, x, y = case(name)
    matrix = fisher_of(model, exact(), x, y)
    opt = started(model, solver="cg")
    assert_natural(train(opt, model, x, y), model, matrix, rtol=0, atol=0.05)
    assert opt.stats()["accepted"] and not math.isnan(opt.stats()["step_size"])


def test_conjugate_gradients_begin_where_they_ended():
    """On the same problem again there is less to do, and many steps on it come close to the solution."""
    model, x, y = case("perceptron")
    matrix = fisher_of(model, exact(), x, y)
    opt = started(model, lr=0.0, damping=1e-3, solver="cg")
    iterations: list[int] = []
    for _ in range(12):
        train(opt, model, x, y)
        iterations.append(opt.store.blocks[0].iterations)
    g = gradient_of(model)
    fall = lambda u: g @ u - u @ damped(matrix, 1e-3) @ u / 2
    last = opt.rule.state.norm * opt.store.blocks[0].last  # type: ignore[attr-defined]  # of gradients of norm one
    assert fall(last) > 0.995 * fall(torch.linalg.solve(damped(matrix, 1e-3), g))
    opt.store.blocks[0].last = None
    train(opt, model, x, y)
    assert max(iterations) < opt.store.blocks[0].iterations


def test_momentum():
    """SPRING: (G + damping) u = g + damping * momentum * last u."""
    model, x, y = case("perceptron")
    opt = started(model, momentum=0.8)
    last = torch.zeros_like(flat(model))
    for batch in (x, x + 0.5, x - 0.5):
        matrix = damped(fisher_of(model, exact(), batch, y))
        found = train(opt, model, batch, y)
        last = torch.linalg.solve(matrix, gradient_of(model) + DAMPING * 0.8 * last)
        torch.testing.assert_close(found, along(last))
        kept = torch.cat([opt.state[p]["direction"].flatten() for p in model.parameters()])
        torch.testing.assert_close(kept, last)


@pytest.mark.parametrize("solver", ["woodbury", "cg"])
def test_a_loaded_state_needs_a_forward_pass(solver: str):
    """What is solved with is of a batch, and in no checkpoint."""
    model, x, y = case("perceptron")
    opt = NaturalGradient(model, solver=solver)
    train(opt, model, x, y)
    resumed = NaturalGradient(model, solver=solver)
    resumed.load_state_dict(opt.state_dict())
    before = flat(model)
    with pytest.raises(RuntimeError, match="no forward pass of the model since"):
        resumed.step()
    assert torch.equal(flat(model), before)


@pytest.mark.training_run
@in_turn(options=[{"line_search": True}, {"adaptive": True}, {}], solver=["woodbury", "cg"])
def test_closures_of_the_loss(solver: str, options: dict[str, bool]):
    model, x, y = case("attention")
    opt = NaturalGradient(model, loss=ENTROPY, solver=solver, **options)
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    losses = [float(opt.step(closure).detach()) for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0]
    if options:
        assert all(b <= a for a, b in zip(losses, losses[1:], strict=False))
        assert opt.stats()["step_size"] != 0 and "step 15" in opt.summary()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("solver", ["woodbury", "cg"])
def test_a_batch_that_is_not_finite_changes_nothing(solver: str, bad: float):
    model, x, y = case("perceptron")
    opt = NaturalGradient(model, loss=ENTROPY, solver=solver)
    train(opt, model, x, y)
    before, steps = flat(model), opt.steps
    train(opt, model, x * bad, y)
    assert torch.equal(flat(model), before) and opt.skipped == 1 and opt.steps == steps
    twin = copy.deepcopy([model, opt])
    train(opt, model, x, y)
    train(twin[1], twin[0], x, y)
    assert bool(torch.isfinite(flat(model)).all()) and torch.equal(flat(model), flat(twin[0]))


def test_options_that_groups_disagree_on():
    model, x, y = case("perceptron")
    opt = NaturalGradient(model, loss=ENTROPY)
    first = opt.param_groups[0]["params"].pop(0)
    opt.add_param_group({"params": [first], "damping": 0.5})
    with pytest.raises(ValueError, match="damping: all parameters are solved for together"):
        train(opt, model, x, y)


# -- layer by layer, against the dense diagonal blocks of the Gauss-Newton matrix


def shared(m: nn.Module, tokens: Tensor) -> Tensor:
    """An embedding that is also the last weight, a bias that two weights share, places, a norm, a branch."""
    h = torch.tanh(m.own(m.table(tokens)))
    h = m.norm(F.linear(torch.tanh(F.linear(h, m.one, m.bias)), m.two, m.bias))
    return (m.branch(h) if tokens[0, 0] == 0 else h).sum(1) @ m.table.weight.T


GROUPS = [
    ["table.weight"], ["one"], ["two"], ["bias"], ["own.weight", "own.bias"], ["norm.weight", "norm.bias"],
    ["branch.weight", "branch.bias"],
]  # fmt: skip


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        layers = {"own": nn.Linear(3, 3), "norm": nn.LayerNorm(3), "branch": nn.Linear(3, 3)}
        model = Raw(shared, table=nn.Embedding(5, 3), one=(3, 3), two=(3, 3), bias=(3,), **layers).double()
        x, y = torch.randint(5, (4, 3)), torch.randint(5, (4,))
    x[:, 0] = 0
    return model, x, y


def direction(opt: NaturalGradient, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where a step goes that no bound cuts, of length one, and the gradient there."""
    before, closure = flat(model), closure_of(model, opt, ENTROPY, x, y)
    closure()
    gradient = gradient_of(model)
    opt.step(closure)
    moved = flat(model) - before
    return moved / moved.norm(), gradient


def expected(model: nn.Module, x: Tensor, y: Tensor, damping: Tensor | float = DAMPING) -> Tensor:
    """The inverse of the damped blocks."""
    matrix = oracle.blocks(model, oracle.Matrices(model, ENTROPY, (x, y)).gauss_newton, GROUPS)
    return torch.linalg.inv(matrix + torch.as_tensor(damping).double().expand(len(matrix)).diag())


def points(found: Tensor, wanted: Tensor, allowed: float = 1e-8) -> None:
    torch.testing.assert_close(found, along(wanted), rtol=0, atol=allowed)


@pytest.mark.parametrize("solver", ["woodbury", "cg"])
def test_every_layer_has_its_exact_block(solver: str) -> None:
    model, x, y = problem()
    inverse = expected(model, x, y)
    opt = NaturalGradient(model, damping=DAMPING, loss=ENTROPY, solver=solver, layerwise=True, line_search=True)
    found, gradient = direction(opt, model, x, y)
    assert sorted(map(sorted, (b.names for b in opt.store.blocks))) == sorted(map(sorted, GROUPS))
    points(found, inverse @ gradient, 0.05 if solver == "cg" else 1e-8)


def test_groups_with_rates_and_dampings_of_their_own() -> None:
    model, x, y = problem()
    few = [*model.own.parameters(), model.two]
    rest = [p for p in model.parameters() if not any(p is q for q in few)]
    options: dict[str, Any] = {"damping": DAMPING, "loss": ENTROPY, "layerwise": True, "line_search": True}
    opt = NaturalGradient(model, **options)
    opt.param_groups.clear()
    opt.add_param_group({"params": few, "lr": 0.25, "damping": 0.3})
    opt.add_param_group({"params": rest})
    is_few = torch.cat([torch.full((p.numel(),), any(p is q for q in few)) for p in model.parameters()])
    inverse = expected(model, x, y, torch.where(is_few, 0.3, DAMPING))
    found, gradient = direction(opt, model, x, y)
    points(found, torch.where(is_few, 0.25, 1.0) * (inverse @ gradient))
    assert opt.param_groups[0]["params"].pop(1) is model.own.bias
    opt.add_param_group({"params": [model.own.bias], "damping": 0.1})
    with pytest.raises(ValueError, match=r"damping: own\.weight, own\.bias are solved.*\[0\.3, 0\.1\]"):
        direction(opt, model, x, y)


def test_the_usual_damping_is_that_of_each_block() -> None:
    """0.05 of its mean eigenvalue, in the smaller of parameter and sample space."""
    model, x, y = problem()
    matrix = oracle.Matrices(model, ENTROPY, (x, y)).gauss_newton
    damping, positions = torch.zeros(len(matrix)).double(), oracle.positions(model)
    for group in GROUPS:
        where = torch.cat([positions[name].flatten() for name in group])
        damping[where] = 0.05 * matrix.diagonal()[where].sum() / min(len(where), 4 * 5)
    inverse = expected(model, x, y, damping)
    opt = NaturalGradient(model, loss=ENTROPY, layerwise=True, line_search=True)
    found, gradient = direction(opt, model, x, y)
    points(found, inverse @ gradient)


def test_a_layer_that_is_read_later_and_one_that_is_frozen() -> None:
    model, x, y = problem()
    with_branch, without = x.clone(), torch.where(x == 0, 1, x)
    opt = NaturalGradient(model, damping=DAMPING, loss=ENTROPY, layerwise=True, line_search=True)
    for batch, frozen in ((without, False), (with_branch, False), (with_branch, True)):
        model.two.requires_grad_(not frozen)
        where = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
        model.two.requires_grad_(True)
        inverse = expected(model, batch, y)
        model.two.requires_grad_(not frozen)
        found, gradient = direction(opt, model, batch, y)
        points(found, torch.where(where, inverse @ gradient, 0.0))
    assert ["two"] not in [list(block.names) for block in opt.store.blocks]


def test_residuals_are_refused() -> None:
    model, x, _ = problem()
    with pytest.raises(ValueError, match="layerwise: residuals are solved for all parameters together"):
        NaturalGradient(model, layerwise=True).step(lambda: model(x)[:, 0])
