"""NaturalGradient layer by layer, against the dense diagonal blocks of the Gauss-Newton matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import NaturalGradient
from support.cases.case import Raw, seeded
from support.habits import flat
from support.oracles import brute_force as oracle

pytestmark = pytest.mark.fast

LOSS, D = nn.CrossEntropyLoss(), 0.05


def shared(m: nn.Module, tokens: Tensor) -> Tensor:
    """An embedding that is also the last weight, a bias that two weights share, places, a norm, a branch."""
    h = torch.tanh(m.own(m.table(tokens)))
    h = m.norm(F.linear(torch.tanh(F.linear(h, m.one, m.bias)), m.two, m.bias))
    return (m.branch(h) if tokens[0, 0] == 0 else h).sum(1) @ m.table.weight.T


GROUPS = [
    ["table.weight"], ["one"], ["two"], ["bias"], ["own.weight", "own.bias"], ["norm.weight", "norm.bias"],
    ["branch.weight", "branch.bias"],
]  # fmt: skip


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        layers = {"own": nn.Linear(3, 3), "norm": nn.LayerNorm(3), "branch": nn.Linear(3, 3)}
        model = Raw(shared, table=nn.Embedding(5, 3), one=(3, 3), two=(3, 3), bias=(3,), **layers).double()
        x, y = torch.randint(5, (4, 3)), torch.randint(5, (4,))
    x[:, 0] = 0
    return model, x, y


def direction(opt: NaturalGradient, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where a step goes that no bound cuts, of length one, and the gradient there."""
    before, gradients = flat(model), []

    def closure() -> Tensor:
        opt.zero_grad()
        value = LOSS(model(x), y)
        value.backward()
        zeros = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
        gradients.append(torch.cat([zeros(p).flatten() for p in model.parameters()]).clone())
        return value

    opt.step(closure)
    moved = flat(model) - before
    return moved / moved.norm(), gradients[0]


def expected(model: nn.Module, x: Tensor, y: Tensor, damping: Tensor | float = D) -> Tensor:
    """The inverse of the damped blocks."""
    matrix = oracle.blocks(model, oracle.Matrices(model, LOSS, (x, y)).gauss_newton, GROUPS)
    return torch.linalg.inv(matrix + torch.as_tensor(damping).double().expand(len(matrix)).diag())


def points(found: Tensor, wanted: Tensor, allowed: float = 1e-8) -> None:
    torch.testing.assert_close(found, -wanted / wanted.norm(), rtol=0, atol=allowed)


@pytest.mark.parametrize("solver", ["woodbury", "dense", "cg"])
def test_every_layer_has_its_exact_block(solver: str) -> None:
    model, x, y = problem()
    inverse = expected(model, x, y)
    opt = NaturalGradient(model, damping=D, loss=LOSS, solver=solver, layerwise=True, line_search=True)
    found, gradient = direction(opt, model, x, y)
    assert sorted(map(sorted, (b.names for b in opt.store.blocks))) == sorted(map(sorted, GROUPS))
    points(found, inverse @ gradient, 0.05 if solver == "cg" else 1e-8)


def test_groups_with_rates_and_dampings_of_their_own() -> None:
    model, x, y = problem()
    few = [*model.own.parameters(), model.two]
    rest = [p for p in model.parameters() if not any(p is q for q in few)]
    options: dict[str, Any] = {"damping": D, "loss": LOSS, "layerwise": True, "line_search": True}
    opt = NaturalGradient(model, **options)
    opt.param_groups.clear()
    opt.add_param_group({"params": few, "lr": 0.25, "damping": 0.3})
    opt.add_param_group({"params": rest})
    is_few = torch.cat([torch.full((p.numel(),), any(p is q for q in few)) for p in model.parameters()])
    inverse = expected(model, x, y, torch.where(is_few, 0.3, D))
    found, gradient = direction(opt, model, x, y)
    points(found, torch.where(is_few, 0.25, 1.0) * (inverse @ gradient))
    assert opt.param_groups[0]["params"].pop(1) is model.own.bias
    opt.add_param_group({"params": [model.own.bias], "damping": 0.1})
    with pytest.raises(ValueError, match=r"damping: own\.weight, own\.bias are solved.*\[0\.3, 0\.1\]"):
        direction(opt, model, x, y)


def test_the_usual_damping_is_that_of_each_block() -> None:
    """0.05 of its mean eigenvalue, in the smaller of parameter and sample space."""
    model, x, y = problem()
    matrix = oracle.Matrices(model, LOSS, (x, y)).gauss_newton
    names = list(oracle.trainable(model))
    sizes = dict(zip(names, (p.numel() for p in model.parameters()), strict=True))
    starts = dict(zip(names, torch.tensor([0, *sizes.values()]).cumsum(0).tolist(), strict=False))
    damping = torch.zeros(len(matrix)).double()
    for group in GROUPS:
        where = torch.cat([torch.arange(starts[name], starts[name] + sizes[name]) for name in group])
        damping[where] = 0.05 * matrix.diagonal()[where].sum() / min(len(where), 4 * 5)
    inverse = expected(model, x, y, damping)
    opt = NaturalGradient(model, loss=LOSS, layerwise=True, line_search=True)
    found, gradient = direction(opt, model, x, y)
    points(found, inverse @ gradient)


def test_a_layer_that_is_read_later_and_one_that_is_frozen() -> None:
    model, x, y = problem()
    with_branch, without = x.clone(), torch.where(x == 0, 1, x)
    opt = NaturalGradient(model, damping=D, loss=LOSS, layerwise=True, line_search=True)
    for batch, frozen in ((without, False), (with_branch, False), (with_branch, True)):
        model.two.requires_grad_(not frozen)
        where = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
        model.two.requires_grad_(True)
        inverse = expected(model, batch, y)
        model.two.requires_grad_(not frozen)
        found, gradient = direction(opt, model, batch, y)
        points(found, torch.where(where, inverse @ gradient, 0.0))
    assert ["two"] not in [list(block.names) for block in opt.store.blocks]


def test_the_last_direction_is_kept_with_the_damping_of_each_block() -> None:
    """SPRING: u = (G + damping)^-1 (g + damping * momentum * last u)."""
    model, x, y = problem()
    opt = NaturalGradient(model, damping=D, momentum=0.6, loss=LOSS, layerwise=True, line_search=True)
    first = expected(model, x, y)
    _, gradient = direction(opt, model, x, y)
    second = expected(model, x, y)
    found, later = direction(opt, model, x, y)
    points(found, second @ (later + D * 0.6 * (first @ gradient)))


def test_residuals_are_refused() -> None:
    model, x, _ = problem()
    with pytest.raises(ValueError, match="layerwise: residuals are solved for all parameters together"):
        NaturalGradient(model, layerwise=True).step(lambda: model(x)[:, 0])
