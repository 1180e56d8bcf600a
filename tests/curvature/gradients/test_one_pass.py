"""Passes that draw random numbers, move buffers or put samples elsewhere: rows are of the pass that is asked about."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import curvature
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles import brute_force as oracle
from support.plans import plans_of
from support.rows import rows_of

pytestmark = pytest.mark.fast


def masked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """`p` is read by a function without a rule, `layer` by one that has a rule; both see the mask."""
    return m.layer(x * mask) + torch.cdist(x * mask, m.p)


RANDOM: dict[str, Any] = {
    "dropout": lambda m, x: masked(m, x, F.dropout(torch.ones_like(x), 0.5, m.training)),
    "noise": lambda m, x: masked(m, x, torch.rand_like(x)),
    "stochastic depth": lambda m, x: masked(m, x, torch.empty(len(x), 1).bernoulli_(0.5).to(x) + 0.1),
    "gumbel": lambda m, x: masked(m, x, F.gumbel_softmax(x, hard=True)),
}


@pytest.mark.parametrize("member", RANDOM)
def test_rows_are_of_the_pass_of_the_same_seed(member: str) -> None:
    with seeded(0):
        model = Raw(RANDOM[member], p=(4, 3), layer=nn.Linear(3, 4)).double().train()
        x, y, loss = torch.randn(5, 3).double(), torch.randn(5, 4).double(), nn.MSELoss()
    for _ in range(2):  # learnt, and known
        with seeded(3):
            rows = curvature.per_sample_gradients(model, loss, x, y)
        with seeded(3):
            output = model(x)
        torch.testing.assert_close(rows, rows_of(model, [loss(output[n], y[n]) for n in range(len(x))]))
        with seeded(3):
            diagonal = curvature.fisher_diagonal(model, loss, (x, y), inject=curvature.empirical())
        torch.testing.assert_close(diagonal, {k: g.square().mean(0) for k, g in rows.items()})


N, T = 4, 3
LOSS = nn.MSELoss()


class Ordered(torch.autograd.Function):
    """Rows in the order of a function of the user's, which has no index in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, order: Tensor) -> Tensor:
        ctx.order = order
        return h[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.order.argsort()], None


def by_size(m: Any, x: Tensor) -> Tensor:
    """Longest first and back, as for packed sequences."""
    order = x[:, 0, 0].argsort()
    return m.head(m.inner(x[order]).tanh()[order.argsort()].sum(1))


def by_function(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return m.head(Ordered.apply(m.inner(x[order]).tanh(), order.argsort()).sum(1))


def by_mask(m: Any, x: Tensor) -> Tensor:
    """Places with a mark pass a layer; as many in both batches, but of other samples."""
    marked = x[..., 1] > 0
    found = torch.zeros_like(x)
    found[marked] = m.mix(x[marked]).tanh()
    return m.head(m.inner(x + found).sum(1))


def by_length(m: Any, x: Tensor) -> Tensor:
    lengths = (x[..., 1] > 0).sum(1) + 1
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    hidden = packed._replace(data=m.inner(packed.data).tanh())
    return m.head(pad_packed_sequence(hidden, batch_first=True, total_length=T)[0].sum(1))


def places(x: Tensor) -> tuple[list[int], list[int]]:
    """The order of samples by size, and the way back, as Python has them."""
    order = sorted(range(len(x)), key=lambda n: float(x[n, 0, 0]))
    return order, [order.index(n) for n in range(len(x))]


def by_stack(m: Any, x: Tensor) -> Tensor:
    order, back = places(x)
    hidden = m.mix(x)
    hidden = m.inner(torch.stack([hidden[n] for n in order])).tanh().sum(1)
    return m.head(torch.cat([hidden[n : n + 1] for n in back]))


def by_unbind(m: Any, x: Tensor) -> Tensor:
    """In autograd's graph only the numbers of the outputs say which goes where."""
    order, back = places(x)
    parts = m.mix(x).unbind()
    parts = m.inner(torch.stack([parts[n] for n in order])).tanh().sum(1).split(1)
    return m.head(torch.cat([parts[n] for n in back]))


def by_roll(m: Any, x: Tensor) -> Tensor:
    count = int(x[0, 0, 0])
    return m.head(m.inner(m.mix(x).roll(count, 0)).tanh().roll(-count, 0).sum(1))


MODELS = {f.__name__: f for f in (by_size, by_function, by_mask, by_length, by_stack, by_unbind, by_roll)}


def made_of(run: Callable[[Any, Tensor], Tensor], device: str) -> nn.Module:
    with seeded(0):
        made = Raw(run, inner=nn.Linear(3, 4), head=nn.Linear(4, 2), mix=nn.Linear(3, 3))
    return made.double().to(device)


def batches(device: str) -> list[tuple[Tensor, Tensor]]:
    """Samples in order, each with one mark; then in another order, and the marks at other samples."""
    with seeded(1):
        x, y = torch.randn(N, T, 3).double(), torch.randn(N, 2).double()
    x[:, 0, 0] = torch.arange(N)
    x[..., 1] = -1
    first, second = x.clone(), x.flip(0)
    first[:, 0, 1] = 1
    second[0, :2, 1] = second[1, :2, 1] = 1
    return [(first.to(device), y.to(device)), (second.to(device), y.to(device))]


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_another_batch_of_the_same_shapes(name: str, order: tuple[int, ...], device: str) -> None:
    made, both = made_of(MODELS[name], device), batches(device)
    for k in order:
        x, y = both[k]
        expected = oracle.per_sample_gradients(made, LOSS, x, y)
        for key, rows in curvature.per_sample_gradients(made, LOSS, x, y).items():
            matches(rows, expected[key])
        values = (made(x) - y).square().mean(1)
        for key, rows in curvature.Jacobian.of(values, made).rows().items():
            matches(rows, expected[key])
        squares = oracle.Matrices(made, LOSS, (x, y)).fisher.diagonal()
        found = curvature.fisher_diagonal(made, LOSS, (x, y))
        matches(torch.cat([found[key].flatten() for key in expected]), squares)


def test_plans_are_confirmed_and_not_collected(device: str) -> None:
    """A batch whose samples go where those of the last one went is not learnt from."""
    made, ((x, _), (other, _)) = made_of(by_mask, device), batches(device)
    fewer = other.clone()
    fewer[..., 1] = -1
    fewer[0, 0, 1] = 1
    curvature.Jacobian.of(made(x).sum(1), made)
    (plan,) = plans_of(made)
    curvature.Jacobian.of(made(x + 0.1 * (x < -1)).sum(1), made)
    assert plans_of(made) == [plan] and plans_of(made)[0] is plan
    for batch in (other, fewer):
        curvature.Jacobian.of(made(batch).sum(1), made)
        *_, new = plans_of(made)
        assert new is not plan and new.general == {"mix.weight", "mix.bias"}
        plan = new
