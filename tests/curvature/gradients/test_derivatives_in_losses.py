"""Per-sample gradients of functions that differentiate the model, against loops of batch size one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.functional import ExactNorms
from curvature.gradients.plans import PLANS
from curvature.preconditioners import residual_blocks
from support.cases.case import Raw, randomise, seeded
from support.differential import gradient, laplacian
from support.oracles import derivatives as oracle_derivatives

D, N = 3, 7


def mixed(model: nn.Module, x: Tensor) -> Tensor:
    """Laplacian, squared gradient and value."""
    u = model(x)[:, 0]
    return laplacian(u, x) + gradient(u, x).square().sum(1) * u - torch.sin(u)


def biharmonic(model: nn.Module, x: Tensor) -> Tensor:
    return laplacian(laplacian(model(x)[:, 0], x), x)


def with_target(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (laplacian(model(x)[:, 0], x) - y.sin()) * y


def periodic(model: nn.Module, x: Tensor) -> Tensor:
    """Two calls of the model in one residual."""
    return model(x)[:, 0] - model(x + 1)[:, 0] + laplacian(model(2 * x)[:, 0], x)


def functional(model: nn.Module, x: Tensor) -> Tensor:
    """The same kind of thing by torch.func."""
    one = lambda row: model(row[None])[0, 0]
    return torch.func.vmap(torch.func.hessian(one))(x).diagonal(dim1=1, dim2=2).sum(1)


def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
    tangent = torch.func.jvp(lambda x: model(x)[:, 0], (x,), (torch.ones_like(x),))[1]
    return tangent + model(x)[:, 0]


def mlp(*activations: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(D, 5)]
        for activation in activations:
            layers += [activation(), nn.Linear(5, 5)]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(5, 1))

    return make


def residual_block() -> nn.Module:
    return Raw(
        lambda m, x: m.out(m.norm(m.first(x).tanh() + m.scale * m.second(m.first(x).tanh()).sin()) + m.shift),
        first=nn.Linear(D, 5), second=nn.Linear(5, 5, bias=False), out=nn.Linear(5, 1), norm=nn.LayerNorm(5),
        scale=nn.Parameter(torch.ones(5)), shift=nn.Parameter(torch.zeros(5)),
    )  # fmt: skip


def tied() -> nn.Module:
    """One layer twice, and once more as its transpose."""
    return Raw(
        lambda m, x: m.out((m.inner(m.inner(m.first(x).tanh()).sigmoid()) @ m.inner.weight).tanh()),
        first=nn.Linear(D, 5), inner=nn.Linear(5, 5), out=nn.Linear(5, 1),
    )  # fmt: skip


def points() -> nn.Module:
    """Several points a sample: a linear layer with two leading axes."""
    return Raw(
        lambda m, x: m.out(m.first(torch.stack([x, x.sin()], 1)).tanh()).mean(1),
        first=nn.Linear(D, 5), out=nn.Linear(5, 1),
    )  # fmt: skip


def scalar() -> nn.Module:
    return Raw(
        lambda m, x: m.out((m.scale * m.first(x)).sin()),
        scale=nn.Parameter(torch.tensor(1.0)), first=nn.Linear(D, 5), out=nn.Linear(5, 1),
    )  # fmt: skip


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)), nn.Tanh(), nn.Linear(5, 1))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))


def unused() -> nn.Module:
    return Raw(lambda m, x: m.out(m.first(x).tanh()), first=nn.Linear(D, 5), out=nn.Linear(5, 1), no=nn.Linear(2, 2))


def frozen() -> nn.Module:
    model = mlp(nn.Tanh)()
    model[2].weight.requires_grad_(False)
    return model


MODELS = {
    "tanh": mlp(nn.Tanh), "silu": mlp(nn.SiLU, nn.SiLU), "softplus": mlp(nn.Softplus), "residual block": residual_block,
    "tied": tied, "points": points, "weight norm": normed, "convolution": convolution, "unused": unused,
    "frozen": frozen, "scalar": scalar,
}  # fmt: skip
RESIDUALS = (mixed, biharmonic, with_target, periodic, functional, forward_mode)
GENERAL = {"convolution"}  # some of its parameters have no rule


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = MODELS[name]()
        randomise(model)
        return model.double(), torch.randn(N, D).double(), torch.randn(N).double()


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("name", MODELS)
def test_rows(name: str, residual: Callable[..., Tensor], device: str):
    """Twice: what the first call learnt serves the second, with other points."""
    model, x, y = case(name)
    batch = (x, y) if residual is with_target else (x,)
    for shift in (0.0, 0.5):
        points = (x + shift, *batch[1:])
        expected = oracle_derivatives.residual_jacobian(model, residual, *points)
        found = curvature.residual_jacobian(model.to(device), residual, *(t.to(device) for t in points))
        assert list(found) == list(expected)
        for key, rows in expected.items():
            torch.testing.assert_close(found[key].cpu(), rows, rtol=1e-12, atol=1e-12 * max(1.0, rows.abs().max()))
        model.cpu()
    general = set().union(*(plan.general for plan in PLANS.get(model, {}).values()))
    assert bool(general) == (name in GENERAL), general


def test_another_order_is_not_taken_for_the_first():
    model, x, _ = case("tanh")
    reverse = lambda model, x: mixed(model, x).flip(0)
    for residual in (mixed, reverse):
        found = curvature.residual_jacobian(model, residual, x)
    expected = oracle_derivatives.residual_jacobian(model, mixed, x)
    for key, rows in expected.items():
        torch.testing.assert_close(found[key], rows.flip(0))


@pytest.mark.parametrize("name", ["index", "roll", "sorted"])
def test_samples_in_another_order_the_second_time(name: str):
    """The same functions and shapes, but samples go elsewhere inside: what the first call learnt must not serve."""
    model, x, _ = case("tanh")
    orders = {"index": [torch.arange(N), torch.randperm(N)], "roll": [0, 2], "sorted": [1.0, -1.0]}[name]

    def residual(model: nn.Module, x: Tensor, order: Any) -> Tensor:
        if name == "roll":
            return model(x.roll(order, 0)).roll(-order, 0)[:, 0].sin()
        if name == "index":
            return model(x[order])[order.argsort(), 0].sin()
        order = (x[:, 0] * order).argsort()
        return torch.zeros(N).double().index_add(0, order, model(x.gather(0, order[:, None].expand_as(x)))[:, 0].sin())

    x = x[x[:, 0].argsort()]
    for order in orders:
        found = curvature.residual_jacobian(model, lambda m, x, order=order: residual(m, x, order), x)
        expected = oracle_derivatives.residual_jacobian(model, lambda m, x: m(x)[:, 0].sin(), x)
        for key, rows in expected.items():
            torch.testing.assert_close(found[key], rows)


def test_samples_that_mix():
    """Then a row is the derivative of one of the batch's values."""
    model, x, _ = case("tanh")

    def centred(model: nn.Module, x: Tensor) -> Tensor:
        u = laplacian(model(x)[:, 0], x)
        return u - u.mean()

    found = curvature.residual_jacobian(model, centred, x)
    named = dict(model.named_parameters())
    values = centred(model, x.clone().requires_grad_())
    for n in range(N):
        expected = torch.autograd.grad(values[n], list(named.values()), retain_graph=True, materialize_grads=True)
        for key, row in zip(named, expected, strict=True):
            torch.testing.assert_close(found[key][n], row)


class Energy(nn.Module):
    """A model that differentiates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh)()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return gradient(self.net(x), x)


def test_models_that_differentiate_themselves():
    with seeded(0):
        model, x = Energy().double(), torch.randn(N, D).double()
    residual = lambda model, x: model(x).square().sum(1)
    expected = oracle_derivatives.residual_jacobian(model, residual, x)
    found = curvature.residual_jacobian(model, residual, x)
    for key, rows in expected.items():
        torch.testing.assert_close(found[key], rows)
    with pytest.raises(ValueError, match=r"residual_jacobian\(model, residual"):
        curvature.per_sample_gradients(model, nn.MSELoss(), x, x)
    assert not any(module._forward_hooks for module in model.modules())


def test_losses_that_differentiate_the_model():
    model, x, y = case("tanh")
    x.requires_grad_()
    loss = lambda out, y: (laplacian(out[:, 0], x) - y).square().mean()
    for function in (curvature.per_sample_gradients, curvature.per_sample_norms, curvature.check_gradients):
        with pytest.raises(ValueError, match="arrives more than once"):
            function(model, loss, x, y)


def test_nothing_is_changed():
    model, x, _ = case("residual block")
    model.one = nn.BatchNorm1d(1).double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()

    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        return laplacian(model.one(model(x + torch.rand_like(x)))[:, 0], x)

    curvature.residual_jacobian(model, noisy, x)
    assert not x.requires_grad and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


NORMS = {
    "layer": lambda: nn.LayerNorm(6), "batch": lambda: nn.BatchNorm1d(6), "group": lambda: nn.GroupNorm(2, 6),
    "rms": lambda: nn.RMSNorm(6), "batch without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
    "function": lambda: Raw(lambda m, x: torch.layer_norm(x * m.scale, (6,)), scale=nn.Parameter(torch.ones(6))),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_their_own_derivatives(name: str):
    """Those of torch's kernels are wrong from the third on (pytorch issues 175754, 186256); differences tell."""
    with seeded(1):
        model = nn.Sequential(nn.Linear(D, 6), NORMS[name](), nn.Tanh(), nn.Linear(6, 1))
        randomise(model)
        model, x = model.double(), torch.randn(N, D).double()
    found = curvature.residual_jacobian(model, mixed, x)
    expected = oracle_derivatives.central_differences(model, mixed, x)
    for key, rows in expected.items():
        torch.testing.assert_close(found[key], rows, rtol=1e-6, atol=1e-7 * max(1.0, float(rows.abs().max())))


@pytest.mark.parametrize("name", ["layer", "batch", "instance"])
def test_kernels_with_wrong_derivatives_are_refused(name: str):
    with seeded(1):
        model = nn.Sequential(nn.Linear(D, 6), NORMS[name](), nn.Tanh(), nn.Linear(6, 1)).double()
        x = torch.randn(N, D).double().requires_grad_()
    with pytest.raises(ValueError, match=r"wrong third derivatives.*curvature\.functional\.ExactNorms\(\)"):
        curvature.Jacobian.of(mixed(model, x), model)
    with ExactNorms():
        values = mixed(model, x)
    assert curvature.Jacobian.of(values, model).shape[0] == N
    if name != "layer":
        assert curvature.residual_jacobian(model.eval(), mixed, x.detach())["0.weight"].shape == (N, 6, D)


def test_written_out_norms_move_their_statistics_once():
    model = nn.Sequential(nn.BatchNorm1d(D), nn.Unflatten(1, (1, D)), nn.InstanceNorm1d(1, track_running_stats=True))
    model, x = model.double(), torch.randn(N, D).double()
    expected = copy.deepcopy(model)
    for _ in range(2):
        out = expected(x)
        with ExactNorms():
            torch.testing.assert_close(model(x), out)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    with ExactNorms():
        torch.testing.assert_close(model.eval()(x), expected.eval()(x))


def test_what_does_not_depend_on_the_model():
    found = curvature.residual_jacobian(LINEAR, lambda model, x: x[:, 0], X)
    assert {name: rows.shape for name, rows in found.items()} == {"weight": (N, 1, D), "bias": (N, 1)}
    assert not any(rows.any() for rows in found.values())


@pytest.mark.parametrize("sizes", [(N, 0), (0, 3, 1), (1, 1), (1,)])
def test_pieces_of_any_size(sizes: tuple[int, ...]):
    model, x, _ = case("silu")
    pieces = [x[:size].clone().requires_grad_() for size in sizes]
    found = curvature.Jacobian.of(torch.cat([mixed(model, x) for x in pieces]), model).rows()
    expected = [oracle_derivatives.residual_jacobian(model, mixed, x) for x in pieces if len(x)]
    for key, rows in found.items():
        torch.testing.assert_close(rows, torch.cat([e[key] for e in expected]))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", ["tanh", "residual block", "convolution", "scalar"])
@pytest.mark.parametrize("count", [8, 60], ids=["P > M", "P <= M"])
def test_rows_less_their_mean(count: int, name: str, pieces: int, device: str):
    model, _, _ = case(name)
    with seeded(1):
        x, z, v = torch.randn(count, D).double(), torch.randn(count).double(), torch.randn(1000).double()
    expected = oracle_derivatives.residual_jacobian(model, mixed, x)
    dense = torch.cat([rows.reshape(count, -1) for rows in expected.values()], 1)
    dense, z, v = (t.to(device) for t in (dense - dense.mean(0), z, v[: dense.shape[1]]))
    model, x = model.to(device), x.to(device)
    with ExactNorms():
        values = torch.cat([mixed(model, part.requires_grad_()) for part in x.chunk(pieces)])
    plain = curvature.Jacobian.of(values, model)
    joined = lambda found: torch.cat([part.flatten() for part in found.values()])
    sizes = {key: rows[0].numel() for key, rows in expected.items()}
    named = {k: part.reshape(expected[k].shape[1:]) for k, part in zip(sizes, v.split([*sizes.values()]), strict=True)}
    first = next(iter(sizes))
    pair = torch.stack([dense[:, : sizes[first]] @ v[: sizes[first]], dense @ v], 1)
    for found in (plain.centred(), plain.merged().centred(), plain.centred().merged(), plain.centred().centred()):
        assert len(found.parts) == pieces and found.shape == plain.shape == dense.shape
        torch.testing.assert_close(torch.cat([rows.reshape(count, -1) for rows in found.rows().values()], 1), dense)
        torch.testing.assert_close(found.to_dense(), dense)
        torch.testing.assert_close(found.gram(), dense @ dense.T)
        torch.testing.assert_close(found.norms(), dense.square().sum(1))
        torch.testing.assert_close(joined(found.squares()), dense.square().sum(0))
        torch.testing.assert_close(joined(found.transposed(z)), dense.T @ z)
        torch.testing.assert_close(found.times(named), dense @ v)
        torch.testing.assert_close(found.columns(named, [[first], list(sizes)]), pair)
    solver = curvature.LeastSquares(plain.centred())
    assert len(solver.matrix) == min(dense.shape)
    damped = dense.T @ dense + 0.1 * torch.eye(len(v), device=device).double()
    torch.testing.assert_close(joined(solver.solve(z, 0.1)), torch.linalg.solve(damped, dense.T @ z))
    torch.testing.assert_close(joined(solver.precondition(named, 0.1)), torch.linalg.solve(damped, v))
    assert (plain.to_dense() - dense).norm() > 0.1 * dense.norm()


@pytest.mark.parametrize("width", [0.3, 2.0])
def test_a_gaussian_in_imaginary_time(width: float):
    """psi = exp(-a x^2 / 2) in the potential x^2 / 2 stays one: da/dt = 1 - a^2, whatever the points (M >= 2)."""
    model = Raw(lambda m, x: -m.a * x[:, 0] ** 2 / 2, a=nn.Parameter(torch.tensor(width).double()))
    x = torch.linspace(-1, 2, 5)[:, None].double()
    log_psi, grad, laplacian = curvature.laplacian(model, x)
    energy = (x[:, 0] ** 2 - laplacian - grad[:, 0] ** 2).detach() / 2
    for values in (log_psi, log_psi[:2], torch.cat([log_psi[:1], log_psi[1:]])):
        solver = curvature.LeastSquares(curvature.Jacobian.of(values, model).centred())
        own = energy[: len(values)]
        torch.testing.assert_close(solver.solve(-(own - own.mean()))["a"].item(), 1 - model.a.item() ** 2)


def test_what_is_centred_has_no_kronecker_factors():
    model, x, _ = case("tanh")
    jacobian = curvature.Jacobian.of(mixed(model, x.requires_grad_()), model).merged()
    with pytest.raises(ValueError, match="rows less their mean are no sums of outer products"):
        residual_blocks(jacobian.centred())


@pytest.mark.parametrize("values", [torch.zeros(()), torch.zeros(0), torch.zeros(3, 1)], ids=["()", "(0,)", "(3, 1)"])
def test_values_that_are_no_vector(values: Tensor):
    with pytest.raises(ValueError, match=r"values: expected shape \(M,\)"):
        curvature.Jacobian.of(values.requires_grad_() * 1, LINEAR)


LINEAR = nn.Linear(D, 1).double()
X = torch.zeros(N, D).double()
FROZEN = nn.Linear(D, 1).double().requires_grad_(False)
REFUSED = {
    "no module": (lambda: curvature.residual_jacobian(lambda x: x, mixed, X), TypeError, "model: expected"),
    "nothing to train": (lambda: curvature.residual_jacobian(FROZEN, mixed, X), ValueError, "no parameter requires"),
    "nothing of it": (lambda: curvature.Jacobian.of(LINEAR(X)[:, 0], FROZEN), ValueError, "no parameter requires"),
    "no batch": (lambda: curvature.residual_jacobian(LINEAR, mixed), TypeError, "batch: expected tensors"),
    "sizes": (lambda: curvature.residual_jacobian(LINEAR, with_target, X, X[:3, 0]), ValueError, r"found \[7, 3\]"),
    "a scalar": (lambda: curvature.residual_jacobian(LINEAR, lambda m, x: m(x).sum(), X), ValueError, r"\(7,\)"),
    "a column": (lambda: curvature.residual_jacobian(LINEAR, lambda m, x: m(x), X), ValueError, r"found \(7, 1\)"),
    "a number": (lambda: curvature.residual_jacobian(LINEAR, lambda m, x: 1.0, X), TypeError, "found float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()
