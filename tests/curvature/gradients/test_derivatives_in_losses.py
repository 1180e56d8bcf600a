"""Jacobians of values, also of functions that differentiate the model, against backward passes of single values."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import curvature
from curvature.functional import ExactNorms
from curvature.preconditioners import residual_blocks
from curvature.recording import warn_once
from support.cases.case import Raw, randomise, seeded
from support.differential import gradient, laplacian
from support.oracles import derivatives as oracle_derivatives
from support.plans import plans_of
from support.rows import rows_of
from support.snapshots import unchanged

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


# several points a sample are a linear layer with two leading axes
several = lambda m, x: m.out(m.first(torch.stack([x, x.sin()], 1)).tanh()).mean(1)
ends = lambda: {"first": nn.Linear(D, 5), "out": nn.Linear(5, 1)}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": mlp(nn.Tanh), "silu": mlp(nn.SiLU, nn.SiLU), "softplus": mlp(nn.Softplus), "residual block": residual_block,
    "tied": tied, "points": lambda: Raw(several, **ends()), "frozen": lambda: frozen(mlp(nn.Tanh)(), "2.weight"),
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(D, 5)), nn.Tanh(), nn.Linear(5, 1)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)
    ),
    "unused": lambda: Raw(lambda m, x: m.out(m.first(x).tanh()), **ends(), no=nn.Linear(2, 2)),
    "scalar": lambda: Raw(lambda m, x: m.out((m.scale * m.first(x)).sin()), scale=(), **ends()),
}  # fmt: skip


def frozen(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


RESIDUALS = (mixed, biharmonic, with_target, periodic, functional, forward_mode)
SEVERAL = {"silu", "residual block", "tied", "convolution"}
GENERAL = {"convolution"}  # some of its parameters have no rule


def case(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = MODELS[name]()
        randomise(model)
        return model.double(), torch.randn(N, D).double(), torch.randn(N).double()


@pytest.mark.parametrize(
    ("name", "residual"),
    [(name, residual) for name in MODELS for residual in (RESIDUALS if name in SEVERAL else RESIDUALS[:1])],
)
def test_rows(name: str, residual: Callable[..., Tensor], device: str):
    """Twice: what the first call learnt serves the second, with other points."""
    model, x, y = case(name)
    batch = (x, y) if residual is with_target else (x,)
    # torch's kernel on CUDA takes the root of a norm in single precision
    tolerance = 1e-6 if device.startswith("cuda") and name == "weight norm" else 1e-12
    for shift in (0.0, 0.5):
        points = (x + shift, *batch[1:])
        expected = oracle_derivatives.residual_jacobian(model, residual, *points)
        found = curvature.residual_jacobian(model.to(device), residual, *(t.to(device) for t in points))
        assert list(found) == list(expected)
        for key, rows in expected.items():
            atol = tolerance * max(1.0, rows.abs().max())
            torch.testing.assert_close(found[key].cpu(), rows, rtol=tolerance, atol=atol)
        model.cpu()
    general = set().union(*(plan.general for plan in plans_of(model)))
    assert bool(general) == (name in GENERAL), general


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
    expected = oracle_derivatives.residual_jacobian(model, lambda m, x: m(x)[:, 0].sin(), x)
    for order in orders:
        found = curvature.residual_jacobian(model, lambda m, x, order=order: residual(m, x, order), x)
        torch.testing.assert_close(found, expected)
    backwards = curvature.residual_jacobian(model, lambda m, x: m(x)[:, 0].sin().flip(0), x)  # the rows themselves
    torch.testing.assert_close(backwards, {key: rows.flip(0) for key, rows in expected.items()})


def test_samples_that_mix():
    """Then a row is the derivative of one of the batch's values."""
    model, x, _ = case("tanh")

    def centred(model: nn.Module, x: Tensor) -> Tensor:
        u = laplacian(model(x)[:, 0], x)
        return u - u.mean()

    found = curvature.residual_jacobian(model, centred, x)
    torch.testing.assert_close(found, rows_of(model, centred(model, x.clone().requires_grad_())))


def energy(m: Any, x: Tensor) -> Tensor:
    """A model that differentiates itself."""
    x = x.detach().requires_grad_()
    return gradient(m.net(x), x)


def test_models_that_differentiate_themselves():
    with seeded(0):
        model, x = Raw(energy, net=mlp(nn.Tanh)()).double(), torch.randn(N, D).double()
    residual = lambda model, x: model(x).square().sum(1)
    expected = oracle_derivatives.residual_jacobian(model, residual, x)
    torch.testing.assert_close(curvature.residual_jacobian(model, residual, x), expected)
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

    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        return laplacian(model.one(model(x + torch.rand_like(x)))[:, 0], x)

    with unchanged(model, x):
        curvature.residual_jacobian(model, noisy, x)
    assert not x.requires_grad


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
    for is_training in (True, True, False):
        with ExactNorms():
            found = model.train(is_training)(x)
        torch.testing.assert_close(found, expected.train(is_training)(x))
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


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


def test_what_is_centred_has_no_kronecker_factors():
    model, x, _ = case("tanh")
    jacobian = curvature.Jacobian.of(mixed(model, x.requires_grad_()), model).merged()
    with pytest.raises(ValueError, match="rows less their mean are no sums of outer products"):
        residual_blocks(jacobian.centred())


def test_values_that_do_not_depend_on_the_model():
    found = curvature.residual_jacobian(LINEAR, lambda model, x: x[:, 0], X)
    assert {name: rows.shape for name, rows in found.items()} == {"weight": (N, 1, D), "bias": (N, 1)}
    assert not any(rows.any() for rows in found.values())


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
    "no gradients": (lambda: curvature.Jacobian.of(X[:, 0], LINEAR), ValueError, "computed without gradients"),
    **{
        f"values of shape {shape}": (
            lambda shape=shape: curvature.Jacobian.of(torch.zeros(shape).requires_grad_() * 1, LINEAR),
            ValueError,
            r"values: expected shape \(M,\)",
        )
        for shape in ((), (0,), (3, 1))
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


P, Q = torch.linspace(-1, 1, 14).reshape(7, 2).double(), torch.linspace(0, 2, 8).reshape(4, 2).double()


def net() -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def one(model: nn.Module) -> Tensor:
    """(7,), of the model's gradient."""
    x = P.clone().requires_grad_()
    return gradient(model(x), x).square().sum(1)


def two(model: nn.Module) -> Tensor:
    """(4,)."""
    return model(Q)[:, 0]


def twice(x: Tensor) -> Tensor:
    return torch.cat([x, x])


# values, and the sizes of the pieces that have terms of their own
TOGETHER: dict[str, tuple[Callable[[nn.Sequential], Tensor], list[int]]] = {
    "nested": (lambda m: torch.cat([torch.cat([one(m), two(m)]), two(m).exp()]), [7, 4, 4]),
    "a piece twice": (lambda m: twice(one(m)), [7, 7]),
    "pieces twice": (lambda m: twice(torch.cat([one(m), two(m)])), [7, 4, 7, 4]),
    "scaled afterwards": (lambda m: torch.cat([torch.cat([one(m), two(m)]) / 3, two(m)]), [11, 4]),
    "a constant piece": (lambda m: torch.cat([torch.ones(2).double(), one(m)]), [9]),
    "a piece without parameters": (lambda m: torch.cat([P[:2, 0].clone().requires_grad_() * 2, one(m)]), [2, 7]),
    "a parameter": (lambda m: torch.cat([one(m), m[0].bias, m[2].bias]), [7, 5, 5]),
    "a parameter alone": (lambda m: m[2].bias, [5]),
    "a parameter and a constant of its size": (
        lambda m: torch.cat([torch.zeros(5).double().requires_grad_(), m[0].bias]), [5, 5]
    ),
    "penalties": (lambda m: torch.cat([one(m), *(0.1 * p.flatten() for p in m.parameters())]), [7, 10, 5, 25, 5, 5, 1]),
    "along another axis": (lambda m: torch.cat([m(P), m(P) ** 2], 1).flatten(), [14]),
    "matrices": (lambda m: torch.cat([m(P), m(Q)])[:, 0], [11]),
    "stacked": (lambda m: torch.stack([one(m), one(m).exp()], 1)[:, 0], [7]),
    "exchanged": (lambda m: torch.cat([one(m), two(m)])[torch.arange(11).flip(0)], [11]),
    "expanded": (lambda m: two(m).sum().expand(3), [3]),
    "mixed precision": (lambda m: torch.cat([one(m).float(), two(m)]), [7, 4]),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("name", TOGETHER)
def test_values_put_together_in_all_kinds_of_ways(name: str, caplog: pytest.LogCaptureFixture):
    """Twice: what the first call learnt serves the second. Pieces of pieces have rules: another way would be logged."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "curvature")
    model, (make, sizes) = net(), TOGETHER[name]
    for _ in range(2):
        values = make(model)
        jacobian = curvature.Jacobian.of(values, model)
        expected = oracle_derivatives.rows(values, model)
        assert [size for size, _ in jacobian.parts] == sizes
        torch.testing.assert_close(jacobian.to_dense(), expected)
        torch.testing.assert_close(jacobian.gram(), expected @ expected.T)
    assert name != "nested" or not caplog.records


def test_a_table_read_at_random_is_learnt_once():
    table = nn.Parameter(torch.randn(20, 3).double())
    model = Raw(lambda m, index: m.table[index].sin().sum(1), table=table)
    for seed in range(3):
        with seeded(seed):
            values = model(torch.randint(20, (7,)))
        expected = oracle_derivatives.rows(values, model)
        torch.testing.assert_close(curvature.Jacobian.of(values, model).to_dense(), expected)
    assert len(plans_of(model)) == 1
