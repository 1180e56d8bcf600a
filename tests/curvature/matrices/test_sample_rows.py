"""Matrices by the rows of their samples, against brute force; when a matrix is held so, and when it is not."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.operators import matrix_free
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles.brute_force import Matrices

D = 0.03
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 2.5]).double(), ignore_index=2)
LOSSES = {"mean": nn.CrossEntropyLoss(), "weighted": WEIGHTED, "sum": nn.CrossEntropyLoss(reduction="sum")}


def branches(m: Any, x: Tensor) -> Tensor:
    """A parameter is read only by batches whose first entry is positive; tokens share a weight."""
    hidden = m.norm(torch.tanh(m.tokens(x)).sum(1))
    return m.head(m.sometimes(hidden) if x[0, 0, 0] > 0 else hidden)


def problem() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    with seeded(0):
        layers = {"tokens": nn.Linear(3, 5), "norm": nn.LayerNorm(5), "head": nn.Linear(5, 3)}
        model = Raw(branches, **layers, sometimes=nn.Linear(5, 5)).double()
        x, y = torch.randn(8, 2, 3).double(), torch.randint(3, (8,))
    x[:, 0, 0] = torch.where(torch.arange(8) < 5, -1.0, 1.0)
    return model, [(x[:5], y[:5]), (x[5:], y[5:])]


def damped(M: Tensor) -> Tensor:
    return M + D * torch.eye(len(M)).to(M)


def squared_root(op: curvature.Operator) -> Tensor:
    root = op._inverse_root(torch.eye(op.space.size).double(), D)
    return root @ root.mT


def test_rows_can_be_pickled() -> None:
    """Those of a LayerNorm, too, whose inputs are normalized anew when a method asks for them."""
    model, data = problem()
    S = curvature.empirical_fisher(model, LOSSES["mean"], data).compact()
    assert isinstance(S, curvature.SampleSpace)
    again = pickle.loads(pickle.dumps(S))
    v = torch.ones(S.space.size).double()
    matches(again @ v, S @ v)
    matches(again.solve(v, D), S.solve(v, D))


WAYS: dict[str, tuple[Callable[[Any], Tensor], Callable[[Tensor], Tensor]]] = {
    "dense": (lambda S: S.to_dense(), lambda M: M),
    "product": (lambda S: S @ torch.eye(S.space.size).double(), lambda M: M),
    "diagonal": (lambda S: S.diagonal(), lambda M: M.diagonal()),
    "trace": (lambda S: S.trace(), lambda M: M.trace()),
    "norm": (lambda S: S.frobenius_norm(), lambda M: M.norm()),
    "det": (lambda S: S.det(D), lambda M: torch.det(damped(M))),
    "eigenvalues": (lambda S: S.eigenvalues(), torch.linalg.eigvalsh),
    "solve": (lambda S: S.solve(torch.eye(S.space.size).double(), D), lambda M: torch.linalg.inv(damped(M))),
    "inverse": (lambda S: S.inverse(D).to_dense(), lambda M: torch.linalg.inv(damped(M))),
    "root": (squared_root, lambda M: torch.linalg.inv(damped(M))),
    "logdet": (lambda S: S.logdet(D), lambda M: torch.logdet(damped(M))),
    "scaled": (lambda S: (3 * S).logdet(3 * D), lambda M: torch.logdet(3 * damped(M))),
    "negative": (lambda S: (-S).eigenvalues(), lambda M: torch.linalg.eigvalsh(-M)),
}


@pytest.mark.fast
@pytest.mark.parametrize("loss", LOSSES)
def test_as_dense(loss: str) -> None:
    model, data = problem()
    S = curvature.gauss_newton(model, LOSSES[loss], data).compact()
    assert isinstance(S, curvature.SampleSpace) and S.gram.shape == (16, 16)  # of 8 samples with 3 classes
    assert "16 rows" in repr(S)
    expected = Matrices(model, LOSSES[loss], data).gauss_newton
    for way, (found, wanted) in WAYS.items():
        assert torch.allclose(found(S), wanted(expected), rtol=1e-9, atol=1e-11), way


def test_one_row_a_sample() -> None:
    model, data = problem()
    S = curvature.empirical_fisher(model, WEIGHTED, data).compact()
    assert isinstance(S, curvature.SampleSpace) and S.gram.shape == (8, 8)
    matches(S.to_dense(), Matrices(model, WEIGHTED, data).empirical_fisher, 1e-9)


def test_solve_goes_there_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parameters are many and the rows few; where both are many, by conjugate gradients."""
    model, data = problem()
    G = curvature.gauss_newton(model, nn.CrossEntropyLoss(), data)
    expected = torch.linalg.inv(damped(Matrices(model, nn.CrossEntropyLoss(), data).gauss_newton))
    calls: list[int] = []
    plain = matrix_free.conjugate_gradient
    monkeypatch.setattr(matrix_free, "conjugate_gradient", lambda *given: calls.append(1) or plain(*given))
    for limit, times in ((24, 0), (23, 1)):
        monkeypatch.setattr(matrix_free, "MAX_DIRECT_SIZE", limit)
        matches(G.solve(torch.eye(len(expected)).double(), D), expected, 1e-8)
        assert len(calls) == times


def test_where_it_is_dense() -> None:
    """More rows than parameters; a Hessian at the output without a root that is known; no rows at all."""
    model, data = problem()
    own = lambda output, target: output.exp().sum(1).mean()
    narrow = nn.Linear(3, 3).double()
    for G in (
        curvature.gauss_newton(model, own, data),
        curvature.hessian(model, nn.CrossEntropyLoss(), data),
        curvature.gauss_newton(narrow, nn.CrossEntropyLoss(), [(x.sum(1), y) for x, y in data]),
    ):
        assert isinstance(G.compact(), curvature.Dense)


def test_without_damping_it_is_singular() -> None:
    model, data = problem()
    S = curvature.gauss_newton(model, nn.CrossEntropyLoss(), data).compact()
    for damping in (0.0, -1.0, 1e-18):
        with pytest.raises(ValueError, match=r"SampleSpace.*(singular|indefinite).*Use a damping above"):
            S.solve(torch.ones(S.space.size).double(), damping)
    with pytest.raises(TypeError, match=r"materialise"):
        S.state()


def test_of_an_output_that_depends_on_the_input_alone_rows_are_zero() -> None:
    x, model = torch.ones(4, 3, requires_grad=True), Raw(lambda m, x: 2 * x, unread=(100,))
    G = curvature.fisher(model, nn.MSELoss(), (x, torch.ones(4, 3))).compact()
    assert isinstance(G, curvature.operators.SampleSpace)
    assert not G.to_dense().any() and torch.equal(G.solve(torch.ones(100), 0.5), torch.full((100,), 2.0))
