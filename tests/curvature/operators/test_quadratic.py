"""Quadratic penalties and merged parameters against dense linear algebra, for every structure."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

import curvature
from curvature import estimators, plots
from curvature.operators import BlockDiagonal, Dense, Diagonal, MatrixFree, Space, Sum
from curvature.operators.space import MAX_DIRECT_SIZE
from support.cases.case import seeded
from support.combinations import member
from support.comparisons import matches
from support.structures import Source, structures

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    plt.close("all")


@pytest.mark.parametrize("structure", structures())
def test_penalties(structure):
    """Value, gradient and second derivatives; a penalty on part of the parameters leaves the others out."""
    op, matrix = structures()[structure](Source())
    centre, theta = Source(seed=1).normal(op.space.size), Source(seed=2).normal(op.space.size)
    named = {name: t.requires_grad_() for name, t in op.space.split(theta.clone()).items()}
    penalty = curvature.quadratic_penalty(op, op.space.split(centre))
    d = theta - centre
    value = penalty({"more": torch.ones(3), **named})
    matches(value, d @ matrix @ d / 2)
    first = torch.autograd.grad(value, list(named.values()), create_graph=True)
    flat = torch.cat([g.flatten() for g in first])
    matches(flat, matrix @ d)
    v = Source(seed=3).normal(op.space.size)
    second = torch.autograd.grad(flat @ v, list(named.values()))
    matches(torch.cat([g.flatten() for g in second]), matrix @ v)


@pytest.mark.parametrize("structure", structures())
def test_merging(structure):
    """The minimiser of the sum of the quadratic losses."""
    make = structures()[structure]
    (one, first), (other, second) = make(Source()), make(Source(seed=5))
    thetas = [Source(seed=k).normal(one.space.size) for k in (1, 2)]
    for damping in (0.0, 0.7):
        eye = damping * torch.eye(one.space.size, dtype=first.dtype)
        expected = torch.linalg.solve(first + second + 2 * eye, (first + eye) @ thetas[0] + (second + eye) @ thetas[1])
        found = curvature.merge([one.space.split(t) for t in thetas], [one, other], damping)
        assert list(found) == list(one.space.names)
        with member(f"damping {damping}"):
            matches(one.space.flatten(found), expected, 1e-8)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_models_and_what_builders_return():
    with seeded(0):
        models, x, y = [network() for _ in range(2)], torch.randn(9, 4).double(), torch.arange(9) % 3
    exact = [curvature.fisher(m, LOSS, (x, y)).materialise() for m in models]
    thetas = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
    d = thetas[1] - thetas[0]
    for K in (curvature.kfac(models[0], LOSS, (x, y)), curvature.fisher_blocks(models[0], LOSS, (x, y)), exact[0]):
        value = curvature.quadratic_penalty(K, models[0])(models[1])
        matches(value, d @ K.to_dense() @ d / 2)
        value.backward()
        matches(torch.cat([p.grad.flatten() for p in models[1].parameters()]), K @ d)
        models[1].zero_grad()
        assert curvature.quadratic_penalty(K, models[0])(models[0]) == 0
    merged = network()
    merged.load_state_dict(curvature.merge(models, exact, 1e-3))
    total = exact[0].to_dense() + exact[1].to_dense() + 2e-3 * torch.eye(len(d)).double()
    pull = sum((K.matrix @ t + 1e-3 * t for K, t in zip(exact, thetas, strict=True)), torch.zeros_like(d))
    matches(torch.cat([p.flatten() for p in merged.parameters()]), torch.linalg.solve(total, pull), 1e-8)
    far = curvature.merge(models, exact, 1e9)
    matches(exact[0].space.flatten(far), (thetas[0] + thetas[1]) / 2, 1e-6)


def test_sums_of_diagonals_dense_matrices_and_blocks_stay_so():
    source = Source()
    a, b = source.space(a=(3,)), source.space(b=(2, 2))
    joint = source.space(a=(3,), b=(2, 2))
    made = [BlockDiagonal(joint, [Diagonal(a, source.positive(3)), Diagonal(b, source.positive(4))]) for _ in range(2)]
    total = made[0] + made[1]
    assert isinstance(total, BlockDiagonal) and isinstance(total["b"], Diagonal)
    matches(total.to_dense(), made[0].to_dense() + made[1].to_dense())
    assert isinstance(made[0] - made[1], BlockDiagonal)
    assert isinstance(made[0] + Diagonal(joint, source.positive(7)), Sum)
    one, other = (Dense(joint, source.definite(d=7)) for _ in range(2))
    assert isinstance(one + other, Dense) and isinstance(one + made[0], Sum)
    matches((one - 2 * other.materialise()).to_dense(), one.matrix - 2 * other.matrix)
    matches(sum([one, made[0], other]).to_dense(), one.matrix + made[0].to_dense() + other.matrix)
    with pytest.raises(TypeError):
        1 + one


def test_large_sums_are_solved_by_products():
    size = MAX_DIRECT_SIZE + 1
    source = Source()
    space = source.space(a=(size,))
    values = [1 + source.positive(size) for _ in range(2)]
    ops = [MatrixFree(space, lambda V, d=d: d[:, None] * V) for d in values]
    thetas = [source.normal(size) for _ in range(2)]
    found = curvature.merge([{"a": t} for t in thetas], ops)["a"]
    matches(found, (values[0] * thetas[0] + values[1] * thetas[1]) / (values[0] + values[1]), 1e-8)


def test_what_does_not_fit_is_refused():
    with seeded(0):
        model, x, y = network(), torch.randn(5, 4).double(), torch.arange(5) % 3
    K = curvature.kfac(model, LOSS, (x, y))
    with pytest.raises(KeyError, match="curvature is of 2.weight, 2.bias, which the model does not have"):
        curvature.quadratic_penalty(K, model)(model[:1])
    with pytest.raises(ValueError, match="one curvature for each model, found 2 and 1"):
        curvature.merge([model, model], [K])
    with pytest.raises(ValueError, match="damping"):
        curvature.merge([model], [K])
    with pytest.raises(ValueError, match="over the same space"):
        curvature.merge([model, model], [K, K["0"]])
    changed = curvature.fisher(model, LOSS, (x, y))
    penalty = curvature.quadratic_penalty(changed, model)
    with torch.no_grad():
        model[0].bias += 1
    with pytest.raises(RuntimeError, match=r"has changed.*materialise\(\)"):
        penalty(model)


ESTIMATES = ("xtrace", "xdiag")
OF_A_CURVATURE = {  # what functions give of a curvature K, and of the parameters
    "quadratic_penalty": lambda K, at: curvature.quadratic_penalty(K, at)({k: x + 1 for k, x in at.items()}),
    "merge": lambda K, at: curvature.merge([at, {k: 2 * x for k, x in at.items()}], [K, K], 0.1),
    "saliencies": lambda K, at: curvature.saliencies(K, at),
    "prune": lambda K, at: curvature.prune(K, at, 0.5)[0],
    "quantize": lambda K, at: curvature.quantize(K, at, 2),
    "conjugate_gradient": lambda K, at: curvature.conjugate_gradient(K, at, 0.1),
    "lanczos": lambda K, at: estimators.lanczos(K, 3).diagonal,
    "lanczos_eigenvalues": lambda K, at: curvature.lanczos_eigenvalues(K, 2),
    "lanczos_logdet": lambda K, at: curvature.lanczos_logdet(K, 0.1).value,
    "spectral_density": lambda K, at: curvature.spectral_density(K, 2, 3)[1],
    "matrix": lambda K, at: torch.as_tensor(plots.matrix(K).images[0].get_array()),
    **{name: lambda K, at, name=name: getattr(curvature, name)(K, 8).value for name in ESTIMATES},
}


@pytest.mark.parametrize("name", OF_A_CURVATURE)
def test_a_diagonal_by_name_is_a_curvature(name):
    """What `fisher_diagonal` gives, against the matrix of the same numbers."""
    source, call = Source(), OF_A_CURVATURE[name]
    at = {k: source.normal(*shape) for k, shape in {"0.weight": (3, 2), "0.bias": (3,), "scale": (1,)}.items()}
    diagonal = {k: x.square() + 0.1 for k, x in at.items()}
    space = Space.of(at)
    torch.testing.assert_close(call(diagonal, at), call(Diagonal(space, space.flatten(diagonal)), at))
    for wrong in (None, 3.0, [1.0], {"0.weight": 1.0}, {}):
        with pytest.raises(TypeError, match="expected an operator"):
            call(wrong, at)


def test_operators_are_arrays_of_numpy():
    source = Source()
    for op in (Dense(source.space(a=(4,)), source.definite(d=4)), Diagonal(source.space(a=(4,)), source.normal(4))):
        matrix = op.to_dense().clone()
        for array in (np.array(op), np.asarray(op), np.array(op, dtype=np.float32)):
            np.testing.assert_allclose(array, matrix.numpy(), rtol=1e-6)
            array[:] = 0
        assert torch.equal(op.to_dense(), matrix)
        assert isinstance(np.float64(2) * op, curvature.Operator)  # as before, a number of NumPy scales it
