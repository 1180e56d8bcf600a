"""Injected vectors: their expectations, scale, independence and randomness; what they are of all losses: test_roots."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature.losses.injections import (
    SEED,
    VECTORS_PER_CHUNK,
    Injection,
    empirical,
    exact,
    isotropic,
    propagated,
    sampled,
)
from support.moments import (
    MANY,
    binary,
    counts,
    hessian,
    normal,
    randn,
    repeated,
    second_moment,
    source,
    within_five_errors,
)

pytestmark = pytest.mark.fast

C, PLACES = 3, 2
ALL = [exact(), sampled(2), propagated(2), isotropic(2), empirical()]
WEIGHT = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)
MEAN_AND_SUM = pytest.mark.parametrize("reduction", ["mean", "sum"])


def classes(output):
    return torch.randint(C, (len(output), *output.shape[2:]), generator=source(3))


def ignoring(output):
    """The first sample ignores everything where there is one term for each, else its first place."""
    target = classes(output)
    target.view(len(target), -1)[0, 0] = -100
    return target


def mixing(output, target):
    """Convex; every entry of a sample meets every other; a mean over samples."""
    return (output.flatten(1) - target.flatten(1)).logsumexp(1).mean() + 0.1 * (output - target).square().mean()


def check_expectation(inject, loss, output, target, expected, n=0, scale=1.0):
    """Many copies of sample n, which are independent of each other, have on average the matrix expected."""
    given = None if target is None else repeated(target, n)
    vectors = inject.vectors(repeated(output, n), loss, given, generator=source(11)) * scale
    within_five_errors(second_moment(vectors), expected)


@pytest.mark.parametrize(
    "function, module, target",
    [
        (F.cross_entropy, nn.CrossEntropyLoss(), classes),
        (F.mse_loss, nn.MSELoss(), normal),
        (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(), binary),
        (F.poisson_nll_loss, nn.PoissonNLLLoss(), counts),
    ],
)
def test_functions_of_torch_are_their_modules(function, module, target):
    output = randn(4, C, PLACES)
    for inject in ALL:
        got, want = (inject.vectors(output, loss, target(output)) for loss in (function, module))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4, VECTORS_PER_CHUNK])
@pytest.mark.parametrize("inject", [exact(), empirical(), propagated(9)], ids=str)
def test_chunks(inject, size):
    output, loss = randn(2, C, PLACES), nn.CrossEntropyLoss()
    y = classes(output)
    chunks = list(inject.chunks(output, loss, y, size=size))
    whole = inject.vectors(output, loss, y)
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert 1 <= len(chunks[-1]) <= size
    joined = torch.cat(chunks)
    assert joined.shape == whole.shape
    if not isinstance(inject, type(propagated())):
        assert torch.equal(joined, whole)
    else:  # pieces of one stream, not the same numbers again and again
        assert not torch.equal(joined[0], joined[-1]) or not torch.equal(joined[1], joined[-2])


def test_chunks_of_random_vectors_add_up_to_the_expectation():
    output, loss = randn(1, C), nn.CrossEntropyLoss()
    chunks = propagated(5).chunks(repeated(output, 0), loss, size=2, generator=source())
    within_five_errors(second_moment(torch.cat(list(chunks))), hessian(loss, output, classes(output), 0))


@pytest.mark.parametrize("make", [sampled, propagated, isotropic])
def test_k_vectors_have_the_expectation_of_one_and_a_wrong_scale_is_seen(make):
    output, loss = randn(1, C), nn.CrossEntropyLoss()
    expected = hessian(loss, output, classes(output), 0) if make is not isotropic else torch.eye(C).double()
    for k in (1, 3, 7):
        assert make(k).vectors(output, loss).shape == (k, 1, C)
        check_expectation(make(k), loss, output, None, expected)
    for wrong in (1 / math.sqrt(2), math.sqrt(2), 0.9):  # 1/k, not scaled at all, a little
        with pytest.raises(AssertionError):
            check_expectation(make(2), loss, output, None, expected, scale=wrong)


@MEAN_AND_SUM
def test_gradients_divided_by_the_number_of_places_would_be_seen(reduction):
    """1/T where 1/sqrt(T) is right: sampled labels of a mean."""
    output, loss = randn(1, C, PLACES), nn.CrossEntropyLoss(reduction=reduction)
    expected = hessian(loss, output, classes(output), 0)
    with pytest.raises(AssertionError):
        check_expectation(sampled(1), loss, output, None, expected, scale=1 / math.sqrt(PLACES))


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(), mixing])
def test_isotropic_with_one_term_per_sample(loss):
    check_expectation(isotropic(2), loss, randn(1, C), None, torch.eye(C, dtype=torch.float64))


@pytest.mark.parametrize("inject", [sampled(MANY), propagated(MANY), isotropic(MANY)], ids=str)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.PoissonNLLLoss()])
def test_samples_and_vectors_are_independent(inject, loss):
    output = repeated(randn(1, C), 0, 2)
    vectors = inject.vectors(output, loss, generator=source(5)) * math.sqrt(MANY)
    zero = torch.zeros(C, C, dtype=torch.float64)
    across_samples = torch.einsum("ki,kj->kij", vectors[:, 0], vectors[:, 1])
    across_vectors = torch.einsum("ki,kj->kij", vectors[1::2, 0], vectors[::2, 0])
    within_five_errors(across_samples, zero)
    within_five_errors(across_vectors, zero)
    with pytest.raises(AssertionError):
        within_five_errors(torch.einsum("ki,kj->kij", vectors[:, 0], vectors[:, 0]), zero)


@pytest.mark.parametrize("inject", [sampled(2), propagated(2), isotropic(2)], ids=str)
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.PoissonNLLLoss()], ids=lambda m: str(m)[:3]
)
def test_random_state(inject, loss):
    output = randn(8, C, PLACES)
    before = torch.get_rng_state()
    unseeded = inject.vectors(output, loss)
    generator = source(1)
    first, second = (inject.vectors(output, loss, generator=generator) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert torch.equal(first, inject.vectors(output, loss, generator=source(1)))
    torch.manual_seed(123)
    assert torch.equal(unseeded, inject.vectors(output, loss))
    assert torch.equal(unseeded, inject.vectors(output, loss, generator=source(SEED)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("inject", ALL, ids=str)
def test_dtype_and_nothing_changed(inject, dtype):
    output = randn(3, C).to(dtype).requires_grad_()
    loss, y = nn.CrossEntropyLoss(weight=WEIGHT.float()), torch.tensor([0, 2, -100])
    if inject == empirical() and dtype == torch.float64:
        loss = nn.CrossEntropyLoss(weight=WEIGHT)
    kept = output.detach().clone(), output.grad_fn, loss.weight.clone()
    vectors = inject.vectors(output, loss, y)
    assert vectors.dtype == dtype and not vectors.requires_grad and vectors.isfinite().all()
    assert vectors.shape[1:] == output.shape
    assert output.requires_grad and output.grad is None and output.grad_fn is kept[1]
    assert torch.equal(output, kept[0]) and torch.equal(loss.weight, kept[2]) and loss.reduction == "mean"
    with torch.no_grad():
        assert torch.equal(inject.vectors(output, loss, y), vectors)


def test_float32_is_accurate():
    output, y = randn(3, C, PLACES), randn(3, C, PLACES, seed=2)
    for loss in (nn.MSELoss(), mixing):
        got = second_moment(exact().vectors(output.float(), loss, y.float()))
        want = second_moment(exact().vectors(output, loss, y))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(reduction="sum")])
def test_empirical_is_the_gradient_of_the_sample_alone(loss):
    output = randn(3, C, PLACES)
    y = ignoring(output)
    got = empirical().vectors(output, loss, y)
    for n in range(3):
        point = output[n : n + 1].clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(point, y[n : n + 1]), point)
        torch.testing.assert_close(got[:, n], want, rtol=1e-12, atol=1e-12)


def test_objects_are_values():
    assert [repr(inject) for inject in ALL] == [
        "exact()",
        "sampled(k=2)",
        "propagated(k=2)",
        "isotropic(k=2)",
        "empirical()",
    ]
    for inject in ALL:
        assert isinstance(inject, Injection)
        assert eval(repr(inject)) == inject
        assert pickle.loads(pickle.dumps(inject)) == copy.deepcopy(inject) == inject
        assert hash(inject) == hash(copy.copy(inject))
    assert len(set(ALL)) == 5
    assert sampled(2) != sampled(3) and sampled(2) != propagated(2)
    with pytest.raises(AttributeError):
        sampled(2).k = 3


@pytest.mark.parametrize("make", [sampled, propagated, isotropic])
@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_refuses_k(make, k):
    with pytest.raises(ValueError, match="k must be an integer"):
        make(k)


@pytest.mark.parametrize("inject", ALL, ids=str)
@pytest.mark.parametrize(
    "output", [torch.ones(3, C, dtype=torch.long), torch.tensor(1.0), torch.zeros(0, C), torch.zeros(3, 0), "logits"]
)
def test_refuses_outputs(inject, output):
    with pytest.raises(ValueError, match="output must"):
        inject.vectors(output, nn.MSELoss(), output)


@pytest.mark.parametrize("inject", [exact(), sampled(), propagated(), empirical()], ids=str)
def test_refuses_to_guess_the_loss(inject):
    with pytest.raises(ValueError, match=r"needs the loss.*KFAC\(model, loss="):
        inject.vectors(randn(3, C))


@pytest.mark.parametrize("inject", ALL, ids=str)
def test_refuses_no_reduction(inject):
    with pytest.raises(ValueError, match="reduction='none'"):
        inject.vectors(randn(3, C), nn.MSELoss(reduction="none"), randn(3, C))


EVERY = [exact(), propagated(2), sampled(2)]
WITH_LIKELIHOOD = [(nn.CrossEntropyLoss, ignoring), (nn.MSELoss, normal)]
HESSIANS = [(inject, *pair) for inject in EVERY for pair in WITH_LIKELIHOOD]
HESSIANS += [(inject, nn.HuberLoss, normal) for inject in EVERY[:2]]


@MEAN_AND_SUM
@pytest.mark.parametrize("inject, kind, target", HESSIANS)
def test_hessian(inject, kind, target, reduction):
    loss, output = kind(reduction=reduction), randn(2, C, PLACES)
    y = target(output)
    for n in range(2):
        if inject == exact():
            got = second_moment(inject.vectors(output, loss, y))[n]
            torch.testing.assert_close(got, hessian(loss, output, y, n), rtol=1e-10, atol=1e-10)
        else:
            check_expectation(inject, loss, output, y, hessian(loss, output, y, n), n)


def test_propagated_through_a_dense_root():
    output = randn(2, C, PLACES)
    check_expectation(propagated(2), mixing, output, normal(output), hessian(mixing, output, normal(output), 0))


@pytest.mark.parametrize(
    "loss, mass", [(None, 1), (nn.CrossEntropyLoss(), 1 / PLACES), (nn.MSELoss(), 1 / (C * PLACES))]
)
def test_isotropic(loss, mass):
    expected = mass * torch.eye(C * PLACES, dtype=torch.float64)
    check_expectation(isotropic(2), loss, randn(1, C, PLACES), None, expected)


def test_isotropic_ignores_what_the_loss_ignores():
    vectors = isotropic().vectors(randn(1, C, PLACES), nn.CrossEntropyLoss(), torch.tensor([[-100, 1]]))
    assert vectors[..., 0].eq(0).all() and vectors[..., 1].ne(0).all()


@pytest.mark.parametrize("inject", [exact(), propagated(), empirical()], ids=str)
def test_refuses_a_missing_target(inject):
    with pytest.raises(ValueError, match="the target.*is missing"):
        inject.vectors(randn(3, C), mixing)


def test_refuses_a_size_of_chunks():
    with pytest.raises(ValueError, match="size must be at least 1"):
        exact().chunks(randn(3, 1), nn.MSELoss(), size=0)
