"""``J v`` by two backward passes, and that products are of model, loss and data as they are."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded
from support.oracles import brute_force as oracle

LOSS = nn.CrossEntropyLoss()
Y = torch.tensor([0, 1, 1, 0, 2])


class Times(torch.autograd.Function):
    """A product with a parameter that no torch function sees."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


def frozen(part: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    getattr(model[0], part).requires_grad_(False)
    return model


def convolved(kind: Callable[..., nn.Module], axes: int, **options: Any) -> nn.Module:
    run = lambda m, x: m.b(torch.relu_(m.a(x[(..., *[None] * axes)].expand(-1, 3, *[4] * axes))).flatten(2).mean(2))
    return Raw(run, a=kind(3, 4, 2, **options), b=nn.Linear(4, 3))


def tied(m: Any, x: Tensor) -> Tensor:
    """Twice through one layer, the second time transposed."""
    return F.linear(torch.tanh(m.a(m.a(x))), m.a.weight.T)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3, bias=False)),
    "a frozen weight": lambda: frozen("weight"),
    "a frozen bias": lambda: frozen("bias"),
    "conv1d": lambda: convolved(nn.Conv1d, 1, padding="same", dilation=2),
    "conv2d": lambda: convolved(nn.Conv2d, 2, stride=2, padding=1, bias=False),
    "conv3d": lambda: convolved(nn.Conv3d, 3),
    "transposed": lambda: convolved(nn.ConvTranspose2d, 2),
    "tied": lambda: Raw(tied, a=nn.Linear(3, 3)),
    "unseen": lambda: Raw(lambda m, x: Times.apply(m.a(x), m.a.bias), a=nn.Linear(3, 3)),
    "embedding": lambda: Raw(lambda m, x: m.a((x > 0).long()).sum(1), a=nn.Embedding(2, 3, padding_idx=0)),
}


def setting(make: Callable[[], nn.Module] = MODELS["linear"]) -> tuple[nn.Module, Tensor]:
    with seeded(0):
        return make().double(), torch.randn(5, 3, dtype=torch.float64)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_products_one_after_another(name: str, is_kept: bool) -> None:
    """With Gauss-Newton matrix and Hessian, of one and of several columns, in batches of unlike sizes."""
    model, x = setting(MODELS[name])
    data = [(x[:3], Y[:3]), (x[3:], Y[3:])]
    expected = oracle.Matrices(model, LOSS, (x, Y))
    for build in (curvature.gauss_newton, curvature.hessian):
        operator = build(model, LOSS, data)
        V = operator.space.normal(4)
        with curvature.kept(operator) if is_kept else nullcontext():
            for some in (V, V[:, :1], V[:, 1:], V[:, 0]):
                wanted = getattr(expected, build.__name__) @ some
                torch.testing.assert_close(operator @ some, wanted, rtol=1e-10, atol=1e-12)


CHANGES: dict[str, Callable[[nn.Module, nn.CrossEntropyLoss], object]] = {
    "unseen by autograd": lambda model, loss: model[0].weight.data.neg_(),
    "of the loss": lambda model, loss: loss.weight.index_fill_(0, torch.tensor(0), 3.0),
    "exchanged in the loss": lambda model, loss: loss.weight.data.copy_(loss.weight.flip(0).clone()),
    "a number of the loss": lambda model, loss: setattr(loss, "label_smoothing", 0.5),
    "a hook": lambda model, loss: model[0].register_forward_hook(lambda module, args, output: output * 2),
    "a number of a layer": lambda model, loss: setattr(model[1], "eps", 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("build", [curvature.gauss_newton, curvature.hessian])
def test_products_are_of_model_and_loss_as_they_are(build: Any, change: str) -> None:
    model, x = setting()
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double())
    operator = build(model, loss, (x, Y))
    V = operator.space.normal(2)
    _ = operator @ V
    CHANGES[change](model, loss)
    expected = getattr(oracle.Matrices(model, loss, (x, Y)), build.__name__)
    torch.testing.assert_close(operator @ V, expected @ V, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "change", [lambda loss: loss.factor.mul_(2), lambda loss: vars(loss.inner).update(label_smoothing=0.5)]
)
def test_numbers_inside_a_loss(change: Callable[[Any], Any]) -> None:
    """That are no buffers of its own."""
    (model, x), loss = setting(), Raw(lambda m, o, y: m.factor * m.inner(o, y), inner=nn.CrossEntropyLoss())
    loss.factor = torch.ones((), dtype=torch.float64)
    operator = curvature.hessian(model, loss, (x, Y))
    v = operator.space.normal(1)
    _ = operator @ v
    change(loss)
    torch.testing.assert_close(operator @ v, curvature.hessian(model, loss, (x, Y)) @ v)


def test_data_that_change() -> None:
    model, x = setting()
    own, y = x.clone(), Y.clone()
    operator = curvature.gauss_newton(model, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]).double()), (own, y))
    v = operator.space.normal(1)
    first = operator @ v
    own[0, 0] += 1
    with pytest.raises(ValueError, match="another pass gave other batches"):
        operator @ v
    own.copy_(x)
    torch.testing.assert_close(operator @ v, first)
    own.numpy()[0, 0] += 1  # without autograd's knowledge
    with pytest.raises(ValueError, match="another pass gave other batches"):
        operator @ v
    own.copy_(x)
    y.numpy()[:2] = [1, 0]  # their sum stays
    assert not torch.allclose(operator @ v, first)


def test_threads_take_turns() -> None:
    model, x = setting()
    built = [build(model, LOSS, (x, Y)) for build in (curvature.gauss_newton, curvature.hessian)] * 2
    V = built[0].space.normal(2)
    expected = [operator @ V for operator in built]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda operator: [operator @ V[:, :n] for n in (1, 2) * 3][-1], built))
    torch.testing.assert_close(found, expected)


def test_products_in_inference_mode() -> None:
    model, x = setting()
    expected = curvature.gauss_newton(model, LOSS, (x, Y)).to_dense()
    with torch.inference_mode():
        operator = curvature.gauss_newton(model, LOSS, (x.clone(), Y.clone()))
        V = operator.space.normal(2)
        for found in (operator.to_dense() @ V, operator @ V, operator @ V):
            torch.testing.assert_close(found, expected @ V)
        norms = curvature.per_sample_norms(model, LOSS, x, Y)
    torch.testing.assert_close(norms, curvature.per_sample_norms(model, LOSS, x, Y))
    torch.testing.assert_close(operator @ V, expected @ V)


def test_autocast_of_one_product_is_not_that_of_the_next() -> None:
    model, x = setting()
    model, x = model.float(), x.float()
    operator = curvature.gauss_newton(model, LOSS, (x, Y))
    v = operator.space.normal(1)
    first = operator @ v
    with torch.autocast("cpu", torch.bfloat16):
        coarse = operator @ v
        torch.testing.assert_close(coarse, curvature.gauss_newton(model, LOSS, (x, Y)) @ v)
    assert not torch.allclose(coarse, first, rtol=1e-5)
    torch.testing.assert_close(operator @ v, first)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
@pytest.mark.parametrize(
    "build", [curvature.fisher, curvature.gauss_newton, curvature.empirical_fisher, curvature.hessian]
)
def test_copies(build: Any, copied: Callable[[Any], Any]) -> None:
    """Of a model of their own."""
    model, x = setting()
    operator = build(model, LOSS, [(x[:3], Y[:3]), (x[3:], Y[3:])])
    V = operator.space.normal(2)
    first = operator @ V
    other = copied(operator)
    model[0].weight.data.mul_(2)
    torch.testing.assert_close(other @ V, first)
    assert not torch.allclose(operator @ V, first)
    torch.testing.assert_close(other.to_dense() @ V, first)


def test_no_copy_of_an_operator_whose_model_has_changed() -> None:
    model, x = setting()
    operator = curvature.hessian(model, LOSS, (x, Y))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="the model has changed"):
        copy.deepcopy(operator)


@pytest.mark.parametrize("build", [curvature.gauss_newton, curvature.hessian])
def test_random_numbers_of_numpy(build: Any) -> None:
    """Each product would be of another matrix."""
    model, x = setting()
    numbers = np.random.default_rng(0)
    model.register_forward_hook(lambda module, inputs, output: output * (1 + numbers.random()))
    operator = build(model, LOSS, (x, Y))
    products = (operator @ operator.space.normal(1) for _ in range(2))
    with pytest.raises(ValueError, match=r"two passes over the same batch differ.*random numbers of NumPy"):
        list(products)


def test_parameters_with_other_data() -> None:
    """As `vector_to_parameters` sets them, of which torch counts nothing."""
    model, x = setting()
    operator = curvature.gauss_newton(model, LOSS, (x, Y))
    v = operator.space.normal(1)
    operator @ v
    torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    with pytest.raises(RuntimeError, match="the model has changed"):
        operator @ v
