"""Injected vectors: expectations, scale, independence, randomness; what they are of all losses: injection_pairs."""

import copy
import math
import pickle

import pytest
import torch
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
    PLACES,
    WEIGHT,
    C,
    classes,
    hessian,
    mixing,
    randn,
    repeated,
    second_moment,
    source,
    within_five_errors,
)

pytestmark = pytest.mark.fast

ALL = [exact(), sampled(2), propagated(2), isotropic(2), empirical()]


def check_expectation(inject, loss, output, target, expected, n=0, scale=1.0):
    """Many copies of sample n, which are independent of each other, have on average the matrix expected."""
    given = None if target is None else repeated(target, n)
    vectors = inject.vectors(repeated(output, n), loss, given, generator=source(11)) * scale
    within_five_errors(second_moment(vectors), expected)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(reduction="sum")])
def test_empirical_is_the_gradient_of_the_sample_alone(loss):
    """With its sign, which no matrix shows."""
    output = randn(3, C, PLACES)
    y = classes(output)
    y[0] = -100  # ignored
    got = empirical().vectors(output, loss, y)
    for n in range(1, 3):
        point = output[n : n + 1].clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(point, y[n : n + 1]), point)
        torch.testing.assert_close(got[:, n], want, rtol=1e-12, atol=1e-12)
    assert not got[:, 0].any()


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


@pytest.mark.parametrize("make", [sampled, propagated, isotropic])
def test_k_vectors_have_the_expectation_of_one_and_a_wrong_scale_is_seen(make):
    output, loss = randn(1, C), nn.CrossEntropyLoss()
    expected = hessian(loss, output, classes(output), 0) if make is not isotropic else torch.eye(C).double()
    for k in (1, 2) if make is isotropic else (1, 3, 7):
        assert make(k).vectors(output, loss).shape == (k, 1, C)
        check_expectation(make(k), loss, output, None, expected)
    for wrong in (1 / math.sqrt(2), math.sqrt(2), 0.9):  # 1/k, not scaled at all, a little
        with pytest.raises(AssertionError):
            check_expectation(make(2), loss, output, None, expected, scale=wrong)


@pytest.mark.parametrize("k", [C, 7])
def test_isotropic_with_a_vector_for_every_entry_is_exact(k):
    """The signs make samples independent that meet, as in a batch norm."""
    output = repeated(randn(1, C), 0)
    vectors = isotropic(k).vectors(output, generator=source(5))
    assert vectors.shape == (C, *output.shape)
    assert torch.equal(torch.einsum("kni,knj->nij", vectors, vectors), torch.eye(C).double().expand(MANY, C, C))
    within_five_errors(torch.einsum("kni,knj->nij", vectors[:, ::2], vectors[:, 1::2]), torch.zeros(C, C).double())
    assert not torch.equal(vectors, isotropic(k).vectors(output, generator=source(6)))


@pytest.mark.parametrize("inject", [sampled(2), propagated(2), isotropic(2)], ids=str)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.PoissonNLLLoss()])
def test_samples_and_vectors_are_independent(inject, loss):
    vectors = inject.vectors(repeated(randn(1, C), 0), loss, generator=source(5)) * math.sqrt(2)
    zero = torch.zeros(C, C, dtype=torch.float64)
    first, second = vectors
    within_five_errors(torch.einsum("ni,nj->nij", first[::2], first[1::2]), zero)
    within_five_errors(torch.einsum("ni,nj->nij", first, second), zero)
    with pytest.raises(AssertionError):
        within_five_errors(torch.einsum("ni,nj->nij", first, first), zero)


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
    state, vectors = torch.get_rng_state(), inject.vectors(output, loss, y)
    ((left, _),) = inject.pairs(output, loss, y, count=3)
    product = inject.product(output, loss, y, count=3)(vectors)
    assert vectors.shape[1:] == output.shape and torch.equal(state, torch.get_rng_state())
    for found in (vectors, left, product):
        assert found.dtype == dtype and not found.requires_grad and found.isfinite().all()
    assert output.requires_grad and output.grad is None and output.grad_fn is kept[1]
    assert torch.equal(output, kept[0]) and torch.equal(loss.weight, kept[2]) and loss.reduction == "mean"
    with torch.no_grad():
        assert torch.equal(inject.vectors(output, loss, y), vectors)


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


@pytest.mark.parametrize("inject", ALL, ids=str)
def test_refusals(inject):
    output = randn(3, C)
    wrong = torch.ones(3, C, dtype=torch.long), torch.tensor(1.0), torch.zeros(0, C), torch.zeros(3, 0), "logits"
    calls = [(lambda given=given: inject.vectors(given, nn.MSELoss(), given), "output must") for given in wrong]
    calls += [(lambda: inject.vectors(output, nn.MSELoss(reduction="none"), output), "reduction='none'")]
    calls += [(lambda: inject.chunks(output, nn.MSELoss(), size=0), "size: expected a whole number of at least 1")]
    if inject in (exact(), propagated(2), empirical()):
        calls += [(lambda: inject.vectors(output, mixing), "the target.*is missing")]
    if inject != isotropic(2):
        calls += [(lambda: inject.vectors(output), r"needs the loss.*KFAC\(model, loss=")]
    if hasattr(inject, "k"):
        calls += [(lambda k=k: type(inject)(k), "k must be an integer") for k in (0, -1, 1.5)]
    for call, text in calls:
        with pytest.raises(ValueError, match=text):
            call()


def test_isotropic_ignores_what_the_loss_ignores():
    vectors = isotropic().vectors(randn(1, C, PLACES), nn.CrossEntropyLoss(), torch.tensor([[-100, 1]]))
    assert vectors[..., 0].eq(0).all() and vectors[..., 1].ne(0).all()


LOGITS = [[0.0, 0, 0], [40, 0, -40], [-40, 0, 40], [300, -300, -300], [-300, 300, -300], [1, -90, -90], [-90, -95, 1]]


@pytest.mark.parametrize("logits", LOGITS, ids=str)
def test_cross_entropy_keeps_all_digits(logits):
    """In single precision, where one class is nearly certain and others have vanished, too."""
    output, loss = torch.tensor([logits], dtype=torch.float32), nn.CrossEntropyLoss()
    p = output.double().softmax(1)[0]
    want = -p[:, None] * p
    for k in range(3):
        want[k, k] = p[k] * p[torch.arange(3) != k].sum()  # 1 - p[k] may have no digits left
    (pair,) = exact().pairs(output, loss, count=1)
    assert len(pair[0]) == 2
    found = torch.einsum("kni,knj->ij", pair[0].double(), pair[0].double())
    product = exact().product(output, loss, count=1)(torch.eye(3)[:, None])[:, 0].double()
    diagonal = exact().known_diagonal(output, loss, count=1)[0].double()
    allowed = 1e-5 * want.diagonal().sqrt()[:, None] * want.diagonal().sqrt() + 1e-37
    assert ((found - want).abs() <= allowed).all()
    assert ((product - want).abs() <= allowed).all()
    assert ((diagonal - want.diagonal()).abs() <= allowed.diagonal()).all()


@pytest.mark.parametrize("inject", [exact(), sampled(), propagated()], ids=str)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MSELoss()])
def test_many_classes_stream(inject, loss):
    """50,000 classes at 3 places: all of the root would be 180 GB, a few of its columns are a few MB."""
    output = randn(3, 50_000).float().log_softmax(1)
    left, right = next(iter(inject.pairs(output, loss, count=1, size=4)))
    assert left.shape == (inject.number(output, 1) if inject != exact() else 4, 3, 50_000) and right is None
    z = randn(2, 3, 50_000).float()
    p = output.exp()
    got = exact().product(output, loss, count=1)(z)
    want = {"CrossEntropyLoss": p * (z - (p * z).sum(2, keepdim=True)) / 3, "NLLLoss": p * z / 3, "MSELoss": z / 75_000}
    torch.testing.assert_close(got, want[type(loss).__name__])
