"""What the pictures show are the numbers of the matrices; they draw where they are told to and change nothing else."""

import math
from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from torch import nn

from curvature import ekfac, fisher, fisher_blocks, fisher_diagonal, kfac, plots
from curvature.operators import BlockDiagonal, Dense, Diagonal, Space
from curvature.operators.matrix_free import MatrixFree
from curvature.plots.figures import MAX_GROUPS
from support.cases.case import seeded
from support.pictures import assert_refused

LOSS = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def problem(device="cpu", model=None, shape=(3,), classes=2):
    with seeded(0):
        model = model or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        x, y = torch.randn(12, *shape), torch.randint(classes, (12,))
    return model.to(device), LOSS, (x.to(device), y.to(device))


def of_values(values, name="a"):
    """A dense matrix with these eigenvalues."""
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(1)).double()).Q
    space = Space((name,), ((len(values),),), torch.float64, torch.device("cpu"))
    return Dense(space, Q * torch.tensor(values, dtype=torch.float64) @ Q.T)


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def array_of(ax):
    (image,) = ax.images
    return np.asarray(image.get_array())


# Each draws what a builder returns for these arguments, into `ax`; and the shape of the axes that it returns.
PICTURES = {
    "matrix": (lambda args, ax=None: plots.matrix(fisher(*args), ax), ()),
    "factors": (lambda args, ax=None: plots.factors(kfac(*args), ax=ax), (2, 2)),
    "spectra": (lambda args, ax=None: plots.spectra(ekfac(*args), ax), ()),
    "spectra of a diagonal": (lambda args, ax=None: plots.spectra(fisher_diagonal(*args), ax), ()),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.filterwarnings("error")
def test_a_new_figure(name, device):
    draw, shape = PICTURES[name]
    settings = dict(matplotlib.rcParams)
    axes = draw(problem(device))
    assert np.shape(axes) == shape and (shape or isinstance(axes, Axes))
    (number,) = plt.get_fignums()
    flat = list(np.asarray(axes, dtype=object).flat)
    assert {ax.figure for ax in flat} == {plt.figure(number)}
    assert all(ax.get_xlabel() for ax in flat) and flat[0].get_ylabel()
    assert all(ax.images or ax.lines for ax in flat)
    plt.figure(number).draw_without_rendering()
    assert dict(matplotlib.rcParams) == settings


@pytest.mark.parametrize(("name", "nested"), [*((name, False) for name in PICTURES), ("factors", True)])
def test_axes_that_are_given(name, nested):
    draw, shape = PICTURES[name]
    figure = plt.figure(layout="constrained")
    parent = figure.subfigures(1, 2)[0] if nested else figure
    given = parent.subplots(1, math.prod(shape), squeeze=False)[0]
    other = plt.figure().subplots()  # stays the current one
    axes = draw(problem(), given if shape else given[0])
    assert list(np.asarray(axes, dtype=object).flat) == list(given)
    assert all(ax.images or ax.lines for ax in given)
    assert len(plt.get_fignums()) == 2
    assert plt.gcf() is other.figure and plt.gca() is other and not other.has_data()


@pytest.mark.parametrize("build", (fisher, fisher_blocks, kfac))
def test_matrix_shows_the_entries(build):
    M = build(*problem())
    ax = plots.matrix(M)
    np.testing.assert_array_equal(array_of(ax), M.to_dense().double().numpy())
    norm = ax.images[0].norm
    assert norm.vmax == -norm.vmin == M.to_dense().abs().max().item()
    assert ax.images[0].colorbar.ax.get_ylabel() == "entry [loss / parameter²]"
    # 4 * 3 + 4 rows of layer 0, then 2 * 4 + 2 of layer 2.
    assert {text.get_text(): y for text, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)} == {
        "0": 7.5,
        "2": 20.5,
    }
    assert [line.get_ydata()[0] for line in ax.lines][::2] == [15.5]


def test_matrix_of_one_layer_names_its_parameters():
    ax = plots.matrix(kfac(*problem()).blocks["2.weight"])
    assert {text.get_text() for text in ax.get_xticklabels()} == {"2.weight", "2.bias"}
    assert ax.get_xlabel() == ax.get_ylabel() == "parameter"


def test_matrix_of_zeros_is_white():
    image = plots.matrix(torch.zeros(3, 3)).images[0]
    assert image.norm(0.0) == 0.5


def test_factors():
    K = kfac(*problem())
    for row, (name, block) in zip(plots.factors(K), K.blocks.items(), strict=True):
        for ax, factor, title in zip(row, (block.A, block.B), "AB", strict=True):
            np.testing.assert_array_equal(array_of(ax), factor[0].double().numpy())
            assert ax.get_title() == f"{name.removesuffix('.weight')}: {title}"
            assert ax.images[0].norm.vmax == -ax.images[0].norm.vmin == factor.abs().max().item()
        units = [ax.images[0].colorbar.ax.get_ylabel() for ax in row]
        assert units == ["entry [activation²]", "entry [loss / output²]"]


@pytest.mark.parametrize(
    ("layers", "shape", "titles"),
    [
        ((nn.Conv1d(4, 2, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)), (4, 4), ""),
        ((nn.LayerNorm(50), nn.Linear(50, 2)), (50,), f", first {MAX_GROUPS} of 50 groups"),
    ],
)
def test_factors_of_groups_lie_on_the_diagonal(layers, shape, titles):
    """Of many groups the first."""
    K = kfac(*problem(model=nn.Sequential(*layers), shape=shape))
    for ax, factor, title in zip(plots.factors(K, "0")[0], (K["0"].A, K["0"].B), "AB", strict=True):
        np.testing.assert_array_equal(array_of(ax), torch.block_diag(*factor[:MAX_GROUPS].double()).numpy())
        assert ax.get_title() == f"0: {title}{titles}"


def test_a_diagonal_factor_is_a_curve():
    model, loss, (_, y) = problem(model=nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)))
    K = kfac(model, loss, (torch.arange(24).reshape(12, 2) % 5, y))
    left = plots.factors(K, "0")[0, 0]
    np.testing.assert_array_equal(left.lines[0].get_ydata(), K.blocks["0.weight"].A[0].double().numpy())
    assert left.get_ylabel() == "diagonal entry [activation²]"


def test_factors_in_an_eigenbasis():
    block = (E := ekfac(*problem())).blocks["0.weight"]
    A, B = map(array_of, plots.factors(E, "0")[0])
    w = (o := len(B)) * (len(A) - 1)  # weights, before the biases
    order = np.c_[np.arange(w).reshape(o, -1), w + np.arange(o)].flatten()
    blocks = block.to_dense().double().numpy()[np.ix_(order, order)].reshape(o, len(A), o, len(A))
    np.testing.assert_allclose(A, np.einsum("aiaj->ij", blocks) / o, atol=1e-5 * A.max())
    np.testing.assert_allclose(B, np.einsum("aibi->ab", blocks) * o / block.trace(), atol=1e-5 * B.max())


def test_layers_without_factors_are_left_out():
    assert [ax.get_title() for ax in plots.factors(kfac(*problem(), structure={"2": "dense"}))[0]] == ["0: A", "0: B"]


@pytest.mark.parametrize("build", (fisher_blocks, kfac, ekfac))
def test_spectra_of_layers(build):
    M = build(*problem())
    ax = plots.spectra(M)
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_legend().get_title().get_text() == "layer"
    assert [label.split()[0] for label in legend_of(ax)] == ["0", "2"]
    for line, block in zip(ax.lines, M.blocks.values(), strict=True):
        expected = block.eigenvalues().flip(0)
        shown = line.get_ydata()
        assert len(shown) > 2 and len(shown) + int((expected < 1e-6 * expected[0]).sum()) >= len(expected)
        np.testing.assert_array_equal(shown, expected[: len(shown)].double().numpy())
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, len(shown) + 1))


def test_negative_eigenvalues_are_triangles_and_zeros_are_left_out():
    ax = plots.spectra({"M": of_values([3.0, 0.0, -0.5, 2.0, 0.0, -0.25])})
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1, 3.0], [2, 2.0]])
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[5, 0.25], [6, 0.5]])
    assert legend_of(ax) == ["M", "M, negative"] and ax.lines[0].get_color() == ax.lines[1].get_color()


def test_spectra_of_a_small_layer_do_not_drown_in_the_rounding_of_a_large_one():
    parts = of_values([1e8, 2e8]), of_values([1e-12, 2e-12], "b")
    space = Space(("a", "b"), ((2,), (2,)), torch.float64, torch.device("cpu"))
    ax = plots.spectra({"both": BlockDiagonal(space, parts)})
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [2e8, 1e8, 2e-12, 1e-12], rtol=1e-6)


def test_spectra_take_a_diagonal_and_eigenvalues_as_exact():
    found = fisher_diagonal(*problem())
    ax = plots.spectra(found)
    assert legend_of(ax) == list(found)
    for line, values in zip(ax.lines, found.values(), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values.flatten().sort(descending=True).values.double())
    exact = torch.tensor([1e-30, 1.0], dtype=torch.float64)
    np.testing.assert_array_equal(plots.spectra(exact).lines[0].get_ydata(), [1.0, 1e-30])
    space = Space(("a",), ((2,),), torch.float64, torch.device("cpu"))
    np.testing.assert_array_equal(plots.spectra(Diagonal(space, exact)).lines[0].get_ydata(), [1.0, 1e-30])


def big():
    space = Space(("a",), ((40_000,),), torch.float32, torch.device("cpu"))
    return MatrixFree(space, lambda V: V)


M = of_values([1.0, 2.0])
REFUSED = {
    "a list as a matrix": (lambda: plots.matrix([[1.0]]), TypeError, "M: expected an operator .* found list"),
    "a vector as a matrix": (lambda: plots.matrix(torch.ones(3)), ValueError, "expected a matrix"),
    "entries not finite": (lambda: plots.matrix(torch.full((2, 2), math.nan)), ValueError, "4 of 4 entries"),
    "a matrix too large": (lambda: plots.matrix(big()), ValueError, "over the limit"),
    "spectra too large": (lambda: plots.spectra(big()), ValueError, "spectral_density"),
    "a figure as axes": (lambda: plots.matrix(M, plt.figure()), TypeError, "matplotlib Axes, found Figure"),
    "an array as axes": (lambda: plots.spectra(M, plt.subplots(2)[1]), ValueError, "1 axes, found 2"),
    "too few axes": (lambda: plots.factors(kfac(*problem()), ax=plt.subplots(3)[1]), ValueError, "expected 4 axes"),
    "no axes": (lambda: plots.factors(kfac(*problem()), "0", [1, 2]), TypeError, "expected matplotlib Axes, found int"),
    "eigenvalues not finite": (lambda: plots.spectra(torch.tensor([1.0, math.nan])), ValueError, "found 1 of 2"),
    "no eigenvalues": (lambda: plots.spectra(torch.zeros(0)), ValueError, "found 0 of 0"),
    "no such layer": (lambda: plots.factors(kfac(*problem()), "1"), ValueError, "none is called '1'; there are 0, 2"),
    "no factors": (lambda: plots.factors(fisher_blocks(*problem()), "0"), ValueError, "0 .Dense."),
    "factors of a dict": (lambda: plots.factors({}), TypeError, "found dict"),
    "a matrix as eigenvalues": (lambda: plots.spectra(M.to_dense()), ValueError, "eigenvalues"),
    "matrices as diagonals": (lambda: plots.spectra({"M": M.to_dense()}), ValueError, "M: .* symmetric matrix"),
    "spectra of nothing": (lambda: plots.spectra({}), ValueError, "empty"),
    "spectra of a number": (lambda: plots.spectra({"M": 3}), TypeError, "M: .* found int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    assert_refused(*REFUSED[case], own_figure="axes" in case)
