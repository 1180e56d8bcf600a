"""Influence scores against dense inverses and loops over samples, and against training without a sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import curvature
import curvature.uses.attribution
from curvature.uses.attribution import LowRank, compress
from support.cases.case import Raw, seeded
from support.oracles.influence import own_gradients, scores

D = 0.3
LOSS = nn.CrossEntropyLoss()


def problem(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    with seeded(0):
        layers = (
            nn.Conv2d(1, 2, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(18, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
        )
        draw = lambda n: (torch.randn(n, 1, 3, 3).double().to(device), torch.randint(3, (n,)).to(device))
        return nn.Sequential(*layers).double().to(device), draw(7), draw(4)


def wanted(matrix: Tensor, damping: float = D) -> Tensor:
    model, train, query = problem()
    return scores(matrix, own_gradients(model, LOSS, *query), own_gradients(model, LOSS, *train), damping)


MATRICES: dict[str, Callable[..., curvature.Operator]] = {
    "kfac": curvature.kfac, "ekfac": curvature.ekfac, "gauss_newton": curvature.gauss_newton,
    "by samples": lambda *given: curvature.gauss_newton(*given).compact(),
}  # fmt: skip


@pytest.mark.parametrize("score", [curvature.influence, curvature.influence_by_parameter, curvature.influence_by_place])
def test_empty_batches_have_no_scores(score: Callable[..., Any]) -> None:
    model, train, query = problem()
    K = curvature.kfac(model, LOSS, train)
    empty = train[0][:0], train[1][:0]
    for among in ([empty, query], [query, empty]):
        found = score(model, LOSS, [empty, train], among, K, damping=D)
        torch.testing.assert_close(found, score(model, LOSS, train, query, K, damping=D))
    for what, data in (("train", (empty, query)), ("query", (train, empty))):
        with pytest.raises(ValueError, match=f"{what}: no batch has a sample"):
            score(model, LOSS, *data, K, damping=D)


@pytest.mark.fast
@pytest.mark.parametrize("name", MATRICES)
def test_scores_are_those_of_the_dense_matrix(name: str, device: str) -> None:
    model, train, query = problem(device)
    K = MATRICES[name](model, LOSS, train)
    found = curvature.influence(model, LOSS, train, query, K, damping=D)
    assert found.shape == (4, 7) and found.device.type == torch.device(device).type
    torch.testing.assert_close(found.cpu(), wanted(MATRICES[name](*problem()[:1], LOSS, problem()[1]).to_dense()))
    parts = curvature.influence_by_parameter(model, LOSS, train, query, K, damping=D)
    assert list(parts) == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(torch.stack(list(parts.values())).sum(0), found)


def test_each_block_has_its_own_damping() -> None:
    model, train, query = problem()
    found = curvature.influence(model, LOSS, train, query)
    K = curvature.ekfac(model, LOSS, train)
    damped = [block.damped(0.1 * float(block.trace()) / block.space.size) for block in K.blocks.values()]
    torch.testing.assert_close(found, wanted(curvature.BlockDiagonal(K.space, damped).to_dense(), 0.0))


def test_batches_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, train, query = problem()
    K = curvature.kfac(model, LOSS, train)
    whole = curvature.influence(model, LOSS, train, query, K)
    monkeypatch.setattr(curvature.uses.attribution, "ENTRIES", 40)
    pieces = [[(x[:2], y[:2]), (x[2:3], y[2:3]), (x[3:], y[3:])] for x, y in (train, query)]
    torch.testing.assert_close(curvature.influence(model, LOSS, *pieces, K), whole)
    without = [[*own, (own[0][0][:0], own[0][1][:0])] for own in pieces]  # as a loader of a filtered set may give
    torch.testing.assert_close(curvature.influence(model, LOSS, *without, K), whole)


def test_queries_of_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a linear layer have rank one, and a multiple of the identity leaves it."""
    model, train, query = problem()
    whole = curvature.kfac(model, LOSS, train)
    alone = curvature.Diagonal(whole["3"].space, torch.ones(whole["3"].space.size).double())
    wanted = curvature.influence(model, LOSS, train, query, alone, damping=D)
    pieces = [[(x[:2], y[:2]), (x[2:], y[2:])] for x, y in (train, query)]
    monkeypatch.setattr(curvature.uses.attribution, "ENTRIES", 100)
    torch.testing.assert_close(
        curvature.influence(model, LOSS, *pieces, alone, damping=D, query_rank=1), wanted, rtol=1e-10, atol=1e-12
    )
    exact = curvature.influence(model, LOSS, train, query, whole)
    assert torch.equal(curvature.influence(model, LOSS, train, query, whole, query_rank=100), exact)
    for name, part in curvature.influence_by_place(model, LOSS, *pieces, whole, query_rank=1).items():
        total = curvature.influence_by_parameter(model, LOSS, *pieces, whole, query_rank=1)[name]
        torch.testing.assert_close(part.sum(2), total)
    for damping, error in ("a", TypeError), (-1.0, ValueError):
        with pytest.raises(error, match="damping: expected"):
            curvature.influence(model, LOSS, train, query, damping=damping)
    with pytest.raises(TypeError, match="query: expected a pair"):
        curvature.influence(model, LOSS, train, query[0])
    with pytest.raises(TypeError, match=r"query_rank: expected a whole number, found 1\.5"):
        curvature.influence(model, LOSS, train, query, query_rank=1.5)
    with pytest.raises(ValueError, match="query_rank: expected a whole number of at least 1, found 0"):
        curvature.influence(model, LOSS, train, query, whole, query_rank=0)


def read(m: Any, x: Tensor) -> Tensor:
    """Layers that read a weight at several places, with and without biases, in groups, transposed, and tied."""
    x = m.plain(m.mix(m.mix(m.embed(x)).tanh()).tanh())
    return m.out((m.grouped(x.mT).tanh().mT @ m.turned).mean(1))


@pytest.mark.parametrize("build", [curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize("length", [2, 7])
def test_scores_in_eigenbases_are_those_of_the_parameters(build: Callable[..., curvature.Operator], length: int):
    with seeded(0):
        layers = {"embed": nn.Embedding(5, 4), "mix": nn.Linear(4, 4), "plain": nn.Linear(4, 6, bias=False)}
        layers |= {"grouped": nn.Conv1d(6, 4, 1, groups=2), "out": nn.Linear(3, 3)}
        model = Raw(read, **layers, turned=(4, 3)).double()
        train, query = ((torch.randint(5, (n, length)), torch.randint(3, (n,))) for n in (6, 3))
    longer = [train, (train[0].repeat(1, 4), train[1])]  # places for which a basis would not be taken
    K = build(model, LOSS, train)
    for rank in (None, 2):
        by_parameter = curvature.influence_by_parameter(model, LOSS, longer, query, K, damping=D)
        found = curvature.influence(model, LOSS, longer, query, K, damping=D, query_rank=rank)
        if rank is None:
            torch.testing.assert_close(found, torch.stack(list(by_parameter.values())).sum(0))
        assert found.shape == (3, 12)
    for layer in ("mix", "plain", "grouped", "turned", "out"):
        found = curvature.influence(model, LOSS, longer, query, K[layer])
        by_parameter = curvature.influence_by_parameter(model, LOSS, longer, query, K[layer])
        torch.testing.assert_close(found, torch.stack(list(by_parameter.values())).sum(0))


@pytest.mark.parametrize("score", [curvature.influence, curvature.influence_by_parameter])
def test_a_matrix_that_is_singular_up_to_rounding_is_refused(score: Callable[..., object]) -> None:
    with seeded(0):
        model, data = nn.Sequential(nn.Linear(8, 3)).double(), (torch.randn(4, 8).double(), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ValueError, match="singular"):
        score(model, LOSS, data, data, curvature.kfac(model, LOSS, data), damping=0.0)


@pytest.mark.parametrize("fall", [0.5, 0.9])
def test_the_nearest_matrix_of_a_rank_nearly(fall: float) -> None:
    """Whose error is that of the singular values left out (Eckart and Young)."""
    with seeded(1):
        turns = [torch.linalg.qr(torch.randn(3, d, 20).double())[0] for d in (30, 40)]
    values = fall ** torch.arange(20).double()
    matrices = (turns[0] * values) @ turns[1].mT
    low = compress(matrices.reshape(3, 30, 8, 5), 6)
    assert isinstance(low, LowRank) and low.left.numel() + low.right.numel() == 3 * 6 * 70
    errors = (low[:] - matrices.reshape(3, 30, 8, 5)).flatten(1).norm(dim=1)
    assert (errors <= 1.1 * values[6:].norm()).all() and (errors >= (1 - 1e-9) * values[6:].norm()).all()


def test_one_layer_alone() -> None:
    model, train, query = problem()
    K = curvature.kfac(model, LOSS, train)["5"]
    parts = curvature.influence_by_parameter(model, LOSS, train, query, K, damping=D)
    every = curvature.influence_by_parameter(model, LOSS, train, query, curvature.kfac(model, LOSS, train), damping=D)
    assert list(parts) == ["5.weight", "5.bias"]
    torch.testing.assert_close(parts, {name: every[name] for name in parts})


def tokens(m: Any, words: Tensor) -> Tensor:
    """A tied embedding, a layer for each token, a norm, a parameter that is added whatever the token."""
    return m.norm(torch.tanh(m.mix(m.table(words) + m.places))) @ m.table.weight.T


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def gradients_by_token(model: Any, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """(N, places, *shape): with a copy of each parameter for every token, or for every read of it."""
    rows: dict[str, list[Tensor]] = {"table.weight": [], "mix.weight": [], "norm.weight": []}
    for own, wanted in zip(tokens, targets, strict=True):
        copies = {name: model.get_parameter(name).detach().expand(3, *model.get_parameter(name).shape) for name in rows}
        copies["last"] = copies["table.weight"]
        copies = {name: x.clone().requires_grad_() for name, x in copies.items()}
        read = copies["table.weight"][torch.arange(3), own] + model.places.detach()
        hidden = torch.tanh(torch.einsum("toi,ti->to", copies["mix.weight"], read) + model.mix.bias.detach())
        hidden = nn.functional.layer_norm(hidden, (4,)) * copies["norm.weight"] + model.norm.bias.detach()
        logits = torch.einsum("toi,ti->to", copies["last"], hidden)
        found = dict(
            zip(copies, torch.autograd.grad(token_loss(logits[None], wanted), list(copies.values())), strict=True)
        )
        found["table.weight"] = torch.cat([found["table.weight"], found.pop("last")])
        for name in rows:
            rows[name].append(found[name])
    return {name: torch.stack(own) for name, own in rows.items()}


def test_each_token_has_its_share() -> None:
    with seeded(0):
        layers = {"table": nn.Embedding(5, 4), "mix": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
        model = Raw(tokens, **layers, places=(3, 4)).double()
        train, query = ((torch.randint(5, (n, 3)), torch.randint(5, (n, 3))) for n in (4, 2))
    K = curvature.gauss_newton(model, token_loss, train).materialise()
    order = torch.tensor([0, 1, 3, 2])
    train_batches = [(train[0][part], train[1][part]) for part in order.split(2)]
    found = curvature.influence_by_place(model, token_loss, train_batches, query, K, damping=D)
    every = curvature.influence_by_parameter(model, token_loss, train, query, K, damping=D)
    solved = K.space.split(K.solve(own_gradients(model, token_loss, *query).T, D).T)
    for name, rows in gradients_by_token(model, train[0][order], train[1][order]).items():
        expected = torch.einsum("qp,ntp->qnt", solved[name].flatten(1), rows.flatten(2))
        torch.testing.assert_close(found[name], expected)
        torch.testing.assert_close(found[name].sum(2), every[name][:, order])
    for name in ("places", "mix.bias", "norm.bias"):
        torch.testing.assert_close(found[name], every[name][:, order, None])
    with pytest.raises(ValueError, match="train: a batch with a single sample does not tell its places"):
        curvature.influence_by_place(model, token_loss, [(train[0][:1], train[1][:1])], query, K, damping=D)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_leaving_a_sample_out(reduction: str) -> None:
    """Ridge regression, whose minimum is known: the change of the queries' losses without each sample."""
    with seeded(0):
        x, noise, asked = torch.randn(40, 5).double(), torch.randn(40, 1).double(), torch.randn(6, 5).double()
    y, answers = x.sum(1, keepdim=True) + noise, asked.sum(1, keepdim=True)
    loss, model = nn.MSELoss(reduction=reduction), nn.Linear(5, 1, bias=False).double()

    def trained(kept: Tensor) -> Tensor:
        model.weight.data = torch.linalg.lstsq(x[kept], y[kept]).solution.T
        return (model(asked).detach() - answers)[:, 0].square()

    every = torch.arange(40)
    changes = torch.stack([trained(every[every != n]) for n in every], 1) - trained(every)[:, None]
    G = curvature.gauss_newton(model, loss, (x, y))
    found = curvature.influence(model, loss, (x, y), (asked, answers), G, damping=0.0)
    predicted = found / (40 if reduction == "mean" else 1)
    assert torch.corrcoef(torch.stack([predicted.flatten(), changes.flatten()]))[0, 1] > 0.98
    assert (predicted - changes).abs().mean() < 0.3 * changes.abs().mean()


def test_what_is_refused() -> None:
    model, train, query = problem()
    with pytest.raises(TypeError, match=r"curvature: expected an operator.*found a str"):
        curvature.influence(model, LOSS, train, query, "kfac")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train: no batch"):
        curvature.influence(model, LOSS, [], query, curvature.kfac(model, LOSS, train))
    with pytest.raises(ValueError, match="query: no batch"):
        curvature.influence(model, LOSS, train, [], curvature.kfac(model, LOSS, train))
    other = curvature.kfac(nn.Sequential(nn.Flatten(), nn.Linear(9, 3)).double(), LOSS, train)
    with pytest.raises(ValueError, match=r"curvature: it is of 1\.weight, 1\.bias, which the model does not train"):
        curvature.influence(model, LOSS, train, query, other)
    batchnorm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3)).double()
    with pytest.raises(ValueError, match="BatchNorm"):
        curvature.influence(batchnorm, LOSS, train, query)


@pytest.mark.parametrize("batches", [[[0, 1, 2], [3, 4, 5, 6]], BatchSampler(SequentialSampler(range(7)), 3, False)])
def test_loaders_in_order_are_not_refused(batches: Any):
    model, train, query = problem()
    loader = DataLoader(TensorDataset(*train), batch_sampler=batches)
    assert torch.allclose(
        curvature.influence(model, LOSS, loader, query), curvature.influence(model, LOSS, train, query)
    )
