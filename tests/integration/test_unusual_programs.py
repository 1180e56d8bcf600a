"""Programs that were found to give wrong numbers, or to fail, each reduced to its core."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.data import DataLoader, Dataset

import curvature
from support.cases.case import Raw
from support.comparisons import right_rows
from support.oracles.brute_force import Matrices

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
ENTROPY = nn.CrossEntropyLoss()


def heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x), m.b(x).exp()


def nll(o: Any, y: Any) -> Tensor:
    """Of each sample, from a mean and a variance."""
    return (o[1].log() + (o[0] - y).square() / o[1]).sum(1)


unit = lambda z: F.normalize(z, dim=1)
CONTAINERS = {  # how a pair is packed, and how it is unpacked
    "tuple": (lambda o: o, lambda o: o),
    "list": (list, lambda o: o),
    "dict": (lambda o: {"mean": o[0], "variance": o[1]}, lambda o: (o["mean"], o["variance"])),
    "nested": (lambda o: ({"mean": o[0]}, [o[1]], len(o[0])), lambda o: (o[0]["mean"], o[1][0])),
}
MEETING = {
    "root of a mean": lambda o, y: (o[0] - y).square().mean().sqrt(),
    "root of a mean of likelihoods": lambda o, y: (nll(o, y) + 5).mean().sqrt(),
    "logarithm of a mean": lambda o, y: (o[0] - y).square().mean().log(),
    "a head in the scale of another": lambda o, y: (o[0] - y).square().sum() / o[1].detach().sum(),
    "each head with its own": lambda o, y: (o[0] - y).square().mean().sqrt() + o[1].mean(),
    # of a pair of embeddings: a sample alone has no gradient under it
    "contrastive": lambda o, y: F.cross_entropy(unit(o[0]) @ unit(o[1]).T / 0.1, torch.arange(len(o[0]))),
    "means in one, sums in the other": lambda o, y: (o[0] - y).square().mean() + o[1].square().sum(),
}
APART = {
    "mean": lambda o, y: nll(o, y).mean(),
    "sum": lambda o, y: nll(o, y).sum(),
    "weighted": lambda o, y: (nll(o, y) * (y[:, 0] > 0)).sum() / (y[:, 0] > 0).sum().clamp(min=1),
    "hinge": lambda o, y: (1 - o[0] * y).relu().mean() + o[1].mean(),
    "angles": lambda o, y: (1 - (unit(o[0]) * unit(o[1])).sum(1)).mean(),
    "one head": lambda o, y: (o[0] - y).square().mean(),
    "at its minimum": lambda o, y: (o[0] - o[0].detach()).square().mean() + 0 * o[1].sum(),
    "of a distribution": lambda o, y: -(torch.distributions.Normal(*o).log_prob(y) * (y[:, :1] > 0)).sum(),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", MEETING)
def test_losses_that_scale_samples_by_the_others_are_refused_in_any_container(name: str, container: str) -> None:
    pack, unpack = CONTAINERS[container]
    model = Raw(lambda m, x: pack(heads(m, x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="no weighted sum of the losses of its samples"):
            curvature.per_sample_gradients(model, lambda o, y: MEETING[name](unpack(o), y), x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", APART)
def test_losses_of_several_outputs(name: str, container: str, dtype: torch.dtype) -> None:
    pack, unpack = CONTAINERS[container]
    model = Raw(lambda m, x: pack(heads(m, x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3)).to(dtype)
    torch.set_default_dtype(dtype)
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    right_rows(model, lambda o, y: APART[name](unpack(o), y), x, y)


def test_losses_of_a_tuple_with_a_complex_part() -> None:
    model = Raw(lambda m, x: (m.a(x), torch.complex(m.a(x), m.b(x).exp())), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    mean = lambda o, y: (torch.view_as_real(o[1]) - y[:, :, None]).square().mean() + o[0].square().mean()
    right_rows(model, mean, x, y)
    with pytest.raises(ValueError, match="no weighted sum"):
        curvature.per_sample_norms(model, lambda o, y: mean(o, y).sqrt(), x, y)


def test_a_loss_of_a_tuple_is_asked_where_another_one_was_used_before() -> None:
    """Also one that has changed."""

    class Either(nn.Module):
        is_root = False

        def forward(self, o: Any, y: Tensor) -> Tensor:
            value = (o[0] - y).square().mean()
            return value.sqrt() if self.is_root else value

    model, either = Raw(heads, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), Either()
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    curvature.per_sample_gradients(model, APART["mean"], x, y)
    with pytest.raises(ValueError, match="no weighted sum"):
        curvature.per_sample_gradients(model, MEETING["root of a mean"], x, y)
    curvature.per_sample_norms(model, either, x, y)
    either.is_root = True
    with pytest.raises(ValueError, match="no weighted sum"):
        curvature.per_sample_norms(model, either, x, y)


def test_a_loss_of_a_tuple_is_asked_once_for_each_shape() -> None:
    model = Raw(heads, a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    x, y, loss = torch.randn(5, 4), torch.randn(5, 3), mock.Mock(side_effect=APART["mean"])
    for _ in range(2):
        loss.reset_mock()
        curvature.per_sample_gradients(model, lambda o, y: loss(o, y), x, y)
    assert loss.call_count > 2  # another loss
    own = lambda o, y: loss(o, y)
    for _ in range(2):
        loss.reset_mock()
        curvature.per_sample_gradients(model, own, x, y)
    assert loss.call_count == 2  # of all samples by vmap, and of one alone


class Flips(Dataset):
    """Each entry of a sample comes from one end or the other, by chance: sums stay as they are."""

    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(3, (12,))

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        return (self.x[n].flip(0) if torch.rand(()) < 0.5 else self.x[n]), self.y[n]


def test_data_that_are_flipped_by_chance_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    G = curvature.gauss_newton(model, ENTROPY, DataLoader(Flips(), batch_size=4))
    v = torch.randn(G.space.size)
    G @ v
    torch.manual_seed(1)  # other flips
    with pytest.raises(ValueError, match="another pass gave other batches"):
        G @ v


def test_a_weight_that_the_forward_pass_normalises_in_place() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.f.weight.div_(m.f.weight.norm(dim=1, keepdim=True).clamp(min=1.0))
        return m.f(x)

    model, x, y = Raw(run, f=nn.Linear(4, 3)), torch.randn(5, 4), torch.randint(3, (5,))
    model.f.weight.data.mul_(5)
    model(x)
    G = curvature.gauss_newton(model, ENTROPY, (x, y))
    v = torch.randn(15)
    torch.testing.assert_close(G @ v, G.to_dense() @ v)


def test_products_with_parameters_that_are_viewed_as_complex() -> None:
    """The slices of a vector begin at odd places, where no complex number begins."""
    run = lambda m, x: m.h(torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=4, dim=1)) + m.b
    model = Raw(run, b=(1,), w=(3, 2), h=nn.Linear(4, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    H = curvature.hessian(model, ENTROPY, (x, y))
    v = torch.randn(H.space.size)
    torch.testing.assert_close(H @ v, H.to_dense() @ v)
    curvature.per_sample_hessian_diagonals(model, ENTROPY, x, y)


def test_one_sample_of_a_sparse_embedding() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randint(6, (4, 2)), torch.randint(3, (4,))
    rows = curvature.per_sample_gradients(model, ENTROPY, x, y)["0.weight"]
    alone = curvature.per_sample_gradients(model, ENTROPY, x[:1], y[:1])["0.weight"]
    torch.testing.assert_close(alone, rows[:1])
    assert curvature.per_sample_norms(model, ENTROPY, x[:1], y[:1]).shape == (1,)


def test_a_residual_with_torch_func_jvp() -> None:
    model = Raw(lambda m, x: m.o(m.a(x).tanh()) * m.t, a=nn.Linear(2, 3), o=nn.Linear(3, 1), t=(1,))
    residual = lambda m, x: torch.func.jvp(lambda z: m(z)[:, 0], (x,), (torch.ones_like(x),))[1]
    x = torch.rand(4, 2)
    found = curvature.residual_jacobian(model, residual, x)["t"]
    for n in range(4):
        (expected,) = torch.autograd.grad(residual(model, x[n : n + 1]).sum(), model.t)
        torch.testing.assert_close(found[n].reshape(1), expected)


def test_what_a_loss_of_the_users_calls_its_reduction_is_its_own_affair() -> None:
    class Own(nn.Module):
        reduction = "batchmean"

        def forward(self, o: Tensor, t: Tensor) -> Tensor:
            return (o - t).square().sum() / len(o)

    right_rows(nn.Linear(4, 3), Own(), torch.randn(5, 4), torch.randn(5, 3))


def test_a_loss_that_reads_parameters_after_one_that_does_not() -> None:
    """What is known of passes with another loss says nothing of a penalty, nor of another penalty."""
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(5, 4), torch.randint(3, (5,))

    def ridge(*parts: nn.Module) -> Any:
        return lambda o, y: F.cross_entropy(o, y) + 0.1 * sum(part.weight.square().sum() for part in parts)

    curvature.per_sample_gradients(model, ENTROPY, x, y)
    for loss in (ridge(model[0]), ridge(model[0], model[2]), ridge(model[2]), ENTROPY):
        right_rows(model, loss, x, y, calls=1)


def masked_mean(o: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
    return ((o - t[0]).square().mean(1) * t[1]).sum() / t[1].sum().clamp(min=1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_sample_that_counts_tells_a_mean_from_a_sum(reduction: str) -> None:
    """The empirical Fisher matrix of a mean divides by all samples, that of a sum does not."""
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([-100, -100, 2, -100, -100])
    loss = lambda o, y: F.cross_entropy(o, y, reduction=reduction)
    row = torch.cat([g.flatten() for g in torch.autograd.grad(loss(model(x[2:3]), y[2:3]), model.parameters())])
    found = curvature.empirical_fisher(model, loss, (x, y))
    torch.testing.assert_close(found.trace(), row @ row / (5 if reduction == "mean" else 1))


@pytest.mark.parametrize("counted", [(0, 0, 1, 0, 0), (0, 1, 0, 1, 1), (1, 0, 1, 1, 0)])
@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1, 1, 1), (2, 3), (1, 4), (3, 2)])
def test_masked_means_in_batches(counted: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(5, 4), (torch.randn(5, 3), torch.tensor(counted).double())
    batches = list(zip(x.split(sizes), zip(*(t.split(sizes) for t in y), strict=True), strict=True))
    expected = Matrices(model, masked_mean, (x, y))
    torch.testing.assert_close(curvature.hessian(model, masked_mean, batches).to_dense(), expected.hessian)
    found = curvature.empirical_fisher(model, masked_mean, batches).to_dense()
    torch.testing.assert_close(found, expected.empirical_fisher)


def test_terms_that_are_all_ignored_count_as_none_in_batches_of_one() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(5, 4), torch.zeros(5).long()
    y[1::2], own = -100, lambda o, y: F.cross_entropy(o, y)
    found = curvature.hessian(model, own, [(x[n : n + 1], y[n : n + 1]) for n in range(5)]).to_dense()
    torch.testing.assert_close(found, curvature.hessian(model, ENTROPY, (x, y)).to_dense())


class Positions(nn.Module):
    """A table of positions that all samples read alike, under a tied decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p, self.l = nn.Embedding(6, 4), nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(self.e(x) + self.p(torch.arange(x.shape[1]))).tanh()
        return F.linear(h, self.e.weight).flatten(0, 1)


@pytest.mark.parametrize("builder", [curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 3), (3, 1)])
def test_a_table_of_positions_in_batches_of_one(builder: Any, sizes: tuple[int, ...]) -> None:
    model, x, y = Positions(), torch.randint(6, (4, 5)), torch.randint(6, (4, 5))
    expected = builder(copy.deepcopy(model), ENTROPY, (x, y.flatten()))
    batches = [(a, b.flatten()) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)]
    found = builder(model, ENTROPY, batches)
    assert repr(found["p.weight"]) == repr(expected["p.weight"])
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


def test_an_expert_that_a_later_batch_reads_otherwise_is_named() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return m.h(x).index_add(0, chosen, m.f(x[chosen]))

    model = Raw(run, h=nn.Linear(4, 3), f=nn.Linear(4, 3))
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    x[:4, 0], x[4:6, 0], x[6:, 0] = 1.0, -1.0, 1.0
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    with pytest.raises(ValueError, match=r'f.weight, f.bias: a batch reads it .* structure=\{"f": "dense"\}'):
        curvature.kfac(model, ENTROPY, batches)
    found = curvature.kfac(model, ENTROPY, batches, structure={"f": "dense"})
    exact = curvature.fisher_blocks(model, ENTROPY, (x, y))
    torch.testing.assert_close(found["f.weight"].to_dense(), exact["f.weight"].to_dense())


def with_penalty(model: nn.Module, reduction: str, kind: str) -> Any:
    """A loss that reads the first weight: as a penalty, or as what scales the outputs."""
    weight, entropy = model[0].weight, partial(F.cross_entropy, reduction=reduction)
    if kind == "penalty":
        return lambda o, y: entropy(o, y) + 0.5 * weight.pow(4).sum()
    return lambda o, y: entropy(o * weight.square().sum(), y)


@pytest.mark.parametrize("kind", ["penalty", "scale"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [(5,), (2, 3), (1, 1, 3), (4, 1)])
def test_the_hessian_of_a_loss_that_reads_parameters(kind: str, reduction: str, sizes: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    loss = with_penalty(model, reduction, kind)
    found = curvature.hessian(model, loss, list(zip(x.split(sizes), y.split(sizes), strict=True)))
    torch.testing.assert_close(found.to_dense(), Matrices(model, loss, (x, y)).hessian)


def test_a_penalty_is_found_where_its_gradient_vanishes() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4), torch.randint(3, (5,))
    with torch.no_grad():
        model[0].weight.zero_()
    loss = lambda o, y: F.cross_entropy(o, y, reduction="sum") + 0.5 * model[0].weight.square().sum()
    found = curvature.hessian(model, loss, [(x[:2], y[:2]), (x[2:], y[2:])]).to_dense()
    torch.testing.assert_close(found, Matrices(model, loss, (x, y)).hessian)


def test_several_batches_of_a_loss_that_reads_parameters_otherwise_are_refused() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4), torch.randint(3, (5,))
    both = lambda o, y: with_penalty(model, "sum", "penalty")(o, y) + with_penalty(model, "sum", "scale")(o, y)
    curvature.hessian(model, both, (x, y)).trace()
    with pytest.raises(ValueError, match=r"reads 0.weight itself.*as one batch"):
        curvature.hessian(model, both, [(x[:2], y[:2]), (x[2:], y[2:])]).trace()


@pytest.mark.parametrize("kind", ["penalty", "scale"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_do_not_go_through_the_output_have_no_empirical_fisher(kind: str, reduction: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    loss = with_penalty(model, reduction, kind)
    found = curvature.empirical_fisher(model, loss, (x, y))
    calls = [found.to_dense, found.diagonal, lambda: found @ torch.ones(found.space.size)]
    calls += [lambda b=b: b(model, loss, (x, y), curvature.empirical()) for b in (curvature.kfac, curvature.ekfac)]
    for call in calls:
        with pytest.raises(ValueError, match=r"reads 0.weight itself.*rows of per_sample_gradients"):
            call()
    nothing = lambda o, y: F.cross_entropy(o, y) + 0.0 * model[0].weight.square().sum()
    found = curvature.empirical_fisher(model, nothing, (x, y)).to_dense()
    torch.testing.assert_close(found, Matrices(model, ENTROPY, (x, y)).empirical_fisher)
    rest = curvature.empirical_fisher(model, loss, (x, y), parameters=["2"])  # which the loss does not read
    assert rest.trace() > 0


def test_axes_of_samples_that_are_counted_from_the_back() -> None:
    model = Raw(lambda m, x: m.f(x.T).T, f=nn.Linear(4, 3))
    x, y, loss = torch.randn(4, 5), torch.randn(3, 5), nn.MSELoss()
    expected = curvature.per_sample_gradients(model, loss, x, y, sample_dim=1)
    for dim in (-1, (-1, 1, -1), (1, -1, 1)):
        found = curvature.per_sample_gradients(model, loss, x, y, sample_dim=dim)
        torch.testing.assert_close(found, expected)
        G, H = (curvature.gauss_newton(model, loss, (x, y), sample_dim=own) for own in (1, dim))
        torch.testing.assert_close(H.to_dense(), G.to_dense())
        torch.testing.assert_close(H @ torch.ones(15), G.to_dense().sum(1))
    with pytest.raises(ValueError, match="-3, but x has tensors of 2 axes"):
        curvature.per_sample_gradients(model, loss, x, y, sample_dim=-3)
    both = Raw(lambda m, x, shift: m.f(x.T).T + shift, f=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="-1, but x has tensors of 1 and 2 axes; count from the front"):
        curvature.per_sample_gradients(both, loss, (x, torch.zeros(5)), y, sample_dim=-1)


@pytest.mark.parametrize("builder", [curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_single_sample_that_does_not_reach_an_expert(builder: Any, sharing: str) -> None:
    """Its factors are those of the samples that do, as if there were no others, but for their number in the mean."""

    def run(m: Any, x: Tensor) -> Tensor:
        chosen, out = x[:, 0] > 0, torch.zeros(len(x), 3)
        return out.index_put((chosen,), m.a(x[chosen])).index_put((~chosen,), m.b(x[~chosen]))

    model, x, y = Raw(run, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), torch.randn(2, 4), torch.randint(3, (2,))
    x[0, 0], x[1, 0] = -1.0, 1.0
    assert not builder(model, ENTROPY, (x[:1], y[:1]), sharing=sharing)["a.weight"].to_dense().any()
    found = builder(model, ENTROPY, [(x[:1], y[:1]), (x[1:], y[1:])], sharing=sharing)
    alone = builder(model, ENTROPY, (x[1:], y[1:]), sharing=sharing)
    torch.testing.assert_close(found["a.weight"].to_dense(), alone["a.weight"].to_dense() / 2)


def test_targets_that_a_loader_puts_into_a_list() -> None:
    data = [(torch.randn(4), (torch.tensor(n % 3), torch.randn(3))) for n in range(6)]
    loss = lambda o, t: F.cross_entropy(o, t[0]) + F.mse_loss(o, t[1])
    model, x = nn.Linear(4, 3), torch.stack([x for x, _ in data])
    y = torch.stack([y for _, (y, _) in data]), torch.stack([t for _, (_, t) in data])
    expected = Matrices(model, loss, (x, y))
    for batches in (DataLoader(data, batch_size=4), (x, list(y))):
        torch.testing.assert_close(curvature.gauss_newton(model, loss, batches).to_dense(), expected.gauss_newton)
        torch.testing.assert_close(
            curvature.empirical_fisher(model, loss, batches).trace(), expected.empirical_fisher.trace()
        )
    rows = curvature.per_sample_gradients(model, loss, x, list(y))
    torch.testing.assert_close(rows, curvature.per_sample_gradients(model, loss, x, y))


def test_the_empirical_fisher_of_a_loss_without_targets() -> None:
    model, x, loss = nn.Linear(4, 3), torch.randn(5, 4), lambda o, _: o.square().mean()
    expected = sum(g.square().sum() for g in curvature.per_sample_gradients(model, loss, x, None).values()) / 5
    torch.testing.assert_close(curvature.empirical_fisher(model, loss, (x, None)).trace(), expected)
    for needs in (ENTROPY, lambda o, y: F.cross_entropy(o, y)):
        with pytest.raises((ValueError, TypeError), match="target"):
            curvature.empirical_fisher(model, needs, (x, None)).trace()


def make_sure(head: nn.Linear) -> None:
    with torch.no_grad():
        head.weight.mul_(300), head.bias.mul_(300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_hessian_of_a_classifier_that_is_sure(dtype: torch.dtype) -> None:
    """Probabilities that are one to the last digits leave nothing of second derivatives but rounding."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x = torch.randn(16, 4, dtype=dtype)
    y = model(x).argmax(1)
    make_sure(model[2])
    found = curvature.hessian(model, ENTROPY, (x, y)).to_dense()
    assert ENTROPY(model(x), y) < 1e-11
    assert found.abs().amax() < 1e-3


def test_a_second_derivative_that_is_wrong_is_seen_beside_a_sure_classifier() -> None:
    class Wrong(torch.autograd.Function):
        twice_differentiable = True

        @staticmethod
        def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(z, w)
            return z * w.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            z, w = ctx.saved_tensors
            return g * w.sin(), (g * z.detach() * w.cos()).sum(0)

    model = Raw(lambda m, x: m.h(Wrong.apply(m.f(x), m.w)), f=nn.Linear(4, 5), w=(5,), h=nn.Linear(5, 3))
    x = torch.randn(16, 4)
    y = model(x).argmax(1)
    make_sure(model.h)
    with pytest.raises(RuntimeError, match="not symmetric"):
        curvature.hessian(model, ENTROPY, (x, y)).to_dense()


@pytest.mark.parametrize("seed", range(4))
def test_the_hessian_of_a_model_in_double_precision_whose_norms_compute_in_single(seed: int) -> None:
    def norm(h: Tensor, dtype: torch.dtype) -> Tensor:
        narrow = h.to(dtype)
        return (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)

    torch.manual_seed(seed)
    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 3)}
    x, y = torch.randn(4, 4).double(), torch.arange(4) % 3
    found = []
    for dtype in (torch.float32, torch.float64):
        model = Raw(lambda m, x, d=dtype: m.c(norm(F.silu(m.b(norm(m.a(x), d))), d)), **layers).double()
        found.append(curvature.hessian(model, ENTROPY, (x, y)).to_dense())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("used_before", [False, True])
def test_weights_that_are_cached(used_before: bool) -> None:
    """Inside ``parametrize.cached()`` a computed weight is kept with its graph."""
    model = nn.Sequential(orthogonal(nn.Linear(4, 4)), nn.Linear(4, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    calls: list[Any] = [
        lambda: curvature.per_sample_gradients(model, ENTROPY, x, y),
        lambda: curvature.kfac(model, ENTROPY, (x, y)).to_dense(),
        lambda: curvature.hessian(model, ENTROPY, (x, y)).to_dense(),
        lambda: curvature.per_sample_jacobians(model, x),
    ]
    expected = [call() for call in calls]
    with parametrize.cached():
        before = model(x) if used_before else None
        found = [call() for call in calls]
        if before is not None:
            before.sum().backward()
            assert model[0].weight is model[0].weight  # the user's cache is as it was
    torch.testing.assert_close(found, expected)


def test_messages_name_the_cause() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    noisy = lambda o, y: F.cross_entropy(o + 0.1 * torch.randn_like(o), y)
    for call in (curvature.per_sample_gradients, curvature.kfac):
        with pytest.raises(ValueError, match="two calls with the same arguments differ: it draws random numbers"):
            call(model, noisy, x, y)
    with pytest.raises(ValueError, match=r"several batches are a list \[\(x, y\), \(x, y\)\], and no tuple"):
        curvature.gauss_newton(model, ENTROPY, ((x[:3], y[:3]), (x[3:], y[3:]))).trace()
