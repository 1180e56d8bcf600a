"""Gradients, norms, Gram matrices and sums of products of every kind of term, against plain sums over places."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.terms import (
    Convolution,
    DenseGradients,
    ElementwiseProduct,
    IndexedRows,
    OuterProduct,
    RowSlice,
    Term,
    TransposedConvolution,
    contractions,
    convolution,
    joined,
    unfold,
)
from support.cases.case import seeded
from support.combinations import member

pytestmark = pytest.mark.fast

N = 5
Sizes = tuple[int, ...]
Built = tuple[Term, Tensor]  # a term, and the per-sample gradients that it stands for


def gram(terms: Sequence[Term]) -> Tensor:
    return contractions.settle([contractions.tentative_gram(terms)])[0]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(places: int, outputs: int, inputs: int) -> Built:
    a, b = draw(N, places, 1, inputs), draw(N, places, 1, outputs)
    rows = torch.zeros(N, outputs, inputs, dtype=torch.float64)
    for n in range(N):
        for t in range(places):
            rows[n] += torch.outer(b[n, t, 0], a[n, t, 0])
    return OuterProduct(a, b, (outputs, inputs)), rows


def transposed(places: int, outputs: int, inputs: int) -> Built:
    """Of a parameter (outputs, inputs) that the layer reads as its transpose."""
    term, rows = outer(places, inputs, outputs)
    assert isinstance(term, OuterProduct)
    return term.transpose(), rows.mT


def permuted(places: int, *sizes: int) -> Built:
    """A three-axis parameter (i, g, o) of a contraction whose view is (g, o, i)."""
    i, g, o = sizes
    a, b = draw(N, places, g, i), draw(N, places, g, o)
    return OuterProduct(a, b, sizes, (g, o, i), (2, 0, 1)), torch.einsum("ntgo,ntgi->nigo", b, a)


def grouped(places: int, groups: int, outputs: int, *inputs: int) -> Built:
    """As a grouped convolution: the parameter is (groups * outputs, *inputs)."""
    a, b = draw(N, places, groups, torch.Size(inputs).numel()), draw(N, places, groups, outputs)
    parts = [torch.einsum("nto,nti->noi", b[:, :, g], a[:, :, g]) for g in range(groups)]
    shape = (groups * outputs, *inputs)
    return OuterProduct(a, b, shape), torch.cat(parts, 1).reshape(N, *shape)


def convolved(
    rows: int, weight: tuple[int, ...], size: tuple[int, ...], stride: int, dilation: int, groups: int
) -> Built:
    """`rows` images a sample; the oracle is autograd of torch's own convolution, one sample at a time."""
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(size)]
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    x, w = draw(N, rows, weight[1] * groups, *size), draw(*weight).requires_grad_()
    b = torch.randn_like(torch.stack([convolve(part, w, **options) for part in x])).detach()
    found = [torch.autograd.grad(convolve(x[n], w, **options), w, b[n])[0] for n in range(N)]
    spread = ((stride,) * len(size), (dilation,) * len(size))
    return Convolution(x, b, weight, *spread, groups), torch.stack(found)


def table(places: int, rows: int, width: int) -> Built:
    index, values = torch.randint(rows, (N, places)), draw(N, places, width)
    out = torch.zeros(N, rows, width, dtype=torch.float64)
    for n in range(N):
        for t in range(places):
            out[n, index[n, t]] += values[n, t]
    return IndexedRows(index, values, (rows, width)), out


def convolved_back(weight: tuple[int, ...], size: tuple[int, ...], stride: int, padding: int) -> Built:
    """A transposed convolution."""
    x, w = draw(N, 1, weight[0], *size), draw(*weight).requires_grad_()
    options = {"stride": stride, "padding": padding}
    b = torch.randn_like(torch.stack([F.conv_transpose2d(part, w, **options) for part in x])).detach()
    found = [torch.autograd.grad(F.conv_transpose2d(x[n], w, **options), w, b[n])[0] for n in range(N)]
    direct = Convolution(b, x, weight, (stride,) * 2, (1, 1), 1, (padding,) * 4)
    return TransposedConvolution(direct), torch.stack(found)


def entrywise(places: int, features: int) -> Built:
    a, b = draw(N, places, features), draw(N, places, features)
    rows = (a * b).sum(1)
    return ElementwiseProduct(DenseGradients(rows), lambda: a, b), rows


def part(start: int, rows: int, inner: Built) -> Built:
    """Some rows of a parameter of `rows`."""
    out = inner[1].new_zeros(N, rows, *inner[1].shape[2:])
    out[:, start : start + inner[1].shape[1]] = inner[1]
    return RowSlice(inner[0], start, tuple(out.shape[1:])), out


def outright(*shape: int) -> Built:
    values = draw(N, *shape)
    return DenseGradients(values), values


# Those whose name ends in "small" have few places, where inner products are cheaper; "large" the other way round.
FAMILIES: dict[str, Callable[[], list[Built]]] = {
    "outer_one_place": lambda: [outer(1, 3, 4)],
    "outer_small": lambda: [outer(2, 30, 40)],
    "outer_large": lambda: [outer(50, 2, 3)],
    "grouped_one_place": lambda: [grouped(1, 3, 2, 4)],
    "grouped_small": lambda: [grouped(2, 2, 20, 30)],
    "grouped_large": lambda: [grouped(40, 2, 3, 2, 2)],
    "depthwise": lambda: [grouped(9, 4, 1, 3)],
    "convolved": lambda: [convolved(1, (4, 2, 3), (7,), 2, 1, 1)],
    "convolved_small": lambda: [convolved(1, (12, 9, 3, 3), (4, 3), 1, 1, 1)],
    "convolved_large": lambda: [convolved(1, (2, 1, 2, 2), (8, 8), 1, 1, 1)],
    "convolved_groups": lambda: [convolved(2, (4, 2, 2, 3), (6, 7), 2, 1, 2)],
    "convolved_few_places": lambda: [convolved(2, (16, 2, 2, 3), (2, 4), 1, 1, 2)],
    "convolved_dilation": lambda: [convolved(3, (2, 2, 2, 2), (5, 6), 1, 2, 1)],
    "convolved_volume": lambda: [convolved(1, (2, 1, 2, 1, 2), (3, 4, 3), 1, 1, 1)],
    "convolved_twice": lambda: [convolved(1, (6, 5, 2), (5,), 1, 1, 1), convolved(2, (6, 5, 2), (6,), 2, 1, 1)],
    "rows_one_place": lambda: [table(1, 4, 3)],
    "rows_small": lambda: [table(3, 50, 40)],
    "rows_large": lambda: [table(60, 3, 2)],
    "dense": lambda: [outright(2, 3)],
    "dense_scalar": lambda: [outright()],
    "transposed_small": lambda: [transposed(2, 30, 40)],
    "transposed_large": lambda: [transposed(50, 4, 3)],
    "permuted_one_place": lambda: [permuted(1, 4, 2, 3)],
    "permuted": lambda: [permuted(3, 4, 2, 3)],
    "twice_small": lambda: [outer(2, 60, 80), outer(1, 60, 80)],
    "twice_large": lambda: [outer(20, 4, 3), outer(30, 4, 3)],
    "steps": lambda: [outer(1, 4, 3) for _ in range(6)],
    "tied_small": lambda: [table(2, 100, 60), outer(1, 100, 60)],
    "tied_outer_first": lambda: [outer(2, 50, 40), table(3, 50, 40)],
    "tied_large": lambda: [table(50, 4, 3), outer(40, 4, 3)],
    "tied_transposed": lambda: [table(3, 30, 20), transposed(3, 30, 20)],
    "tied_twice": lambda: [table(2, 50, 40), outer(3, 50, 40), table(4, 50, 40)],
    "autoencoder": lambda: [outer(2, 6, 6), transposed(2, 6, 6)],
    "mixed_with_dense": lambda: [outer(2, 5, 4), outright(5, 4), table(3, 5, 4)],
    "convolved_back": lambda: [convolved_back((3, 2, 2, 3), (2, 3), 2, 1)],
    "convolved_back_small": lambda: [convolved_back((16, 24, 3, 3), (2, 1), 1, 0)],
    "entrywise": lambda: [entrywise(4, 3), outright(3)],
    "parts_small": lambda: [
        part(0, 140, outer(2, 60, 80)),
        part(60, 140, outer(1, 80, 80)),
        part(0, 140, outer(1, 60, 80)),
    ],
    "parts_large": lambda: [part(4, 7, outer(50, 3, 4)), part(1, 7, outer(40, 3, 4))],
    "parts_that_overlap": lambda: [part(0, 5, outer(2, 3, 4)), part(2, 5, outer(1, 3, 4))],
    "parts_beside_the_whole": lambda: [part(0, 5, outer(2, 3, 4)), outer(1, 5, 4), part(3, 5, outright(2, 4))],
    "groups_beside_plain": lambda: [grouped(2, 2, 2, 3), outer(2, 4, 3)],
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def built(family: str, device: str) -> tuple[list[Term], Tensor]:
    """The terms, and the sum of what they stand for."""
    with seeded(3):
        parts = FAMILIES[family]()
    total = torch.stack([rows for _, rows in parts]).sum(0)
    return [moved(term, device) for term, _ in parts], total.to(device)


def moved(term: Term, device: str) -> Term:
    if isinstance(term, RowSlice):
        return replace(term, term=moved(term.term, device))
    fields = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(term).items()}
    if isinstance(term, TransposedConvolution | ElementwiseProduct):
        fields["direct"] = moved(term.direct, device)
    return type(term)(**fields)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())


@each_family
def test_gradients(family: str, device, monkeypatch):
    """Also from patches of one sample at a time."""
    terms, rows = built(family, device)
    assert_equal(torch.stack([term.gradients() for term in terms]).sum(0), rows)
    assert all(tuple(term.shape) == tuple(rows.shape[1:]) for term in terms)
    for elements in (convolution.CACHED_ELEMENTS, 1):
        monkeypatch.setattr(convolution, "CACHED_ELEMENTS", elements)
        assert_equal(contractions.gradients(terms), rows)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("size", [(9,), (8, 9), (7, 8, 6)])
def test_depthwise_gradients_in_single_precision(size: Sizes, dilation: int, stride: int):
    """These are convolutions with the backprops. The stride leaves out some of the input."""
    with seeded(3):
        term, rows = convolved(2, (3, 1, *(3, 2, 2)[: len(size)]), size, stride, dilation, 3)
    assert isinstance(term, Convolution)
    padded = replace(term, source=term.source[(..., *[slice(1, -1)] * len(size))], padding=(1, 1) * len(size))
    for one, expected in ((term, rows), (padded, padded.gradients())):
        found = replace(one, source=one.source.float(), b=one.b.float()).gradients()
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


@each_family
def test_norms_and_gram(family: str, device, monkeypatch):
    terms, rows = built(family, device)
    flat = rows.reshape(N, -1)
    for chunk in (1, 40, 1 << 24):
        with member(f"norms in chunks of {chunk}"), monkeypatch.context() as patch:
            patch.setattr(contractions, "CHUNK_ELEMENTS", chunk)
            assert_equal(contractions.norms_squared(terms), flat.square().sum(1))
        with member(f"Gram matrix in chunks of {chunk}"), monkeypatch.context() as patch:
            patch.setattr(contractions, "CACHED_CHUNK_ELEMENTS", chunk)
            assert_equal(gram(terms), flat @ flat.T)
    with member("inner products of two sets of samples"):
        left, right = ([term.samples(part) for term in terms] for part in (slice(0, 3), slice(3, N)))
        assert_equal(contractions.cross_gram(left, right), flat[:3] @ flat[3:].T)


@each_family
def test_sums_products_and_parts(family: str, device):
    terms, rows = built(family, device)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64, device=device)
    with member("weighted sum"):
        assert_equal(contractions.weighted_sum(terms, weights), torch.einsum("n,n...->...", weights, rows))
    with member("samples"):
        assert_equal(contractions.gradients([term.samples(slice(1, 4)) for term in terms]), rows[1:4])
    with seeded(4):
        vector = torch.randn(rows.shape[1:], dtype=torch.float64).to(device)
    strided = vector.mT.contiguous().mT if vector.ndim > 1 else vector.repeat_interleave(2)[::2].view(vector.shape)
    for v in (vector, strided):
        with member(f"inner products with a vector of strides {v.stride()}"):
            assert_equal(contractions.inner_products(terms, v), rows.reshape(N, -1) @ v.flatten())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.endswith(("small", "large"))])
@pytest.mark.parametrize("function", [contractions.norms_squared, gram])
def test_gradients_are_built_only_where_that_is_cheaper(family: str, function, monkeypatch):
    counted = []
    build = contractions.gradients
    monkeypatch.setattr(contractions, "gradients", lambda terms: counted.append(1) or build(terms))
    function(built(family, "cpu")[0])
    assert bool(counted) == family.endswith("large")


def test_one_place_and_one_term_never_build(monkeypatch):
    monkeypatch.setattr(contractions, "gradients", None)
    for family in ("outer_one_place", "grouped_one_place", "rows_one_place"):
        terms, _ = built(family, "cpu")
        contractions.norms_squared(terms)


def test_built_gradients_are_bounded_in_memory(monkeypatch):
    """No more than CHUNK elements of per-sample gradients at once."""
    sizes = []
    build = contractions.gradients
    monkeypatch.setattr(contractions, "CHUNK_ELEMENTS", 2 * 2 * 3)
    monkeypatch.setattr(contractions, "gradients", lambda terms: sizes.append(build(terms)) or sizes[-1])
    contractions.norms_squared(built("outer_large", "cpu")[0])
    assert [g.numel() for g in sizes] == [12, 12, 6]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("convolved") and "back" not in name])
def test_unfolded_convolutions_are_the_same(family: str, device):
    """And inner products of patches without patches are those of the patches."""
    terms, rows = built(family, device)
    outers = [unfold(term) for term in terms]
    assert all(isinstance(term, OuterProduct) for term in outers)
    assert_equal(contractions.gradients(outers), rows)
    for term, outer in zip(terms, outers, strict=True):
        assert isinstance(term, Convolution)
        a, b = (x.transpose(1, 2) for x in (outer.a, term.backprops()))
        for left in (term._patch_gram(), term.grams()[0]):
            assert_equal(left, a @ a.mT)
        assert_equal(term.grams()[1], b @ b.mT)


def cancelling(kind: str) -> tuple[list[Term], Tensor]:
    """Terms in single precision, of which the places of the last samples nearly cancel, and gradients in double."""
    torch.manual_seed(0)
    n, inputs, outputs = 12, 40, 30
    a, b = torch.randn(n, 1, 1, inputs).repeat(1, 2, 1, 1), torch.randn(n, 1, 1, outputs).repeat(1, 2, 1, 1)
    b[6:, 1] *= -1
    a[6:, 1] += 1e-4 * torch.randn(n - 6, 1, inputs)
    dense = torch.einsum("ntgo,ntgi->noi", b.double(), a.double())
    if kind == "places":
        return [OuterProduct(a, b, (outputs, inputs))], dense
    index, values = torch.arange(n)[:, None] % outputs, torch.zeros(n, 1, inputs)  # another read
    return [OuterProduct(a, b, (outputs, inputs)), IndexedRows(index, values, (outputs, inputs))], dense


@pytest.mark.parametrize("kind", ["places", "terms"])
def test_places_that_cancel(kind: str) -> None:
    terms, rows = cancelling(kind)
    assert contractions.norms_cheaper_by_pairs(terms)  # else nothing cancels
    flat = rows.flatten(1)
    norms = flat.norm(dim=1)
    found = contractions.norms_squared(terms).double().sqrt()
    assert ((found - norms).abs() <= 3e-4 * norms).all()
    scale = norms[:, None] * norms
    assert ((gram(terms).double() - flat @ flat.T).abs() <= 3e-4 * scale).all()
    halves = [[term.samples(part) for term in terms] for part in (slice(0, 8), slice(8, None))]
    assert ((contractions.cross_gram(*halves).double() - (flat @ flat.T)[:8, 8:]).abs() <= 3e-4 * scale[:8, 8:]).all()


def test_tensors_are_joined_without_a_copy_where_they_follow_each_other() -> None:
    whole = draw(4, 2, 3)
    assert joined(whole.unbind()).data_ptr() == whole.data_ptr()
    for parts in (whole.unbind()[::-1], whole.unbind()[::2], whole.mT.unbind(), [whole[0], whole[2], whole[1]]):
        torch.testing.assert_close(joined(parts), torch.cat(list(parts)), rtol=0, atol=0)
