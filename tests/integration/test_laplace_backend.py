"""The backend for laplace-torch in the examples, against brute force and against laplace-torch's own backends."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from support.cases.case import floats, indices, seeded
from support.comparisons import matches
from support.oracles.brute_force import Matrices, blocks
from support.oracles.kronecker import affine_layers, kronecker

REASON = "laplace-torch of the bench extra is missing: make test installs it"
laplace = pytest.importorskip("laplace", reason=REASON)
# of laplace-torch's own imports and of BackPACK's hooks
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

from laplace.curvature import BackPackGGN, CurvatureInterface, EFInterface, GGNInterface  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from laplace_backend import CurvatureEF, CurvatureGGN, CurvatureHessian, main  # noqa: E402

LIKELIHOODS = {
    "classification": (nn.CrossEntropyLoss(reduction="sum"), 1),
    "regression": (nn.MSELoss(reduction="sum"), 0.5),
}
likelihoods = pytest.mark.parametrize("likelihood", LIKELIHOODS)


def task(likelihood: str, words: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        if words:
            model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.LayerNorm(8), *model[1:2], nn.Linear(8, 3))
        x = indices(6, 2)(7) if words else floats(4)(7).double()
        y = indices(3)(7) if likelihood == "classification" else floats(3)(7).double()
    return model.double(), x, y


def apart(model: nn.Module, matrix: Tensor) -> Tensor:
    """The blocks of single parameters."""
    return blocks(model, matrix, [[name] for name, _ in model.named_parameters()])


@likelihoods
def test_jacobians_gradients_and_exact_matrices(likelihood: str):
    """laplace-torch's own, by torch.func, on the same model."""
    model, x, y = task(likelihood)
    for ours, theirs in ((CurvatureGGN, GGNInterface), (CurvatureEF, EFInterface)):
        backend, peer = ours(model, likelihood), theirs(model, likelihood)
        for name, inputs in {"jacobians": (x,), "gradients": (x, y), "full": (x, y), "diag": (x, y)}.items():
            for found, expected in zip(getattr(backend, name)(*inputs), getattr(peer, name)(*inputs), strict=True):
                matches(found, expected)
        (rows, output), (wanted, _) = backend.jacobians(x, enable_backprop=True), peer.jacobians(x)
        assert output.requires_grad
        matches(rows.detach(), wanted)


@likelihoods
def test_a_subnetwork(likelihood: str):
    model, x, y = task(likelihood)
    some = torch.tensor([3, 0, 17, 25])
    for backend in (CurvatureGGN, CurvatureEF, CurvatureHessian):
        part, all_of_it = backend(model, likelihood, subnetwork_indices=some), backend(model, likelihood)
        matches(part.full(x, y)[1], all_of_it.full(x, y)[1][some[:, None], some])
        matches(part.diag(x, y)[1], all_of_it.diag(x, y)[1][some])


@likelihoods
def test_hessian(likelihood: str):
    model, x, y = task(likelihood)
    loss, factor = LIKELIHOODS[likelihood]
    expected = factor * Matrices(model, loss, (x, y)).hessian
    value, found = CurvatureHessian(model, likelihood).full(x, y)
    matches(found, expected)
    matches(value, factor * loss(model(x), y).detach())
    matches(CurvatureHessian(model, likelihood).diag(x, y)[1], expected.diagonal())


@likelihoods
@pytest.mark.parametrize("words", [False, True], ids=["mlp", "words"])
def test_kronecker_factors_of_uneven_batches(likelihood: str, words: bool):
    """The sum over batches has the factors of all data; laplace-torch keeps weights and biases apart."""
    model, x, y = task(likelihood, words)
    loss, factor = LIKELIHOODS[likelihood]
    backend = CurvatureGGN(model, likelihood)
    (_, first), (_, second) = backend.kron(x[:2], y[:2], N=7), backend.kron(x[2:], y[2:], N=7)
    of = Matrices(model, loss, (x, y))
    expected = factor * apart(model, kronecker(affine_layers(of)))
    if words:  # vectors that are read at every sample have their exact block
        norms = [["2.weight"], ["2.bias"]]
        expected += factor * blocks(model, of.fisher - kronecker(affine_layers(of)), norms)
    matches((first + second).to_matrix(), expected)


def test_reduced_factors_of_a_convolution():
    with seeded(0):
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
        x, y = floats(2, 3, 3)(5).double(), indices(3)(5)
    of = Matrices(model, nn.CrossEntropyLoss(reduction="sum"), (x, y))
    for sharing in ("expand", "reduce"):
        found = CurvatureGGN(model, "classification").kron(x, y, N=5, kfac_approx=sharing)[1].to_matrix()
        matches(found, apart(model, kronecker(affine_layers(of), sharing)))


def test_factors_that_laplace_torch_cannot_hold_are_refused():
    model = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(3, 4, 3), torch.tensor([0, 1, 1])
    with pytest.raises(NotImplementedError, match="no Kronecker factors"):
        CurvatureHessian(model, "classification").kron(x, y, N=3)
    with pytest.raises(NotImplementedError, match=r"0\.weight.*hessian_structure"):
        CurvatureGGN(model, "classification").kron(x, y, N=3)


@likelihoods
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_posteriors_are_those_of_backpack(likelihood: str, structure: str, subset: str):
    model, x, y = task(likelihood)
    model.output_size = 3  # BackPACK's backend reads it
    found = []
    for backend in (CurvatureGGN, BackPackGGN):
        own: Any = laplace.Laplace(
            copy.deepcopy(model), likelihood, subset_of_weights=subset, hessian_structure=structure, backend=backend
        )
        own.fit(DataLoader(TensorDataset(x, y), 3))
        predicted = own(x)
        found.append((own.log_marginal_likelihood(), predicted if isinstance(predicted, Tensor) else predicted[1]))
    for ours, theirs in zip(*found, strict=True):
        matches(ours.detach(), theirs.detach())


def test_frozen_layers_and_dicts():
    model, x, y = task("classification")

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, data: dict[str, Tensor]) -> Tensor:
            return self.body(data["input_ids"])

    wrapped, batch = Words(), {"input_ids": x, "labels": y}
    model[0].requires_grad_(False)
    ours = CurvatureGGN(wrapped, "classification"), CurvatureGGN(model, "classification")
    for name in ("full", "diag"):
        matches(getattr(ours[0], name)(batch, y)[1], getattr(ours[1], name)(x, y)[1])
    matches(ours[0].kron(batch, y, N=7)[1].to_matrix(), ours[1].kron(x, y, N=7)[1].to_matrix())


def test_sampled_labels_follow_the_global_seed():
    model, x, y = task("classification")
    backend = CurvatureGGN(model, "classification", stochastic=True, num_samples=400)
    exact = CurvatureGGN(model, "classification").diag(x, y)[1]
    torch.manual_seed(3)
    first, second = backend.diag(x, y)[1], backend.diag(x, y)[1]
    torch.manual_seed(3)
    assert torch.equal(backend.diag(x, y)[1], first) and not torch.equal(first, second)
    assert (first - exact).norm() < 0.2 * exact.norm()
    for name in ("full", "diag", "kron"):
        few, many = (entries(backend, name, x, y, mc_samples=count) for count in (1, 400))
        wanted = entries(CurvatureGGN(model, "classification"), name, x, y)
        assert (many - wanted).norm() < 0.2 * (few - wanted).norm()


def entries(backend: CurvatureInterface, name: str, x: Tensor, y: Tensor, **options: int) -> Tensor:
    found = getattr(backend, name)(x, y, N=7, **options)[1]
    return found if isinstance(found, Tensor) else found.to_matrix()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]):
    main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["full", "kron", "diag"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@likelihoods
def test_results_are_in_the_precision_of_the_model(likelihood: str, dtype: torch.dtype):
    model, x, y = task(likelihood)
    model, x, y = model.to(dtype), x.to(dtype), y if likelihood == "classification" else y.to(dtype)
    wide, (x_wide, y_wide) = copy.deepcopy(model).double(), (x.double(), y if y.dtype == torch.long else y.double())
    backend, exact = CurvatureGGN(model, likelihood), CurvatureGGN(wide, likelihood)
    tolerance = 20 * torch.finfo(dtype).eps
    for name, inputs in {"jacobians": (False,), "full": (), "diag": (), "kron": (len(x),)}.items():
        given = (x,) if name == "jacobians" else (x, y)
        given_wide = (x_wide,) if name == "jacobians" else (x_wide, y_wide)
        found, expected = getattr(backend, name)(*given, *inputs), getattr(exact, name)(*given_wide, *inputs)
        both = [(found[0], expected[0])] if name == "jacobians" else [(found[1], expected[1])]
        if name == "kron":
            pairs = zip(found[1].kfacs, expected[1].kfacs, strict=True)
            both = [both for ours, theirs in pairs for both in zip(ours, theirs, strict=True)]
        for one, other in both:
            assert one.dtype == dtype
            assert (one.double() - other).norm() <= tolerance * other.norm()
    for one in (CurvatureHessian(model, likelihood), CurvatureEF(model, likelihood)):
        assert one.diag(x, y)[1].dtype == one.full(x, y)[1].dtype == dtype
