"""Roots of Hessians, drawn labels and masses of all losses against torch's own differentiation of one sample."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.combinations import member
from support.moments import (
    MANY,
    PLACES,
    WEIGHT,
    C,
    binary,
    classes,
    counts,
    hessian,
    ignoring,
    mixing,
    normal,
    rand,
    randn,
    repeated,
    second_moment,
    soft,
    source,
    within_five_errors,
)
from support.output_batches import masses_of, root_of, sampler_of

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:(reduction. 'mean'|Using a target size|There is a performance drop)"),
]


unbroadcast = lambda target: lambda output: target(output)[:, :1]
softened = lambda output: (randn(*output.shape, seed=4)).softmax(1)


def gaussian(output, target):
    """Neither diagonal nor convex."""
    mean, log_precision = output.flatten(1).chunk(2, 1)
    return 0.5 * ((mean - target.flatten(1)[:, : mean.shape[1]]).square() * log_precision.exp() - log_precision).mean()


def paired(output, target):
    return mixing(output, target["a"]) + F.mse_loss(output, target["b"])


pair = lambda output: {"a": normal(output), "b": soft(output)}


def closed(reduction):
    """id, loss, target, whether the target is needed: the losses of a likelihood."""
    entropy = partial(nn.CrossEntropyLoss, reduction=reduction)
    bce = partial(nn.BCEWithLogitsLoss, reduction=reduction)
    return [
        ("entropy", entropy(), classes, False),
        ("entropy_smoothed", entropy(label_smoothing=0.3), classes, False),
        ("entropy_ignored", entropy(), ignoring, True),
        ("entropy_ignored_smoothed", entropy(label_smoothing=0.3), ignoring, True),
        ("entropy_ignored_class", entropy(ignore_index=1), classes, True),
        ("entropy_weight", entropy(weight=WEIGHT), classes, True),
        ("entropy_all", entropy(weight=WEIGHT, label_smoothing=0.3), ignoring, True),
        ("entropy_soft", entropy(), soft, True),
        ("entropy_soft_all", entropy(weight=WEIGHT, label_smoothing=0.3), soft, True),
        ("bce", bce(), binary, False),
        ("bce_soft", bce(), lambda o: rand(*o.shape), False),
        ("bce_weight", bce(weight=WEIGHT[:, None]), binary, False),
        ("bce_pos_weight", bce(pos_weight=WEIGHT[:, None]), binary, True),
        ("bce_both", bce(weight=WEIGHT.flip(0)[:, None], pos_weight=WEIGHT[:, None]), lambda o: rand(*o.shape), True),
        ("mse", nn.MSELoss(reduction=reduction), normal, False),
        ("mse_broadcast", nn.MSELoss(reduction=reduction), unbroadcast(normal), False),
        ("poisson", nn.PoissonNLLLoss(reduction=reduction, full=True), counts, False),
    ]


def twice_differentiable(reduction):
    """Those without a likelihood that is known, all of which need the target."""
    return [
        ("huber", nn.HuberLoss(reduction=reduction, delta=0.7), normal),
        ("smooth_l1", nn.SmoothL1Loss(reduction=reduction, beta=0.8), normal),
        ("l1", nn.L1Loss(reduction=reduction), normal),
        ("kl", nn.KLDivLoss(reduction=reduction), softened),
        ("soft_margin", nn.SoftMarginLoss(reduction=reduction), lambda o: 2 * binary(o) - 1),
        ("multilabel", nn.MultiLabelSoftMarginLoss(reduction=reduction), binary),
    ]


CALLABLES = [
    ("mixing", mixing, normal),
    ("dict", paired, pair),
    ("partial", partial(F.cross_entropy, label_smoothing=0.1), classes),
    ("lambda_sum", lambda o, t: 0.5 * (o - t).square().sum(), normal),
    ("linear", lambda o, t: (o * t).mean(), normal),
]


def both_reductions(cases):
    return [
        pytest.param(*case[1:], id=f"{case[0]}_{reduction}")
        for reduction in ("mean", "sum")
        for case in cases(reduction)
    ]


LIKELIHOODS = both_reductions(closed)
OTHERS = both_reductions(twice_differentiable) + [pytest.param(*case[1:], id=case[0]) for case in CALLABLES]


def fits(loss, shape):
    """Weights of shape (C, 1) are for one dim of places."""
    column = any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight"))
    return not (isinstance(loss, nn.BCEWithLogitsLoss) and column and len(shape) != 3)


SHAPES = [(4, C), (4, C, PLACES), (2, C, 2, 2)]


def assert_roots(loss, target, shapes, needed=True):
    """The root of every sample's Hessian, with the target and, where it is not needed, without."""
    for shape in shapes:
        output = randn(*shape)
        y = target(output)
        for given in [y] if needed else [y, None]:
            got = columns(loss, output, given)
            for n in range(len(output)):
                with member(f"{shape}, sample {n}, with target: {given is not None}"):
                    torch.testing.assert_close(got[n], hessian(loss, output, y, n), rtol=1e-10, atol=1e-10)


def columns(loss, output, target=None):
    """S S^T of every sample, (N, D, D), S being read off column by column."""
    size = output[0].numel()
    basis = torch.eye(size, dtype=output.dtype).reshape(-1, 1, *output.shape[1:]).expand(-1, *output.shape)
    return second_moment(root_of(loss, output, target)(basis))


@pytest.mark.parametrize("loss, target, needed", LIKELIHOODS)
def test_roots_of_likelihoods(loss, target, needed):
    assert_roots(loss, target, [shape for shape in SHAPES if fits(loss, shape)], needed)


def takes(loss, shape):
    """The multi-label losses take (N, C) alone."""
    return len(shape) == 2 or not isinstance(loss, nn.MultiLabelSoftMarginLoss)


@pytest.mark.parametrize("loss, target", OTHERS)
def test_roots_of_other_losses(loss, target):
    assert_roots(loss, target, [shape for shape in SHAPES if takes(loss, shape)])


def test_no_curvature_where_all_is_ignored_and_of_a_single_class():
    output, loss = randn(3, C, PLACES), nn.CrossEntropyLoss(weight=WEIGHT)
    y = ignoring(output).index_fill(0, torch.tensor(0), -100)
    got = columns(loss, output, y)
    assert got[0].eq(0).all()
    torch.testing.assert_close(got[1], hessian(loss, output, y, 1), rtol=1e-10, atol=1e-10)
    assert columns(nn.CrossEntropyLoss(), randn(3, 1), torch.zeros(3, dtype=torch.long)).eq(0).all()


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.HuberLoss(), lambda o, t: (o - t).exp().sum()]
)
def test_one_number_per_sample(loss):
    assert_roots(loss, binary, [(4,)])


def test_kl_batchmean():
    output, loss = randn(2, C).log_softmax(1), nn.KLDivLoss(reduction="batchmean")
    assert columns(loss, output, softened(output)).eq(0).all() and masses_of(loss, output).eq(1).all()


@pytest.mark.parametrize("loss, target, needed", LIKELIHOODS)
def test_second_moments_of_drawn_gradients(loss, target, needed):
    output = randn(2, C, PLACES)
    y = target(output)
    for n in range(2):
        draw = sampler_of(loss, repeated(output, n), repeated(y, n) if needed else None)
        within_five_errors(second_moment(draw(1, source(11))), hessian(loss, output, y, n))


def test_labels_are_drawn_from_the_model():
    """p - v is one-hot at a class drawn with probability p; a class without probability never comes."""
    output = torch.tensor([[0.3, -math.inf, 1.1]], dtype=torch.float64).repeat(MANY, 1)
    p = output.softmax(1)
    labels = p - sampler_of(nn.CrossEntropyLoss(), output)(1, source())[0]
    torch.testing.assert_close(labels.sort(1).values, torch.tensor([0.0, 0, 1]).double().expand(MANY, -1))
    assert labels[:, 1].abs().max() == 0
    assert (labels.mean(0) - p[0]).abs().max() < 5 * math.sqrt(0.25 / MANY)


@pytest.mark.parametrize(
    "loss, mass",
    [
        (nn.CrossEntropyLoss(), 1 / PLACES),
        (nn.NLLLoss(), 1 / PLACES),
        (nn.CrossEntropyLoss(weight=WEIGHT), 1 / PLACES),
        (nn.CrossEntropyLoss(reduction="sum"), 1.0),
        (nn.MSELoss(), 1 / (C * PLACES)),
        (nn.L1Loss(), 1 / (C * PLACES)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), 1 / (C * PLACES)),
        (nn.BCEWithLogitsLoss(reduction="sum"), 1.0),
        (mixing, 1.0),
    ],
)
def test_masses_without_target(loss, mass):
    got = masses_of(loss, randn(2, C, PLACES), strict=False)
    torch.testing.assert_close(got, torch.full_like(got, mass))


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_masses_of_places(make):
    output, target = randn(2, C, 3), torch.tensor([[0, -100, 2], [-100, -100, -100]])
    masses = torch.tensor([WEIGHT[0], 0.0, WEIGHT[2]], dtype=torch.float64)
    for reduction, expected in (("mean", masses / masses.sum()), ("sum", masses)):
        got = masses_of(make(weight=WEIGHT, reduction=reduction), output, target)
        torch.testing.assert_close(got, torch.stack([expected, 0 * expected])[:, None])


def test_nan_in_a_sample_is_nan_there_and_nowhere_else():
    """Where the Hessian is that of a callable; test_likelihoods.py has losses."""
    output = randn(3, C)
    output[1, 0] = math.nan
    vectors = root_of(mixing, output, binary(output))(torch.ones(1, 3, C).double())
    assert vectors[:, 1].isnan().any() and vectors[:, [0, 2]].isfinite().all()


def test_refuses_a_little_negative_curvature_but_no_rounding_error():
    with pytest.raises(ValueError, match="not convex"):
        root_of(lambda o, t: (o[:, 0].square() - 1e-6 * o[:, 1].square()).mean(), randn(4, C), randn(4, C))
    for seed in range(5):  # rank 1 of 40
        output, line = randn(4, 40, seed=seed).float(), randn(40, seed=9).float()
        root_of(lambda o, t, line=line: (o @ line).square().mean(), output, output)


def spoilt(*shape):
    """A nan in one sample hides no negative curvature elsewhere."""
    output = randn(*shape)
    output[1, 0] = math.nan
    return output


D, E = randn(4, C), randn(4, C + 1)
NO_LIKELIHOOD = "CrossEntropyLoss, NLLLoss.* PoissonNLLLoss, GaussianNLLLoss"
REFUSED = {
    "neither diagonal nor convex": (root_of, (gaussian, E, binary(E)), "not convex in the output"),
    "concave": (root_of, (lambda o, t: -(o - t).square().mean(), E, E), "not convex in the output"),
    "a saddle": (root_of, (lambda o, t: (o[:, 0] * o[:, 1]).mean(), E, E), "not convex in the output"),
    "a negative weight": (
        root_of, (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(-3.0)), E, binary(E)), "not convex in the output"
    ),
    "concave beside a nan": (
        root_of, (lambda o, t: -(o - t).square().mean(), spoilt(3, C), randn(3, C)), "not convex"
    ),
    "not differentiable": (root_of, (lambda o, t: (o > t).double().mean(), D, D), "not differentiable"),
    **{
        f"{find.__name__} of {type(loss).__name__} with weights alone": (
            find, (loss, D), f"has {name}=, which needs the target"
        )
        for find in (root_of, sampler_of)
        for loss, name in (
            (nn.CrossEntropyLoss(WEIGHT), "weight"),
            (nn.NLLLoss(WEIGHT), "weight"),
            (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), "pos_weight"),
        )
    },
    **{
        f"no target for {name}": (root_of, (loss, D), "the target, which is missing")
        for name, loss in (("mixing", mixing), ("Huber", nn.HuberLoss()), ("KL", nn.KLDivLoss()))
    },
    "no likelihood of KL": (sampler_of, (nn.KLDivLoss(), D, D), f"KLDivLoss.*{NO_LIKELIHOOD}"),
    "no likelihood of Huber": (sampler_of, (nn.HuberLoss(), D, D), f"HuberLoss.*{NO_LIKELIHOOD}"),
    "no likelihood of one's own": (sampler_of, (mixing, D, D), f"mixing.*{NO_LIKELIHOOD}"),
    "no axis of classes": (root_of, (nn.CrossEntropyLoss(), randn(3)), r"\(N, C, ...\)"),
    "two shapes": (root_of, (nn.MSELoss(), randn(3, 1), randn(3, 2)), "give both the same shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    find, given, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        find(*given)
