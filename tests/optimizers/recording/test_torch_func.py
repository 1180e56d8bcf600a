"""torch.func, forward mode, tracing and derivatives by inputs of a model that is watched: none is a training pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from curvature import empirical
from optimizers import EKFAC, KFAC, NaturalGradient
from support.combinations import in_pairs, in_turn
from support.habits import flat
from support.oracles.derivatives import rows

OPTIMIZERS = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "NaturalGradient": NaturalGradient,
    "KFAC, empirical": lambda model: KFAC(model, inject=empirical()),
    "NaturalGradient, empirical": lambda model: NaturalGradient(model, inject=empirical()),
}
ADAPTIVE: list[Callable[[nn.Module], Any]] = [
    lambda model: KFAC(model, adaptive=True),
    lambda model: NaturalGradient(model, adaptive=True),
    lambda model: NaturalGradient(model, line_search=True),
]
copied = lambda model: {name: p.detach().clone() for name, p in model.named_parameters()}
forward_slopes = lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()
laplacians = lambda model, x: vmap(lambda z: hessian(lambda z: model(z[None])[0, 0])(z).trace())(x) - 1


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(12, 2, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=generator)


def per_sample(model: nn.Module, x: Tensor) -> Any:
    loss = lambda p, a: functional_call(model, p, (a[None],)).square().sum()
    return vmap(grad(loss), (None, 0))(copied(model), x)


def forward_mode(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


USES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap of grad": per_sample,
    "vmap of jacrev": lambda model, x: vmap(jacrev(model))(x),
    "vmap of hessian": lambda model, x: vmap(hessian(lambda z: model(z).sum()))(x),
    "nested": lambda model, x: vmap(jacfwd(jacrev(model)))(x),
    "jvp": lambda model, x: jvp(model, (x,), (x,))[1],
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(12, 3, dtype=x.dtype)),
    "forward mode": forward_mode,
    "forward-mode jacobian": lambda model, x: functional.jacobian(model, x, vectorize=True, strategy="forward-mode"),
    "make_fx": lambda model, x: make_fx(model)(x),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
}


def trained(make: Callable[[nn.Module], torch.optim.Optimizer], use: Any, when: str) -> Tensor:
    """Where three steps lead, with such a use before the forward pass or after it."""
    model, (x, y) = network(), batch()
    opt = make(model)
    for _ in range(3):
        opt.zero_grad()
        if when == "before":
            use(model, x)
        loss = F.cross_entropy(model(x), y)
        if when == "within":
            use(model, x)
        loss.backward()
        opt.step()
    return flat(model)


@pytest.mark.filterwarnings("ignore")
@in_turn(name=OPTIMIZERS, use=USES)
def test_a_pass_within_a_transform_leaves_training_as_it_is(name: str, use: str) -> None:
    plain = trained(OPTIMIZERS[name], USES[use], "never")
    for when in ("before", "within"):
        torch.testing.assert_close(trained(OPTIMIZERS[name], USES[use], when), plain, rtol=0, atol=0)


# These passes may be training passes until many vectors arrive at once; sampled vectors have been drawn by then
JACOBIANS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "by inputs": lambda model, x: functional.jacobian(model, x, vectorize=True),
    "by parameters": lambda model, x: jacrev(lambda p: functional_call(model, p, (x,)))(copied(model)),
}


@in_pairs(name=["KFAC, empirical", "NaturalGradient, empirical"], when=["before", "within"], jacobian=JACOBIANS)
def test_many_vectors_sent_back_at_once_are_no_gradients_of_the_loss(name: str, when: str, jacobian: str) -> None:
    use = JACOBIANS[jacobian]
    plain = trained(OPTIMIZERS[name], use, "never")
    torch.testing.assert_close(trained(OPTIMIZERS[name], use, when), plain, rtol=0, atol=0)


LOSSES = {
    "vmap": lambda model, x, y: vmap(lambda a, b: F.cross_entropy(model(a), b))(x, y).mean(),
    "penalty by jvp": lambda model, x, y: F.cross_entropy(model(x), y) + 0.01 * forward_slopes(model, x),
    "functional_call": lambda model, x, y: F.cross_entropy(
        functional_call(model, dict(model.named_parameters()), (x,)), y
    ),
}


@in_turn(loss=LOSSES, make=[*OPTIMIZERS.values(), *ADAPTIVE])
def test_losses_that_use_transforms_fall(loss: str, make: Callable[[nn.Module], Any]) -> None:
    model, (x, y) = network(), batch()
    opt = make(model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = LOSSES[loss](model, x, y)
        value.backward()
        return value

    losses = [opt.step(closure).item() for _ in range(9)]
    assert losses[-1] < losses[0]


RESIDUALS = {
    "Laplacians": laplacians,
    "vmap of jacrev": lambda model, x: vmap(jacrev(lambda z: model(z)[0]))(x).sum(1) - 1,
    "grad of a sum": lambda model, x: grad(lambda z: model(z).sum())(x).sum(1) - 1,
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1][:, 0] - 1,
    "vmap": lambda model, x: vmap(model)(x)[:, 0] - 1,
    "vmap of functional_call": lambda model, x: (
        vmap(lambda z: functional_call(model, dict(model.named_parameters()), (z,)))(x)[:, 0] - 1
    ),
    "with a plain pass": lambda model, x: torch.cat([laplacians(model, x), model(x)[:5, 0]]),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_a_step_on_residuals_by_transforms_is_the_damped_minimum(name: str) -> None:
    model, (x, _) = network(1), batch()
    residuals = RESIDUALS[name]
    values = residuals(model, x)
    jacobian, before = rows(values, model), flat(model)
    opt = NaturalGradient(model, adaptive=True)
    loss = opt.step(lambda: residuals(model, x))

    torch.testing.assert_close(loss, values.detach().square().sum() / 2)
    damping, found = opt.history[-1]["damping"], flat(model) - before
    damped = jacobian.T @ jacobian + damping * torch.eye(len(found), dtype=torch.float64)
    torch.testing.assert_close(found, -torch.linalg.solve(damped, jacobian.T @ values.detach()), rtol=1e-6, atol=1e-8)
