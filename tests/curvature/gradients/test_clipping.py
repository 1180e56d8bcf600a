"""Sums of clipped gradients and the noise on them, and the noise scale, against loops over samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import curvature
from support.cases.case import Raw, seeded
from support.cases.models import attending
from support.comparisons import matches
from support.rows import clipped, real, rows_of, same
from support.snapshots import unchanged

LOSS = nn.CrossEntropyLoss()
N = 7


def tied() -> nn.Module:
    model = Raw(lambda m, x: m.b(m.a(x).tanh())[:, 0, :3], a=nn.Linear(4, 4), b=nn.Linear(4, 4, bias=False))
    model.b.weight = model.a.weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": attending,
    "tied": tied,
    "lstm": lambda: Raw(lambda m, x: m.lstm(x)[0].mean(1), lstm=nn.LSTM(4, 3, batch_first=True)),
    "cnn": lambda: nn.Sequential(nn.Conv1d(6, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = MODELS[name]().double()
        return model, torch.randn(N, 6, 4).double() * torch.linspace(0.2, 3, N)[:, None, None], torch.arange(N) % 3


def rows(model: nn.Module, pairs: Any) -> dict[str, Tensor]:
    """The gradients of (arguments, target) of one sample each."""
    return rows_of(model, [LOSS(model(*x), y) for x, y in pairs])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_clipped_gradients(name: str, reduction: str):
    """Whole, in parts that do not divide the batch, and with a mask; half of the samples are clipped."""
    model, x, y = problem(name)
    found = rows(model, [((x[n : n + 1],), y[n : n + 1]) for n in range(N)])
    c, mask = float(real(found).norm(dim=1).median()), torch.tensor([True, False, True, True, False, True, True])
    loss = nn.CrossEntropyLoss(reduction=reduction)
    for options in ({}, {"microbatch": 3}, {"mask": mask}, {"mask": mask, "microbatch": 2}):
        with unchanged(model.eval(), (x, y)):
            actual = curvature.clipped_gradient(model, loss, x, y, c, **options)
        counted = options.get("mask", slice(None))
        same(actual, clipped({key: g[counted] for key, g in found.items()}, c))


@pytest.mark.parametrize("form", ["bags", "packed sequences"])
def test_parts_of(form: str):
    y = torch.arange(5) % 3
    with seeded(0):
        if form == "bags":
            model = Raw(lambda m, *x: m.head(m.bag(*x)), bag=nn.EmbeddingBag(6, 4), head=nn.Linear(4, 3)).double()
            words, starts = torch.arange(11) % 6, [0, 3, 3, 4, 8]
            x = words, torch.tensor(starts)
            each = [(words[s:e], torch.tensor([0])) for s, e in zip(starts, [*starts[1:], 11], strict=True)]
        else:
            model = Raw(lambda m, x: m.head(m.lstm(x)[1][0][0]), lstm=nn.LSTM(3, 4), head=nn.Linear(4, 3)).double()
            sequences = [torch.randn(t, 3).double() for t in (2, 4, 1, 3, 3)]
            x, each = pack_sequence(sequences, enforce_sorted=False), [(pack_sequence([s]),) for s in sequences]
    found = rows(model, [(own, y[n : n + 1]) for n, own in enumerate(each)])
    same(curvature.clipped_gradient(model, LOSS, x, y, 0.5, microbatch=2), clipped(found, 0.5))


def test_noise():
    """Its standard deviation is noise * max_norm on the sum; alone where no sample counts, or none is there."""
    with seeded(0):
        model, x, y = nn.Linear(100, 60).double(), torch.randn(4, 100).double(), torch.arange(4)
    clean = curvature.clipped_gradient(model, LOSS, x, y, 0.5)
    source = torch.Generator().manual_seed(1)
    noisy = curvature.clipped_gradient(model, LOSS, x, y, 0.5, noise=3.0, generator=source)
    for name, g in noisy.items():
        z = (g - clean[name]).flatten() / 1.5
        assert abs(float(z.mean())) < 5 / len(z) ** 0.5 and abs(float(z.std()) - 1) < 5 / (2 * len(z)) ** 0.5
    nobody = torch.zeros(4, dtype=torch.bool)
    for empty in ((x, y, {"mask": nobody}), (x[:0], y[:0], {})):
        source.manual_seed(1)
        alone = curvature.clipped_gradient(model, LOSS, *empty[:2], 0.5, noise=3.0, generator=source, **empty[2])
        for name, g in alone.items():
            matches(g, noisy[name] - clean[name], 1e-12)
    # without a generator every call has noise of its own
    one, other = (curvature.clipped_gradient(model, LOSS, x, y, 0.5, noise=1.0)["weight"] for _ in range(2))
    assert not torch.equal(one, other)


def test_no_two_passes_in_training_mode_share_random_numbers():
    """Neither calls nor parts of one, also not at other places; in evaluation mode the random state stays as it is."""
    drawn: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        drawn.append(torch.rand(x.shape, dtype=torch.float64))
        return m.head(x * drawn[-1])

    model, x, y = Raw(run, head=nn.Linear(20, 3)).double(), torch.ones(6, 20).double(), torch.arange(6) % 3
    for _ in range(2):
        curvature.clipped_gradient(model, LOSS, x, y, 1.0, microbatch=3)
    passes = {frozenset(numbers.flatten().tolist()) for numbers in drawn if len(numbers) == 3}
    assert len(passes) == 4 and len(frozenset.union(*passes)) == 4 * 3 * 20
    before = torch.get_rng_state()
    curvature.clipped_gradient(model.eval(), LOSS, x, y, 1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 0.0}, "max_norm: expected a positive norm, found 0"),
        ({"noise": -1.0}, "noise: expected"),
        ({"mask": torch.ones(N)}, r"mask: expected \(7,\) of bool, found \(7,\) of torch.float32"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask: expected \(7,\) of bool, found \(2,\)"),
        ({"microbatch": 0}, "microbatch: expected a whole number of at least 1, found 0"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], text: str):
    model, x, y = problem("cnn")
    with pytest.raises(ValueError, match=text):
        curvature.clipped_gradient(model, LOSS, x, y, **{"max_norm": 1.0} | options)


def counted(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4))
        return model.double(), torch.randn(count, 2, 5).double(), torch.randint(4, (count,))


def flat_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return real(rows(model, [((x[n : n + 1],), y[n : n + 1]) for n in range(len(y))]))


@pytest.mark.parametrize("loss", [LOSS, nn.CrossEntropyLoss(reduction="sum")], ids=lambda loss: loss.reduction)
def test_the_noise_scale(loss: nn.Module):
    """Uneven batches are one; a sum or a mean, each sample's gradient is its own."""
    model, x, y = counted(23)
    flat = flat_rows(model, x, y)
    trace = flat.var(0).sum()
    norm = flat.mean(0).square().sum() - trace / len(flat)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    for data in ((x, y), loader):
        found = curvature.gradient_noise_scale(model, loss, data)
        assert math.isclose(found.trace, trace, rel_tol=1e-10)
        assert math.isclose(found.squared_norm, norm, rel_tol=1e-10)
        assert math.isclose(found.value, trace / norm, rel_tol=1e-10)


def test_its_parts_have_no_bias():
    """Over all pairs of a population, drawn with replacement."""
    model, x, y = counted(6)
    flat = flat_rows(model, x, y)
    pairs = [torch.tensor([a, b]) for a in range(6) for b in range(6)]
    found = [curvature.gradient_noise_scale(model, LOSS, (x[pair], y[pair])) for pair in pairs]
    matches(torch.tensor([f.trace for f in found]).double().mean(), flat.var(0, correction=0).sum(), 1e-6)
    matches(torch.tensor([f.squared_norm for f in found]).double().mean(), flat.mean(0).square().sum(), 1e-6)
    assert any(f.value == math.inf for f in found)


def test_one_sample_has_no_covariance():
    model, x, y = counted(1)
    with pytest.raises(ValueError, match="two samples at least, found 1"):
        curvature.gradient_noise_scale(model, LOSS, (x, y))
    with pytest.raises(TypeError, match="expected a pair"):
        curvature.gradient_noise_scale(model, LOSS, x)
