"""Per-sample gradients, norms and Gram matrices against loops of batch size one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import curvature
from curvature.gradients.plans import PLANS
from support.cases.case import Case, seeded
from support.cases.catalogue import CASES, CATALOGUE, EXACT_OR_REFUSED, REFUSED, WITHOUT_RULE
from support.combinations import member
from support.oracles import brute_force as oracle
from support.snapshots import unchanged

TOLERANCE = 1e-10
QUANTITIES = ("per_sample_gradients", "per_sample_norms", "per_sample_gram", "check_gradients")
LARGER = CASES[::3]
each_quantity = pytest.mark.parametrize("quantity", QUANTITIES)


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


@functools.cache
def reference(case: Case, device: str, n: int, seed: int) -> dict[str, Tensor]:
    """The oracle's rows, which say something; the tests of one case share them."""
    model, loss = case.build(device)
    rows = oracle.per_sample_gradients(model, loss, *case.batch(model, n, seed), case.sample_dim)
    assert all(row.isfinite().all() for row in rows.values()), "not finite"
    assert n < case.n or any(row.any() for row in rows.values()), "every gradient is zero"
    return rows


def compute(quantity: str, case: Case, model: nn.Module, loss: Any, x: Any, y: Tensor) -> Any:
    options = {} if case.sample_dim == 0 else {"sample_dim": case.sample_dim}
    with unchanged(model, x, y):
        return getattr(curvature, quantity)(model, loss, x, y, **options)


def assert_rows(rows: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert list(rows) == list(expected)
    for name, right in expected.items():
        row = rows[name]
        assert (row.shape, row.dtype, row.device) == (right.shape, right.dtype, right.device), name
        assert not row.requires_grad, name
        scale = max(1.0, right.abs().max().item())
        error = (row - right).abs().max().item()
        assert error <= tolerance * scale, f"{name}: error {error:.3g} at scale {scale:.3g}"


def assert_norms(norms: Tensor, rows: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Squares are compared, as a root makes much of the rounding of what should be zero."""
    expected = oracle.norms(rows)
    assert norms.shape == expected.shape and not norms.requires_grad
    floor = tolerance / 100 * expected.max().item() ** 2
    torch.testing.assert_close(norms.square(), expected.square(), rtol=tolerance, atol=floor)


def assert_gram(gram: Tensor, rows: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    expected = oracle.gram(rows)
    assert gram.shape == expected.shape and not gram.requires_grad
    torch.testing.assert_close(gram, expected, rtol=0, atol=tolerance * expected.abs().max().item())


ASSERTIONS: dict[str, Callable[..., None]] = {
    "per_sample_gradients": assert_rows,
    "per_sample_norms": assert_norms,
    "per_sample_gram": assert_gram,
    "check_gradients": lambda nothing, rows, tolerance=0: None,
}


@each(CASES)
def test_gradients_norms_and_gram(case: Case, device):
    """Then with other data of the same shape (what was learnt of the model is kept), and another batch size.

    That is one; for every third case a larger one, too, at which nothing new is learnt but the shape.
    """
    model, loss = case.build(device)
    larger = [(case.n + 2, 3)] if case in LARGER else []
    for n, seed in ((case.n, 1), (case.n, 2), *larger, (1, 4)):
        x, y = case.batch(model, n, seed)
        rows = compute("per_sample_gradients", case, model, loss, x, y)
        assert_rows(rows, reference(case, device, n, seed))
        if seed == 2:
            for quantity in ("per_sample_norms", "per_sample_gram"):
                value = compute(quantity, case, model, loss, x, y)
                ASSERTIONS[quantity](value, reference(case, device, n, seed))
    # a rule that is wrong goes unnoticed in the rows: what fails its check is computed in another way
    assert any(plan.general for plan in PLANS.get(model, {}).values()) == (case.id in WITHOUT_RULE)


@each(CASES[::9])
def test_check(case: Case, device):
    """What it compares is tested above: here, that it is content."""
    model, loss = case.build(device)
    for seed in (1, 2):
        compute("check_gradients", case, model, loss, *case.batch(model, seed=seed))


@each(CATALOGUE["models"])
def test_single_precision(case: Case, device, monkeypatch):
    """In full: TF32, torch's own choice for convolutions, rounds the loop too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, loss = case.build(device, torch.float32)
    x, y = case.batch(model)
    rows = oracle.per_sample_gradients(model, loss, x, y, case.sample_dim)
    for quantity in QUANTITIES:
        value = compute(quantity, case, model, loss, x, y)
        ASSERTIONS[quantity](value, rows, tolerance=1e-4)


@each(EXACT_OR_REFUSED)
def test_exact_or_refused(case: Case, device):
    for quantity in QUANTITIES:
        model, loss = case.build(device)
        for seed in (1, 2):
            x, y = case.batch(model, seed=seed)
            with member(quantity), contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                value = compute(quantity, case, model, loss, x, y)
                ASSERTIONS[quantity](value, reference(case, device, case.n, seed))


@pytest.mark.parametrize(("case", "module"), REFUSED, ids=[case.id for case, _ in REFUSED])
def test_batch_statistics_are_refused_by_name(case: Case, module: str, device):
    model, loss = case.build(device)
    x, y = case.batch(model)
    named = rf"(?<![\w.]){re.escape(module)}(?![\w])"
    for quantity in QUANTITIES:
        with member(quantity), pytest.raises((ValueError, RuntimeError), match=named):
            compute(quantity, case, model, loss, x, y)


def small(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(device, torch.float64)
        x, y = torch.randn(6, 4), torch.randn(6, 3)
    return model, x.to(device, torch.float64), y.to(device, torch.float64)


@each_quantity
def test_unreduced_loss_is_refused(quantity: str, device):
    model, x, y = small(device)
    with unchanged(model, x, y), pytest.raises(ValueError, match="reduction"):
        getattr(curvature, quantity)(model, nn.MSELoss(reduction="none"), x, y)


def test_empty_batches(device):
    """Poisson sampling draws them. The model is not called: many layers refuse an empty batch."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3), Scale()).to(device)
    batch = torch.empty(0, 1, 4, 4, device=device), torch.empty(0, dtype=torch.long, device=device)
    loss = nn.CrossEntropyLoss()
    found = curvature.per_sample_gradients(model, loss, *batch)
    assert {k: g.shape for k, g in found.items()} == {k: (0, *p.shape) for k, p in model.named_parameters()}
    assert curvature.per_sample_norms(model, loss, *batch).shape == (0,)
    assert curvature.per_sample_gram(model, loss, *batch).shape == (0, 0)
    curvature.check_gradients(model, loss, *batch)
    with pytest.raises(ValueError, match="y: 0 samples in x, but the shape of y is"):
        curvature.per_sample_norms(model, loss, batch[0], torch.tensor([0, 1], device=device))
    with pytest.raises(ValueError, match="there is no sample, all batches are empty"):
        curvature.fisher_diagonal(model, loss, batch)
    full = torch.randn(3, 1, 4, 4, device=device), torch.tensor([0, 1, 2], device=device)
    torch.testing.assert_close(
        curvature.fisher_diagonal(model, loss, [batch, full, batch]), curvature.fisher_diagonal(model, loss, full)
    )


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@each_quantity
def test_sizes_that_disagree_are_refused(quantity: str, device):
    model, x, y = small(device)
    for loss in (nn.MSELoss(), F.mse_loss):
        with unchanged(model, x, y), pytest.raises(ValueError):
            getattr(curvature, quantity)(model, loss, x, y[:5])


@each_quantity
def test_model_without_trainable_parameter_is_refused(quantity: str, device):
    model, x, y = small(device)
    model.requires_grad_(False)
    with unchanged(model, x, y), pytest.raises(ValueError):
        getattr(curvature, quantity)(model, nn.MSELoss(), x, y)


@each_quantity
def test_sample_dim_is_an_option(quantity: str):
    option = inspect.signature(getattr(curvature, quantity)).parameters["sample_dim"]
    assert option.default == 0


class Failing(nn.Module):
    """Raises when told to, in the middle of the forward pass."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("forward")
        return x


@each_quantity
@pytest.mark.parametrize("calls_before", [0, 1])
def test_nothing_is_left_by_a_failing_model(quantity: str, calls_before: int, device):
    model, x, y = small(device)
    model.insert(2, Failing())
    function = getattr(curvature, quantity)
    for _ in range(calls_before):
        function(model, nn.MSELoss(), x, y)
    model[2].fails = True
    with unchanged(model, x, y), pytest.raises(ArithmeticError, match="forward"):
        function(model, nn.MSELoss(), x, y)
    model[2].fails = False
    assert_rows(
        curvature.per_sample_gradients(model, nn.MSELoss(), x, y),
        oracle.per_sample_gradients(model, nn.MSELoss(), x, y),
    )


@each_quantity
@pytest.mark.parametrize("calls_before", [0, 1])
def test_nothing_is_left_by_a_failing_loss(quantity: str, calls_before: int, device):
    model, x, y = small(device)
    function = getattr(curvature, quantity)

    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("loss")

    for _ in range(calls_before):
        function(model, nn.MSELoss(), x, y)
    with unchanged(model, x, y), pytest.raises(ArithmeticError, match="loss"):
        function(model, failing, x, y)


@each_quantity
def test_gradient_of_the_input_is_left_alone(quantity: str, device):
    model, x, y = small(device)
    x.requires_grad_()
    expected = oracle.per_sample_gradients(model, nn.MSELoss(), x, y)
    with unchanged(model, x, y):
        value = getattr(curvature, quantity)(model, nn.MSELoss(), x, y)
    ASSERTIONS[quantity](value, expected)


@pytest.mark.parametrize("quantity", QUANTITIES[:3])
def test_dropout_leaves_the_random_state(quantity: str, device):
    """In training mode the rows are those of the masks that the batch draws from the random state as it is."""
    model, x, y = small(device)
    model.insert(2, nn.Dropout(0.5))
    loss = nn.MSELoss(reduction="sum")
    with unchanged(model, x, y):
        value = getattr(curvature, quantity)(model, loss, x, y)
    if quantity == "per_sample_gradients":
        model.zero_grad()
        with oracle.forked():
            loss(model(x), y).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(value[name].sum(0), parameter.grad)


@each_quantity
def test_running_statistics_are_left_alone(quantity: str, device):
    """Instance normalisation has rows in training mode too, but a forward pass moves its statistics."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
    model.to(device, torch.float64)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, y = torch.randn(4, 2, 6, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    getattr(curvature, quantity)(model, nn.MSELoss(), x.to(device), y.to(device))
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_losses_may_change_between_calls(device):
    """Nothing of one loss or model is kept for the next."""
    model, x, y = small(device)
    for loss in (nn.MSELoss(), nn.L1Loss(reduction="sum"), F.huber_loss, nn.MSELoss(reduction="sum")):
        rows = curvature.per_sample_gradients(model, loss, x, y)
        assert_rows(rows, oracle.per_sample_gradients(model, loss, x, y))


def test_model_may_change_between_calls(device):
    """New values, a frozen layer, another layer in the place of one, evaluation mode: each is seen."""
    model, x, y = small(device)
    loss = nn.MSELoss()

    def changes() -> Any:
        yield
        torch.nn.init.ones_(model[0].weight)
        yield
        model[0].weight.requires_grad_(False)
        yield
        model[0].weight.requires_grad_(True)
        model[1] = nn.ReLU(inplace=True)
        yield
        model[2] = nn.Linear(5, 3, bias=False).to(device, torch.float64)
        yield
        model.append(nn.LayerNorm(3).to(device, torch.float64)).eval()
        yield

    for _ in changes():
        rows = curvature.per_sample_gradients(model, loss, x, y)
        assert_rows(rows, oracle.per_sample_gradients(model, loss, x, y))


def test_structure_is_learnt_once_per_shape(monkeypatch):
    calls = []
    original = curvature.gradients.per_sample.learn
    monkeypatch.setattr(curvature.gradients.per_sample, "learn", lambda *a: calls.append(1) or original(*a))
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.MSELoss()
    for n in (5, 5, 6, 5, 6):
        curvature.per_sample_norms(model, loss, torch.randn(n, 3), torch.randn(n, 2))
    assert len(calls) == 2


def test_a_recurrent_layer_under_checkpointing_is_not_mistaken_for_its_loop():
    """The fused kernel runs again in the backward pass; taking its tensors for the loop's would go unnoticed."""
    lstm, head = nn.LSTM(3, 4, batch_first=True).double(), nn.Linear(4, 2).double()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = lstm, head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=False)[:, -1])

    x, y = torch.randn(5, 3, 3).double(), torch.randn(5, 2).double()
    rows = curvature.per_sample_gradients(Checkpointed(), nn.MSELoss(), x, y)
    assert_rows(rows, oracle.per_sample_gradients(Checkpointed(), nn.MSELoss(), x, y))


def test_second_call_under_autocast_repeats_the_first():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (curvature.per_sample_gradients(model, nn.MSELoss(), x, y) for _ in range(2))
    for name, g in first.items():
        assert g.dtype == second[name].dtype == torch.float32
        assert torch.equal(g, second[name])
