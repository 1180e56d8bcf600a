"""Values, gradients and Laplacians in one forward pass, against whole Hessians of one sample after the other."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import oracle_derivatives
import oracle_laplacian as oracle
import pytest
import torch
import torch.nn.functional as F
from case import Raw, randomise, seeded
from torch import Tensor, nn

import curvature
from curvature.laplacian import _say
from curvature.taylor import NoRule

D, N = 3, 4


def mlp(activation: Callable[[], nn.Module], out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, out))


def block() -> nn.Module:
    return Raw(
        lambda m, x: m.out(m.first(x) + m.second(F.silu(m.first(x))) * m.scale + m.shift),
        first=nn.Linear(D, 5), second=nn.Linear(5, 5, bias=False), out=nn.Linear(5, 1),
        scale=nn.Parameter(torch.ones(5)), shift=nn.Parameter(torch.zeros(5)),
    )  # fmt: skip


def attention(m: nn.Module, x: Tensor) -> Tensor:
    """Three tokens a sample."""
    h = m.embed(x.unsqueeze(-1))
    q, k, v = m.inner(h).chunk(3, -1)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return m.out((weights @ v).mean(1))


def tokens(function: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return Raw(function, embed=nn.Linear(1, 4), inner=nn.Linear(4, 12), out=nn.Linear(4, 2))


def fused(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.inner(m.embed(x[..., None])).view(len(x), D, 3, 2, 2).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(h.transpose(1, 2).flatten(2)[:, -1])


def arithmetic(m: nn.Module, x: Tensor) -> Tensor:
    """All operators, with numbers, parameters and each other."""
    a, b = m.first(x).tanh(), torch.sin(m.first(x))
    c = 2 - a * b / (3 + b.square()) + 1 / (4 - a) - (-a) ** 3 + m.w * a / 2 + b / (2 + m.w.exp())
    return m.out(c - (x * x).sum(1, keepdim=True) * m.w + a**2 * b.pow(4) + 2.0**a + (m.w - b) + torch.rsub(a, 3.0))


def joined(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.cat([m.first(x).tanh(), x[:, :2], x.new_ones(len(x), 1)], 1)
    h = torch.stack([h, h.cos()], 1).flip(2)[:, :, 1:].reshape(len(x), -1)
    left, right = h.split([4, h.shape[1] - 4], dim=1)
    return m.out(torch.where(left > 0.3, left.exp(), 0.5) + right[:, [0, 2, 1, 1]] * left.new_tensor([1, 2, 3, 4.0]))


def tied(m: nn.Module, x: Tensor) -> Tensor:
    return m.out((m.inner(m.inner(m.first(x).tanh()).sigmoid()) @ m.inner.weight).tanh())


def waves(m: nn.Module, x: Tensor) -> Tensor:
    """Random features and a boundary factor."""
    features = torch.cat([torch.sin(x @ m.w), torch.cos(x @ m.w)], -1)
    return m.out(features) * (x * (1 - x)).prod(1, keepdim=True)


def sums(m: nn.Module, x: Tensor) -> Tensor:
    h = m.first(x)
    r = h.norm(dim=1, keepdim=True) + F.normalize(h, dim=1) * h.std(1, keepdim=True) + h.logsumexp(1, keepdim=True)
    return m.out(F.log_softmax(r, 1) + torch.linalg.vector_norm(h, dim=1, keepdim=True) + F.glu(torch.cat([r, h], 1)))


def products(m: nn.Module, x: Tensor) -> Tensor:
    a, b = m.first(x).tanh().view(-1, 5, 1), m.first(x).sin().view(-1, 1, 5)
    c = torch.einsum("nij,nkj->nik", a @ b, a.mul(b)) + torch.bmm(a, b) + m.w @ (a + b)
    return m.out((c @ m.w).sum(1) + torch.einsum("nij,j->ni", c, m.w[0]))


def linears(**more: nn.Module | nn.Parameter) -> dict[str, nn.Module | nn.Parameter]:
    return {"first": nn.Linear(D, 5), "out": nn.Linear(5, 2), **more}


def vector(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def normed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), *layers, nn.Linear(6, 2))


def channels(norm: nn.Module) -> nn.Module:
    """Two channels of three places."""
    return normed(nn.Unflatten(1, (2, 3)), norm, nn.Softplus(), nn.Flatten())


class Custom(torch.autograd.Function):
    """A sine that torch's functions do not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def in_place(m: nn.Module, x: Tensor) -> Tensor:
    h = m.first(x)
    h += h.detach().sin()
    h[:, 0] = h[:, 1] * 2
    return m.out(h.tanh_())


def without_gradients(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.first(x).exp()
    return m.out(m.first(x).tanh() * scale)


def differentiated(m: nn.Module, x: Tensor) -> Tensor:
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    return torch.autograd.grad(m.out(m.first(x).tanh()).sum(), x, create_graph=True)[0]


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, D)), *layers)


RULES: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: mlp(nn.Tanh),
    "several outputs": lambda: mlp(nn.SiLU, 3),
    "residual block": block,
    "layer norm": lambda: normed(nn.LayerNorm(6), nn.Softplus()),
    "rms norm": lambda: normed(nn.RMSNorm(6), nn.Softplus()),
    "group norm": lambda: channels(nn.GroupNorm(2, 2)),
    "instance norm": lambda: channels(nn.InstanceNorm1d(2, affine=True)),
    "batch norm": lambda: normed(nn.BatchNorm1d(6), nn.Softplus()).eval(),
    "attention": lambda: tokens(attention),
    "fused attention": lambda: tokens(fused),
    "multi-head attention": lambda: Raw(
        lambda m, x: m.out(m.heads(*[m.embed(x[..., None])] * 3)[0].mean(1)),
        embed=nn.Linear(1, 4), heads=nn.MultiheadAttention(4, 2, batch_first=True), out=nn.Linear(4, 1),
    ),
    "transformer": lambda: Raw(
        lambda m, x: m.layer(m.embed(x[..., None]))[:, 0],
        embed=nn.Linear(1, 4), layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True),
    ),
    "arithmetic": lambda: Raw(arithmetic, **linears(w=vector(5))),
    "joined": lambda: Raw(joined, first=nn.Linear(D, 3), out=nn.Linear(4, 2)),
    "tied": lambda: Raw(tied, **linears(inner=nn.Linear(5, 5))),
    "waves": lambda: Raw(waves, w=vector(D, 4), out=nn.Linear(8, 1)),
    "sums": lambda: Raw(sums, **linears()),
    "products": lambda: Raw(products, **linears(w=vector(5, 5))),
    "convolution": lambda: image(nn.Conv1d(1, 4, 2, padding=1), nn.Tanh(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(8, 1)),
    "bilinear": lambda: Raw(lambda m, x: m.pair(m.first(x), x).tanh(), first=nn.Linear(D, 5), pair=nn.Bilinear(5, D, 2)),
    "linear": lambda: nn.Linear(D, 2),
    "inputs as they are": lambda: Raw(lambda m, x: x, w=vector(1)),
    "constant": lambda: Raw(lambda m, x: m.w.expand(len(x), 1), w=vector(1)),
    "detached": lambda: Raw(lambda m, x: m.out(m.first(x)).detach() * m.w + x.new_ones(1), **linears(w=vector(2))),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)), nn.Tanh(), nn.Linear(5, 1)),
}  # fmt: skip
GENERAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "determinant": (
        lambda: Raw(
            lambda m, x: (m.inner(m.first(x).tanh()).view(-1, 2, 2) + 2 * torch.eye(2).to(x)).slogdet()[1][:, None],
            first=nn.Linear(D, 5), inner=nn.Linear(5, 4),
        ),
        "slogdet",
    ),
    "maximum": (lambda: Raw(lambda m, x: m.out(m.first(x).tanh()).max(1, keepdim=True)[0], **linears()), "max"),
    "recurrent": (lambda: Raw(lambda m, x: m.out(m.rnn(x[..., None])[0][:, -1]), rnn=nn.GRU(1, 3, batch_first=True), out=nn.Linear(3, 1)), "gru"),
    "custom function": (lambda: Raw(lambda m, x: m.out(Custom.apply(m.first(x))), **linears()), "gradients off"),
    "in place": (lambda: Raw(in_place, **linears()), "add_"),
    "no_grad": (lambda: Raw(without_gradients, **linears()), "gradients off"),
    "its own gradient": (lambda: Raw(differentiated, **linears()), "grad"),
}  # fmt: skip
MODELS = RULES | {name: model for name, (model, _) in GENERAL.items()}
FORMS = {
    "laplacian": None,
    "diagonal": torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64),
    "matrix": torch.tensor([[1.0, 0.5, -0.3], [0.5, 0.0, 2.0], [-0.3, 2.0, -1.0]], dtype=torch.float64),
}


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Each warning comes once a process: here once a test."""
    _say.cache_clear()
    caplog.set_level(logging.INFO, "curvature")
    yield caplog


def case(name: str) -> tuple[nn.Module, Tensor]:
    with seeded(0):
        model = MODELS[name]()
        randomise(model)
        return model.double(), torch.randn(N, D).double()


def assert_equal(found: oracle.Result, expected: oracle.Result, rtol: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=rtol, atol=rtol * max(1.0, b.abs().max().item()))


def slopes(model: nn.Module, x: Tensor, result: oracle.Result) -> list[Tensor]:
    leaves = [*model.parameters(), *([x] if x.requires_grad else [])]
    return list(torch.autograd.grad(oracle.mixed(result), leaves, materialize_grads=True))


@pytest.mark.parametrize("form", FORMS)
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
    said = [record.getMessage() for record in warnings.records]
    assert len(said) == (name in GENERAL), said
    if name in GENERAL:
        assert GENERAL[name][1] in said[0]


def everything(m: nn.Module, x: Tensor) -> Tensor:
    """x of shape (N, 3, 4)."""
    h = m.first(x).tanh()
    return m.out(h.transpose(1, 2) @ x[..., :2]) + x.movedim(1, 2).mean(2, keepdim=True)[:, :2]


def check(model: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor | None = None, rtol: float = 1e-10) -> None:
    found = curvature.laplacian(model, x, weights)
    assert_equal(found, oracle.laplacian(model, x, weights), rtol)


def test_inputs_of_several_axes(warnings: pytest.LogCaptureFixture):
    with seeded(1):
        model = Raw(everything, first=nn.Linear(4, 2), out=nn.Linear(2, 2)).double()
        x, C = torch.randn(N, 3, 4).double(), torch.randn(12, 12).double()
    u, grad, second = curvature.laplacian(model, x)
    assert (u.shape, grad.shape, second.shape) == ((N, 2, 2), (N, 2, 2, 3, 4), (N, 2, 2))
    for weights in (None, C[0], C + C.mT):
        check(model, x, weights)
    assert not warnings.records


@pytest.mark.parametrize("shape", [(1, D), (5, 1), (5,)])
def test_small_shapes(shape: tuple[int, ...]):
    with seeded(1):
        inner, x = mlp(nn.Tanh).double(), torch.randn(shape).double()
    model = lambda x: inner(x.reshape(len(x), -1).expand(len(x), D) * torch.arange(1.0, D + 1))
    check(model, x)
    check(model, x, torch.full((x[0].numel(),), 2.0).double())


def test_float32(device: str):
    model, x = case("residual block")
    expected = oracle.laplacian(model, x)
    found = curvature.laplacian(model.to(device).float(), x.to(device).float())
    assert all(part.dtype == torch.float32 for part in found)
    assert_equal([part.double() for part in found], expected, rtol=1e-4)


def test_heat_operator():
    """The time derivative from the gradient, the Laplacian by the other inputs."""
    model, x = case("tanh")
    u, grad, second = curvature.laplacian(model, x, torch.tensor([0.0, 1.0, 1.0]).double())
    y = x.clone().requires_grad_()
    (du,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
    expected = sum(torch.autograd.grad(du[:, k].sum(), y, retain_graph=True)[0][:, k] for k in (1, 2))
    torch.testing.assert_close(grad[:, 0, 0] - second[:, 0], du[:, 0] - expected)


UNARY = [
    "tanh",
    "sin",
    "cos",
    "exp",
    "sigmoid",
    "square",
    "tan",
    "sinh",
    "cosh",
    "atan",
    "asinh",
    "exp2",
    "expm1",
    "erf",
    "erfc",
    "sinc",
    "digamma",
    "silu",
    "softplus",
    "elu",
    "selu",
    "celu",
    "gelu",
    "mish",
    "relu",
    "relu6",
    "leaky_relu",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "softshrink",
    "hardshrink",
    "tanhshrink",
    "softsign",
    "logsigmoid",
    "abs",
    "neg",
    "deg2rad",
]
POSITIVE = ["log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma"]
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


@pytest.mark.parametrize("name", [*UNARY, *POSITIVE, *INSIDE, *OTHERS])
def test_functions_of_entries(name: str, warnings: pytest.LogCaptureFixture):
    """The gradients by the parameters against differences: kernels have wrong third derivatives now and then."""
    function = OTHERS.get(name) or unary(name)
    with seeded(3):
        first, x = nn.Linear(D, 5).double(), torch.randn(N, D).double()
    model = lambda x: function(first(x))
    check(model, x)
    found = torch.autograd.grad(oracle.mixed(curvature.laplacian(model, x)), first.weight)[0]
    expected = oracle.differences(lambda: oracle.mixed(oracle.laplacian(model, x)), first.weight)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * max(1.0, expected.abs().max().item()))
    assert not warnings.records


@pytest.mark.parametrize(
    "name",
    ["residual block", "layer norm", "rms norm", "group norm", "instance norm", "batch norm", "fused attention", "sums",
     "recurrent", "determinant"],
)  # fmt: skip
def test_third_derivatives(name: str):
    """Against differences of the oracle's values, which need second derivatives alone."""
    model, x = case(name)
    parameter = next(model.parameters())
    found = torch.autograd.grad(oracle.mixed(curvature.laplacian(model, x)), parameter)[0]
    expected = oracle.differences(lambda: oracle.mixed(oracle.laplacian(model, x)), parameter)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("name", ["tanh", "determinant"])
def test_gradients_by_the_weights(name: str):
    """A diffusion that is learnt."""
    model, x = case(name)
    for weights in (FORMS["diagonal"].clone().requires_grad_(), FORMS["matrix"].clone().requires_grad_()):
        found, expected = (
            torch.autograd.grad(way(model, x, weights)[2].square().sum(), weights)[0]
            for way in (curvature.laplacian, oracle.differentiable)
        )
        torch.testing.assert_close(found, expected)


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


@pytest.mark.parametrize("name", ["tanh", "determinant", "batch norm"])
def test_nothing_is_changed(name: str):
    model, x = case(name)
    model.counter = nn.Module()
    model.counter.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.counter.calls.add_(1))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        curvature.laplacian(model, x)
        assert not torch.is_grad_enabled()
    u, grad, second = curvature.laplacian(model, x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and x.grad is None and not x.requires_grad
    assert len(model._forward_pre_hooks) == 1 and not model._forward_hooks
    assert all(type(part) is Tensor for part in (u, grad, second))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_one_forward_pass():
    """Of the model, after the first call."""
    model, x = case("tanh")
    calls: list[int] = []
    curvature.laplacian(model, x)
    model.register_forward_hook(lambda *_: calls.append(1))
    curvature.laplacian(model, x)
    assert len(calls) == 1


def test_a_linear_layer_is_read_twice():
    """Once with its bias and once without: what pairs them in the graph relies on it."""
    model, x = case("tanh")
    u, grad, second = curvature.laplacian(model, x)
    _, names = curvature.graph.tape_of(torch.autograd.graph.get_gradient_edge((u + second + grad.sum(-1)).sum()), {})
    assert (names.count("AddmmBackward0"), names.count("MmBackward0")) == (3, 3)


def residual(model: nn.Module, x: Tensor) -> Tensor:
    u, grad, second = (part[:, 0] for part in curvature.laplacian(model, x))
    return second + grad.square().sum(1) * u - torch.sin(u)


def nested(model: nn.Module, x: Tensor) -> Tensor:
    u, grad, second = (part[:, 0] for part in oracle.differentiable(model, x))
    return second + grad.square().sum(1) * u - torch.sin(u)


def one_output(name: str) -> nn.Module:
    with seeded(0):
        model = {
            "tanh": lambda: mlp(nn.Tanh), "silu": lambda: mlp(nn.SiLU), "residual block": block,
            "layer norm": lambda: nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)),
        }[name]()  # fmt: skip
        randomise(model)
    return model.double()


@pytest.mark.parametrize("name", ["tanh", "silu", "residual block", "layer norm"])
def test_jacobians_of_residuals(name: str, warnings: pytest.LogCaptureFixture):
    """By rules: a way row by row would be logged."""
    model = one_output(name)
    with seeded(2):
        x = torch.randn(7, D).double()
    for points in (x, x + 0.5):  # what the first call learnt serves the second
        expected = oracle_derivatives.residual_jacobian(model, nested, points)
        found = curvature.residual_jacobian(model, residual, points)
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
REFUSED = {
    "no model": (lambda: curvature.laplacian(3, X), TypeError, "model: expected a module or a function, found int"),
    "integers": (lambda: curvature.laplacian(LINEAR, X.long()), TypeError, "x: expected a floating point tensor, found torch.int64"),
    "a list": (lambda: curvature.laplacian(LINEAR, [1.0]), TypeError, "x: .* found list"),
    "no sample": (lambda: curvature.laplacian(LINEAR, X[:0]), ValueError, r"found \(0, 3\)"),
    "a number": (lambda: curvature.laplacian(LINEAR, X[0, 0]), ValueError, r"x: expected shape"),
    "weights' type": (lambda: curvature.laplacian(LINEAR, X, [1.0]), TypeError, "weights: .* found list"),
    "weights' shape": (lambda: curvature.laplacian(LINEAR, X, X[0, :2]), ValueError, r"weights: expected shape \(3,\) or \(3, 3\)"),
    "asymmetric": (lambda: curvature.laplacian(LINEAR, X, torch.ones(3, 3).triu()), ValueError, "weights: .* symmetric"),
    "no number": (lambda: curvature.laplacian(LINEAR, X, X[0] * math.nan + torch.eye(3)), ValueError, "weights: .* symmetric"),
    "a tuple": (lambda: curvature.laplacian(lambda x: (x, x), X), TypeError, "model: .* found tuple"),
    "a sum": (lambda: curvature.laplacian(lambda x: x.sum(), X), ValueError, r"model: expected an output \(N, ...\)"),
    "samples": (lambda: curvature.laplacian(lambda x: x[:1], X), ValueError, r"for the 4 samples of x, found \(1, 3\)"),
    "mixed": (lambda: curvature.laplacian(mixing, torch.arange(12.0).view(4, 3)), ValueError, "depends on the other samples"),
    "BatchNorm": (lambda: curvature.laplacian(BATCH, X), ValueError, "^1: BatchNorm in training mode"),
    "BatchNorm inside": (lambda: curvature.laplacian(lambda x: BATCH(x).slogdet(), X), ValueError, "BatchNorm in training mode"),
    "BatchNorm, general": (lambda: curvature.laplacian(nn.Sequential(nn.GRU(D, 2), Raw(lambda m, x: x[0]), BATCH[1]).double(), X), ValueError, "^2: BatchNorm"),
    "a wrong layer": (lambda: curvature.laplacian(LINEAR, X[:, :2]), RuntimeError, "shapes cannot be multiplied"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


def test_random_models_are_not_compared():
    curvature.laplacian(dropped(), torch.randn(N, D).double())


def test_a_jet_never_passes_for_a_plain_tensor():
    """Outside of the rules every function of it raises."""
    kept: list[Tensor] = []
    curvature.laplacian(lambda x: kept.append(x) or x, X)
    jet = next(x for x in kept if type(x) is not Tensor)
    with pytest.raises(NoRule):
        jet + 1
