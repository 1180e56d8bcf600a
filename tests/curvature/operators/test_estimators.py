"""What products alone tell of a matrix, against dense linear algebra: exact where theory says so, or within errors."""

import math

import pytest
import torch

from curvature import conjugate_gradient
from curvature.estimators import (
    lanczos,
    lanczos_eigenpairs,
    lanczos_eigenvalues,
    lanczos_logdet,
    spectral_density,
    xdiag,
    xtrace,
)
from curvature.operators import Dense, Diagonal
from support.combinations import in_pairs, in_turn, member
from support.structures import Source, blocks, dense, structures

OF_PRODUCTS = {"xtrace": xtrace, "xdiag": xdiag}
ESTIMATORS = {
    **OF_PRODUCTS,
    "lanczos": lambda op, k, generator: lanczos(op, k, generator=generator),
    "lanczos_eigenvalues": lambda op, k, generator: lanczos_eigenpairs(op, k, generator=generator),
    "lanczos_logdet": lambda op, k, generator: lanczos_logdet(op, 0.1, k, k, generator=generator),
    "spectral_density": lambda op, k, generator: spectral_density(op, k, k, generator=generator),
}
D = 0.3


def of_values(source, values):
    """A dense matrix with these eigenvalues in a random basis."""
    values = torch.as_tensor(values).to(source.normal(1))
    Q = source.orthogonal(d=len(values))
    return Dense(source.space(a=(len(values),)), Q * values @ Q.T)


def indefinite(source, size=30):
    return of_values(source, torch.linspace(-1, 3, size))


class Counted(Dense):
    """Counts the columns that it multiplied with."""

    products = 0

    def _matmat(self, V):
        self.products += V.shape[1]
        return super()._matmat(V)


@pytest.mark.parametrize("structure", structures())
def test_conjugate_gradient(structure, device):
    op, matrix = structures()[structure](Source(device))
    v = Source(device, seed=1).normal(op.space.size, 3)
    for damping in (0.0, D):
        expected = torch.linalg.solve(matrix + damping * torch.eye(len(v)).to(v), v)
        by_name = conjugate_gradient(op, op.space.split(v[:, 0]), damping)
        with member(f"damping {damping}"):
            for found, column in (
                (conjugate_gradient(op, v, damping), expected),
                (conjugate_gradient(op, v[:, 0], damping), expected[:, 0]),
                (op.space.flatten(by_name), expected[:, 0]),
            ):
                torch.testing.assert_close(found, column, rtol=1e-6, atol=1e-7)


@pytest.mark.fast
def test_conjugate_gradient_needs_one_step_for_each_eigenvalue(device):
    """Four different eigenvalues; one of them zero, which a vector in the range does not meet."""
    source = Source(device)
    op = of_values(source, [0.0] * 10 + [1.0] * 10 + [2.0] * 5 + [5.0] * 5)
    v = op @ source.normal(30)
    torch.testing.assert_close(op @ conjugate_gradient(op, v, max_iter=3), v)
    torch.testing.assert_close(conjugate_gradient(op, v), torch.linalg.pinv(op.matrix, rtol=1e-8) @ v)
    with pytest.raises(RuntimeError, match=r"relative residual of .* in 2 iterations"):
        conjugate_gradient(op, v, max_iter=2)
    with pytest.raises((ValueError, RuntimeError), match=r"singular|relative residual"):
        conjugate_gradient(op, source.normal(30))


def test_conjugate_gradient_with_a_preconditioner(device):
    source = Source(device)
    values = torch.logspace(-3, 3, 60)
    first = of_values(source, values)
    matrix = first.matrix + 0.01 * source.definite(d=60)
    op, close = Counted(first.space, matrix), first.damped(0.01)
    v = source.normal(60)
    counts = []
    for preconditioner in (None, close.inverse(), close.inverse().__matmul__, op.materialise().inverse(D)):
        op.products = 0
        found = conjugate_gradient(op, v, D, preconditioner=preconditioner)
        counts.append(op.products)
        torch.testing.assert_close(found, op.solve(v, D), rtol=1e-6, atol=1e-7)
    assert counts[1] == counts[2] < counts[0] / 2 and counts[3] <= 4
    with pytest.raises(ValueError, match="preconditioner is not positive definite"):
        conjugate_gradient(op, v, D, preconditioner=lambda V: -V)


def test_conjugate_gradient_refuses(device):
    op = indefinite(Source(device))
    v = Source(device).normal(30)
    with pytest.raises(ValueError, match=r"direction of curvature -.* singular or indefinite"):
        conjugate_gradient(op, v)
    torch.testing.assert_close(conjugate_gradient(op, v, 1.5), op.solve(v, 1.5))
    with pytest.raises(ValueError, match="the vector is not finite"):
        conjugate_gradient(op, v * math.nan, 1.5)
    with pytest.raises(RuntimeError, match="Use more damping, a preconditioner"):
        conjugate_gradient(op, v, 1.5, max_iter=2)
    for rtol in (0, -1.0, 1e-30, math.nan):
        with pytest.raises(ValueError, match="rtol: expected at least 2.2e-16, the rounding of torch.float64"):
            conjugate_gradient(op, v, 1.5, rtol=rtol)
    with pytest.raises(TypeError, match="max_iter: expected a whole number, found 1.5"):
        conjugate_gradient(op, v, 1.5, max_iter=1.5)
    with pytest.raises(TypeError, match="preconditioner: expected an operator or a function of columns, found 5"):
        conjugate_gradient(op, v, 1.5, preconditioner=5)


def test_conjugate_gradient_in_single_precision(device):
    source = Source(device, torch.float32)
    op = of_values(source, torch.logspace(-3, 0, 50))
    v = source.normal(50)
    found = conjugate_gradient(op, v)
    assert (op @ found - v).norm() <= 1e-4 * v.norm()
    with pytest.raises(RuntimeError, match="relative residual"):
        conjugate_gradient(op, v, rtol=2e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_randomness_and_kind(name, dtype, device):
    """Without a generator two calls agree and the global state stays; with one they differ; kind and place are kept."""
    op = dense(Source(device, dtype))[0]
    state = torch.get_rng_state()
    one, two = (ESTIMATORS[name](op, 6, None) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(a.dtype == dtype and a.device == op.space.device for a in one)
    generator = torch.Generator().manual_seed(1)
    one, two = (ESTIMATORS[name](op, 6, generator) for _ in range(2))
    assert not all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@in_pairs(name=OF_PRODUCTS, make=[indefinite, lambda source: dense(source)[0]])
def test_unbiased(name, make, device):
    op = make(Source(device))
    generator = torch.Generator().manual_seed(0)
    found = [OF_PRODUCTS[name](op, 10, generator) for _ in range(1000)]
    values = torch.stack([estimate.value for estimate in found])
    expected, spread = op.diagonal() if name == "xdiag" else op.trace(), values.std(0)
    assert ((values.mean(0) - expected).abs() <= 5 * spread / len(values) ** 0.5).all()
    # the error that each estimate gives itself is of the right size
    errors = torch.stack([estimate.error for estimate in found]).square().mean(0).sqrt()
    assert (0.9 * spread <= errors).all() and (errors <= 2 * spread).all()


SPECTRA = {
    "flat": lambda k: k**0,
    "slow": lambda k: 1 / k,
    "fast": lambda k: 0.7**k,
    "low rank": lambda k: (k <= 15) * 1.0,  # as many as xtrace takes vectors of 30 products: without one, one is missed
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_two_errors_hold_the_true_value(name, spectrum):
    """In 95 of 100 cases; 80 at least of each kind, and 90 in the mean (50 to 88 without covariances)."""
    values, source = SPECTRA[spectrum](torch.arange(1.0, 41, dtype=torch.float64)), Source()
    rotated = of_values(source, values)
    aligned = Diagonal(rotated.space, values)
    shares = []
    for op in (rotated, aligned):
        expected = op.to_dense().diagonal() if name == "xdiag" else op.to_dense().trace()
        for products in (6, 10, 30):
            found = [OF_PRODUCTS[name](op, products, torch.Generator().manual_seed(k)) for k in range(50)]
            inside = [((value - expected).abs() <= 2 * error).double().mean() for value, error in found]
            shares.append(float(torch.stack(inside).mean()))
    assert min(shares) >= 0.8 and sum(shares) / len(shares) >= 0.9, shares


def whole_numbers(source):
    """Products without any rounding, so that columns are dependent exactly."""
    matrix = torch.zeros(20, 20).to(source.normal(1))
    matrix[:3, :3] = 2
    return Dense(source.space(a=(20,)), matrix)


LOW_RANK = {
    f"rank {rank}": lambda source, rank=rank: of_values(source, [3.0, -2.0, 1.0, 0.5][:rank] + [0.0] * (40 - rank))
    for rank in (0, 1, 4)
}
LOW_RANK |= {"whole numbers": whole_numbers, "fewer rows than products": lambda source: indefinite(source, 3)}
LOW_RANK["a single row"] = lambda source: of_values(source, [2.5])


@pytest.mark.fast
@pytest.mark.parametrize("make", LOW_RANK)
@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_exact_for_low_rank(name, make, device):
    op = LOW_RANK[make](Source(device))
    value, error = OF_PRODUCTS[name](op, 10)
    torch.testing.assert_close(value, op.diagonal() if name == "xdiag" else op.trace(), rtol=1e-10, atol=1e-10)
    assert (error < 1e-9).all()


@pytest.mark.parametrize("products", (6, 10, 20))
def test_errors_of_a_diagonal_matrix(products, device):
    """The worst case of `xdiag`: what one vector adds to the sample of another, that one adds to its own."""
    source = Source(device)
    op = Diagonal(source.space(a=(40,)), torch.logspace(0, -1, 40).to(source.normal(1)))
    generator = torch.Generator().manual_seed(0)
    found = [xdiag(op, products, generator) for _ in range(300)]
    spread = torch.stack([estimate.value for estimate in found]).std(0)
    errors = torch.stack([estimate.error for estimate in found]).square().mean(0).sqrt()
    assert 0.9 * spread.norm() < errors.norm()
    with pytest.raises(ValueError, match="k: expected a whole number of at least 6, found 5"):
        xdiag(op, 5)


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_number_of_products(name, device):
    op = Counted(*(lambda op: (op.space, op.matrix))(indefinite(Source(device))))
    function = OF_PRODUCTS[name]
    function(op, 12)
    assert op.products == 12
    with pytest.raises(ValueError, match=r"k: expected a whole number of at least \d, found 1"):
        function(op, 1)


@pytest.mark.fast
def test_lanczos(device):
    source = Source(device)
    op, start = indefinite(source), source.normal(30)
    found = lanczos(op, 12, start)
    T, Q = found.to_dense(), found.basis
    torch.testing.assert_close(Q.T @ Q, torch.eye(12).to(Q), rtol=0, atol=1e-12)
    torch.testing.assert_close(Q.T @ op.matrix @ Q, T, rtol=0, atol=1e-12)
    torch.testing.assert_close(Q[:, 0], start / start.norm())
    # Gauss quadrature with 12 nodes is exact for polynomials of degree 23.
    values, vectors = torch.linalg.eigh(T)
    moment = (vectors[0].square() * values**23).sum()
    v = start / start.norm()
    torch.testing.assert_close(moment, v @ torch.linalg.matrix_power(op.matrix, 23) @ v)


@pytest.mark.parametrize("values", ([2.0] * 8, [0.0] * 8, [0.0] * 4 + [1.0] * 3 + [5.0], list(range(8))), ids=str)
def test_lanczos_with_all_steps_is_exact(values, device):
    """With the multiplicities, for which the basis has to go on with new vectors."""
    op = of_values(Source(device), values)
    found = lanczos(op, 20)
    assert found.basis.shape == (8, 8) and len(found.off_diagonal) == 7
    expected = torch.tensor(values).to(op.matrix)
    torch.testing.assert_close(torch.linalg.eigvalsh(found.to_dense()), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.basis @ found.to_dense() @ found.basis.T, op.matrix, rtol=0, atol=1e-10)


def test_lanczos_refuses(device):
    op = indefinite(Source(device))
    with pytest.raises(ValueError, match="k: expected a whole number of at least 1, found 0"):
        lanczos(op, 0)
    with pytest.raises(ValueError, match="not zero"):
        lanczos(op, 3, torch.zeros(30).to(op.matrix))
    with pytest.raises(ValueError, match=r"start should have shape \(30,\)"):
        lanczos(op, 3, torch.zeros(29).to(op.matrix))


@in_turn(
    values=[
        torch.linspace(-3, 2, 300),
        torch.logspace(0, -8, 300),
        torch.tensor([5.0] * 4 + [1.0] * 296),
        torch.zeros(300),
    ],
    dtype=[torch.float32] * 4 + [torch.float64] * 4,
    k=[1, 4, 6],
)
def test_lanczos_eigenvalues(values, dtype, k, device):
    op = of_values(Source(device, dtype), values)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    if device.startswith("cuda"):  # its products round otherwise; still within the residual, below
        tolerance *= 3
    expected = values.to(op.matrix).sort().values
    torch.testing.assert_close(lanczos_eigenvalues(op, k), expected[-k:], rtol=0, atol=tolerance)
    torch.testing.assert_close(-lanczos_eigenvalues(-op, k).flip(0), expected[:k], rtol=0, atol=tolerance)
    found, vectors = lanczos_eigenpairs(op, k)
    # eigenvectors of cuSOLVER in single precision are less orthogonal than those of LAPACK
    atol = 1e-4 if device.startswith("cuda") and dtype == torch.float32 else 1e-5
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(k).to(vectors), rtol=0, atol=atol)
    residual = (op @ vectors - vectors * found).norm(dim=0)
    assert (residual <= 2 * torch.finfo(dtype).eps ** 0.5 * values.abs().max().to(residual)).all()


def test_lanczos_eigenvalues_all_of_them(device):
    op, matrix = blocks(Source(device))
    torch.testing.assert_close(lanczos_eigenvalues(op, len(matrix)), torch.linalg.eigvalsh(matrix))
    torch.testing.assert_close(lanczos_eigenvalues(op, 5, rtol=0.0), torch.linalg.eigvalsh(matrix)[-5:])


def test_lanczos_eigenvalues_refuse(device):
    op = of_values(Source(device), torch.linspace(0, 1, 300))
    with pytest.raises(RuntimeError, match=r"relative residual of .* with 12 products"):
        lanczos_eigenvalues(op, 3, max_products=10)
    for k in (0, 301):
        with pytest.raises(ValueError, match=f"k: expected a whole number from 1 to 300, found {k}"):
            lanczos_eigenvalues(op, k)


@pytest.mark.fast
def test_spectral_density(device):
    values = torch.cat([torch.zeros(60), torch.linspace(3, 4, 40)])
    op = of_values(Source(device), values)
    grid, density = spectral_density(op, vectors=100, steps=40)
    step = grid[1] - grid[0]
    torch.testing.assert_close(density.sum() * step, torch.ones_like(step), rtol=1e-6, atol=0.0)
    # The share of eigenvalues at zero is 0.6, with weights of variance 2 * 0.6 * 0.4 / 102 for each vector.
    share = (density[grid < 1.5].sum() * step).item()
    assert abs(share - 0.6) <= 5 * (2 * 0.6 * 0.4 / 102 / 100) ** 0.5
    mine = torch.linspace(-1, 5, 50).to(op.matrix)
    grid, density = spectral_density(op, vectors=100, steps=40, grid=mine, width=0.5)
    expected = torch.distributions.Normal(values.to(mine), 0.5).log_prob(mine[:, None]).exp().mean(1)
    assert torch.equal(grid, mine)
    torch.testing.assert_close(density, expected, rtol=0, atol=0.03)


def test_spectral_density_of_a_multiple_of_the_identity(device):
    grid, density = spectral_density(of_values(Source(device), [2.0] * 10), vectors=3, steps=5)
    assert abs(grid[density.argmax()] - 2) < 0.01 and density.isfinite().all()
    with pytest.raises(ValueError, match="vectors: expected a whole number of at least 1, found 0"):
        spectral_density(of_values(Source(device), [2.0] * 10), vectors=0)
    for function in (spectral_density, lanczos_logdet):
        with pytest.raises(ValueError, match="steps: expected a whole number of at least 1, found 0"):
            function(of_values(Source(device), [2.0] * 10), steps=0)
    with pytest.raises(ValueError, match="width: expected a positive standard deviation, found 0"):
        spectral_density(of_values(Source(device), [2.0] * 10), width=0)


@pytest.mark.fast
def test_logdet(device):
    op = of_values(Source(device), torch.logspace(0, -3, 100))
    value, error = lanczos_logdet(op, D, k=50, steps=40)
    assert (value - op.logdet(D)).abs() <= 5 * error
    assert error < 0.02 * op.logdet(D).abs()
    generator = torch.Generator().manual_seed(0)
    found = torch.stack([lanczos_logdet(op, D, k=2, steps=20, generator=generator).value for _ in range(100)])
    assert (found.mean() - op.logdet(D)).abs() <= 5 * found.std() / 100**0.5
    with pytest.raises(ValueError, match="indefinite with damping 0.3: its least eigenvalue is -1 without"):
        lanczos_logdet(indefinite(Source(device)), D)
    with pytest.raises(ValueError, match="k: expected a whole number of at least 2, found 1"):
        lanczos_logdet(op, D, k=1)
