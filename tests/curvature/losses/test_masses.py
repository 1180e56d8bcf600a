"""What each sample counts for in a loss of the user's own: found from the loss, against the oracle's quotients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature.losses.masses import NoWeightedSum, SampleMasses, require_weighted_sum, shares
from support.moments import rand, randn, source
from support.oracles.brute_force import sample_weights

C, N = 4, 6
WEIGHT = torch.tensor([0.3, 2.0, 0.7, 1.4], dtype=torch.float64)
LABELS = torch.randint(C, (N,), generator=source(3))
TOKENS = torch.randint(C, (N, 5), generator=source(4))
TOKENS[1, 2:], TOKENS[3, 1:], TOKENS[4] = -100, -100, -100
pytestmark = pytest.mark.fast


def tokens(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def masked(output, target):
    mask = target > 0.3
    return ((output - target).square() * mask).sum() / mask.sum()


SUMS = {
    "mean": (F.mse_loss, randn(N, C), randn(N, C, seed=1)),
    "lambda of a mean": (lambda o, t: (o - t).square().mean(), randn(N, C), randn(N, C, seed=1)),
    "sum": (lambda o, t: (o - t).square().sum(), randn(N, C), randn(N, C, seed=1)),
    "partial": (partial(F.cross_entropy, reduction="sum"), randn(N, C), LABELS),
    "class weights": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHT), randn(N, C), LABELS),
    "sample weights": (
        lambda o, t: (t[1] * F.cross_entropy(o, t[0], reduction="none")).sum() / t[1].sum(),
        randn(N, C),
        (LABELS, rand(N)),
    ),
    "tokens": (tokens, randn(N, 5, C), TOKENS),
    "shifted tokens": (lambda o, t: tokens(o[:, :-1], t[:, 1:]), randn(N, 5, C), TOKENS),
    "mask in the target": (masked, randn(N, C), rand(N, C)),
    "weights by position": (lambda o, t: (torch.arange(1.0, len(o) + 1) * o[:, 0].exp()).sum(), randn(N, C), None),
    "root of the number": (lambda o, t: o.exp().sum() / len(o) ** 0.5, randn(N, C), None),
    "hinge": (lambda o, t: F.multi_margin_loss(3 * F.one_hot(t, C) + o, t), randn(N, C), LABELS),
    "at its minimum": (lambda o, t: (o - t).square().sum(), randn(N, C), randn(N, C)),
    "zeros": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHT), 0 * randn(N, C), LABELS),
}
MEETING = {
    "contrastive": lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))),
    "root of a mean": lambda o, t: F.mse_loss(o, t).sqrt(),
    "root of a mean of one entry": lambda o, t: F.mse_loss(o[:, 0], t[:, 0]).sqrt(),
    "square of a mean": lambda o, t: F.mse_loss(o, t).square(),
    "centred": lambda o, t: (o - o.mean(0) - t).square().sum(),
    "pairs": lambda o, t: torch.cdist(o, o).sum(),
    "normalised by the output": lambda o, t: (o.exp() * t).sum() / o.exp().sum(),
    "another scale": lambda o, t: F.mse_loss(o, t) + 0.1 * o.square().sum(),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shares_are_those_of_the_loss(name):
    loss, output, target = SUMS[name]
    if name == "weights by position":  # what the weight of a sample alone is, is that of the first
        expected = torch.arange(1.0, N + 1, dtype=output.dtype)
    else:
        point = randn(N, C, seed=7) if name in ("at its minimum", "zeros") else output
        cut = lambda t, n: tuple(x[n : n + 1] for x in t) if isinstance(t, tuple) else t if t is None else t[n : n + 1]
        expected = sample_weights(loss, [o[None] for o in point], [cut(target, n) for n in range(N)])
    if name == "hinge":  # the oracle's samples are within the margin
        expected = torch.full_like(expected, 1 / N)
    torch.testing.assert_close(shares(loss, output, target, N), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MEETING)
def test_losses_in_which_samples_meet_have_no_shares(name):
    with pytest.raises(NoWeightedSum, match=r"no weighted sum.*hessian\(\).*gauss_newton\(\)"):
        shares(MEETING[name], randn(N, C), randn(N, C, seed=1), N)


def test_a_loss_that_does_not_run_on_one_sample_is_no_sum():
    def pairs(output, target):
        return (output[::2] - output[1::2]).square().sum() / len(output[1::2][0])

    with pytest.raises(NoWeightedSum, match="does not run on one sample"):
        shares(pairs, randn(N, C), None, N)


def test_a_plain_mean_has_no_rounding():
    for dtype in (torch.float32, torch.float64):
        found = shares(lambda o, t: (o - t).square().mean(), randn(7, C).to(dtype), randn(7, C).to(dtype) + 1, 7)
        assert (found == 1 / torch.tensor(7, dtype=dtype)).all()


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHT), nn.NLLLoss(reduction="sum")], ids=str)
def test_torch_losses_pass_the_same_check(loss, monkeypatch):
    require_weighted_sum(loss, randn(N, C), LABELS, N)
    monkeypatch.setattr("curvature.losses.masses.sample_masses", lambda *a: torch.arange(1.0, N + 1).double())
    again = lambda **options: type(loss)(weight=loss.weight, reduction=loss.reduction, **options)
    require_weighted_sum(again(), randn(N, C), LABELS, N)  # the same kind of batch is not tried again
    with pytest.raises(NoWeightedSum):
        require_weighted_sum(again(ignore_index=-7), randn(N, C), LABELS, N)
    hooked = again()
    hooked.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(NoWeightedSum):
        require_weighted_sum(hooked, randn(N, C), LABELS, N)


@pytest.mark.parametrize("sizes", [(3, 3), (1, 2, 3), (5, 1), (1, 1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["class weights", "tokens", "sum", "mean", "sample weights", "mask in the target"])
def test_batches_make_up_the_whole(name, sizes):
    """Masses of all batches, over their sum for a mean, are the shares in the loss of all data."""
    loss, output, target = SUMS[name]
    masses, start, found = SampleMasses(loss), 0, []
    for number, size in enumerate(sizes):
        some = slice(start, start := start + size)
        own = tuple(t[some] for t in target) if isinstance(target, tuple) else target[some]
        found.append(masses.of(number, output[some], own, size))
    together = torch.cat(found)
    expected = shares(loss, output, target, N)
    torch.testing.assert_close(together / (1 if masses.is_sum else together.sum()), expected, rtol=1e-10, atol=1e-12)
    assert masses.is_sum == (name == "sum")


def test_batches_that_cannot_be_told_apart_are_refused():
    root = SampleMasses(lambda o, t: o.exp().sum() / len(o) ** 0.5)
    assert root.of(0, randn(3, C), None, 3).allclose(torch.tensor(3.0).double() ** -0.5)
    with pytest.raises(ValueError, match="several batches.*all data as one batch"):
        root.of(1, randn(3, C), None, 3)
    lengths = SampleMasses(lambda o, t: o.square().mean())
    lengths.of(0, randn(3, 5), None, 3)
    with pytest.raises(ValueError, match="several batches.*do not fit together"):
        lengths.of(1, randn(3, 7), None, 3)
