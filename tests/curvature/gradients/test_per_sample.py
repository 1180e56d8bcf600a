"""Per-sample gradients, norms and Gram matrices against loops of batch size one."""

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import curvature
import curvature.gradients.per_sample
from support.cases.case import Case, Raw, seeded
from support.cases.catalogue import CASES, CATALOGUE, EXACT_OR_REFUSED, REFUSED, WITHOUT_RULE
from support.combinations import member
from support.oracles import brute_force as oracle
from support.plans import plans_of
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
    if device.startswith("cuda") and case.id.endswith("max_norm_offsets"):
        pytest.skip("torch cannot renormalise the words of an empty bag on CUDA")
    # torch's kernel on CUDA takes the root of a norm in single precision
    tolerance = 1e-7 if device.startswith("cuda") and "weight_norm" in case.id else TOLERANCE
    for n, seed in ((case.n, 1), (case.n, 2), *larger, (1, 4)):
        x, y = case.batch(model, n, seed)
        rows = compute("per_sample_gradients", case, model, loss, x, y)
        assert_rows(rows, reference(case, device, n, seed), tolerance)
        if seed == 2:
            for quantity in ("per_sample_norms", "per_sample_gram"):
                value = compute(quantity, case, model, loss, x, y)
                ASSERTIONS[quantity](value, reference(case, device, n, seed), tolerance)
    # a rule that is wrong goes unnoticed in the rows: what fails its check is computed in another way
    assert any(plan.general for plan in plans_of(model)) == (case.id in WITHOUT_RULE)


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


def test_empty_batches(device, double):
    """Poisson sampling draws them. The model is not called: many layers refuse an empty batch."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3), Raw(lambda m, x: m.scale * x, scale=())
    ).to(device)
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


@each_quantity
def test_refused(quantity: str, device):
    """An unreduced loss, sizes that disagree, and a model without a trainable parameter."""
    model, x, y = small(device)
    function = getattr(curvature, quantity)
    with unchanged(model, x, y):
        with pytest.raises(ValueError, match="reduction"):
            function(model, nn.MSELoss(reduction="none"), x, y)
        for loss in (nn.MSELoss(), F.mse_loss):
            with pytest.raises(ValueError):
                function(model, loss, x, y[:5])
    model.requires_grad_(False)
    with unchanged(model, x, y), pytest.raises(ValueError):
        function(model, nn.MSELoss(), x, y)


def fail(*_: Any) -> Any:
    raise ArithmeticError("on purpose")


@each_quantity
@pytest.mark.parametrize("calls_before", [0, 1])
def test_nothing_is_left_by_a_failing_model_or_loss(quantity: str, calls_before: int, device):
    model, x, y = small(device)
    function = getattr(curvature, quantity)
    for _ in range(calls_before):
        function(model, nn.MSELoss(), x, y)
    hook = model[1].register_forward_hook(fail)  # in the middle of the forward pass
    with unchanged(model, x, y), pytest.raises(ArithmeticError, match="on purpose"):
        function(model, nn.MSELoss(), x, y)
    hook.remove()
    with unchanged(model, x, y), pytest.raises(ArithmeticError, match="on purpose"):
        function(model, fail, x, y)
    assert_rows(
        curvature.per_sample_gradients(model, nn.MSELoss(), x, y),
        oracle.per_sample_gradients(model, nn.MSELoss(), x, y),
    )


@each_quantity
def test_what_is_given_is_left_alone(quantity: str, device):
    """The gradient of the input, and the statistics that an instance norm in training mode moves."""
    model, x, y = small(device)
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True).to(device, torch.float64)
    model = nn.Sequential(*model, nn.Unflatten(1, (3, 1)), nn.ConstantPad1d((0, 2), 0.5), norm)
    x.requires_grad_()
    y = y[:, :, None].expand(-1, -1, 3)
    with unchanged(model, x, y):
        value = getattr(curvature, quantity)(model, nn.MSELoss(), x, y)
    ASSERTIONS[quantity](value, oracle.per_sample_gradients(model, nn.MSELoss(), x, y))


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


def test_losses_and_models_may_change_between_calls(device):
    """Other losses, new values, a frozen layer, another layer in the place of one, evaluation mode: each is seen."""
    model, x, y = small(device)

    def changes() -> Any:
        yield from (nn.L1Loss(reduction="sum"), F.huber_loss, nn.MSELoss(reduction="sum"), nn.MSELoss())
        torch.nn.init.ones_(model[0].weight)
        yield nn.MSELoss()
        model[0].weight.requires_grad_(False)
        yield nn.MSELoss()
        model[0].weight.requires_grad_(True)
        model[1] = nn.ReLU(inplace=True)
        yield nn.MSELoss()
        model[2] = nn.Linear(5, 3, bias=False).to(device, torch.float64)
        yield nn.MSELoss()
        model.append(nn.LayerNorm(3).to(device, torch.float64)).eval()
        yield nn.MSELoss()

    for loss in changes():
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
    run = lambda m, x: m.head(checkpoint(lambda x: m.lstm(x)[0], x, use_reentrant=False)[:, -1])
    model = Raw(run, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3, 3).double(), torch.randn(5, 2).double()
    rows = curvature.per_sample_gradients(model, nn.MSELoss(), x, y)
    assert_rows(rows, oracle.per_sample_gradients(model, nn.MSELoss(), x, y))


def test_second_call_under_autocast_repeats_the_first():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (curvature.per_sample_gradients(model, nn.MSELoss(), x, y) for _ in range(2))
    for name, g in first.items():
        assert g.dtype == second[name].dtype == torch.float32
        assert torch.equal(g, second[name])


LOSS = nn.CrossEntropyLoss()


def sinh(m: Any, x: Tensor) -> Tensor:
    """A parameter that takes the general path."""
    return torch.einsum("nc,c,c->nc", x, m.w, m.w).sinh()


def deep(*layers: nn.Module, size: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    last = Raw(sinh, w=nn.Parameter(torch.rand(4))), nn.Linear(4, 3)
    return nn.Sequential(*layers, *last).double(), torch.randn(7, 1, size, size).double(), torch.randint(3, (7,))


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        return deep(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 4))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    sizes: list[int] = []
    kept = curvature.gradients.per_sample.contracted
    counted = lambda batch, contract: sizes.append(batch.count) or kept(batch, contract)
    monkeypatch.setattr(curvature.gradients.per_sample, "contracted", counted)
    found = curvature.per_sample_gradients(model, LOSS, x, y, chunk=chunk)
    torch.testing.assert_close(found, oracle.per_sample_gradients(model, LOSS, x, y))
    assert set(sizes) == {min(chunk, 7)} and not any(g.requires_grad for g in found.values())
    assert len(curvature.per_sample_gradients(model, LOSS, x[:0], y[:0], chunk=chunk)["0.weight"]) == 0


@pytest.mark.parametrize("most", [0, 1 << 22])
def test_backprops_are_contracted_as_they_arrive(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a known plan, in portions of one layer or all together."""
    monkeypatch.setattr("curvature.gradients.per_sample.WAITING_BYTES", most)
    with seeded(0):
        model, x, y = deep(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 4), size=4)
    portions: list[int] = []
    kept = curvature.gradients.per_sample.terms_by_parameter
    counted = lambda tape, backprops, *rest, **options: (
        portions.append(sum(b is not None for b in backprops)) or kept(tape, backprops, *rest, **options)
    )
    monkeypatch.setattr(curvature.gradients.per_sample, "terms_by_parameter", counted)
    wanted = oracle.per_sample_gradients(model, LOSS, x, y)
    curvature.per_sample_norms(model, LOSS, x, y)
    portions.clear()
    torch.testing.assert_close(curvature.per_sample_gradients(model, LOSS, x, y), wanted)
    assert (max(portions) == 1) == (most == 0)
    torch.testing.assert_close(curvature.per_sample_norms(model, LOSS, x, y), oracle.norms(wanted))


def test_results_go_where_they_are_sent(tmp_path: Path) -> None:
    model, x, y = problem()
    wanted = oracle.per_sample_gradients(model, LOSS, x, y)
    files = {
        name: np.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="w+", dtype="float64", shape=tuple(g.shape))
        for name, g in wanted.items()
    }
    tensors = {name: torch.zeros_like(g, dtype=torch.float32) for name, g in wanted.items()}
    found = curvature.per_sample_gradients(model, LOSS, x, y, chunk=3, out=files)
    alone = curvature.per_sample_gradients(model, LOSS, x, y, out=tensors)
    for name, g in wanted.items():
        files[name].flush()
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), g.numpy(), atol=1e-14)
        torch.testing.assert_close(found[name], g)
        assert alone[name] is tensors[name]
        torch.testing.assert_close(tensors[name], g.float())


def test_chunks_and_memory_that_are_refused() -> None:
    model, x, y = problem()
    right = {name: torch.empty(7, *p.shape) for name, p in model.named_parameters()}
    call = lambda **options: curvature.per_sample_gradients(model, LOSS, x, y, **options)
    with pytest.raises(ValueError, match="chunk: expected a whole number of at least 1, found 0"):
        call(chunk=0)
    with pytest.raises(TypeError, match=r"chunk: expected a whole number, found 1\.5"):
        call(chunk=1.5)
    for dim in (1.5, None, "batch", (0, 0, 0.5)):
        with pytest.raises(TypeError, match="sample_dim: expected a whole number, found"):
            call(sample_dim=dim)
    for out in (list(right.values()), 5, dict.fromkeys(right, [1.0])):
        with pytest.raises(TypeError, match=r"out: expected \{name: tensor or numpy array\}"):
            call(out=out)
    with pytest.raises(ValueError, match=r"out: expected 4\.bias of shape \(7, 3\), found \(6, 3\)"):
        call(out=right | {"4.bias": torch.empty(6, 3)})
    with pytest.raises(ValueError, match=r"out: expected 0\.weight of shape \(7, 4, 1, 3, 3\), found none"):
        call(out={name: t for name, t in right.items() if name != "0.weight"})
    with pytest.raises(ValueError, match="out: expected more of shape no such parameter"):
        call(out=right | {"more": torch.empty(7)})
    with pytest.raises(ValueError, match=r"out: 4\.bias is torch\.int64, which cannot hold gradients of torch\.float"):
        call(out=right | {"4.bias": np.empty((7, 3), dtype=int)})
