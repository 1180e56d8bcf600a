"""Complex parameters and outputs: rows are autograd's, inner products real; what has no complex form says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.terms import DenseGradients
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.rows import all_of_rows, real, rows_of, same

pytestmark = pytest.mark.fast
N, T, LOSS = 5, 8, nn.MSELoss()


def spectral(m: Any, x: Tensor) -> Tensor:
    """A layer of a Fourier neural operator."""
    found = torch.fft.rfft(m.up(x).transpose(1, 2))
    kept = torch.zeros_like(found)
    kept[:, :, :3] = torch.einsum("nim,iom->nom", found[:, :, :3], m.w)
    return m.down(torch.fft.irfft(kept, n=T).transpose(1, 2))


def product(m: Any, x: Tensor) -> Tensor:
    """Complex matrices, in a form that a rule knows for real ones."""
    h = m.up(x).to(m.w.dtype) @ m.w[..., 0]
    return m.down((h * m.w[0, :, 1]).abs())


def linear(m: Any, x: Tensor) -> Tensor:
    h = nn.functional.linear(m.up(x).to(m.w.dtype), m.w[..., 0], m.w[:, 0, 1])
    return m.down(h.real * h.imag)


def filtered(m: Any, x: Tensor) -> Tensor:
    """A real weight computed from a complex one, as of state space models."""
    kernel = torch.view_as_real(m.w.exp())[..., 0].sum(2)
    return m.down(torch.tanh(m.up(x) @ kernel.T) + m.w.abs()[0, :, 0])


def rotated(m: Any, x: Tensor) -> Tensor:
    """Queries as complex numbers that a real angle turns."""
    h = torch.view_as_complex(m.up(x).unflatten(2, (2, 2))) * torch.polar(torch.ones(2).to(x), m.angle)
    return m.down(torch.view_as_real(h * m.w[0, :2, 0].conj()).flatten(2))


FORWARD = [spectral, product, linear, filtered, rotated]
Forward = Callable[[Any, Tensor], Tensor]


def problem(forward: Forward) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        w = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cdouble))
        angle = {"angle": (2,)} if forward is rotated else {}
        model = Raw(forward, up=nn.Linear(1, 4), down=nn.Linear(4, 1), **angle).double()
        model.w = w
        return model, torch.randn(N, T, 1).double(), torch.randn(N, T, 1).double()


def rows(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """By backward passes of single samples."""
    return rows_of(model, [LOSS(model(x[n : n + 1]), y[n : n + 1]) for n in range(N)])


@pytest.mark.parametrize("forward", FORWARD)
def test_rows_and_their_contractions(forward: Forward) -> None:
    model, x, y = problem(forward)
    expected = rows(model, x, y)
    all_of_rows(model, LOSS, x, y, expected)
    same(curvature.per_sample_gradients(model, LOSS, x, y, chunk=2), expected)
    curvature.check_gradients(model, LOSS, x, y)


def test_the_noise_scale() -> None:
    model, x, y = problem(spectral)
    flat = real(rows(model, x, y))
    found = curvature.gradient_noise_scale(model, LOSS, [(x[:2], y[:2]), (x[2:], y[2:])])
    assert found.trace == pytest.approx(float(flat.var(0).sum()))


def test_noise_is_as_large_on_real_and_on_imaginary_parts() -> None:
    with seeded(0):
        model = Raw(lambda m, x: x * m.w.abs().mean(), w=nn.Parameter(torch.randn(20_000, dtype=torch.cfloat)))
        noise = curvature.clipped_gradient(model, LOSS, torch.zeros(2, 1), torch.zeros(2, 1), 1.0, noise=3.0)["w"]
    for part in (noise.real, noise.imag):
        assert float(part.std()) == pytest.approx(3.0, rel=0.05)  # 10 standard deviations


PROJECTIONS = [curvature.SignProjection(7), curvature.NormalProjection(7), curvature.KroneckerProjection(3)]


@pytest.mark.parametrize("make", PROJECTIONS)
def test_projections_are_linear_maps_of_pairs_of_real_numbers(make: Any) -> None:
    model, x, y = problem(spectral)
    expected = rows(model, x, y)
    pairs = {name: torch.view_as_real(g) if g.is_complex() else g for name, g in expected.items()}
    found = curvature.per_sample_projections(model, LOSS, x, y, make)
    torch.testing.assert_close(found, make(pairs))
    torch.testing.assert_close(found, make(expected))
    assert found.shape[1] == max(part.stop for part in make.columns(model).values())


def test_inner_products_are_real() -> None:
    with seeded(0):
        g, v = torch.randn(3, 4, dtype=torch.cdouble), torch.randn(4, dtype=torch.cdouble)
    expected = torch.view_as_real(g).flatten(1) @ torch.view_as_real(v).flatten()
    torch.testing.assert_close(DenseGradients(g).inner_products(v), expected)


BUILDERS = [
    curvature.fisher_diagonal, curvature.fisher, curvature.gauss_newton, curvature.empirical_fisher, curvature.hessian,
    curvature.fisher_blocks, curvature.kfac, curvature.ekfac,
]  # fmt: skip


@pytest.mark.filterwarnings("error:Casting complex values")
@pytest.mark.parametrize("forward", [spectral, filtered])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_matrices_refuse_by_name_and_are_those_of_the_real_parameters(build: Any, forward: Forward) -> None:
    model, x, y = problem(forward)
    with pytest.raises(ValueError, match=r"w: .*complex"):
        build(model, LOSS, (x, y))
    found = build(model, LOSS, (x, y), parameters=["up", "down"])
    fixed, _, _ = problem(forward)
    fixed.w.requires_grad_(False)
    expected = build(fixed, LOSS, (x, y))
    if build is curvature.gauss_newton:
        jacobian = curvature.per_sample_jacobians(model, x, parameters=["up", "down"])
        flat = torch.cat([rows.reshape(N * T, -1) for rows in jacobian.values()], 1)
        torch.testing.assert_close(found.to_dense(), 2 / (N * T) * flat.T @ flat)
    if isinstance(found, dict):
        torch.testing.assert_close(found, expected)
    else:
        torch.testing.assert_close(found.to_dense(), expected.to_dense())


OTHERS: dict[str, Callable[..., Any]] = {
    "laplace": lambda m, x, y: curvature.laplace(m, LOSS, (x, y)),
    "per_sample_fisher_diagonals": lambda m, x, y: curvature.per_sample_fisher_diagonals(m, LOSS, x, y),
    "per_sample_hessian_diagonals": lambda m, x, y: curvature.per_sample_hessian_diagonals(m, LOSS, x, y),
    "per_sample_jacobians": lambda m, x, y: curvature.per_sample_jacobians(m, x),
    "influence": lambda m, x, y: curvature.influence(m, LOSS, (x, y), (x, y)),
    **{make.__name__: lambda m, x, y, make=make: make(m) for make in (KFAC, EKFAC, NaturalGradient)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_refuses_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"w: (.* )?complex"):
        OTHERS[name](*problem(spectral))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distances": lambda f, y: (f - y).abs().sum(1).mean(),
    "squares": lambda f, y: (f - y).abs().square().mean(),
    "projections": lambda f, y: (f * y.conj()).real.exp().mean(),
    "angles": lambda f, y: (1 - torch.cos(f.angle() - y.angle())).sum(1).mean(),
}


def of_angles() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = Raw(lambda m, x: torch.exp(1j * m.angle) * m.up(x), up=nn.Linear(4, 3), angle=(3,)).double()
        return model, torch.randn(6, 4).double(), torch.randn(6, 3, dtype=torch.cdouble)


def by_backward_passes(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian, row by row."""
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    entries = torch.cat([g.flatten() for g in gradient])
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True) for g in entries]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize("name", LOSSES)
def test_rows_and_hessians_of_complex_outputs(name: str) -> None:
    (model, x, y), loss = of_angles(), LOSSES[name]
    all_of_rows(model, loss, x, y, rows_of(model, [loss(model(x[n : n + 1]), y[n : n + 1]) for n in range(6)]))
    whole = by_backward_passes(model, loss, x, y)
    for data in ((x, y), [(x[:4], y[:4]), (x[4:], y[4:])]):
        torch.testing.assert_close(curvature.hessian(model, loss, data).to_dense(), whole)


def test_a_loss_that_is_no_sum_over_samples_is_found() -> None:
    model, x, y = of_angles()
    with pytest.raises(ValueError, match="samples"):
        curvature.clipped_gradient(model, lambda f, y: (f - y).abs().square().mean().sqrt(), x, y, 1.0)


@pytest.mark.parametrize("build", [curvature.fisher_diagonal, curvature.gauss_newton, curvature.kfac])
def test_what_needs_vectors_at_the_output_is_refused(build: Any) -> None:
    model, x, y = of_angles()
    with pytest.raises(ValueError, match=r"real floating point tensor.* got torch\.complex128"):
        build(model, LOSSES["squares"], (x, y)).to_dense()
