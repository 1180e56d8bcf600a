"""Functions that torch cannot differentiate twice, and models that keep something."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import curvature
import optimizers
from curvature.recording import warn_once
from support.cases.case import Raw
from support.odd.functions import (
    Kinked,
    Sine,
    SineByNumpy,
    SineInGivenMemory,
    SineOfContext,
    SineWithDetachedGradient,
    StraightThrough,
)
from support.oracles.brute_force import Matrices, of_the_batch
from support.oracles.derivatives import rows
from support.training import closure_of

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
ENTROPY = nn.CrossEntropyLoss()


UNDIFFERENTIATED = [Sine, SineByNumpy, SineInGivenMemory, SineWithDetachedGradient]


def products_are_right(
    model: nn.Module, loss: Any, x: Tensor, y: Tensor, through_outputs: bool = True
) -> tuple[Any, Tensor, Tensor]:
    """Of the Gauss-Newton matrix, and of the Jacobian, from backward passes; all three of them with vectors."""
    output = model(x).detach()
    J = rows(model(x).flatten(), model)
    H = torch.autograd.functional.hessian(lambda f: loss(f.view_as(output), y), output.flatten())
    G, V = curvature.gauss_newton(model, loss, (x, y)), torch.randn(J.shape[1], 3)
    for context in (contextlib.nullcontext(), contextlib.nullcontext(), curvature.kept(G)):
        with context:
            torch.testing.assert_close(G @ V[:, 0], J.T @ H @ J @ V[:, 0])
            torch.testing.assert_close(G @ V, J.T @ H @ J @ V)
    if not through_outputs:
        return G, J, V
    found = curvature.output_changes([model(x)], dict(model.named_parameters()), [G.space.split(v) for v in V.T])
    torch.testing.assert_close(torch.stack([change.flatten() for (change,) in found], 1), J @ V)
    return G, J, V


@pytest.mark.parametrize("function", UNDIFFERENTIATED)
@pytest.mark.parametrize("name", ["plain", "with a group norm", "samples meet", "in sequences"])
def test_products_through_functions_that_cannot_be_differentiated_twice(function: Any, name: str) -> None:
    norm = nn.GroupNorm(1, 5) if name == "with a group norm" else nn.Identity()
    centre = (lambda h: h - 0.5 * h.mean(0)) if name == "samples meet" else lambda h: h
    model = Raw(
        lambda m, x: m.b(centre(function.apply(m.norm(m.a(x))))), a=nn.Linear(4, 5), norm=norm, b=nn.Linear(5, 3)
    )
    x, y, loss = torch.randn(6, 4), torch.randint(3, (6,)), ENTROPY
    if name == "in sequences":
        model = Raw(lambda m, x: m.b(function.apply(m.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
        x, y, loss = torch.randn(6, 2, 4), torch.rand(6, 2, 3), nn.BCEWithLogitsLoss()
    G, J, V = products_are_right(model, loss, x, y)
    directions = [G.space.split(v) for v in V.T]
    few = [{"b.weight": G.space.split(V[:, 0])["b.weight"]}]
    ((change,),) = curvature.output_changes([model(x)], dict(model.named_parameters()), few)
    alone = torch.cat([d.flatten() if n in few[0] else 0 * d.flatten() for n, d in directions[0].items()])
    torch.testing.assert_close(change.flatten(), J @ alone)


class Unseen(torch.autograd.Function):
    """The input itself, as a view that is made where no mode looks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_views_of_the_input_are_data() -> None:
    """As those that `nn.DataParallel` makes for a GPU."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = Raw(lambda m, x: m.layers(Unseen.apply(x)), layers=layers)
    data = torch.randn(6, 4), torch.randint(3, (6,))
    K, expected = (curvature.kfac(one, ENTROPY, data, progress=False) for one in (model, layers))
    assert len(K.blocks) == len(expected.blocks) == 2
    torch.testing.assert_close(K.to_dense(), expected.to_dense())


def test_a_hessian_through_functions_that_cannot_be_differentiated_twice_is_refused() -> None:
    """Of a first layer alone it would be zero, and symmetric."""
    model = Raw(lambda m, x: Sine.apply(m.a(x)), a=nn.Linear(4, 3))
    H = curvature.hessian(model, ENTROPY, (torch.randn(5, 4), torch.randint(3, (5,))))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"autograd.Function \(Sine\).*gauss_newton"):
            H @ torch.ones(15)


class Cubed(torch.autograd.Function):
    twice_differentiable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0] ** 2


def own_network(function: Any) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = Raw(lambda m, x: m.b(function.apply(m.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    return model, torch.randn(6, 4), torch.randint(3, (6,))


def test_a_hessian_without_the_second_derivative_of_a_function_is_refused() -> None:
    """Also where it is symmetric without it."""
    model, x, y = own_network(SineOfContext)
    before = copy.deepcopy(model.state_dict())
    H = curvature.hessian(model, ENTROPY, (x, y))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Hessian .*\(SineOfContext\).*twice_differentiable = True"):
            H @ torch.ones(H.space.size)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", ["model", "output"])
def test_hooks_that_detach_gradients(place: str) -> None:
    """Torch loses what is behind them; for products there are rows."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        out = m.b(h.tanh())
        if h.requires_grad:
            (h if place == "model" else out).register_hook(lambda g: g.detach().clone())
        return out

    model, x, y = Raw(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)), torch.randn(6, 4), torch.randint(3, (6,))
    with pytest.raises(RuntimeError, match=r"a hook of the model.*gauss_newton"):
        curvature.hessian(model, ENTROPY, (x, y)) @ torch.ones(43)
    products_are_right(model, ENTROPY, x, y, through_outputs=False)


@pytest.mark.parametrize("function", [Kinked, StraightThrough, Cubed])
def test_hessians_through_functions_that_say_that_they_have_a_second_derivative(function: Any) -> None:
    model, x, y = own_network(function)
    H = curvature.hessian(model, ENTROPY, (x, y))
    gradients = torch.autograd.grad(ENTROPY(model(x), y), list(model.parameters()), create_graph=True)
    product = torch.autograd.grad(sum(g.sum() for g in gradients), list(model.parameters()))
    torch.testing.assert_close(H @ torch.ones(H.space.size), torch.cat([p.flatten() for p in product]))


@pytest.mark.parametrize("axes", [(1, 0), (0, 1)])
def test_changes_of_outputs_in_any_order_of_memory(axes: tuple[int, int]) -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    direction = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    ((change,),) = curvature.output_changes(
        [Sine.apply(layer(x)).permute(axes)], dict(layer.named_parameters()), [direction]
    )
    expected = layer(x).cos() * (x @ direction["weight"].T + direction["bias"])
    torch.testing.assert_close(change, expected.permute(axes))


# of parameters: one whose gradient is zero wherever it has one, and one without a batched backward pass
WEIGHTS = {
    "signs": torch.sgn,
    "unfolded": lambda w: torch.cat([w.sum().unfold(0, 1, 1), w.flatten()[1:]]).view_as(w),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_by_unusual_functions(name: str) -> None:
    w = nn.Parameter(torch.randn(3, 4))
    model = Raw(lambda m, x: F.linear(x, WEIGHTS[name](m.w)).tanh(), w=w)
    x, y, loss = torch.randn(5, 4), torch.randn(5, 3), nn.MSELoss()
    G, H = of_the_batch(model, loss, x, y)
    torch.testing.assert_close(curvature.fisher_diagonal(model, loss, x, y)["w"].flatten(), G.diagonal())
    torch.testing.assert_close(curvature.gauss_newton(model, loss, x, y).to_dense(), G)
    torch.testing.assert_close(curvature.hessian(model, loss, x, y).to_dense(), H)


@pytest.mark.parametrize("function", [Sine, SineByNumpy, SineOfContext])
def test_laplacians_without_the_second_derivative_of_a_function_are_refused(function: Any) -> None:
    model, x, _ = own_network(function)
    for call in (model, model, lambda x: (function.apply(x) * x).sum(1)):
        with pytest.raises(RuntimeError, match=rf"laplacian .*\({function.__name__}\).*twice_differentiable = True"):
            curvature.laplacian(call, x)


@pytest.mark.parametrize("function", [Kinked, StraightThrough, Cubed])
def test_laplacians_through_functions_of_the_users(function: Any) -> None:
    model, x, _ = own_network(function)
    hessians = [
        torch.autograd.functional.hessian(lambda row, k=k: model(row[None])[0, k], row) for row in x for k in range(3)
    ]
    expected = torch.stack([h.trace() for h in hessians]).reshape(6, 3)
    torch.testing.assert_close(curvature.laplacian(model, x)[2], expected)


@pytest.mark.parametrize("in_loss", [False, True])
def test_adaptive_steps_through_functions_that_cannot_be_differentiated_twice(
    in_loss: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer goes by slopes alone, and says so, rather than by a curvature without some of its parts."""

    own = Raw(lambda _, x: Sine.apply(x))
    activation, of_loss = (nn.Tanh(), Sine.apply) if in_loss else (own, lambda o: o)
    model = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))
    opt, x, y = optimizers.KFAC(model, adaptive=True), torch.randn(16, 4), torch.randint(3, (16,))

    closure = closure_of(model, opt, lambda o, y: F.cross_entropy(of_loss(o), y), x, y)
    first = float(closure().detach())
    warn_once.cache_clear()
    for _ in range(3):
        opt.step(closure)
    assert float(closure().detach()) < first
    assert "torch can differentiate the backward pass of Sine" in caplog.text


def test_models_that_keep_their_features() -> None:
    """Also where samples run under torch.func, whose tensors nobody can use afterwards."""

    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return x @ w

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g @ w.T, x.T @ g

    class Keeps(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.w, self.function = nn.Parameter(torch.randn(4, 3)), function

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.function(x, self.w)
            return self.hidden

    for function in (Own.apply, torch.matmul):
        model, x, y = Keeps(function), torch.randn(5, 4), torch.randint(3, (5,))
        curvature.per_sample_gradients(model, ENTROPY, x, y)
        assert not hasattr(model, "hidden")
        model(x)
        hidden = model.hidden
        curvature.per_sample_gradients(model, ENTROPY, x, y)
        curvature.gauss_newton(model, ENTROPY, (x, y)) @ torch.ones(12)
        assert model.hidden is hidden


class KeepsItsBias(nn.Module):
    """In a cache, with the graph of the first pass, as some vision transformers do in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.l, self.biases = nn.Parameter(torch.randn(5)), nn.Linear(4, 3), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if "cpu" not in self.biases:
            self.biases["cpu"] = self.w[:4].exp()
        return self.l(x * self.biases["cpu"])


@pytest.mark.parametrize("call", [curvature.per_sample_gradients, curvature.fisher_diagonal, curvature.kfac])
def test_models_that_keep_a_graph(call: Any) -> None:
    model, x, y = nn.Sequential(KeepsItsBias(), nn.Tanh()), torch.randn(5, 4), torch.randint(3, (5,))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^0\.biases: the model keeps it.*forward pre-hook"):
            call(model, ENTROPY, x, y)
    model[0].register_forward_pre_hook(lambda module, _: module.biases.clear())
    call(model, ENTROPY, x, y)


def test_products_where_torch_has_no_second_derivative() -> None:
    """That of distances torch has from 2.14 on."""
    by_hand = lambda x, c: (x[:, None] - c).square().sum(-1).sqrt()
    model = Raw(lambda m, x: m.h((-m.distances(x, m.c)).exp()), c=nn.Parameter(torch.randn(4, 4)), h=nn.Linear(4, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    model.distances = torch.cdist
    products_are_right(model, ENTROPY, x, y)
    if torch.__version__ >= TorchVersion("2.14"):
        found = curvature.hessian(model, ENTROPY, (x, y)).to_dense()
        model.distances = by_hand
        torch.testing.assert_close(found, curvature.hessian(model, ENTROPY, (x, y)).to_dense(), atol=1e-6, rtol=1e-4)
        return
    with pytest.raises(RuntimeError, match=r"torch has no Hessian of the loss.*cdist.*gauss_newton"):
        curvature.hessian(model, ENTROPY, (x, y)).to_dense()


@pytest.mark.parametrize("builder", [curvature.gauss_newton, curvature.hessian])
def test_a_loss_without_a_second_derivative(builder: Any) -> None:
    model, lengths = Raw(lambda m, x: m.l(x).unflatten(1, (3, 4)), l=nn.Linear(4, 12)), torch.full((5,), 3)

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y, lengths, torch.full((5,), 2))

    with pytest.raises(RuntimeError, match="(loss cannot be differentiated twice|no Hessian of the loss): .*ctc"):
        builder(model, loss, (torch.randn(5, 4), torch.randint(1, 4, (5, 2)))) @ torch.ones(60)


def spread_of_one(m: Any, x: Tensor) -> Tensor:
    """Torch's gradient of a standard deviation that is zero is zero, its derivative is not finite."""
    h = m.a(x)
    return m.b(h / (1 + h[..., :1].std(-1, unbiased=False, keepdim=True)))


NOT_FINITE = {
    "a spread of one entry": spread_of_one,
    "logcumsumexp": lambda m, x: m.b(m.a(x)[:, None].expand(-1, 2, -1).logcumsumexp(1)[:, -1]),
}


def prepared(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Raw(NOT_FINITE[name], a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    return model, torch.randn(5, 4), torch.randint(3, (5,))


@pytest.mark.parametrize("builder", [curvature.gauss_newton, curvature.fisher, curvature.empirical_fisher])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_products_by_rows_are_right(name: str, builder: Any) -> None:
    """They are those of the dense matrix, which comes from backward passes."""
    model, x, y = prepared(name)
    found = builder(model, ENTROPY, (x, y))
    dense, v = found.to_dense(), torch.randn(found.space.size, 3)
    assert dense.isfinite().all() and dense.any()
    torch.testing.assert_close(found @ v[:, 0], dense @ v[:, 0])
    torch.testing.assert_close(found @ v, dense @ v)
    with curvature.kept(found):
        torch.testing.assert_close(found @ v, dense @ v)


def test_a_hessian_that_is_not_finite_says_so() -> None:
    model, x, y = prepared("a spread of one entry")
    with pytest.raises(RuntimeError, match=r"a function of torch is wrong or not finite.*gauss_newton"):
        curvature.hessian(model, ENTROPY, (x, y)).to_dense()


def test_a_hessian_through_a_function_whose_pass_of_zeros_alone_is_not_finite() -> None:
    """In the model, and in the loss: a partial likelihood, of Cox."""
    model, x, y = prepared("logcumsumexp")
    found = curvature.hessian(model, ENTROPY, (x, y)).to_dense()
    torch.testing.assert_close(found, Matrices(model, ENTROPY, (x, y)).hessian_by_differences, rtol=1e-7, atol=1e-9)
    cox = lambda o, t: -(o[:, 0] - o[:, 0].logcumsumexp(0)).mean()
    model = Raw(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    expected = of_the_batch(model, cox, x, y)
    for builder, matrix in zip((curvature.gauss_newton, curvature.hessian), expected, strict=True):
        torch.testing.assert_close(builder(model, cox, (x, y)).to_dense(), matrix)


def test_a_hessian_through_a_function_that_gets_a_gradient_of_zero_in_places() -> None:
    """Censored patients, who count in the risks of others alone."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(5, 4), torch.rand(5, 2)
    y[:, 1] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])

    def cox(o: Tensor, t: Tensor) -> Tensor:
        order = t[:, 0].argsort(descending=True)
        risks = o[order, 0]
        return -((risks - risks.logcumsumexp(0)) * t[order, 1]).sum() / t[:, 1].sum()

    expected = of_the_batch(model, cox, x, y)
    for builder, matrix in zip((curvature.gauss_newton, curvature.hessian), expected, strict=True):
        torch.testing.assert_close(builder(model, cox, (x, y)).to_dense(), matrix)


# torch's second derivative of a group norm, for several vectors at once, needs these sizes not to raise
GROUP_NORMS = {
    "as many samples as channels": (4, (4,), nn.GroupNorm(1, 4, affine=False)),
    "as many pixels as samples": (2, (4, 2), nn.GroupNorm(2, 4, affine=False)),
    "one sample": (1, (2, 2), nn.GroupNorm(1, 2)),
    "other sizes": (3, (6, 2), nn.GroupNorm(3, 6)),
}


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("name", GROUP_NORMS)
def test_hessians_through_group_norms(name: str, is_mapped: bool) -> None:
    count, shape, norm = GROUP_NORMS[name]

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).unflatten(1, shape)
        own = torch.vmap(lambda row: m.norm(row[None])[0])(h) if is_mapped else m.norm(h)
        return m.b(own.flatten(1).tanh())

    width = math.prod(shape)
    model = Raw(forward, a=nn.Linear(2, width), norm=copy.deepcopy(norm).double(), b=nn.Linear(width, 2))
    x, y = torch.randn(count, 2), torch.randn(count, 2)
    _, expected = of_the_batch(model, nn.MSELoss(), x, y)
    torch.testing.assert_close(curvature.hessian(model, nn.MSELoss(), (x, y)).to_dense(), expected)
