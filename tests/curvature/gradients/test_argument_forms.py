"""The pair (x, y) and x, y as two arguments are the same call, and mistakes in the arguments say what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature
from curvature.recording import warn_once
from support.cases.case import Raw, seeded

pytestmark = pytest.mark.fast

LOSS = nn.CrossEntropyLoss()
Call = Callable[..., Any]

PER_SAMPLE: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "gradients": (curvature.per_sample_gradients, ()),
    "norms": (curvature.per_sample_norms, ()),
    "norms by parameter": (curvature.per_sample_norms_by_parameter, ()),
    "gram": (curvature.per_sample_gram, ()),
    "check": (curvature.check_gradients, ()),
    "clipped": (curvature.clipped_gradient, (0.3,)),
    "projections": (curvature.per_sample_projections, (curvature.SignProjection(5),)),
    "fisher diagonals": (curvature.per_sample_fisher_diagonals, ()),
    "empirical diagonals": (curvature.per_sample_fisher_diagonals, (curvature.empirical(),)),
    "hessian diagonals": (curvature.per_sample_hessian_diagonals, ()),
}
BUILDERS: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "fisher_diagonal": (curvature.fisher_diagonal, ()),
    "fisher_diagonal, empirical": (curvature.fisher_diagonal, (curvature.empirical(),)),
    "fisher_blocks": (curvature.fisher_blocks, ()),
    "fisher": (curvature.fisher, ()),
    "fisher, empirical": (curvature.fisher, (curvature.empirical(),)),
    "gauss_newton": (curvature.gauss_newton, ()),
    "empirical_fisher": (curvature.empirical_fisher, ()),
    "hessian": (curvature.hessian, ()),
    "kfac": (curvature.kfac, ()),
    "kfac, empirical": (curvature.kfac, (curvature.empirical(),)),
    "ekfac": (curvature.ekfac, ()),
    "laplace": (curvature.laplace, ("diagonal",)),
    "noise scale": (curvature.gradient_noise_scale, ()),
}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        return (
            nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
            torch.randn(2, 3).double(),
            torch.arange(2),
        )


def plain(found: Any) -> Any:
    if isinstance(found, curvature.LaplacePosterior):
        return plain(found.precision)
    return found.to_dense() if isinstance(found, curvature.Operator) else found


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_functions_of_samples_take_a_pair(name: str) -> None:
    function, rest = PER_SAMPLE[name]
    model, x, y = problem()
    expected = function(model, LOSS, x, y, *rest)
    calls = [
        function(model, LOSS, (x, y), *rest),
        function(model, LOSS, [x, y], *rest),
        function(model, LOSS, ((x,), y), *rest),
        function(model, LOSS, (x,), y, *rest),
        function(
            model,
            LOSS,
            x=(x, y),
            **dict(
                zip(
                    ("max_norm",)
                    if name == "clipped"
                    else ("projection",)
                    if rest and name == "projections"
                    else ("inject",),
                    rest,
                    strict=False,
                )
            ),
        ),
    ]
    for found in calls:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_take_inputs_and_targets(name: str) -> None:
    function, rest = BUILDERS[name]
    model, x, y = problem()
    expected = plain(function(model, LOSS, (x, y), *rest))
    calls = [
        function(model, LOSS, x, y, *rest),
        function(model, LOSS, (x,), y, *rest),
        function(model, LOSS, x, *rest, y=y),
    ]
    for found in map(plain, calls):
        torch.testing.assert_close(found, expected)


def test_inputs_that_are_tuples_are_not_taken_for_pairs() -> None:
    """Of two arguments of the model, and of a pair of one with the target."""
    with seeded(0):
        model = Raw(lambda m, a, b: m.head(a * b), head=nn.Linear(3, 3)).double()
        a, b = torch.randn(2, 2, 3).double()
    y = torch.arange(2)
    expected = curvature.per_sample_gradients(model, LOSS, (a, b), y)
    torch.testing.assert_close(curvature.per_sample_gradients(model, LOSS, ((a, b), y)), expected)
    matrix = curvature.fisher_diagonal(model, LOSS, ((a, b), y))
    torch.testing.assert_close(curvature.fisher_diagonal(model, LOSS, (a, b), y), matrix)
    torch.testing.assert_close(curvature.fisher_diagonal(model, LOSS, {"a": a, "b": b}, y), matrix)
    nested = [(problem()[1], problem()[2])] * 2  # two batches, where one is asked for
    with pytest.raises(TypeError, match="y: it is missing, and x is no pair"):
        curvature.per_sample_gradients(problem()[0], LOSS, nested)  # type: ignore[call-arg]


def test_no_target_and_loaders_beside_a_target() -> None:
    model, x, y = problem()
    for wrong in (x, (x,), (x, y, y), {"input": x}):
        with pytest.raises(TypeError, match=r"y: it is missing, and x is no pair \(x, y\)"):
            curvature.per_sample_norms(model, LOSS, wrong)  # type: ignore[call-arg]
    loader = DataLoader(TensorDataset(x, y))
    with pytest.raises(TypeError, match="leave y out"):
        curvature.kfac(model, LOSS, loader, y)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inject"):
        curvature.kfac(model, LOSS, (x, y), "empirical")  # type: ignore[arg-type]


MISTAKES: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], tuple[Any, ...]], str]] = {
    "model and loss swapped": (
        lambda m, x, y: (LOSS, m, x, y),
        r"first argument is a CrossEntropyLoss, .*order is model, loss, data",
    ),
    "a function first": (lambda m, x, y: (lambda o, t: o.sum(), m, x, y), "found function .*order is model, loss"),
    "numpy input": (lambda m, x, y: (m, LOSS, x.numpy(), y), "x: .*found a numpy.ndarray: pass torch.as_tensor"),
    "numpy inputs": (lambda m, x, y: (m, LOSS, (x.numpy(),), y), "x: .*found .*numpy.ndarray: pass torch.as_tensor"),
    "numpy target": (lambda m, x, y: (m, LOSS, x, y.numpy()), "y: .*found a numpy.ndarray: pass torch.as_tensor"),
    "one sample": (lambda m, x, y: (m, LOSS, x[0], y[0]), r"single sample needs x\[None\] and y\[None\]"),
    "one number": (lambda m, x, y: (m, LOSS, x[0, 0], y[:1]), r"single sample needs x\[None\] and y\[None\]"),
    "a short target": (lambda m, x, y: (m, LOSS, x, y[:1]), r"y: 2 samples in x, but the shape of y is \(1,\)"),
}


class Wrapped(nn.Module):
    """Around a model that takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.taken(*args, **kwargs)

    def taken(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(batch["image"])
        return out


def test_a_dict_for_a_model_that_says_nothing_of_its_arguments() -> None:
    model, x, y = Wrapped(), torch.randn(2, 3), torch.tensor([0, 2])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'image'.*pass x=\(that dict,\)"):
        curvature.per_sample_norms(model, LOSS, {"image": x}, y)
    found = curvature.per_sample_norms(model, LOSS, ({"image": x},), y)
    assert torch.equal(found, curvature.per_sample_norms(model.inner, LOSS, x, y))


@pytest.mark.parametrize("as_pair", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_to_do(mistake: str, as_pair: bool) -> None:
    arguments, message = MISTAKES[mistake]
    model, loss, x, y = arguments(*problem())
    function: Call = curvature.kfac if as_pair else curvature.per_sample_gradients
    with pytest.raises((TypeError, ValueError), match=message) as told:
        function(model, loss, *([(x, y)] if as_pair else [x, y]))
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("count", [1, 2, 3])  # two look like a pair
@pytest.mark.parametrize("key", ["labels", "label", "y"])
def test_batches_that_are_dicts_get_a_recipe_that_works(key: str, count: int) -> None:
    model, x, y = problem()
    loader = [{"input": x, key: y} for _ in range(count)]
    with pytest.raises(TypeError, match=r"found a dict of 2.*\[\(batch, batch.pop\('" + key) as told:
        curvature.kfac(model, LOSS, loader)
    recipe = "[" + str(told.value).split(": [")[1]
    found = curvature.kfac(model, LOSS, eval(recipe, {"loader": loader}))
    torch.testing.assert_close(found.to_dense(), curvature.kfac(model, LOSS, (x, y)).to_dense())
    with pytest.raises(TypeError, match=r"batch.pop"):
        curvature.fisher(model, LOSS, {"input": x, key: y})


@pytest.mark.parametrize("loss", [nn.NLLLoss(reduction="sum"), torch.nn.functional.nll_loss, nn.L1Loss()])
def test_the_log_says_that_a_matrix_is_zero(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model, x, y = problem()
    model = nn.Sequential(model, nn.LogSoftmax(1))
    target = torch.randn(2, 3).double() if isinstance(loss, nn.L1Loss) else y
    with caplog.at_level(logging.WARNING, "curvature"):
        assert not curvature.gauss_newton(model, loss, (x, target)).to_dense().any()
    assert "Gauss-Newton matrix is zero" in caplog.text
    caplog.clear()
    curvature.gauss_newton(model, LOSS, (x, y))
    assert "zero" not in caplog.text
    assert np.isfinite(float(curvature.gauss_newton(model, LOSS, (x, y)).trace()))
