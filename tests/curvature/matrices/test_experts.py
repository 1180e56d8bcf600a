"""Experts on stacked weights (E, i, o): per-sample gradients by rule, and one pair of factors for each expert."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
import optimizers
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles import brute_force as oracle
from support.oracles.brute_force import Matrices
from support.plans import plans_of
from support.training import train

E, N, I, O = 3, 7, 4, 2
LOSS = nn.MSELoss()


def weighted(z: Tensor, p: Tensor) -> Tensor:
    """(E, N, ..., O) to (N, ..., O)."""
    return torch.einsum("e...o,...e->...o", z, p)


def by_bmm(x: Tensor, W: Tensor, p: Tensor) -> Tensor:
    z = torch.bmm(x.reshape(1, -1, I).expand(E, -1, -1), W)
    return weighted(z.unflatten(1, x.shape[:-1]), p)


def routed(x: Tensor, W: Tensor, p: Tensor) -> Tensor:
    """Each place goes to the expert of the largest weight, times that weight; to others go zeros."""
    sent = nn.functional.one_hot(p.argmax(-1), E).to(x.dtype)
    z = torch.einsum("e...i,eio->e...o", torch.einsum("...e,...i->e...i", sent, x), W)
    return weighted(z, p * sent)


def routed_by_gate(x: Tensor, W: Tensor, p: Tensor) -> Tensor:
    """The same, with the weight applied at the output alone."""
    sent = nn.functional.one_hot(p.argmax(-1), E).to(x.dtype)
    return weighted(torch.einsum("...e,...i,eio->e...o", sent, x, W), p)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, W, p: weighted(torch.einsum("e...i,eio->e...o", x.expand(E, *x.shape), W), p),
    "bmm": by_bmm,
    "matmul": lambda x, W, p: weighted((x.expand(E, *x.shape).flatten(1, -2) @ W).unflatten(1, x.shape[:-1]), p),
    "routed": routed,
    "routed_by_gate": routed_by_gate,
}


def problem(call: str, *places: int) -> tuple[Any, tuple[Tensor, Tensor]]:
    forward = lambda m, x: CALLS[call](x, m.W, m.gate(x).softmax(-1))
    with seeded(1):
        data = torch.randn(N, *places, I).double(), torch.randn(N, *places, O).double()
        return Raw(forward, gate=nn.Linear(I, E), W=(E, I, O)).double(), data


def pairs(model: Any, call: str, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(B, A) of each expert for the loss above: those of a linear layer that sees the places sent to it alone."""
    rows = x.reshape(-1, I)
    p = model.gate(rows).softmax(-1).detach()
    sent = torch.ones_like(p)
    if "routed" in call:
        sent = nn.functional.one_hot(p.argmax(-1), E).to(p)
    found = []
    for e in range(E):
        here = rows[sent[:, e] > 0]
        # the loss of all places is a mean over (places, O) of squares of p z + ...
        B = 2 * p[sent[:, e] > 0, e].square().sum() / (len(rows) * O) * torch.eye(O).double()
        found.append((B, here.T @ here / max(1, len(here))))
    return found


@pytest.mark.parametrize("places", [(), (3,)])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_by_rule(call: str, places: tuple[int, ...]) -> None:
    model, (x, y) = problem(call, *places)
    expected = oracle.per_sample_gradients(model, LOSS, x, y)
    for name, rows in curvature.per_sample_gradients(model, LOSS, x, y).items():
        matches(rows, expected[name])
    assert [plan.general for plan in plans_of(model)] == [set()]
    if not places:
        matches(curvature.fisher(model, LOSS, (x, y)).to_dense(), Matrices(model, LOSS, (x, y)).fisher, 1e-8)


@pytest.mark.parametrize("places", [(), (3,)])
@pytest.mark.parametrize("call", CALLS)
def test_a_pair_for_each_expert(call: str, places: tuple[int, ...]) -> None:
    model, (x, y) = problem(call, *places)
    block = curvature.kfac(model, LOSS, (x, y))["W"]
    assert block.sides == (E, O, I)
    dense = block.to_dense()
    index = torch.arange(E * I * O).reshape(E, I, O).mT.flatten(1)  # rows (o, i) of each expert
    for e, (B, A) in enumerate(pairs(model, call, x)):
        matches(dense[index[e][:, None], index[e]], torch.kron(B, A), 1e-10)
        dense[index[e][:, None], index[e]] = 0
    assert not dense.any()
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    matches(curvature.kfac(model, LOSS, parts)["W"].to_dense(), block.to_dense(), 1e-10)


@pytest.mark.parametrize("call", CALLS)
def test_one_place_for_each_sample(call: str) -> None:
    """Then both ways of sharing are the same: samples that do not reach an expert count in neither."""
    model, data = problem(call)
    expand, reduce = (curvature.kfac(model, LOSS, data, sharing=sharing)["W"] for sharing in ("expand", "reduce"))
    matches(reduce.to_dense(), expand.to_dense(), 1e-12)


@pytest.mark.parametrize("call", CALLS)
def test_rescaled_by_expert(call: str) -> None:
    """EKFAC: the exact block's diagonal in the eigenbasis of each expert."""
    model, data = problem(call)
    found = curvature.ekfac(model, LOSS, data)["W"]
    exact = Matrices(model, LOSS, data).fisher
    where = oracle.positions(model)["W"].flatten()
    exact, basis = exact[where[:, None], where], torch.zeros(E * I * O, E * I * O).double()
    eye = torch.eye(E * I * O).double()
    basis = torch.stack([found._rotate_back(row.reshape(1, E, O, I))[:, 0] for row in eye], 1)
    matches(found.to_dense(), basis @ (basis.T @ exact @ basis).diagonal().diag() @ basis.T, 1e-8)


@pytest.mark.parametrize("kind", [optimizers.KFAC, optimizers.EKFAC])
@pytest.mark.parametrize("call", CALLS)
def test_optimizers(kind: type, call: str) -> None:
    """They have one pair for each expert, too, and an expert that nothing is sent to stays finite, and where it was."""
    model, (x, y) = problem(call, 3)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.copy_(torch.tensor([1.0, 0.5, -2.0]))
    before, opt = model.W.detach().clone(), kind(model, lr=0.1, weight_decay=0.0)
    losses = train(model, opt, LOSS, x, y, 5)
    (row,) = [line for line in opt.report().splitlines() if line.startswith("W ")]
    assert f"{E} x" in row or f"{E} groups" in row, row
    assert losses[-1] < losses[0] and all(p.isfinite().all() for p in model.parameters())
    if "routed" in call:
        idle = [e for e in range(E) if e != int(model.gate(x).mean((0, 1)).argmax())]
        assert call == "routed_by_gate" or torch.equal(model.W[idle[-1]], before[idle[-1]])


@pytest.mark.parametrize("call", ["routed", "routed_by_gate"])
def test_an_expert_with_few_samples(call: str) -> None:
    """With one place, its factors are its exact block; without any, they are zero and the solve is finite."""
    model, (x, y) = problem(call)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[:2, 0] = torch.tensor([5.0, -5.0])
        x[:, 0] = 1
        x[3, 0] = -1
    block, exact = curvature.kfac(model, LOSS, (x, y))["W"], curvature.fisher_blocks(model, LOSS, (x, y))["W"]
    own = slice(I * O, 2 * I * O)
    matches(block.to_dense()[own, own], exact.to_dense()[own, own], 1e-10)
    assert not block.to_dense()[2 * I * O :].any() and exact.to_dense()[own, own].any()
    v = torch.ones(E * I * O).double()
    for builder in (curvature.kfac, curvature.ekfac):
        matches(builder(model, LOSS, (x, y))["W"].solve(v, 0.1)[2 * I * O :], 10 * v[2 * I * O :])


class Indexed(nn.Module):
    """Experts that get their samples by an index; the last gets none, and is called without samples or not at all."""

    def __init__(self, expert: Callable[[], nn.Module], is_called: bool) -> None:
        super().__init__()
        self.experts, self.is_called = nn.ModuleList(expert() for _ in range(3)), is_called

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0).long() == k).nonzero()[:, 0]
            if self.is_called or len(rows):
                out = out.index_put((rows,), expert(x[rows]))
        return out


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
    "without_bias": lambda: nn.Linear(4, 2, bias=False),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
    "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LSTM(2, 2, batch_first=True), Last()),
    "attention": lambda: nn.Sequential(Attention(), nn.Linear(4, 2)),
}


class Last(nn.Module):
    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0][:, -1]


class Attention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = torch.stack([x, x.flip(1)], 1)
        return super().forward(tokens, tokens, tokens, need_weights=False)[0].mean(1)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("builder", [curvature.fisher_blocks, curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize("expert", EXPERTS)
def test_an_expert_that_no_sample_reaches(expert: str, builder: Callable[..., Any], is_called: bool) -> None:
    """Its curvature is zero, in blocks of the same parameters as that of the others."""
    with seeded(2):
        model = Indexed(EXPERTS[expert], is_called).double()
        data = torch.randn(N, I).double(), torch.randn(N, 2).double()
    K = builder(model, LOSS, data)
    for name, _ in model.experts[0].named_parameters():
        own = [K[f"experts.{k}.{name}"] for k in range(3)]
        inner = [[n.removeprefix(f"experts.{k}.") for n in block.space.names] for k, block in enumerate(own)]
        assert inner[0] == inner[1] == inner[2]
        assert not own[2].to_dense().any() and own[0].shape == own[2].shape
    if builder is curvature.fisher_blocks:
        exact, where = Matrices(model, LOSS, data).fisher, oracle.positions(model)
        for block in K.blocks.values():
            rows = torch.cat([where[name].flatten() for name in block.space.names])
            matches(block.to_dense(), exact[rows[:, None], rows], 1e-8)


@pytest.mark.parametrize("is_called", [False, True])
def test_a_structure_of_its_own_for_an_expert_that_no_sample_reaches(is_called: bool) -> None:
    with seeded(2):
        model = Indexed(EXPERTS["mlp"], is_called).double()
        data = torch.randn(N, I).double(), torch.randn(N, 2).double()
    K = curvature.kfac(model, LOSS, data, structure={"experts.2.0.weight": "dense"})
    assert K["experts.2.0.weight"].space.names == ("experts.2.0.weight",)
    assert K["experts.2.0.bias"].space.names == ("experts.2.0.bias",)
    assert K["experts.2.2"].space.names == ("experts.2.2.weight", "experts.2.2.bias")


def test_factors_of_data_that_reach_fewer_experts() -> None:
    """An expert that is zero in them is measured with the data at hand; one that is read in another way raises."""
    with seeded(2):
        model = Indexed(lambda: nn.Linear(4, 2), False).double()
        x, y = torch.randn(N, I).double(), torch.randn(N, 2).double()
    some = torch.cat([-x[:, :1].abs(), x[:, 1:]], 1)
    chosen = {"experts.0.weight": "dense", "experts.0.bias": "dense"}
    K = curvature.kfac(model, LOSS, (some, y), structure=chosen)
    assert not K["experts.1"].to_dense().any()
    found, exact = curvature.ekfac(model, LOSS, (x, y), factors=K, structure=chosen), Matrices(model, LOSS, (x, y))
    rows = torch.cat([oracle.positions(model)[f"experts.1.{name}"].flatten() for name in ("weight", "bias")])
    matches(found["experts.1"].to_dense(), exact.fisher[rows[:, None], rows], 1e-8)
    matches(found["experts.0.weight"].to_dense(), K["experts.0.weight"].to_dense(), 1e-12)
    K = curvature.kfac(model, LOSS, (some, y))
    with pytest.raises(ValueError, match=r"factors: found Kronecker.*read experts.0.weight in a way"):
        curvature.ekfac(model, LOSS, (x, y), factors=K)
