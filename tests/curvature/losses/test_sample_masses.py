"""What a sample counts for in a batch, also in losses of the user's own, and functions of torch in place of modules."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature.losses.masses import NoWeightedSum, SampleMasses, require_weighted_sum, shares
from curvature.losses.table import dim_of_terms, per_sample_losses, resolve, sample_masses
from support.combinations import pairwise
from support.moments import rand, randn, source
from support.oracles.brute_force import sample_weights

C, PLACES = 4, 5
DOUBLE = torch.float64
WEIGHT = torch.tensor([0.3, 2.0, 0.7, 1.4], dtype=DOUBLE)
pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:(reduction. 'mean'|Using a target size)")]


def classes(shape):
    return torch.randint(C, (shape[0], *shape[2:]), generator=source(3))


def ignoring(shape, index=-100):
    """No sample ignores as much as another; the second ignores everything."""
    target = classes(shape)
    flat = target.view(len(target), -1)
    for n, row in enumerate(flat):
        row[: flat.shape[1] * n // 5] = index
    flat[1] = index
    return target


def soft(shape):
    return rand(*shape)


def labels(shape):
    return torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0]]).repeat(shape[0], 1)[: shape[0]]


OPTIONS = [{}, {"weight": WEIGHT}, {"ignore_index": 2}, {"weight": WEIGHT, "ignore_index": 2}]
CASES = [(kind, option, target) for kind in (nn.CrossEntropyLoss, nn.NLLLoss) for option in OPTIONS
         for target in (classes, partial(ignoring, index=option.get("ignore_index", -100)))]  # fmt: skip
CASES += [(nn.CrossEntropyLoss, {**option, "label_smoothing": 0.2}, ignoring) for option in OPTIONS[:2]]
CASES += [(nn.CrossEntropyLoss, {"weight": WEIGHT}, soft)]
ENTRIES = (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss)
CASES += [(kind, {}, soft) for kind in (*ENTRIES, nn.KLDivLoss, nn.SoftMarginLoss)]
FLAT = [  # one target for each sample
    (nn.MultiMarginLoss, {"weight": WEIGHT}, classes),
    (nn.MultiLabelMarginLoss, {}, labels),
    (nn.MultiLabelSoftMarginLoss, {"weight": WEIGHT}, soft),
]
SHAPES = [(6, C), (6, C, PLACES), (6, C, 2, 3)]
ALL = pairwise(CASES, SHAPES, [6, 3, 1], ["mean", "sum"]) + pairwise(FLAT, SHAPES[:1], [6, 3, 1], ["mean", "sum"])


@pytest.mark.parametrize("case, shape, count, reduction", ALL)
def test_masses_make_the_loss_of_the_batch(case, shape, count, reduction):
    """sum_n m_n l_n, over the sum of masses for a mean; a sample without valid place counts nothing."""
    kind, option, target = case
    loss, output, y = kind(reduction=reduction, **option), rand(*shape), target(shape)
    masses, losses = sample_masses(loss, output, y, count), per_sample_losses(loss, output, y, count)
    assert masses.shape == (count,) and masses.dtype == output.dtype
    assert losses[masses == 0].isnan().all()
    total = (masses * losses)[masses > 0].sum() / (masses.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(total, loss(output, y), rtol=1e-12, atol=1e-12)
    assert dim_of_terms(loss, output, y) is not None
    assert dim_of_terms(lambda output, y: loss(output, y), output, y) is None
    assert dim_of_terms(loss, output, y[1:]) is None
    if reduction == "sum":
        assert masses.eq(1).all()


def test_masses_of_sentences_of_unlike_length():
    """The number of terms counts, so that batches padded to unlike lengths weigh alike per token."""
    for loss, terms in ((nn.CrossEntropyLoss(), 7), (nn.MSELoss(), 7 * C)):
        output = randn(3, C, 7)
        target = torch.zeros(3, 7).long() if terms == 7 else output
        assert sample_masses(loss, output, target, 3).tolist() == [terms] * 3
        assert sample_masses(loss, output, None, 3).tolist() == [terms] * 3


@pytest.mark.parametrize(
    "loss", [lambda o, t: o.mean(), nn.KLDivLoss(reduction="batchmean"), nn.MSELoss(reduction="sum"), nn.Linear(1, 1)]
)
def test_what_counts_one(loss):
    assert sample_masses(loss, randn(6, C), randn(6, C), 3).tolist() == [1] * 3


def test_other_dims_and_low_precision():
    y = torch.tensor([[0, 1, -100], [-100, 2, -100]])
    loss = nn.CrossEntropyLoss(weight=WEIGHT.bfloat16())
    got = sample_masses(loss, randn(2, C, 3).bfloat16(), y, 3, 2, 1)
    torch.testing.assert_close(got, torch.tensor([0.3, 2.7, 0.0]), rtol=1e-2, atol=0)
    many = sample_masses(nn.MSELoss(), torch.zeros(2, 4097).bfloat16(), torch.zeros(2, 4097), 2)
    assert many.dtype == torch.float32 and many.tolist() == [4097] * 2
    assert sample_masses(nn.MSELoss(), randn(2, 5, 3), randn(2, 5, 3), 5, 1, 1).tolist() == [6] * 5
    assert sample_masses(nn.MultiLabelSoftMarginLoss(), randn(4), randn(4), 4).tolist() == [1] * 4


@pytest.mark.parametrize("sizes", [((5, C), (6,), 3), ((6, C), (5,), 3), ((0, C), (0,), 1), ((6, C), (6,), 0)])
def test_sizes_are_checked(sizes):
    output, target, count = sizes
    with pytest.raises(ValueError, match="multiple|at least 1"):
        sample_masses(nn.CrossEntropyLoss(), randn(*output), torch.zeros(target).long(), count)
    with pytest.raises(ValueError, match="reduction='none'"):
        sample_masses(nn.MSELoss(reduction="none"), randn(3), randn(3), 3)


FUNCTIONS = [
    (F.cross_entropy, nn.CrossEntropyLoss, classes), (F.nll_loss, nn.NLLLoss, classes),
    (F.multi_margin_loss, nn.MultiMarginLoss, classes), (F.multilabel_margin_loss, nn.MultiLabelMarginLoss, labels),
    (F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, soft), (F.binary_cross_entropy, nn.BCELoss, soft),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, soft), (F.mse_loss, nn.MSELoss, soft),
    (F.l1_loss, nn.L1Loss, soft), (F.smooth_l1_loss, nn.SmoothL1Loss, soft), (F.huber_loss, nn.HuberLoss, soft),
    (F.poisson_nll_loss, nn.PoissonNLLLoss, soft), (F.kl_div, nn.KLDivLoss, soft),
    (F.soft_margin_loss, nn.SoftMarginLoss, soft),
]  # fmt: skip


@pytest.mark.parametrize("function, kind, target", FUNCTIONS)
def test_functions_are_their_modules(function, kind, target):
    """The same values with the defaults, at numbers where beta, delta, eps, log_input and so on make a difference."""
    module, output, y = resolve(function), 3 * rand(6, C) if kind is not nn.BCELoss else rand(6, C), target((6, C))
    assert type(module) is kind
    got = per_sample_losses(function, output, y, 3)
    want = torch.stack([function(o, t) for o, t in zip(output.chunk(3), y.chunk(3), strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sample_masses(function, output, y, 3), sample_masses(kind(), output, y, 3))
    defaults = {
        name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty
    }
    own = {name: value for name, value in defaults.items() if hasattr(module, name)}
    assert {"reduction"} <= set(own) and all(getattr(module, name) == value for name, value in own.items())


def test_other_callables_stay_what_they_are():
    for loss in (lambda o, t: o.sum(), nn.MSELoss(), F.hinge_embedding_loss):
        assert resolve(loss) is loss


N = 6
LABELS = torch.randint(C, (N,), generator=source(3))
TOKENS = torch.randint(C, (N, 5), generator=source(4))
TOKENS[1, 2:], TOKENS[3, 1:], TOKENS[4] = -100, -100, -100


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


def test_a_torch_loss_with_a_hook_or_another_forward_is_one_of_the_users():
    hooked, changed = nn.CrossEntropyLoss(weight=WEIGHT), nn.MSELoss(reduction="sum")
    hooked.register_forward_hook(lambda module, args, value: value.square())
    changed.forward = lambda o, t: (o - t).square().sum().sqrt()
    for loss, target in ((hooked, LABELS), (changed, randn(N, C, seed=1))):
        with pytest.raises(NoWeightedSum, match=type(loss).__name__):
            require_weighted_sum(resolve(loss), randn(N, C), target, N)
        assert require_weighted_sum(resolve(type(loss)()), randn(N, C), target, N) is None


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
