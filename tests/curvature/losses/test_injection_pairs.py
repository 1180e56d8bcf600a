"""Vectors, pairs and products of injections, one row or several to a sample, against torch's differentiation of it."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature.losses.injections import Curved, empirical, exact, isotropic, propagated, sampled
from curvature.losses.table import resolve, sample_masses
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
    joined_moment,
    mixing,
    normal,
    rand,
    randn,
    second_moment,
    soft,
    source,
    within_five_errors,
)
from support.output_batches import masses_of, root_of, sampler_of

DOUBLE = torch.float64
ROWS = pytest.mark.parametrize("rows", [1, 2])
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


def entangled(output, target):
    """Every entry of a sample meets every other, also those of other rows; not convex."""
    return ((output - target).flatten().logsumexp(0) + output.prod(1).sum() ** 2) / 3


def branches(output, target):
    """Nothing that vmap can follow."""
    return entangled(output, target) if float(output.detach().sum()) else output.sum()


class Half(torch.autograd.Function):
    """A linear function of which vmap cannot follow the derivative."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return Half.apply(g) if float(g.abs().sum()) else g


def with_likelihood(reduction):
    """id, loss, target, whether the target is needed."""
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


def without_likelihood(reduction):
    return [
        ("huber", nn.HuberLoss(reduction=reduction, delta=0.7), normal, True),
        ("smooth_l1", nn.SmoothL1Loss(reduction=reduction, beta=0.8), normal, True),
        ("l1", nn.L1Loss(reduction=reduction), normal, True),
        ("kl", nn.KLDivLoss(reduction=reduction), softened, True),
        ("soft_margin", nn.SoftMarginLoss(reduction=reduction), lambda o: 2 * binary(o) - 1, True),
        ("multilabel", nn.MultiLabelSoftMarginLoss(reduction=reduction), binary, True),
    ]


CALLABLES = [
    ("mixing", mixing, normal, True),
    ("dict", paired, pair, True),
    ("partial", partial(F.cross_entropy, label_smoothing=0.1), classes, True),
    ("lambda_sum", lambda o, t: 0.5 * (o - t).square().sum(), normal, True),
    ("linear", lambda o, t: (o * t).mean(), normal, True),
]
NOT_CONVEX = {
    "entangled": entangled,
    "branches": branches,
    "no_batching": lambda o, t: (Half.apply(o).square() * t.exp()).mean() + entangled(o, t),
    "concave": lambda o, t: -0.5 * (o - t).square().sum(),
}


def both_reductions(cases):
    return [
        pytest.param(*case[1:], id=f"{case[0]}_{reduction}")
        for reduction in ("mean", "sum")
        for case in cases(reduction)
    ]


LIKELIHOODS = both_reductions(with_likelihood)
CONVEX = [
    *LIKELIHOODS,
    *both_reductions(without_likelihood),
    *(pytest.param(*case[1:], id=case[0]) for case in CALLABLES),
]
SHAPES = [(1, (4, C)), (2, (4, C)), (1, (4, C, PLACES)), (2, (4, C, PLACES)), (1, (2, C, 2, 2))]  # rows of a sample


def takes(loss, shape):
    """Weights of shape (C, 1) are for one dim of places; the multi-label losses take (N, C) alone."""
    column = any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight"))
    if isinstance(loss, nn.BCEWithLogitsLoss) and column:
        return len(shape) == 3
    return len(shape) == 2 or not isinstance(loss, nn.MultiLabelSoftMarginLoss)


def matrix(inject, output, loss, target, count, **options):
    return joined_moment(inject.pairs(output, loss, target, count=count, **options), count)


def assert_hessians(loss, output, target, given, rows, is_convex=True):
    """Of pairs, products and, of a sample of one row, vectors, with what is given of the target."""
    want = torch.stack([hessian(resolve(loss), output, target, n, rows) for n in range(len(output) // rows)])
    for inject in (exact(), Curved()):
        got = matrix(inject, output, loss, given, len(want), size=4)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert_products(inject, output, loss, given, want)
    if rows == 1 and is_convex:
        got = second_moment(exact().vectors(output, loss, given))
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def assert_products(inject, output, loss, y, want, tolerance=1e-10):
    product, z = inject.product(output, loss, y, count=len(want)), randn(3, *output.shape, seed=6)
    for some in (z, z[:1]):
        flat = some.reshape(len(some), len(want), -1)
        expected = torch.einsum("nij,knj->kni", want, flat).reshape(some.shape)
        torch.testing.assert_close(product(some), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss, target, needed", CONVEX)
def test_hessians(loss, target, needed):
    """Where the target is not needed, without it too."""
    for rows, shape in [(rows, shape) for rows, shape in SHAPES if takes(loss, shape)]:
        output = randn(*shape)
        y = target(output)
        for given in [y] if needed else [y, None]:
            with member(f"{shape} in {rows} rows, with target: {given is not None}"):
                assert_hessians(loss, output, y, given, rows)


@ROWS
@pytest.mark.parametrize("name", NOT_CONVEX)
def test_hessians_that_have_no_root(name, rows):
    output = randn(2 * rows, C)
    assert_hessians(NOT_CONVEX[name], output, normal(output), normal(output), rows, is_convex=False)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.HuberLoss(), lambda o, t: (o - t).exp().sum()]
)
def test_one_number_per_sample(loss):
    output = randn(4)
    assert_hessians(loss, output, binary(output), binary(output), 1)


def test_no_curvature_where_all_is_ignored_and_of_a_single_class():
    output, loss = randn(3, C, PLACES), nn.CrossEntropyLoss(weight=WEIGHT)
    y = ignoring(output).index_fill(0, torch.tensor(0), -100)
    assert_hessians(loss, output, y, y, 1)
    for inject, some in ((exact(), y[:1]), (Curved(), y[:1])):
        assert not matrix(inject, output[:1], loss, some, 1).any()
    assert not exact().vectors(randn(3, 1), nn.CrossEntropyLoss(), torch.zeros(3, dtype=torch.long)).any()


def test_kl_batchmean():
    output, loss = randn(2, C).log_softmax(1), nn.KLDivLoss(reduction="batchmean")
    assert not exact().vectors(output, loss, softened(output)).any() and masses_of(loss, output).eq(1).all()


def test_labels_are_drawn_from_the_model():
    """p - v is one-hot at a class drawn with probability p; a class without probability never comes."""
    output = torch.tensor([[0.3, -math.inf, 1.1]], dtype=torch.float64).repeat(MANY, 1)
    p = output.softmax(1)
    labels = p - sampler_of(nn.CrossEntropyLoss(), output)(1, source())[0]
    torch.testing.assert_close(labels.sort(1).values, torch.tensor([0.0, 0, 1]).double().expand(MANY, -1))
    assert labels[:, 1].abs().max() == 0
    assert (labels.mean(0) - p[0]).abs().max() < 5 * math.sqrt(0.25 / MANY)


# where exact() has the expected Hessian, and there is another: loss, target of the raw output, link from it
def heads(output):
    """Means and positive variances of the same shape."""
    return torch.cat([output, output.exp()], 1)


def log_softmax(output):
    return output.log_softmax(1)


EXPECTED = [
    pytest.param(loss, target, link, id=f"{type(loss).__name__}_{reduction}")
    for reduction in ("mean", "sum")
    for loss, target, link in (
        (nn.NLLLoss(weight=WEIGHT, reduction=reduction), ignoring, log_softmax),
        (nn.BCELoss(reduction=reduction), binary, torch.sigmoid),
        (nn.PoissonNLLLoss(log_input=False, reduction=reduction), counts, torch.exp),
        (nn.GaussianNLLLoss(reduction=reduction), normal, heads),
    )
]


@ROWS
@pytest.mark.parametrize("loss, target, link", EXPECTED)
def test_the_hessian_that_depends_on_the_label(loss, target, link, rows):
    raw = randn(2 * rows, C)
    output, y = link(raw), target(raw)
    want = torch.stack([hessian(resolve(loss), output, y, n, rows) for n in range(2)])
    torch.testing.assert_close(matrix(Curved(), output, loss, y, 2), want, rtol=1e-9, atol=1e-9)
    assert_products(Curved(), output, loss, y, want, tolerance=1e-9)


@ROWS
@pytest.mark.parametrize("loss, target, link", EXPECTED)
def test_rows_of_a_sample_are_terms_of_its_loss(loss, target, link, rows):
    """m rows of a mean make blocks of their own masses: what the rows have as samples of a sum, but for the mean."""
    raw = randn(2 * rows, C, PLACES)
    output, y = link(raw), target(raw)
    got = matrix(exact(), output, loss, y, 2)
    each = matrix(exact(), output, loss, y, 2 * rows).unflatten(0, (2, rows))
    masses = sample_masses(loss, output, y, 2 * rows).reshape(2, rows)
    if loss.reduction == "mean":
        masses = masses / masses.sum(1, keepdim=True)
    blocks = [torch.block_diag(*parts) for parts in masses[:, :, None, None] * each]
    torch.testing.assert_close(got, torch.stack(blocks), rtol=1e-10, atol=1e-10)
    assert_products(exact(), output, loss, y, got)


RANDOM = [sampled(2), propagated(2), isotropic(2)]
DRAWN = [
    pytest.param(loss, target, lambda raw: raw, id=case.id)
    for case in LIKELIHOODS
    for loss, target, _ in [case.values]
    if takes(loss, (4, C))
]


@pytest.mark.parametrize("inject", [*RANDOM[:2], sampled(30)], ids=str)
@pytest.mark.parametrize("loss, target, link", DRAWN + EXPECTED)
def test_random_pairs_with_rows(loss, target, link, inject):
    """Copies of one sample of two rows: on average what exact() has, rows of one sample being independent."""
    raw = randn(4, C)
    output, y = link(raw), target(raw)
    want = matrix(exact(), output, loss, y, 2)[0]
    copies = [t[:2].repeat(MANY, *[1] * (t.ndim - 1)) for t in (output, y)]
    got = matrix(inject, copies[0], loss, copies[1], MANY, generator=source(8))
    within_five_errors(got, want)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.5], dtype=DOUBLE), reduction="sum")]
)
def test_more_labels_than_classes(loss):
    """As many pairs as classes; the matrix of k labels: the right mean, and the variance of one label over k."""
    output, k = randn(1, C), 7
    y = torch.tensor([2])
    copies = output.repeat(MANY, 1), y.repeat(MANY)
    got = matrix(sampled(k), copies[0], loss, copies[1], MANY, generator=source(8))
    within_five_errors(got, matrix(exact(), output, loss, y, 1)[0])
    assert sum(len(left) for left, _ in sampled(k).pairs(output, loss, y, count=1, size=2)) == C
    mass = 1.0 if loss.weight is None else loss.weight[2]
    p = output.softmax(1)[0]
    each = torch.stack([mass * torch.outer(p - e, p - e) for e in torch.eye(C, dtype=DOUBLE)])
    mean = torch.einsum("c,cij->ij", p, each)
    variance = torch.einsum("c,cij->ij", p, (each - mean).square()) / k
    within_five_errors((got - mean).square(), variance)
    # rows of one sample, and places, are terms of their own
    for rows, count in ((randn(4, C), 2), (randn(2, C, PLACES), 2)):
        assert sum(len(left) for left, _ in sampled(k).pairs(rows, nn.CrossEntropyLoss(), count=count)) == 2 * C


@pytest.mark.parametrize(
    "loss, link",
    [
        (nn.BCEWithLogitsLoss(), lambda raw: raw),
        (nn.BCELoss(), torch.sigmoid),
        (nn.MSELoss(), lambda raw: raw),
        (nn.PoissonNLLLoss(), lambda raw: raw),
    ],
)
def test_more_labels_than_entries(loss, link):
    """One pair for an output with one entry; the variance is that of one label over their number."""
    output, k = link(randn(1, 1)), 5
    copies = output.repeat(MANY, 1)
    got = matrix(sampled(k), copies, loss, copies.clamp(0, 1), MANY, generator=source(8))
    one = matrix(sampled(), copies, loss, copies.clamp(0, 1), MANY, generator=source(9))
    within_five_errors(got, matrix(exact(), output, loss, output.clamp(0, 1), 1)[0])
    spread = (one - one.mean(0)).square()
    assert (got.var(0) - spread.mean(0) / k).abs() <= 5 * spread.std(0) * math.sqrt((1 + 2 / k) / MANY)
    assert [len(left) for left, _ in sampled(k).pairs(output, loss, output.clamp(0, 1), count=1)] == [1]


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()])
def test_a_billion_labels(loss):
    """They cost what a few do, and give the exact diagonal but for 1/sqrt(k p) of it, in single precision."""
    rows, k = torch.tensor([[0.3, -1.2, 0.7], [0.0, -10.0, -14.0], [12.0, 14.0, 0.0]]), 10**9
    got, want = (matrix(inject, rows, loss, None, 3).diagonal(dim1=1, dim2=2) for inject in (sampled(k), exact()))
    torch.testing.assert_close(got[:1], want[:1], rtol=3e-4, atol=0)
    torch.testing.assert_close(got, want, rtol=5 / math.sqrt(k * 7e-7), atol=0)


@ROWS
@pytest.mark.parametrize("inject", [*RANDOM, empirical()], ids=str)
def test_products_of_few_vectors_are_those_of_the_pairs(inject, rows):
    output, loss = randn(2 * rows, C, PLACES), nn.CrossEntropyLoss(weight=WEIGHT)
    y = ignoring(output)
    want = matrix(inject, output, loss, y, 2, generator=source(4))
    z = randn(3, *output.shape, seed=6)
    product = inject.product(output, loss, y, count=2, generator=source(4))
    expected = torch.einsum("nij,knj->kni", want, z.reshape(3, 2, -1)).reshape(z.shape)
    for _ in range(2):  # drawn once
        torch.testing.assert_close(product(z), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "loss, target",
    [
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), ignoring),
        (nn.CrossEntropyLoss(reduction="sum"), ignoring),
        (nn.MSELoss(), normal),
        (F.mse_loss, normal),
        (lambda o, t: F.mse_loss(o, t), normal),
    ],
)
def test_masses_make_the_hessian_of_the_batch(loss, target):
    """sum_n (m_n / M) H_n: the batch as one loss, with samples that count differently; 1 where the loss adds."""
    output = randn(4, C, PLACES)
    y = target(output)
    if not y.is_floating_point():
        y[1] = -100
    masses = sample_masses(loss, output, y, 4)
    weights = masses / masses.sum() if getattr(loss, "reduction", "mean") == "mean" else masses
    whole = torch.autograd.functional.hessian(lambda o: loss(o, y), output).reshape(4, 6, 4, 6)
    got = weights[:, None, None] * matrix(exact(), output, loss, y, 4)
    torch.testing.assert_close(got, torch.stack([whole[n, :, n] for n in range(4)]), rtol=1e-10, atol=1e-10)
    assert exact().weighs_samples and isotropic().weighs_samples and not empirical().weighs_samples


STREAMS = [
    (inject, loss, target)
    for inject in (exact(), Curved(), empirical(), *RANDOM)
    for loss, target in ((nn.CrossEntropyLoss(), classes), (F.mse_loss, normal), (mixing, normal))
    if loss is not mixing or inject not in RANDOM[:2]  # no likelihood, no root
]


@pytest.mark.parametrize("inject, loss, target", STREAMS)
def test_sizes_and_numbers(inject, loss, target):
    output = randn(4, C)
    for size in (1, 4, 64):
        chunks = list(inject.pairs(output, loss, target(output), count=2, size=size))
        sizes = [len(left) for left, _ in chunks]
        assert all(n == size for n in sizes[:-1]) and sizes[-1] <= size, sizes
        # two places a sample, each of which has a Hessian of rank C - 1 under cross-entropy
        spared = 2 if isinstance(loss, nn.CrossEntropyLoss) and inject in (exact(), Curved()) else 0
        assert sum(sizes) == inject.number(output, 2) - spared
        for left, right in chunks:
            assert left.shape[1:] == output.shape and (right is None or right.shape == left.shape)
            assert (right is not None) == (loss is mixing and inject in (exact(), Curved()))


def test_a_callable_of_many_entries_streams():
    """Neither D x D numbers nor eigenvalues of them."""
    output, y = randn(2, 20_000), randn(2, 20_000, seed=3)
    loss = lambda o, t: (o - t).square().mean() + o.mean() ** 2
    left, right = next(iter(exact().pairs(output, loss, y, count=2, size=3)))
    torch.testing.assert_close(right, 2 / 20_000 * left + 2 / 20_000**2)


def test_refuses_what_torch_differentiates_once():
    output = randn(2, C)
    product = exact().product(output, nn.MultiMarginLoss(p=2), classes(output), count=2)
    with pytest.raises(RuntimeError, match="MultiMarginLoss cannot be differentiated twice: derivative for"):
        product(output[None])


def test_vectors_of_the_hessian_itself_only_with_a_root():
    output = randn(2, C)
    torch.testing.assert_close(Curved().vectors(output, nn.MSELoss()), exact().vectors(output, nn.MSELoss()))
    with pytest.raises(ValueError, match="no root that is known: use pairs"):
        Curved().vectors(output, mixing, output)


def test_a_callable_may_do_without_target():
    """As it may for its gradients; a torch loss that needs one is refused."""
    loss = lambda o, _: o.square().sum()
    got = matrix(exact(), randn(2, C), loss, None, 2)
    torch.testing.assert_close(got, 2 * torch.eye(C, dtype=DOUBLE).expand(2, C, C))
    for inject, kind in ((exact(), nn.HuberLoss()), (Curved(), nn.NLLLoss()), (Curved(), nn.GaussianNLLLoss())):
        with pytest.raises(ValueError, match=f"Hessian of {type(kind).__name__} depends on the target, which is miss"):
            inject.pairs(heads(randn(2, C)), kind, count=2)


@pytest.mark.parametrize("inject", [exact(), Curved(), *RANDOM, empirical()], ids=lambda inject: type(inject).__name__)
def test_refusals(inject):
    output, loss = randn(4, C), nn.CrossEntropyLoss()
    for count in (0, 3, 8):
        with pytest.raises(ValueError, match=rf"rows for {count} samples.*\(4, 3\)"):
            inject.pairs(output, loss, classes(output), count=count)
        with pytest.raises(ValueError, match=rf"rows for {count} samples.*\(4, 3\)"):
            inject.product(output, loss, classes(output), count=count)
    with pytest.raises(ValueError, match="size: expected a whole number of at least 1"):
        inject.pairs(output, loss, classes(output), count=2, size=0)
    if inject not in RANDOM[2:]:
        with pytest.raises(ValueError, match="needs the loss"):
            inject.product(output, count=2)


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
def test_losses_without_root_or_likelihood_are_refused(name):
    find, given, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        find(*given)
