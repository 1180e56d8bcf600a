"""Values, gradients and Laplacians in one forward pass, against whole Hessians of one sample after the other."""

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.functional import ExactNorms
from curvature.recording import warn_once
from optimizers import KFAC, NaturalGradient
from support.cases.case import Raw, randomise, seeded
from support.cases.laplacian import FORMS, GENERAL, MODELS, D, N, block, case, mlp
from support.laplacians import assert_equal, check, slopes
from support.oracles import derivatives as oracle_derivatives
from support.oracles import laplacian as oracle


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Each warning comes once a process: here once a test."""
    warn_once.cache_clear()
    caplog.set_level(logging.INFO, "curvature")
    yield caplog


@pytest.mark.parametrize("form", [pytest.param("laplacian", marks=pytest.mark.fast), "diagonal", "matrix"])
@pytest.mark.parametrize("name", MODELS)
def test_results(name: str, form: str, warnings: pytest.LogCaptureFixture):
    """The three results, and the gradient of a scalar of all three by the parameters and by x."""
    model, x = case(name)
    expected = oracle.laplacian(model, x, FORMS[form])
    assert_equal(curvature.laplacian(model, x, FORMS[form]), expected)
    x.requires_grad_()
    found = curvature.laplacian(model, x, FORMS[form])
    assert_equal(found, expected)
    by_loop = oracle.differentiable(model, x, FORMS[form])
    assert_equal(by_loop, expected)
    for a, b in zip(slopes(model, x, found), slopes(model, x, by_loop), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * max(1.0, b.abs().max().item()))
    said = [record.getMessage() for record in warnings.records if record.levelno == logging.WARNING]
    assert len(said) == (name in GENERAL), said
    if name in GENERAL:
        assert GENERAL[name][1] in said[0]


def everything(m: nn.Module, x: Tensor) -> Tensor:
    """x of shape (N, 3, 4)."""
    h = m.first(x).tanh()
    return m.out(h.transpose(1, 2) @ x[..., :2]) + x.movedim(1, 2).mean(2, keepdim=True)[:, :2]


def test_inputs_of_several_axes(warnings: pytest.LogCaptureFixture):
    with seeded(1):
        model = Raw(everything, first=nn.Linear(4, 2), out=nn.Linear(2, 2)).double()
        x, C = torch.randn(N, 3, 4).double(), torch.randn(12, 12).double()
    u, grad, second = curvature.laplacian(model, x)
    assert (u.shape, grad.shape, second.shape) == ((N, 2, 2), (N, 2, 2, 3, 4), (N, 2, 2))
    for weights in (None, C[0], C + C.mT):
        check(model, x, weights)
    assert not warnings.records


def test_float32(device: str):
    model, x = case("residual block")
    expected = oracle.laplacian(model, x)
    found = curvature.laplacian(model.to(device).float(), x.to(device).float())
    assert all(part.dtype == torch.float32 for part in found)
    assert_equal([part.double() for part in found], expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["tanh", "determinant", "attention"])
def test_without_gradients(name: str):
    """The same values, and nothing to be differentiated."""
    model, x = case(name)
    expected = oracle.laplacian(model, x)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = curvature.laplacian(model, x.clone())
        assert not any(part.requires_grad for part in found)
        assert_equal(found, expected)
    found = curvature.laplacian(model.requires_grad_(False), x)
    assert not any(part.requires_grad for part in found)
    assert_equal(found, expected)


def dropped(p: float = 0.5) -> nn.Module:
    layers = nn.Linear(D, 64), nn.Tanh(), nn.Dropout(p), nn.Linear(64, 1)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("general", [False, True])
def test_dropout_has_one_mask(general: bool):
    """Value, gradient and Laplacian belong to one network with half of its units."""
    with seeded(0):
        model, x = dropped(), torch.randn(1, D).double()
    bent = (lambda u: torch.linalg.det(u[:, None])[:, None]) if general else lambda u: u
    found = curvature.laplacian(lambda x: bent(model(x)), x)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = curvature.laplacian(lambda x: bent(model(x)), x)
    assert torch.equal(state, torch.get_rng_state())
    mask = F.dropout(torch.ones(1, 64).double(), 0.5)
    fixed = lambda x: bent(model[3](model[1](model[0](x)) * mask))
    assert_equal(found, oracle.laplacian(fixed, x))


@pytest.mark.parametrize("first", [torch.zeros(D).double(), None])
def test_buffers_that_are_replaced(first: Tensor | None):
    """By what depends on x, in every way that runs the model."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        m.mean = (0 if m.mean is None else 0.9 * m.mean) + 0.1 * x.sum(0)
        return m.inner(x)

    model = Raw(function, inner=nn.Linear(D, 1).double())
    model.register_buffer("mean", first)
    x = torch.ones(N, D).double()
    curvature.laplacian(model, x)
    curvature.residual_jacobian(model, lambda m, x: m(x)[:, 0], x)
    curvature.per_sample_gradients(model, nn.MSELoss(), x, x[:, :1])
    assert model.mean is first and (first is None or not first.any())


def residual(model: nn.Module, x: Tensor, way: Callable[..., Any] = curvature.laplacian) -> Tensor:
    u, grad, second = (part[:, 0] for part in way(model, x))
    return second + grad.square().sum(1) * u - torch.sin(u)


nested = partial(residual, way=oracle.differentiable)
ONE_OUTPUT: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: mlp(nn.Tanh), "silu": lambda: mlp(nn.SiLU), "residual block": block,
    "layer norm": lambda: nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", ONE_OUTPUT)


def one_output(name: str) -> tuple[nn.Module, Tensor]:
    with seeded(0):
        model = ONE_OUTPUT[name]()
        randomise(model)
    with seeded(2):
        return model.double(), torch.randn(7, D).double()


@each_model
def test_jacobians_of_residuals(name: str, warnings: pytest.LogCaptureFixture):
    """By rules: a way row by row would be logged."""
    model, x = one_output(name)
    for points in (x, x + 0.5):  # what the first call learnt serves the second
        expected = oracle_derivatives.residual_jacobian(model, nested, points)
        found = curvature.residual_jacobian(model, residual, points)
        with ExactNorms():
            values = torch.cat([residual(model, points), model(points)[:, 0] / 3])
        whole = curvature.Jacobian.of(values, model).rows()
        for key, rows in expected.items():
            for rows_found in (found[key], whole[key][:7]):
                torch.testing.assert_close(rows_found, rows, rtol=1e-10, atol=1e-10 * max(1.0, rows.abs().max().item()))
    assert not warnings.records


def mixing(x: Tensor) -> Tensor:
    return x - x.mean(0)


LINEAR = nn.Linear(D, 1).double()
X = torch.ones(N, D).double()
BATCH = nn.Sequential(nn.Linear(D, 2), nn.BatchNorm1d(2)).double()
RECURRENT = nn.Sequential(nn.GRU(D, 2), Raw(lambda m, x: x[0]), BATCH[1]).double()
BLOCK = torch.arange(12.0).view(4, 3).double()
NAN = torch.full((D, D), math.nan)
find = curvature.laplacian
REFUSED = {
    "no model": (lambda: find(3, X), TypeError, "model: expected a module or a function, found int"),
    "integers": (lambda: find(LINEAR, X.long()), TypeError, "x: expected a floating point tensor, found torch.int64"),
    "a list": (lambda: find(LINEAR, [1.0]), TypeError, "x: .* found list"),
    "no input": (lambda: find(LINEAR, X[:, :0]), ValueError, r"found \(4, 0\)"),
    "a number": (lambda: find(LINEAR, X[0, 0]), ValueError, r"x: expected shape"),
    "weights' type": (lambda: find(LINEAR, X, [1.0]), TypeError, "weights: .* found list"),
    "weights' shape": (lambda: find(LINEAR, X, X[0, :2]), ValueError, r"weights: expected shape \(3,\) or \(3, 3\)"),
    "asymmetric": (lambda: find(LINEAR, X, torch.ones(3, 3).triu()), ValueError, "weights: .* symmetric"),
    "no weights": (lambda: find(LINEAR, X, NAN), ValueError, "weights: .* symmetric"),
    "a tuple": (lambda: find(lambda x: (x, x), X), TypeError, "model: .* found tuple"),
    "a sum": (lambda: find(lambda x: x.sum(), X), ValueError, r"model: expected an output \(N, ...\)"),
    "samples": (lambda: find(lambda x: x[:1], X), ValueError, r"for the 4 samples of x, found \(1, 3\)"),
    "mixed": (lambda: find(mixing, BLOCK), ValueError, "sample 0 of x depends on the other samples"),
    "mixed before": (lambda: find(lambda x: x.cumsum(0), BLOCK), ValueError, "sample 3 of x depends"),
    "BatchNorm": (lambda: find(BATCH, X), ValueError, "^1: BatchNorm in training mode"),
    "BatchNorm in a function": (lambda: find(lambda x: BATCH(x), X), ValueError, "BatchNorm in training mode"),
    "BatchNorm, general": (lambda: find(RECURRENT, X), ValueError, "^2: BatchNorm"),
    "a wrong layer": (lambda: find(LINEAR, X[:, :2]), RuntimeError, "shapes cannot be multiplied"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    call, kind, text = REFUSED[name]
    for _ in range(2):  # also where the shape is known
        with pytest.raises(kind, match=text):
            call()


def test_no_sample():
    """Empty results in the shapes of others, of which a sum can be differentiated; so with `residual_jacobian`."""
    model = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    some, found = (curvature.laplacian(model, X[:n].clone().requires_grad_()) for n in (2, 0))
    assert [t.shape for t in found] == [(0, *t.shape[1:]) for t in some]
    found[2].sum().backward()
    assert not any(p.grad.any() for p in model[0].parameters())
    residual = lambda model, x: curvature.laplacian(model, x)[2][:, 0]
    rows = curvature.residual_jacobian(model, residual, X[:0])
    assert {k: g.shape for k, g in rows.items()} == {k: (0, *p.shape) for k, p in model.named_parameters()}
    assert all(g.dtype is torch.float64 for g in rows.values())


@each_model
def test_recorded_models(name: str, warnings: pytest.LogCaptureFixture):
    """A recorder sees a plain forward pass, and nothing is said: the model has rules for all that it does."""
    model, x = one_output(name)
    with curvature.capture(model) as tape:
        found = curvature.laplacian(model, x)
    assert_equal(found, oracle.laplacian(model, x, None))
    backprops = tape.backprops(found[0], torch.ones(1, 7, 1).double())
    assert backprops and all(b is not None for b in backprops)
    assert not warnings.records


@pytest.mark.parametrize("optimizer", [KFAC, NaturalGradient])
def test_steps_of_residuals_say_nothing(optimizer: type, warnings: pytest.LogCaptureFixture):
    """The first call of a closure is recorded, since it may be that of a loss."""
    model, x = one_output("tanh")
    solver = optimizer(model)
    losses = [float(solver.step(lambda: residual(model, x))) for _ in range(3)]
    assert losses[2] < losses[0] and not warnings.records


def test_an_optimizer_hears_a_laplacian_that_is_in_the_loss(warnings: pytest.LogCaptureFixture):
    """Its pass is that of the loop, unlike those of builders between the lines of one."""
    model, x = one_output("tanh")
    opt = KFAC(model)
    for _ in range(2):
        opt.zero_grad()
        residual(model, x).square().mean().backward()
        opt.step()
    assert opt.monitor.entries[-1]["renewed"] and "kronecker" in opt.report() and not warnings.records


UNARY = [
    "tanh", "sin", "cos", "exp", "sigmoid", "square", "tan", "sinh", "cosh", "atan", "asinh", "exp2", "expm1",
    "erf", "erfc", "sinc", "silu", "softplus", "elu", "selu", "celu", "gelu", "mish", "relu", "relu6", "leaky_relu",
    "hardswish", "hardtanh", "softshrink", "hardshrink", "tanhshrink", "softsign", "logsigmoid", "abs", "neg",
]  # fmt: skip
POSITIVE = ["log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma"]
INSIDE = ["asin", "acos", "atanh", "erfinv"]
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu tanh": lambda h: F.gelu(h, approximate="tanh"),
    "softplus 2": lambda h: F.softplus(h, beta=2.0, threshold=1.0),
    "elu in between": lambda h: F.elu(h, 0.7) + F.celu(h, 1.3) + F.leaky_relu(h, 0.3),
    "powers": lambda h: h**3 + h.pow(2) + (h * h + 1) ** -0.5 + (h * h + 1).pow(h) + 2**h + h.square() ** 0.5,
    "clamp": lambda h: h.clamp(-0.4, 0.6) + h.clamp_min(0.1) + torch.clamp(h, max=h.flip(1)),
    "atan2": lambda h: torch.atan2(h, h.roll(1, 1) + 2) + torch.hypot(h, h.new_ones(5)),
    "maximum": lambda h: torch.maximum(h, h.flip(1)) + torch.minimum(h, h.new_zeros(())),
    "lerp": lambda h: torch.lerp(h, h.sin(), h.cos()) + torch.addcmul(h, h, h.exp(), value=0.3),
    "logaddexp": lambda h: torch.logaddexp(h, h.sin()) + torch.addcdiv(h, h, h.exp() + 1) + torch.xlogy(h, h.exp()),
    "prelu": lambda h: F.prelu(h, h.new_tensor([0.1, 0.2, 0.3, 0.4, 0.5])) + F.prelu(h, h.new_tensor([0.3])),
    "remainder": lambda h: h.remainder(0.7) * h.fmod(0.9) + h.frac() + h.floor() + h.sign() + h.round().detach(),
    "scalars": lambda h: torch.add(h, h.sin(), alpha=3) - torch.sub(h.cos(), h, alpha=0.5) + torch.rsub(h, h.exp()),
    "quotients": lambda h: h / (2 + h * h) + 1 / (h.exp() + 1) + torch.ones(5).double() / (3 + h.sin()) + h / 4,
}  # fmt: skip


def unary(name: str) -> Callable[[Tensor], Tensor]:
    spaces = (torch, F, torch.special)
    function = next(getattr(space, name) for space in spaces if hasattr(space, name))
    shift = {**dict.fromkeys(POSITIVE, lambda h: h * h + 0.3), **dict.fromkeys(INSIDE, lambda h: 0.9 * h.sin())}
    return lambda h: function(shift[name](h) if name in shift else h)


def assert_slope(model: Callable[[Tensor], Tensor], x: Tensor, parameter: Tensor) -> None:
    """The gradient by the parameters, in a random direction, against differences of second derivatives."""
    with seeded(4):
        direction = torch.randn_like(parameter)
    found = torch.autograd.grad(oracle.mixed(curvature.laplacian(model, x)), parameter)[0]
    expected = oracle.difference(lambda: oracle.mixed(oracle.laplacian(model, x)), parameter, direction)
    scale = (found * direction).norm().item()
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-6, atol=1e-6 * max(1.0, scale))


@pytest.mark.fast
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE, *INSIDE, *OTHERS])
def test_functions_of_entries(name: str, warnings: pytest.LogCaptureFixture):
    """By rules; kernels have wrong third derivatives now and then."""
    function = OTHERS.get(name) or unary(name)
    with seeded(3):
        first, x = nn.Linear(D, 5).double(), torch.randn(N, D).double()
    model = lambda x: function(first(x))
    check(model, x)
    assert_slope(model, x, first.weight)
    assert not warnings.records


NORMS = ["layer norm", "rms norm", "group norm", "instance norm", "batch norm"]


@pytest.mark.parametrize("name", [*NORMS, "residual block", "fused attention", "sums", "recurrent", "determinant"])
def test_third_derivatives(name: str):
    model, x = case(name)
    assert_slope(model, x, next(model.parameters()))


W = torch.linspace(-1, 1.5, 25).reshape(5, 5).double()
EVEN = torch.arange(5) % 2 == 0
BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda h: torch.where(EVEN, other=h.sin(), input=h.exp()),
    "where, all": lambda h: torch.where(other=h.sin(), condition=EVEN, input=h.exp()),
    "matmul": lambda h: torch.matmul(other=h[:, :, None] * h[:, None], input=h.sin()[:, :, None] * W).flatten(1),
    "matmul, a constant": lambda h: torch.matmul(other=W, input=h) + torch.mm(mat2=W, input=h),
    "pow": lambda h: torch.pow(exponent=h, self=2) + torch.pow(exponent=2, input=h) + h.pow(exponent=3),
    "linear": lambda h: F.linear(bias=W[0], weight=W, input=h),
    "others": lambda h: (
        torch.sub(other=h.sin(), input=h) + torch.div(other=h.exp(), input=h) + torch.mul(other=h, input=h)
    ),
}
# what must not go with the derivatives, or has none
HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda h: torch.diff(h.sin(), n=2),
    "differences from constants": lambda h: torch.diff(h, prepend=h.new_ones(len(h), 1), append=h.new_ones(len(h), 2)),
    "differences from others": lambda h: h.sin().diff(dim=1, prepend=h[:, 1:2].exp()),
    "whole numbers": lambda h: h * (3 * h).to(torch.int64) + h * h.type(torch.int32) + h * h.to(torch.bool),
    "the type of whole numbers": lambda h: h * (3 * h).type_as(EVEN.long()) + h * (3 * h).view(torch.int64).sign(),
    "numbers that are rolled": lambda h: torch.stack([torch.roll(row[0].sin(), 1) for row in h])[:, None],
    "queries that see nothing": lambda h: F.scaled_dot_product_attention(
        h[..., None], h[..., None].sin(), h[..., None], attn_mask=(EVEN[:, None] & EVEN).expand(len(h), 5, 5)
    )[..., 0],
}  # fmt: skip


@pytest.mark.parametrize("name", [*BY_NAME, *HELD])
def test_arguments(name: str, warnings: pytest.LogCaptureFixture):
    function = (BY_NAME | HELD)[name]
    with seeded(3):
        first, x, C = nn.Linear(D, 5).double(), torch.randn(N, D).double(), torch.randn(D, D).double()
    model = lambda x: function(first(x))
    for weights in (None, C + C.mT):
        check(model, x, weights)
    u, _, second = curvature.laplacian(model, x)
    torch.testing.assert_close(u, model(x))
    slopes = torch.autograd.grad((u + second).sum(), list(first.parameters()))
    assert all(slope.isfinite().all() for slope in slopes)
    assert not warnings.records


IN_PLACE = {
    "relu6": lambda h: F.relu6(h, inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "hardtanh": lambda h: F.hardtanh(h, -0.3, 0.4, True),
    "leaky_relu": nn.LeakyReLU(0.2, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_activations_in_place(name: str, warnings: pytest.LogCaptureFixture):
    """The function overwrites its argument, which the model reads again."""
    with seeded(3):
        first, x = nn.Linear(D, 5).double(), torch.randn(N, D).double()

    def model(x: Tensor) -> Tensor:
        h = first(x) * 1
        return IN_PLACE[name](h) * h.sin()

    check(model, x)
    assert f"no rule for {name}_" in warnings.text


def test_a_result_in_given_memory():
    """Refused as torch refuses it: the derivatives would be lost."""
    with pytest.raises(RuntimeError, match="out=... arguments don't support automatic differentiation"):
        curvature.laplacian(lambda x: torch.exp(x, out=torch.empty(N, D).double()), torch.ones(N, D).double())
