"""Losses in which a sample counts by the others of its batch or its place: they are refused, or right."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.combinations import in_turn
from support.oracles.brute_force import Matrices

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
Loss = Callable[[Tensor, Tensor], Tensor]


def squares(o: Tensor, y: Tensor) -> Tensor:
    return (o - F.one_hot(y, 3)).square().sum(1)


def entropies(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="none")


def trimmed(o: Tensor, y: Tensor) -> Tensor:
    return entropies(o, y).sort().values[: max(1, len(o) - 1)].mean()


def balanced(o: Tensor, y: Tensor) -> Tensor:
    """Every class counts alike, whatever the number of its samples."""
    return torch.stack([entropies(o[y == k], y[y == k]).mean() for k in y.unique()]).mean()


def by_frequency(o: Tensor, y: Tensor) -> Tensor:
    weights = 1 / torch.bincount(y, minlength=3)[y]
    return (weights * entropies(o, y)).sum() / weights.sum()


def by_place(o: Tensor, y: Tensor) -> Tensor:
    places = 1.0 + torch.arange(len(o))
    return (places * entropies(o, y)).sum() / places.sum()


RANKED: dict[str, Loss] = {
    "the two largest": lambda o, y: squares(o, y).topk(min(2, len(o))).values.mean(),
    "the largest half": lambda o, y: squares(o, y).topk(max(1, len(o) // 2)).values.mean(),
    "their sum": lambda o, y: squares(o, y).topk(min(2, len(o))).values.sum(),
    "a quantile": lambda o, y: squares(o, y).quantile(0.8),
    "all but the largest": trimmed,
    "the largest once more": lambda o, y: squares(o, y).mean() + 0.1 * squares(o, y).max(),
    "balanced classes": balanced,
    "weights by frequency": by_frequency,
    "weights by place": by_place,
}


def batches(sizes: tuple[int, ...], seed: int) -> tuple[nn.Module, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    x, y = 2 * torch.randn(sum(sizes), 4), torch.randint(3, (sum(sizes),))
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    return model, x, y, list(zip(x.split(sizes), y.split(sizes), strict=True))


@in_turn(name=RANKED, sizes=[(2, 2), (1, 1, 1, 1), (4, 2, 6), (2, 4)])
def test_losses_in_which_samples_count_by_the_others(name: str, sizes: tuple[int, ...]) -> None:
    """Right, where samples do not meet in these data, or refused."""
    refused, loss = 0, RANKED[name]
    for seed in range(2):
        model, x, y, data = batches(sizes, seed)
        reference = Matrices(model, loss, (x, y)).hessian
        try:
            found = curvature.hessian(model, loss, data).to_dense()
        except ValueError as error:
            assert "how several batches make up the loss" in str(error)
            refused += 1
        else:
            torch.testing.assert_close(found, reference)
    assert refused


def test_a_loss_that_takes_no_few_samples_says_so() -> None:
    model, _, _, data = batches((6, 6), 0)
    loss = lambda o, y: squares(o, y).topk(6).values.mean() + 0.1 * squares(o, y)[:1].sum()
    with pytest.raises(ValueError, match=r"no weighted sum|does not run|cannot be told"):
        curvature.hessian(model, loss, data).to_dense()


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


SEEDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise on outputs": lambda o, y: F.cross_entropy(o + drawn(*o.shape), y),
    "negatives": lambda o, y: (o[:, 0] - o.gather(1, (3 * drawn(len(o), 1)).long())[:, 0]).sigmoid().mean(),
    "smoothed labels": lambda o, y: (F.one_hot(y, 3) - drawn(*o.shape) - o).square().mean(),
}


@pytest.mark.parametrize("name", SEEDED)
def test_draws_that_go_by_the_place_of_a_sample_are_refused(name: str) -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    for call in (curvature.per_sample_gradients, curvature.per_sample_norms, curvature.kfac):
        with pytest.raises(ValueError, match="no weighted sum of the losses of its samples"):
            call(model, SEEDED[name], x, y)


@pytest.mark.parametrize("seed", range(6))
def test_rows_have_the_draws_of_a_batch_of_one(seed: int) -> None:
    """Weights that are drawn change what a sample counts for in a batch, and alone it has the first of them."""
    torch.manual_seed(seed)
    loss = lambda o, y: (drawn(len(o)) * F.cross_entropy(o, y, reduction="none")).sum()
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    rows = curvature.per_sample_gradients(model, loss, x, y)["weight"]
    for n in range(5):
        torch.testing.assert_close(
            rows[n], torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]), model.weight)[0]
        )
