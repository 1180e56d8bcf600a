"""Batches of one sample, wherever they are in the data, and batches in which no term of the loss counts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded
from support.combinations import in_pairs
from support.oracles.brute_force import Matrices

pytestmark = pytest.mark.fast


def folded(head: Callable[[], nn.Module], sequence_first: bool = False) -> nn.Module:
    """Layers with one output, called with tokens folded into the batch axis: (N, T, 3) to (N, T)."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if sequence_first else x
        h = m.head(m.body(x.flatten(0, 1)).tanh()).view(x.shape[:2])
        return h.T if sequence_first else h

    return Raw(run, body=nn.Linear(3, 4), head=head())


squares = lambda m, x: x.square().sum(-1, keepdim=True)
HEADS: dict[str, Callable[[], nn.Module]] = {
    "value head": lambda: nn.Linear(4, 1),
    "two layers": lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 1)),
    "norm of one feature": lambda: nn.Sequential(nn.Linear(4, 1), nn.LayerNorm(1), nn.Linear(1, 1)),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.Linear(4, 1)),
    "norm of two groups": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 1)),
    "norm last": lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), Raw(squares)),
    "norms": lambda: nn.Sequential(nn.GroupNorm(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 1)),
    "scale": lambda: Raw(lambda m, x: m.linear(x) * m.scale, linear=nn.Linear(4, 1), scale=nn.Parameter(torch.ones(1))),
    "product": lambda: Raw(lambda m, x: x @ m.weight, weight=(4, 1)),
    "convolution": lambda: Raw(lambda m, x: m.layer(x[:, None]).sum((1, 2)), layer=nn.Conv1d(1, 1, 2)),
}


@in_pairs(
    head=HEADS, builder=[curvature.kfac, curvature.ekfac], sequence_first=[False, True], sizes=[[3, 3, 1], [1, 3, 3]]
)
def test_batches_of_one_sample_are_read_as_others(
    builder: Callable[..., curvature.BlockDiagonal], head: str, sequence_first: bool, sizes: list[int]
) -> None:
    with seeded(0):
        model = folded(HEADS[head], sequence_first).double()
        x, y = torch.randn(7, 5, 3).double(), torch.randn(7, 5).double()
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    for sharing in ("expand", "reduce"):
        expected = builder(copy.deepcopy(model), nn.MSELoss(), (x, y), sharing=sharing)
        found = builder(copy.deepcopy(model), nn.MSELoss(), batches, sharing=sharing)
        assert list(map(type, found.blocks.values())) == list(map(type, expected.blocks.values()))
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-7, atol=1e-10)


def test_a_batch_of_one_sample_goes_through_the_rules(caplog: pytest.LogCaptureFixture) -> None:
    model = folded(HEADS["value head"])
    curvature.kfac(model, nn.MSELoss(), (torch.randn(1, 5, 3), torch.randn(1, 5)))
    assert "no layer rule" not in caplog.text


EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expand": lambda p, x: p.expand(len(x), -1, -1),
    "expand_as": lambda p, x: p.expand_as(x),
    "of a view": lambda p, x: p.view(-1, 3).broadcast_to(x.shape),
    "of a computed table": lambda p, x: p.exp().expand(len(x), -1, -1),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", EXPANDED)
def test_a_table_expanded_to_one_sample_is_one_of_its_reads(name: str) -> None:
    """The result is a view of all of the table, whose node in the graph gets what comes from the other read, too."""
    with seeded(0):
        model = Raw(lambda m, x: (x * EXPANDED[name](m.table, x)).tanh() * m.table, table=(5, 3))
        x, y = torch.randn(3, 5, 3), torch.randn(3, 5, 3)
    expected = Matrices(model, nn.MSELoss(), (x, y)).fisher
    for data in ([(x[:1], y[:1]), (x[1:], y[1:])], [(x[:2], y[:2]), (x[2:], y[2:])]):
        found = curvature.fisher_blocks(model, nn.MSELoss(), data)
        torch.testing.assert_close(found.to_dense(), expected)
        diagonal = curvature.fisher_diagonal(model, nn.MSELoss(), data)["table"]
        torch.testing.assert_close(diagonal.flatten(), expected.diagonal())


LOSSES: dict[str, Any] = {
    "a loss of torch": nn.CrossEntropyLoss(),
    "a function": lambda o, y: F.cross_entropy(o, y),
    "a masked mean": lambda o, y: (o.square().sum(1) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
}
BUILDERS = [curvature.gauss_newton, curvature.fisher]


def prepared() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    return nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,)), torch.full((5,), -100)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_products_say_that_no_term_counts(name: str, is_split: bool, builder: Any) -> None:
    model, x, _, nothing = prepared()
    data = [(x[:2], nothing[:2]), (x[2:], nothing[2:])] if is_split else (x, nothing)
    found = builder(model, LOSSES[name], data)
    for call in (lambda: found @ torch.ones(15), lambda: found @ torch.ones(15, 2), found.to_dense, found.diagonal):
        with pytest.raises(ValueError, match="no term of it counts"):
            call()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", LOSSES)
def test_batches_in_which_no_term_counts_change_nothing(name: str) -> None:
    model, x, y, nothing = prepared()
    for data in ([(x, y), (x, nothing)], [(x, nothing), (x, y)]):
        for builder in (*BUILDERS, curvature.hessian):
            expected, found = builder(model, LOSSES[name], (x, y)), builder(model, LOSSES[name], data)
            torch.testing.assert_close(found @ torch.ones(15), expected @ torch.ones(15))
            torch.testing.assert_close(found.to_dense(), expected.to_dense())
