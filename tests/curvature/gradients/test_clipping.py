"""Sums of clipped gradients against a loop over samples, and the noise on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import curvature
from support.cases.case import Raw, seeded
from support.cases.models import attending
from support.comparisons import matches
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
    named = dict(model.named_parameters())
    found = [torch.autograd.grad(LOSS(model(*x), y), list(named.values()), materialize_grads=True) for x, y in pairs]
    return dict(zip(named, map(torch.stack, zip(*found, strict=True)), strict=True))


def clipped(found: dict[str, Tensor], max_norm: float, mask: Tensor | None = None) -> dict[str, Tensor]:
    """By hand: sample by sample."""
    total = {name: torch.zeros_like(g[0]) for name, g in found.items()}
    for n in range(len(next(iter(found.values())))):
        norm = sum(g[n].square().sum() for g in found.values()) ** 0.5
        if mask is None or mask[n]:
            for name, g in found.items():
                total[name] += g[n] * min(1.0, max_norm / float(norm))
    return total


def median_norm(found: dict[str, Tensor]) -> float:
    return float(torch.cat([g.flatten(1) for g in found.values()], 1).norm(dim=1).median())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_sums_of_clipped_gradients(name: str, reduction: str):
    """Whole, in parts that do not divide the batch, and with a mask; half of the samples are clipped."""
    model, x, y = problem(name)
    found = rows(model, [((x[n : n + 1],), y[n : n + 1]) for n in range(N)])
    c, mask = median_norm(found), torch.tensor([True, False, True, True, False, True, True])
    loss = nn.CrossEntropyLoss(reduction=reduction)
    for options in ({}, {"microbatch": 3}, {"mask": mask}, {"mask": mask, "microbatch": 2}):
        with unchanged(model.eval(), (x, y)):
            actual = curvature.clipped_gradient(model, loss, x, y, c, **options)
        expected = clipped(found, c, options.get("mask"))
        assert list(actual) == list(expected)
        for key, g in expected.items():
            matches(actual[key], g)
            assert not actual[key].requires_grad


def test_parts_of_bags():
    with seeded(0):
        model = Raw(lambda m, *x: m.head(m.bag(*x)), bag=nn.EmbeddingBag(6, 4), head=nn.Linear(4, 3)).double()
    words, starts, y = torch.arange(11) % 6, [0, 3, 3, 4, 8], torch.arange(5) % 3
    cuts = zip(starts, [*starts[1:], 11], strict=True)
    found = rows(model, [((words[s:e], torch.tensor([0])), y[n : n + 1]) for n, (s, e) in enumerate(cuts)])
    actual = curvature.clipped_gradient(model, LOSS, (words, torch.tensor(starts)), y, 0.5, microbatch=2)
    for name, g in clipped(found, 0.5).items():
        matches(actual[name], g)


def test_parts_of_packed_sequences():
    with seeded(0):
        model = Raw(lambda m, x: m.head(m.lstm(x)[1][0][0]), lstm=nn.LSTM(3, 4), head=nn.Linear(4, 3)).double()
        sequences = [torch.randn(t, 3).double() for t in (2, 4, 1, 3, 3)]
    x, y = pack_sequence(sequences, enforce_sorted=False), torch.arange(5) % 3
    found = rows(model, [((pack_sequence([s]),), y[n : n + 1]) for n, s in enumerate(sequences)])
    actual = curvature.clipped_gradient(model, LOSS, x, y, 0.5, microbatch=2)
    for name, g in clipped(found, 0.5).items():
        matches(actual[name], g)


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


def test_a_step_of_private_training():
    """As the guide writes it: `.grad` of any optimizer."""
    model, x, y = problem("cnn")
    parameters, before = dict(model.named_parameters()), [p.detach().clone() for p in model.parameters()]
    opt = torch.optim.SGD(parameters.values(), lr=0.1)
    found = rows(model, [((x[n : n + 1],), y[n : n + 1]) for n in range(N)])
    for name, g in curvature.clipped_gradient(model, LOSS, x, y, max_norm=0.5).items():
        parameters[name].grad = g / N
    opt.step()
    for p, old, g in zip(parameters.values(), before, clipped(found, 0.5).values(), strict=True):
        matches(p.detach(), old - 0.1 * g / N)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": 0.0}, "max_norm: expected a positive norm, found 0"),
        ({"noise": -1.0}, "noise: expected"),
        ({"mask": torch.ones(N)}, r"mask: expected \(7,\) of bool, found \(7,\) of torch.float32"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"mask: expected \(7,\) of bool, found \(2,\)"),
        ({"microbatch": 0}, "microbatch: expected a number of samples, found 0"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], text: str):
    model, x, y = problem("cnn")
    with pytest.raises(ValueError, match=text):
        curvature.clipped_gradient(model, LOSS, x, y, **{"max_norm": 1.0} | options)


def test_batch_norm_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="1: BatchNorm in training mode"):
        curvature.clipped_gradient(model, LOSS, torch.randn(5, 4), torch.arange(5) % 3, 1.0)
