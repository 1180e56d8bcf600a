"""Sums of Kronecker products, and the blocks of ``J^T J``, against loops of batch size one and dense algebra."""

import pytest
import torch
from torch import Tensor, nn

from curvature import Jacobian
from curvature.kronecker.inverses import invert_kronecker_sums
from curvature.preconditioners import residual_blocks
from support.cases.case import Raw, seeded
from support.oracles.residuals import damped_sum
from support.residual_problem import Closure, by_hand, problem

pytestmark = pytest.mark.fast

# -- sums of Kronecker products


def positive(size: int, rank: int) -> Tensor:
    root = torch.randn(size, rank).double()
    return root @ root.T


@pytest.mark.parametrize("damping", [1e-6, 0.1, 100.0])
@pytest.mark.parametrize("count", [1, 2])
def test_a_sum_of_products_is_solved_with_exactly(count: int, damping: float):
    """Also of factors that are singular, and of products of very different size."""
    with seeded(1):
        pairs = [(10.0**-k * positive(4, 3 + k), positive(7, 7 - 2 * k)) for k in range(count)]
        x = torch.randn(4, 7).double()
    expected = torch.linalg.solve(damped_sum(pairs, damping), x.flatten()).reshape(4, 7)
    found = invert_kronecker_sums([pairs], damping)[0]
    # the condition number of the singular ones at damping 1e-6 is about 1e9
    torch.testing.assert_close(found(x[None])[0], expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


def test_of_three_products_two_are_merged():
    """All but the largest, their sides weighted by the trace of the other."""
    with seeded(2):
        pairs = [(10.0**-k * positive(4, 6), positive(5, 8)) for k in (1, 0, 2)]
        x = torch.randn(4, 5).double()
    (b, a), (d, c) = pairs[0], pairs[2]
    size = (a.trace() * b.trace() + c.trace() * d.trace()).sqrt()
    rest = (b * a.trace() + d * c.trace()) / size, (a * b.trace() + c * d.trace()) / size
    # the damping is divided by the number of products before they are merged
    two = damped_sum([pairs[1], rest], 2 / 3 * 0.1)
    expected = torch.linalg.solve(two, x.flatten()).reshape(4, 5)
    torch.testing.assert_close(invert_kronecker_sums([pairs], 0.1)[0](x[None])[0], expected)


def test_without_damping_a_singular_sum_gives_finite_numbers():
    with seeded(3):
        pairs = [(positive(4, 2), positive(5, 1)), (positive(4, 1), positive(5, 2))]
    assert invert_kronecker_sums([pairs], 0.0)[0](torch.ones(1, 4, 5).double()).isfinite().all()


# -- factors


def test_factors_are_those_of_a_loop_over_samples():
    model, closure = problem()
    blocks = residual_blocks(Jacobian.of(closure(), model).merged())
    r, jacobian, expected = by_hand(model)
    torch.testing.assert_close(closure().detach(), r)
    torch.testing.assert_close(
        (jacobian.T @ r), torch.cat([_flat_gradient(model, m, closure) for m in model if isinstance(m, nn.Linear)])
    )
    for block, pairs in zip(blocks, expected, strict=True):
        for (rows, columns), (b, a) in zip(block.pairs, pairs, strict=True):
            torch.testing.assert_close(torch.kron(rows, columns), torch.kron(b, a))


def _flat_gradient(model: nn.Module, layer: nn.Linear, closure: Closure) -> Tensor:
    weight, bias = torch.autograd.grad(closure().square().sum() / 2, [layer.weight, layer.bias])
    return torch.cat([weight, bias[:, None]], 1).flatten()


def test_a_linear_layer_alone_is_exact_for_every_piece():
    with seeded(0):
        model, x = nn.Linear(3, 1).double(), torch.randn(12, 3).double()
    values = torch.cat([model(x[:8])[:, 0] / 8, model(x[8:])[:, 0] / 4])
    jacobian = Jacobian.of(values, model)
    (block,) = residual_blocks(jacobian.merged())
    dense = jacobian.to_dense()
    torch.testing.assert_close(sum(torch.kron(b, a) for b, a in block.pairs), dense.T @ dense)


def test_what_is_no_matrix_has_its_exact_diagonal():
    parts = {name: nn.Parameter(torch.rand(3)) for name in ("scale", "shift")}
    forward = lambda m, x: m.head((x * m.scale).tanh() * m.scale + m.shift)
    with seeded(0):
        model = Raw(forward, **parts, head=nn.Linear(3, 1, bias=False), idle=(2,)).double()
        x = torch.randn(9, 3).double()
    jacobian = Jacobian.of(torch.cat([model(x)[:, 0], model(2 * x)[:, 0] ** 2]), model)
    blocks = {block.names: block for block in residual_blocks(jacobian.merged())}
    assert set(blocks) == {("scale",), ("shift",), ("idle",), ("head.weight",)}
    for name in ("scale", "shift", "idle"):
        squares = jacobian.rows()[name].square().sum(0)
        found = blocks[name,].solve(blocks[name,].inverse(0.1), {name: torch.ones_like(squares)})
        torch.testing.assert_close(found[name], 1 / (squares + 0.1))
        assert "diagonal" in blocks[name,].structure and blocks[name,].reason
