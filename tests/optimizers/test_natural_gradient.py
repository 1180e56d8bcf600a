"""Exact Gauss-Newton steps, against dense algebra on the Jacobian of a loop of batch size one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from curvature import Jacobian, LeastSquares
from optimizers import NaturalGradient
from support.cases.case import randomise, seeded
from support.differential import laplacian
from support.habits import flat
from support.oracles import derivatives as oracle_derivatives

pytestmark = pytest.mark.fast

SIZES = {"few parameters": (3, 40), "many parameters": (12, 8)}  # width and number of samples
closure_of = lambda model, x, residual: lambda: residual(model, x.detach().requires_grad_())


def problem(name: str) -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    width, count = SIZES[name]
    with seeded(0):
        model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        randomise(model)
        x = torch.randn(count, 2).double()

    def residual(model: nn.Module, x: Tensor) -> Tensor:
        return (laplacian(model(x)[:, 0], x) - x.prod(1).detach().sin()) / count**0.5

    return model.double(), x, residual


def joined(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def dense(model: nn.Module, x: Tensor, residual: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """J (M, P) and r (M,)."""
    rows = oracle_derivatives.residual_jacobian(model, residual, x)
    return torch.cat([g.flatten(1) for g in rows.values()], 1), closure_of(model, x, residual)().detach()


# -- linear least squares


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", SIZES)
def test_least_squares(name: str, pieces: int, device: str):
    """Values from one place, or put together from several."""
    model, x, residual = problem(name)
    expected, r = dense(model, x, residual)
    model, x, r = model.to(device), x.to(device), r.to(device)
    expected = expected.to(device)
    values = torch.cat([residual(model, part.detach().requires_grad_()) for part in x.chunk(pieces)])
    jacobian = Jacobian.of(values, model)
    assert len(jacobian.parts) == pieces and jacobian.shape == tuple(expected.shape)
    torch.testing.assert_close(jacobian.to_dense(), expected)
    torch.testing.assert_close(jacobian.gram(), expected @ expected.T)
    solver = LeastSquares(jacobian)
    assert solver.matrix.shape[0] == min(expected.shape)
    v = jacobian.split(torch.sin(torch.arange(float(expected.shape[1]), device=device).double()))
    for times in (solver.times, jacobian.times):
        torch.testing.assert_close(times(v), expected @ joined(v))
    torch.testing.assert_close(joined(jacobian.transposed(r)), expected.T @ r)
    for damping in (1e-3, 0.0):  # by Cholesky, by eigenvalues, and by these once they are known
        damped = expected.T @ expected + damping * torch.eye(expected.shape[1], device=device).double()
        by_hand = torch.linalg.pinv(damped, rtol=1e-13, hermitian=True) @ expected.T @ r
        torch.testing.assert_close(joined(solver.solve(r, damping)), by_hand, rtol=1e-5, atol=1e-6)
    again = joined(solver.solve(r, 1e-3))
    torch.testing.assert_close(again, joined(LeastSquares(jacobian).solve(r, 1e-3)), rtol=1e-6, atol=1e-9)


def test_a_matrix_that_is_not_definite_is_solved_by_its_eigenvalues():
    """Two samples are the same, and the damping is lost in rounding."""
    model, x, residual = problem("many parameters")
    x = torch.cat([x[:3], x[:3]])
    expected, r = dense(model, x, residual)
    with torch.enable_grad():
        solver = LeastSquares(Jacobian.of(closure_of(model, x, residual)(), model))
    solver.matrix -= 1e-12 * solver.matrix.trace() * torch.eye(6).double()
    found = joined(solver.solve(r, 1e-300))
    torch.testing.assert_close(found, torch.linalg.pinv(expected, rtol=1e-6) @ r, rtol=1e-4, atol=1e-6)


# -- steps


Curve = Callable[[float], Tensor]


def bent_step(
    seen: Callable[[Tensor], Tensor], jacobian: Tensor, solve: Callable[[Tensor], Tensor], direction: Tensor
) -> Tensor:
    """The displacement by hand: straight or bent back, whichever is lower, and one correction.

    Args:
        seen: the residuals after a displacement.
        solve: ``J^+ v``.
    """
    zero = torch.zeros_like(direction)

    def halved(curve: Curve, start: Tensor) -> tuple[float, Tensor]:
        losses = [seen(start).square().sum()]
        for k in range(31):
            losses.append(seen(curve(0.5**k)).square().sum())
            if losses[-1] >= min(losses[:-1]) and min(losses[:-1]) < losses[0]:
                break
        best = min(range(len(losses)), key=lambda k: losses[k])
        return (0.0, start) if best == 0 else (0.5 ** (best - 1), curve(0.5 ** (best - 1)))

    length, straight = halved(lambda t: t * direction, zero)
    h = 0.1 * (length or 2**-10)
    r = seen(zero)
    bend = -solve((seen(h * direction) - r - h * jacobian @ direction) * 2 / h**2)
    _, bent = halved(lambda t: t * direction + t**2 / 2 * bend, zero)
    lower = min(straight, bent, key=lambda d: seen(d).square().sum())
    correction = -solve(seen(lower))
    return halved(lambda t: lower + t * correction, lower)[1]


def residuals_after(model: nn.Module, x: Tensor, residual: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Of a displacement of what is trained, from where the model is now."""
    twin = copy.deepcopy(model)
    trained = [p for p in twin.parameters() if p.requires_grad]
    before = nn.utils.parameters_to_vector(trained).detach()

    def seen(displacement: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(before + displacement, trained)
        return closure_of(twin, x, residual)().detach()

    return seen


@pytest.mark.parametrize(("damping", "rate"), [(0.0, 1.0), (0.1, 1.0), (0.1, 0.3)])
@pytest.mark.parametrize("name", SIZES)
def test_the_step_is_gauss_newtons(name: str, damping: float, rate: float):
    model, x, residual = problem(name)
    jacobian, r = dense(model, x, residual)
    matrix = jacobian.T @ jacobian + damping * torch.eye(jacobian.shape[1]).double()
    inverse = torch.linalg.pinv(matrix, rtol=1e-13, hermitian=True)
    solve = lambda v: rate * inverse @ jacobian.T @ v
    before, seen = flat(model), residuals_after(model, x, residual)
    loss = NaturalGradient(model, rate, damping=damping).step(closure_of(model, x, residual))
    assert loss.item() == pytest.approx(r.square().sum().item() / 2)
    expected = bent_step(seen, jacobian, solve, -solve(r))
    torch.testing.assert_close(flat(model) - before, expected, rtol=1e-5, atol=1e-6)
    assert seen(flat(model) - before).square().sum() / 2 < loss


def test_coarser_steps_where_the_finest_brings_little():
    """Two directions of which the smaller is a trap: along it the model is right over a short way only."""
    model = nn.ParameterList([torch.zeros(2).double()])
    (p,) = model

    def residuals() -> Tensor:
        wall = 1e3 * torch.relu(p[1].abs() - 1e-7)
        return torch.stack([p[0] - 1, 1e-4 * (p[1] + 1e3), wall])

    opt = NaturalGradient(model)
    for _ in range(2):
        opt.step(residuals)
    assert opt.history[0]["coarser"] > 0
    torch.testing.assert_close(p.detach()[0], torch.ones(()).double())


def test_momentum():
    """SPRING: the step solves for what the last displacement, shortened, leaves (arXiv:2401.10190)."""
    model, x, residual = problem("many parameters")
    opt = NaturalGradient(model, damping=0.01, momentum=0.9)
    closure = closure_of(model, x, residual)
    start = flat(model)
    opt.step(closure)
    last = 0.9 * (flat(model) - start)
    jacobian, r = dense(model, x, residual)
    matrix = jacobian.T @ jacobian + 0.01 * torch.eye(len(last)).double()
    direction = last - torch.linalg.solve(matrix, jacobian.T @ (r + jacobian @ last))
    before = flat(model)
    opt.step(closure)
    torch.testing.assert_close(flat(model) - before, opt.stats()["step_size"] * direction)


@pytest.mark.parametrize("name", SIZES)
def test_levenberg_marquardt(name: str):
    model, x, residual = problem(name)
    opt = NaturalGradient(model, adaptive=True)
    losses = [opt.step(closure_of(model, x, residual)).item() for _ in range(8)]
    assert all(b <= a for a, b in zip(losses, losses[1:], strict=False)) and losses[-1] < 0.5 * losses[0]
    assert opt.stats()["ratio"] > 0 and len({entry["damping"] for entry in opt.history}) > 1
    assert "exact Gauss-Newton" in opt.report() and "step 8" in opt.summary()


def test_groups_frozen_parameters_and_decay():
    model, x, residual = problem("many parameters")
    opt = NaturalGradient(model, damping=0.1, weight_decay=10.0)
    first = opt.param_groups[0]["params"].pop(0)
    opt.add_param_group({"params": [first], "lr": 0.5, "weight_decay": 0.0})
    model[2].requires_grad_(False)
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    jacobian, r = dense(model, x, residual)
    inverse = torch.linalg.inv(jacobian.T @ jacobian + 0.1 * torch.eye(jacobian.shape[1]).double())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rates = torch.cat([torch.full((p.numel(),), 0.5 if p is first else 1.0) for p in trained.values()]).double()
    solve = lambda v: rates * (inverse @ jacobian.T @ v)
    seen = residuals_after(model, x, residual)
    opt.step(closure_of(model, x, residual))
    left = bent_step(seen, jacobian, solve, -solve(r))
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p, starts[name])
            continue
        own, left = left[: p.numel()].reshape(p.shape), left[p.numel() :]
        kept = 1.0 if p is first else 0.99
        torch.testing.assert_close(p.detach(), kept * (starts[name] + own))


PRECISIONS = {  # of the first layer, the second and the residuals
    "single parameters": (torch.float32, torch.float32, torch.float64),
    "single residuals": (torch.float64, torch.float64, torch.float32),
    "first layer": (torch.float32, torch.float64, torch.float64),
    "second layer": (torch.float64, torch.float32, torch.float64),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d])
@pytest.mark.parametrize("case", PRECISIONS)
def test_residuals_and_parameters_of_different_precision(case: str, kind: type[nn.Module], name: str):
    """The step is that of double precision, to the rounding of single."""
    _, x, _ = problem(name)
    moved = []
    for own in ([torch.float64] * 3, PRECISIONS[case]):
        with seeded(0):
            convolution = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 2, 1, 1))
            layers = nn.ModuleList([nn.Linear(2, 6) if kind is nn.Linear else convolution, nn.Linear(6, 1)])
        layers[0].to(own[0])
        layers[1].to(own[1])

        def closure(layers: nn.ModuleList = layers, own: Sequence[torch.dtype] = own) -> Tensor:
            hidden = layers[0](x.to(own[0])).flatten(1).tanh()
            return (layers[1](hidden.to(own[1]))[:, 0].double() - x.prod(1).sin()).to(own[2])

        start = flat(layers).double()
        NaturalGradient(layers, damping=0.1).step(closure)
        moved.append(flat(layers).double() - start)
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-4)
