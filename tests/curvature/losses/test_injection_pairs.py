"""Pairs and products of injections, one row or several to a sample, against torch's differentiation of one sample."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature.losses.injections import Curved, empirical, exact, isotropic, propagated, sampled
from curvature.losses.output_hessian import OutputBatch
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
    joined_moment,
    normal,
    randn,
    repeated,
    soft,
    source,
    within_five_errors,
)

DOUBLE = torch.float64
ROWS = pytest.mark.parametrize("rows", [1, 2])
pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:(reduction. 'mean'|There is a performance drop)")]


def ignoring(output):
    target = classes(output)
    target.view(-1)[0] = -100
    return target


def mixing(output, target):
    """Every entry of a sample meets every other, also those of other rows; not convex."""
    return ((output - target).flatten().logsumexp(0) + output.prod(1).sum() ** 2) / 3


def branches(output, target):
    """Nothing that vmap can follow."""
    return mixing(output, target) if float(output.detach().sum()) else output.sum()


class Half(torch.autograd.Function):
    """A linear function of which vmap cannot follow the derivative."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return Half.apply(g) if float(g.abs().sum()) else g


def heads(output):
    """Means and positive variances of the same shape."""
    return torch.cat([output, output.exp()], 1)


def same(output):
    return output


def log_softmax(output):
    return output.log_softmax(1)


# id, loss, target of the raw output, link from the raw output: the Hessian is what exact() has
HESSIANS = [
    ("entropy", nn.CrossEntropyLoss, {}, classes, same),
    ("entropy_all", nn.CrossEntropyLoss, {"weight": WEIGHT, "label_smoothing": 0.3}, ignoring, same),
    ("entropy_soft", nn.CrossEntropyLoss, {"weight": WEIGHT}, soft, same),
    ("bce", nn.BCEWithLogitsLoss, {"pos_weight": torch.tensor(2.5, dtype=DOUBLE)}, binary, same),
    ("mse", nn.MSELoss, {}, normal, same),
    ("poisson", nn.PoissonNLLLoss, {}, counts, same),
    ("huber", nn.HuberLoss, {"delta": 0.7}, normal, same),
    ("kl", nn.KLDivLoss, {}, soft, log_softmax),
]
# those where exact() has the expected Hessian, and there is another
OTHERS = [
    ("nll", nn.NLLLoss, {"weight": WEIGHT}, ignoring, log_softmax),
    ("bce_probability", nn.BCELoss, {}, binary, torch.sigmoid),
    ("poisson_rate", nn.PoissonNLLLoss, {"log_input": False}, counts, torch.exp),
    ("gaussian", nn.GaussianNLLLoss, {}, normal, heads),
]
CALLABLES = [
    ("mixing", mixing, normal),
    ("branches", branches, normal),
    ("no_batching", lambda o, t: (Half.apply(o).square() * t.exp()).mean() + mixing(o, t), normal),
    ("partial", partial(F.cross_entropy, label_smoothing=0.1), classes),
    ("concave", lambda o, t: -0.5 * (o - t).square().sum(), normal),
    ("linear", lambda o, t: (o * t).mean(), normal),
]


def modules(cases):
    for (name, kind, options, target, link), reduction in itertools.product(cases, ("mean", "sum")):
        yield pytest.param(kind(reduction=reduction, **options), target, link, id=f"{name}_{reduction}")


CONVEX = list(modules(HESSIANS))
EXPECTED = list(modules(OTHERS))
OPAQUE = [pytest.param(loss, target, same, id=name) for name, loss, target in CALLABLES]


def sample_hessians(loss, output, target, count):
    """The oracle: of every sample's own loss, (N, D, D), with D all entries of its rows."""
    found = []
    for o, y in zip(output.chunk(count), target.chunk(count), strict=True):
        alone = lambda flat, o=o, y=y: resolve(loss)(flat.reshape(o.shape), y)
        found.append(torch.autograd.functional.hessian(alone, o.flatten()).nan_to_num(0.0))
    return torch.stack(found)


def matrix(inject, output, loss, target, count, **options):
    return joined_moment(inject.pairs(output, loss, target, count=count, **options), count)


def drawn(target, link, rows, shape=(C,)):
    raw = randn(2 * rows, *shape)
    return link(raw), target(raw)


@ROWS
@pytest.mark.parametrize("loss, target, link", CONVEX + OPAQUE)
def test_pairs_and_products_are_the_hessian(loss, target, link, rows):
    output, y = drawn(target, link, rows)
    want = sample_hessians(loss, output, y, 2)
    for inject in (exact(), Curved()):
        with member(inject):
            got = matrix(inject, output, loss, y, 2, size=4)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            assert_products(inject, output, loss, y, want)


@ROWS
@pytest.mark.parametrize("loss, target, link", EXPECTED)
def test_the_hessian_that_depends_on_the_label(loss, target, link, rows):
    output, y = drawn(target, link, rows)
    want = sample_hessians(loss, output, y, 2)
    torch.testing.assert_close(matrix(Curved(), output, loss, y, 2), want, rtol=1e-9, atol=1e-9)
    assert_products(Curved(), output, loss, y, want, tolerance=1e-9)


def assert_products(inject, output, loss, y, want, tolerance=1e-10):
    z = randn(3, *output.shape, seed=6)
    got = inject.product(output, loss, y, count=len(want))(z)
    flat = z.reshape(3, len(want), -1)
    torch.testing.assert_close(
        got.reshape(flat.shape), torch.einsum("nij,knj->kni", want, flat), rtol=tolerance, atol=tolerance
    )


@ROWS
@pytest.mark.parametrize("loss, target, link", CONVEX + EXPECTED)
def test_rows_of_a_sample_are_terms_of_its_loss(loss, target, link, rows):
    """m rows of a mean make blocks of their own masses: what the rows have as samples of a sum, but for the mean."""
    output, y = drawn(target, link, rows, (C, PLACES))
    got = matrix(exact(), output, loss, y, 2)
    each = matrix(exact(), output, loss, y, 2 * rows).unflatten(0, (2, rows))
    masses = sample_masses(loss, output, y, 2 * rows).reshape(2, rows)
    if loss.reduction == "mean":
        masses = masses / masses.sum(1, keepdim=True)
    blocks = [torch.block_diag(*parts) for parts in masses[:, :, None, None] * each]
    torch.testing.assert_close(got, torch.stack(blocks), rtol=1e-10, atol=1e-10)
    assert_products(exact(), output, loss, y, got)


RANDOM = [sampled(2), propagated(2), isotropic(2)]
WITH_LIKELIHOOD = [case for case in CONVEX + EXPECTED if not case.id.startswith(("huber", "kl"))]


@pytest.mark.parametrize("inject", [*RANDOM[:2], sampled(30)], ids=str)
@pytest.mark.parametrize("loss, target, link", WITH_LIKELIHOOD)
def test_random_pairs_with_rows(loss, target, link, inject):
    """Copies of one sample of two rows: on average what exact() has, rows of one sample being independent."""
    output, y = drawn(target, link, 2)
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
    [(nn.BCEWithLogitsLoss(), same), (nn.BCELoss(), torch.sigmoid), (nn.MSELoss(), same), (nn.PoissonNLLLoss(), same)],
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


@pytest.mark.parametrize("loss, share", [(None, 1), (nn.CrossEntropyLoss(), 1 / 2), (nn.MSELoss(), 1 / 6), (mixing, 1)])
def test_isotropic_with_rows(loss, share):
    output = repeated(randn(1, C), 0, 2 * MANY)
    got = matrix(isotropic(2), output, loss, None, MANY, generator=source(8))
    within_five_errors(got, share * torch.eye(2 * C, dtype=DOUBLE))


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


@ROWS
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(reduction="sum")])
def test_empirical_is_the_square_of_the_gradient_of_the_whole_sample(loss, rows):
    output = randn(2 * rows, C)
    y = ignoring(output)
    y[-1] = 1
    point = output.clone().requires_grad_()
    alone = sum(loss(o, t).nan_to_num() for o, t in zip(point.chunk(2), y.chunk(2), strict=True))
    g = torch.autograd.grad(alone, point)[0].reshape(2, -1).nan_to_num()
    torch.testing.assert_close(matrix(empirical(), output, loss, y, 2), torch.einsum("ni,nj->nij", g, g))


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("inject", [exact(), Curved(), *RANDOM], ids=lambda inject: type(inject).__name__)
def test_dtypes(inject, dtype):
    output, loss = randn(4, C).to(dtype).requires_grad_(), nn.CrossEntropyLoss()
    y, z = classes(output), randn(2, 4, C).to(dtype)
    state = torch.get_rng_state()
    ((left, _),) = inject.pairs(output, loss, y, count=2)
    product = inject.product(output, loss, y, count=2)(z)
    assert left.dtype == product.dtype == dtype and not left.requires_grad and not product.requires_grad
    assert product.isfinite().all() and output.grad is None and torch.equal(state, torch.get_rng_state())


def test_hessian_product_serves_many_calls():
    output, y = randn(2, C), randn(2, C, seed=3)
    product = OutputBatch.of(output, mixing, y, 2, None).product()
    z = randn(5, 2, C, seed=4)
    torch.testing.assert_close(product(z), torch.cat([product(one[None]) for one in z]))


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
    with pytest.raises(ValueError, match="size must be at least 1"):
        inject.pairs(output, loss, classes(output), count=2, size=0)
    if inject not in RANDOM[2:]:
        with pytest.raises(ValueError, match="needs the loss"):
            inject.product(output, count=2)


def test_nan_stays_in_its_sample():
    output = randn(4, C)
    output[1, 0] = math.nan
    for loss in (nn.CrossEntropyLoss(), mixing):
        got = matrix(exact(), output, loss, classes(output) if loss is not mixing else normal(output), 2)
        assert got[0].isnan().any() and got[1].isfinite().all()
