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

from curvature import ekfac, fisher, fisher_blocks, fisher_diagonal, kfac, load, plots, spectral_density
from curvature.operators import BlockDiagonal, Dense, Diagonal, Space
from curvature.operators.matrix_free import MatrixFree
from curvature.plots.heatmaps import MAX_GROUPS, MAX_LAYERS, MAX_POINTS
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
    "comparison": (lambda args, ax=None: plots.comparison(fisher_blocks(*args), kfac(*args), ax), (3,)),
    "spectra": (lambda args, ax=None: plots.spectra(ekfac(*args), ax), ()),
    "spectra of a diagonal": (lambda args, ax=None: plots.spectra(fisher_diagonal(*args), ax), ()),
    "spectral_density": (lambda args, ax=None: plots.spectral_density(fisher(*args), ax), ()),
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


@pytest.mark.parametrize(("name", "nested"), [*((name, False) for name in PICTURES), ("comparison", True)])
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


def test_a_large_matrix_is_shown_by_means():
    entries = torch.randn(MAX_POINTS + 500, 3, generator=torch.Generator().manual_seed(0)).double()
    ax = plots.matrix(entries)
    shown = array_of(ax)
    assert shown.shape == (MAX_POINTS, 3)
    # Every fourth point holds two rows, the others one.
    np.testing.assert_allclose(shown[:4], [entries[0], entries[1], entries[2], entries[3:5].mean(0)])
    assert list(ax.images[0].get_extent()) == [-0.5, 2.5, MAX_POINTS + 499.5, -0.5]
    np.testing.assert_allclose(array_of(plots.matrix(entries.T)), shown.T)


def test_comparison_shows_both_and_their_difference():
    exact, approximation = fisher_blocks(*problem()).blocks["0.weight"], kfac(*problem()).blocks["0.weight"]
    axes = plots.comparison(exact, approximation)
    one, other = exact.to_dense().double(), approximation.to_dense().double()
    for ax, expected in zip(axes, (one, other, other - one), strict=True):
        np.testing.assert_array_equal(array_of(ax), expected.numpy())
        assert ax.images[0].norm.vmax == -ax.images[0].norm.vmin == max(one.abs().max(), other.abs().max())
    assert f"relative error {(other - one).norm() / one.norm():.3g}" in axes[2].get_title()


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
        ((nn.Conv1d(4, 2, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)), (4, 4), "2 groups"),
        ((nn.LayerNorm(50), nn.Linear(50, 2)), (50,), f"first {MAX_GROUPS} of 50 groups"),
    ],
)
def test_factors_of_groups_lie_on_the_diagonal(layers, shape, titles):
    """Of many groups the first."""
    K = kfac(*problem(model=nn.Sequential(*layers), shape=shape))
    for ax, factor, title in zip(plots.factors(K, "0")[0], (K["0"].A, K["0"].B), "AB", strict=True):
        np.testing.assert_array_equal(array_of(ax), torch.block_diag(*factor[:MAX_GROUPS].double()).numpy())
        assert ax.get_title() == f"0: {title}, {titles}"


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


def test_factors_that_are_mapped_from_a_file(tmp_path):
    K = kfac(*problem())
    K.save(tmp_path / "K.pt")
    shown = plots.factors(load(tmp_path / "K.pt", lazily=True))
    np.testing.assert_array_equal(array_of(shown[0, 0]), K["0"].A[0].double().numpy())


def test_layers_without_factors_are_named():
    figure = plots.factors(kfac(*problem(), structure={"2": "dense"}))[0, 0].figure
    assert figure.get_suptitle() == "without Kronecker factors: 2"


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


def test_spectra_count_what_a_log_axis_cannot_show():
    ax = plots.spectra({"M": of_values([3.0, 0.0, -0.5, 2.0, 0.0, -0.25])})
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [3.0, 2.0])
    assert legend_of(ax) == ["M (not shown: 2 zero, 2 negative down to -0.5)"]


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
    exact = torch.tensor([1e-30, 1.0, math.nan], dtype=torch.float64)
    ax = plots.spectra(exact)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [1.0, 1e-30])
    assert legend_of(ax) == ["eigenvalues (not shown: 1 not finite)"]
    space = Space(("a",), ((2,),), torch.float64, torch.device("cpu"))
    np.testing.assert_array_equal(plots.spectra(Diagonal(space, exact[:2])).lines[0].get_ydata(), [1.0, 1e-30])


@pytest.mark.filterwarnings("error")
def test_nothing_positive_draws_empty_axes():
    ax = plots.spectra({"M": of_values([-1.0, -2.0])})
    ax.figure.draw_without_rendering()
    assert legend_of(ax) == ["M (not shown: 2 negative down to -2)"]


def test_spectral_density():
    M = of_values(np.linspace(-1, 3, 40))
    grid, density = spectral_density(M)
    ax = plots.spectral_density({"M": M, "wide": spectral_density(M, width=1.0)})
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), grid)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), density)
    assert legend_of(ax) == ["M", "wide"]
    assert ax.get_xlabel() == "eigenvalue [loss / parameter²]"
    assert ax.get_ylabel() == "density of eigenvalues [parameter² / loss]"
    np.testing.assert_array_equal(plots.spectral_density((grid, density)).lines[0].get_ydata(), density)


def test_a_single_eigenvalue_shows_in_a_density():
    grid = np.linspace(0, 1, 201)
    peak = lambda at: np.exp(-0.5 * ((grid - at) / 0.01) ** 2)
    ax = plots.spectral_density((grid, peak(0.2) + 1e-7 * peak(0.7)))
    assert 1e-9 < ax.get_ylim()[0] < 1e-7 and 1 < ax.get_ylim()[1] < 10
    plots.spectral_density((grid, peak(0.5)), ax)  # a second one does not hide the first
    assert 1e-9 < ax.get_ylim()[0] < 1e-7
    assert len({line.get_color() for line in ax.lines}) == 2


def big():
    space = Space(("a",), ((40_000,),), torch.float32, torch.device("cpu"))
    return MatrixFree(space, lambda V: V)


deep = lambda: kfac(*problem(model=nn.Sequential(*(nn.Linear(2, 2) for _ in range(MAX_LAYERS + 1))), shape=(2,)))


M = of_values([1.0, 2.0])
REFUSED = {
    "a list as a matrix": (lambda: plots.matrix([[1.0]]), TypeError, "M: expected an operator .* found list"),
    "a vector as a matrix": (lambda: plots.matrix(torch.ones(3)), ValueError, "expected a matrix"),
    "entries not finite": (lambda: plots.matrix(torch.full((2, 2), math.nan)), ValueError, "4 of 4 entries"),
    "a matrix too large": (lambda: plots.matrix(big()), ValueError, "over the limit"),
    "spectra too large": (lambda: plots.spectra(big()), ValueError, "spectral_density"),
    "a figure as axes": (lambda: plots.matrix(M, plt.figure()), TypeError, "one matplotlib Axes, found Figure"),
    "an array as axes": (lambda: plots.spectra(M, plt.subplots(2)[1]), TypeError, "one matplotlib Axes"),
    "too few axes": (lambda: plots.comparison(M, M, plt.subplots(1, 2)[1]), ValueError, "expected 3 axes"),
    "no axes": (lambda: plots.comparison(M, M, [1, 2, 3]), TypeError, "expected matplotlib Axes, found int"),
    "axes apart": (lambda: plots.comparison(M, M, [plt.figure().subplots() for _ in "123"]), ValueError, "several"),
    "two shapes": (lambda: plots.comparison(M, torch.ones(3, 3)), ValueError, "one shape"),
    "other parameters": (lambda: plots.comparison(M, of_values([1.0, 2.0], "b")), ValueError, "same parameters"),
    "no such layer": (lambda: plots.factors(kfac(*problem()), "1"), ValueError, "none is called '1'; there are 0, 2"),
    "no factors": (lambda: plots.factors(fisher_blocks(*problem()), "0"), ValueError, "0 .Dense."),
    "factors of a dict": (lambda: plots.factors({}), TypeError, "found dict"),
    "too many layers": (lambda: plots.factors(deep()), ValueError, "choose with layer="),
    "a matrix as eigenvalues": (lambda: plots.spectra(M.to_dense()), ValueError, "eigenvalues"),
    "matrices as diagonals": (lambda: plots.spectra({"M": M.to_dense()}), ValueError, "M: .* symmetric matrix"),
    "spectra of nothing": (lambda: plots.spectra({}), ValueError, "empty"),
    "spectra of a number": (lambda: plots.spectra({"M": 3}), TypeError, "M: .* found int"),
    "half a density": (lambda: plots.spectral_density(torch.ones(3)), TypeError, "a pair"),
    "density first": (lambda: plots.spectral_density(spectral_density(M)[::-1]), ValueError, "order"),
    "a density that is negative": (lambda: plots.spectral_density(([0, 1], [1, -1])), ValueError, "from -1 to 1"),
    "density of two lengths": (lambda: plots.spectral_density(([0, 1], [1])), ValueError, "same length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    assert_refused(*REFUSED[case], own_figure="axes" in case)
