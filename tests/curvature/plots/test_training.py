"""The picture of a run shows the numbers of its history, and only what is known of it."""

import math
from collections import deque
from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from curvature import plots
from optimizers import KFAC
from support.pictures import assert_refused

LABELS = ["loss", "damping\n[loss / parameter²]", "step size", "reduction ratio", "time per step\n[ms]"]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    plt.close("all")


def history_of(count=12, scale=1.0):
    return [
        {
            "step": 5 + k,
            "seconds": scale * (0.002 + 0.001 * (k % 3)),
            "loss": scale * 2.0 * 0.9**k,
            "damping": scale * 0.1 * 0.8**k,
            "step_size": scale * (0.5 + 0.01 * k),
            "ratio": 0.1 * k,
            "confirmed": 0.9,
            "accepted": k not in (3, 7),
            "renewed": k % 4 == 0,
            "inverted": 2 if k == 8 else 0,
        }
        for k in range(count)
    ]


only = lambda key, values: [{"step": k, key: value} for k, value in enumerate(values)]


def legend_of(ax):
    found = ax.get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


shown = lambda ax, index=0: [np.asarray(values).tolist() for values in ax.lines[index].get_data()]


@pytest.mark.filterwarnings("error")
def test_every_panel_shows_its_numbers():
    history = history_of()
    settings = dict(matplotlib.rcParams)
    axes = plots.training(history)
    axes[0].figure.draw_without_rendering()
    assert dict(matplotlib.rcParams) == settings and len(plt.get_fignums()) == 1
    assert [ax.get_ylabel() for ax in axes] == LABELS
    steps = list(range(5, 17))
    for ax, key, factor in zip(
        axes, ("loss", "damping", "step_size", "ratio", "seconds"), (1, 1, 1, 1, 1e3), strict=True
    ):
        assert shown(ax) == [steps, [factor * entry[key] for entry in history]]
    assert [ax.get_yscale() for ax in axes] == ["log", "log", "log", "linear", "log"]
    assert [ax.get_xlabel() for ax in axes] == ["", "", "", "", "step"]
    assert len({ax.get_xlim() for ax in axes}) == 1 and axes[0].get_xlim()[0] < 5 < 16 < axes[0].get_xlim()[1]


def test_rejected_steps_are_marked_in_every_panel():
    axes = plots.training(history_of())
    for ax in axes:
        (lines,) = ax.collections
        assert [segment[:, 0].tolist() for segment in lines.get_segments()] == [[8, 8], [12, 12]]
        assert lines.get_transform().transform((8, 0.5))[1] == ax.transAxes.transform((0, 0.5))[1]
    assert legend_of(axes[0]) == ["2 steps rejected"]
    assert not any("rejected" in text for ax in axes[1:] for text in legend_of(ax))
    (ax,) = plots.training([{"loss": 2.0, "accepted": True}, {"loss": 1.0, "accepted": None}])
    assert not ax.collections and not legend_of(ax)


def test_many_rejected_steps_are_a_shade_that_the_legend_still_names():
    (ax,) = plots.training([{"loss": 1.0, "accepted": k % 2} for k in range(2000)])
    assert ax.collections[0].get_alpha() < 0.1 and legend_of(ax) == ["1000 steps rejected"]
    (handle,) = ax.get_legend().legend_handles
    assert handle.get_alpha() == 0.5


def test_ratios_out_of_the_picture_are_arrows_at_its_edge():
    (ax,) = plots.training(only("ratio", [0.5, -3.0, math.inf, math.nan, 2.0, -math.inf, -1.0]))
    np.testing.assert_array_equal(shown(ax)[1], [0.5, -1, 2, np.nan, 2, -1, -1])
    found = {line.get_marker(): np.asarray(line.get_xdata()).tolist() for line in ax.lines[1:3]}
    assert found == {"^": [2], "v": [1, 5]}
    assert {line.get_ydata()[0] for line in ax.lines[3:]} == {0.25, 0.75, 1.0}
    assert ax.get_ylim() == (-1, 2) and legend_of(ax) == ["not shown: 1 not finite"]


def test_times_have_a_median_and_marks():
    ax = plots.training(history_of())[-1]
    points, renewed, inverted, median = ax.lines
    assert np.asarray(renewed.get_xdata()).tolist() == [5, 9, 13]
    assert np.asarray(inverted.get_xdata()).tolist() == [13]
    np.testing.assert_allclose(renewed.get_ydata(), [2, 3, 4])
    np.testing.assert_allclose(inverted.get_ydata(), [4])
    np.testing.assert_allclose(median.get_ydata(), [3, 3])
    assert legend_of(ax) == ["factors renewed", "blocks inverted", "median 3 ms"]
    assert renewed.get_marker() != inverted.get_marker() != points.get_marker()


def test_what_is_unknown_is_left_out():
    (ax,) = plots.training([{"damping": 0.1}, {"damping": None}, {}, {"damping": 0.3}])
    assert ax.get_ylabel() == LABELS[1] and shown(ax) == [[0, 3], [0.1, 0.3]]
    history = [entry | {"loss": None, "ratio": None} for entry in history_of()]
    axes = plots.training(history)
    assert [ax.get_ylabel() for ax in axes] == [LABELS[1], LABELS[2], LABELS[4]]
    assert legend_of(axes[0]) == ["2 steps rejected"]


def test_a_batch_that_was_skipped_is_a_rejected_step():
    model = torch.nn.Linear(3, 1)
    opt = KFAC(model)
    for factor in (1.0, math.nan, 1.0):
        opt.zero_grad()
        (model(torch.ones(4, 3) * factor) - 1).square().mean().backward()
        opt.step()
    axes = plots.training(opt)
    assert legend_of(axes[0]) == ["1 step rejected"] and len(axes[0].collections[0].get_segments()) == 1


def test_a_loss_that_is_not_positive_has_a_linear_axis():
    (ax,) = plots.training(only("loss", [1.0, 0.0, -2.0, math.nan]))
    np.testing.assert_array_equal(shown(ax)[1], [1, 0, -2, np.nan])
    assert ax.get_yscale() == "linear" and legend_of(ax) == ["not shown: 1 not finite"]
    (ax,) = plots.training(only("loss", [1.0, math.inf, 0.5]))
    assert ax.get_yscale() == "log"


@pytest.mark.filterwarnings("error")
def test_what_a_log_axis_cannot_show_is_counted():
    axes = plots.training([{"damping": 0.0, "step_size": 0.0, "seconds": 0.0}, {"step_size": 0.1, "seconds": 0.0}])
    axes[0].figure.draw_without_rendering()
    assert [legend_of(ax) for ax in axes] == [["not shown: 1 zero"], ["not shown: 1 zero"], ["not shown: 2 zero"]]
    np.testing.assert_array_equal(shown(axes[1])[1], [np.nan, 0.1])


def test_several_runs_share_the_panels():
    one, other = history_of(), [{**entry, "loss": None, "ratio": None} for entry in history_of(4, 10.0)]
    axes = plots.training({"KFAC": one, "SGD": other})
    assert [ax.get_ylabel() for ax in axes] == LABELS
    damping = axes[1]
    for index, run in enumerate((one, other)):
        assert shown(damping, index) == [[e["step"] for e in run], [e["damping"] for e in run]]
    colours = [line.get_color() for line in damping.lines]
    assert len(set(colours)) == 2
    # The legend has the run of which the first panel shows nothing, in the colour of the others.
    assert legend_of(axes[0]) == ["KFAC", "SGD", "KFAC: 2 steps rejected", "SGD: 1 step rejected"]
    assert [line.get_color() for line in axes[0].lines] == colours and shown(axes[0], 1) == [[], []]
    texts = legend_of(axes[-1])
    assert texts == ["factors renewed", "blocks inverted", "KFAC: median 3 ms", "SGD: median 25 ms"]
    assert [len(lines.get_segments()) for lines in damping.collections] == [2, 1]
    axes = plots.training({"KFAC": only("damping", [0.1, 0.0])})
    assert legend_of(axes[0]) == ["KFAC (not shown: 1 zero)"]


def test_long_names_do_not_make_the_panels_narrower():
    widths = []
    for name in ("a", "a name of a run that is rather long, of sixty letters or so"):
        figure = plots.training({f"{name} {k}": history_of() for k in range(4)})[0].figure
        figure.draw_without_rendering()
        widths.append(figure.axes[0].get_position().width)
    assert widths[0] == pytest.approx(widths[1], rel=0.02)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "history", ([{"loss": 1.0}], deque([{"step": 3, "seconds": torch.tensor(0.1)}]), history_of(1))
)
def test_a_single_step(history):
    axes = plots.training(history)
    axes[0].figure.draw_without_rendering()
    assert axes[0].lines[0].get_marker() == "."


def test_numbers_on_log_axes_are_no_powers():
    (ax,) = plots.training(only("step_size", [0.2, 0.9]))
    ax.figure.draw_without_rendering()
    texts = {text.get_text() for text in ax.get_yticklabels(minor=True)}
    assert {"0.2", "0.4"} <= texts and not any("e" in text for text in texts)


def test_axes_that_are_given():
    figure, given = plt.subplots(5)
    other = plt.figure().subplots()
    axes = plots.training(history_of(), ax=given)
    assert list(axes) == list(given) and all(ax.lines and ax.get_xlabel() == "step" for ax in given)
    assert len(plt.get_fignums()) == 2 and plt.gca() is other and not other.has_data()
    assert list(plots.training(only("loss", [1.0]), ax=other)) == [other]
    assert figure.get_suptitle() == ""


LOSSES = only("loss", [1.0, 0.5])
REFUSED = {
    "no list": (lambda: plots.training(3), TypeError, "opt.history, or a dict .* found int"),
    "the text of a list": (lambda: plots.training("[]"), TypeError, "found str"),
    "one entry": (lambda: plots.training(LOSSES[0]), TypeError, "step: expected an optimizer, a list .* found int"),
    "numbers": (lambda: plots.training([1.0, 0.5]), TypeError, "a dict for each step, found float"),
    "nothing": (lambda: plots.training([]), ValueError, "history: no steps yet"),
    "no runs": (lambda: plots.training({}), ValueError, "found an empty one"),
    "an empty run": (lambda: plots.training({"A": LOSSES, "B": []}), ValueError, "B: no steps yet"),
    "nothing known": (lambda: plots.training([{"step": 0, "Loss": 1.0}]), ValueError, "keys are step, Loss"),
    "a text as loss": (lambda: plots.training({"A": only("loss", ["1"])}), TypeError, "A: loss: expected numbers"),
    "vectors": (lambda: plots.training(only("loss", [torch.ones(2)])), ValueError, "history: loss: .*shape .1, 2."),
    "a step not finite": (lambda: plots.training([{"step": math.nan, "loss": 1.0}]), ValueError, "found nan"),
    "too few axes": (
        lambda: plots.training(history_of(), ax=plt.subplots(2)[1]),
        ValueError,
        "5 axes .* loss, damping",
    ),
    "a figure as axes": (lambda: plots.training(LOSSES, ax=plt.figure()), TypeError, "matplotlib Axes, found Figure"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    assert_refused(*REFUSED[case], own_figure="axes" in case)


def test_a_method_keeps_its_colour():
    """Whatever else is in the figure; a second line of the same method, and unknown ones, take what is left."""
    few, many = plots.colours(["Adam, lr=0.1", "KFAC"]), plots.colours(["EKFAC", "mine", "KFAC", "Adam", "Adam, lr=3"])
    assert few["KFAC"] == many["KFAC"] and few["Adam, lr=0.1"] == many["Adam"] and len(set(many.values())) == 5
    assert len(plots.colours([f"line {k}" for k in range(20)])) == 20
    runs = {"EKFAC": history_of(), "KFAC": history_of(scale=2.0)}
    lines = plots.training(runs)[0].lines
    assert [line.get_color() for line in lines] == list(plots.colours(runs).values())
    spectra = plots.spectra({"mine": torch.ones(2), "Hessian": torch.ones(2)})
    assert spectra.lines[1].get_color() == plots.colours(["Hessian"])["Hessian"]
