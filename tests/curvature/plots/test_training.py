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

KEYS = ["loss", "damping", "step_size", "ratio", "seconds"]
LABELS = ["loss", "damping\n[loss / parameter²]", "step size", "reduction ratio", "time per step\n[s]"]


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
        }
        for k in range(count)
    ]


only = lambda key, values: [{"step": k, key: value} for k, value in enumerate(values)]
shown = lambda ax, index=0: [np.asarray(values).tolist() for values in ax.lines[index].get_data()]
rejected = lambda ax, index=0: [segment[0, 0] for segment in ax.collections[index].get_segments()]


@pytest.mark.filterwarnings("error")
def test_every_panel_shows_its_numbers():
    history = history_of()
    settings = dict(matplotlib.rcParams)
    axes = plots.training(history)
    axes[0].figure.draw_without_rendering()
    assert dict(matplotlib.rcParams) == settings and len(plt.get_fignums()) == 1
    assert [ax.get_ylabel() for ax in axes] == LABELS
    for ax, key in zip(axes, KEYS, strict=True):
        assert shown(ax) == [list(range(5, 17)), [entry[key] for entry in history]]
        assert rejected(ax) == [8, 12]
        (lines,) = ax.collections
        assert lines.get_transform().transform((8, 0.5))[1] == pytest.approx(ax.transAxes.transform((0, 0.5))[1])
    assert [ax.get_yscale() for ax in axes] == ["log", "log", "log", "linear", "log"]
    assert [ax.get_xlabel() for ax in axes] == ["", "", "", "", "step"]
    assert len({ax.get_xlim() for ax in axes}) == 1 and axes[0].get_xlim()[0] < 5 < 16 < axes[0].get_xlim()[1]


def test_ratios_out_of_the_picture_are_at_its_edge():
    (ax,) = plots.training(only("ratio", [0.5, -3.0, math.inf, math.nan, 2.0, -math.inf, -1.0]))
    np.testing.assert_array_equal(shown(ax)[1], [0.5, -1, 2, np.nan, 2, -1, -1])
    assert {line.get_ydata()[0] for line in ax.lines[1:]} == {0.25, 0.75, 1.0}
    assert ax.get_ylim()[0] < -1 < 2 < ax.get_ylim()[1]


def test_a_batch_that_was_skipped_is_a_rejected_step():
    model = torch.nn.Linear(3, 1)
    opt = KFAC(model)
    for factor in (1.0, math.nan, 1.0):
        opt.zero_grad()
        (model(torch.ones(4, 3) * factor) - 1).square().mean().backward()
        opt.step()
    assert len(rejected(plots.training(opt)[0])) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("key", ["loss", "damping", "seconds"])
def test_an_axis_is_logarithmic_where_it_shows_all(key):
    for values, scale in {(1.0, 0.0, -2.0, math.nan): "linear", (1.0, math.inf, 0.5): "log"}.items():
        (ax,) = plots.training(only(key, values))
        ax.figure.draw_without_rendering()
        np.testing.assert_array_equal(shown(ax)[1], values)
        assert ax.get_yscale() == scale


def test_several_runs_share_the_panels():
    one, other = history_of(), [{**entry, "loss": None, "ratio": None} for entry in history_of(4, 10.0)]
    axes = plots.training({"KFAC": one, "SGD": other})
    assert [ax.get_ylabel() for ax in axes] == LABELS
    for index, run in enumerate((one, other)):
        assert shown(axes[1], index) == [[e["step"] for e in run], [e["damping"] for e in run]]
        assert rejected(axes[1], index) == [e["step"] for e in run if not e["accepted"]]
    colours = [line.get_color() for line in axes[1].lines]
    # The legend has the run of which the first panel shows nothing, in the colour of the others.
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["KFAC", "SGD"]
    assert [line.get_color() for line in axes[0].lines] == colours and shown(axes[0], 1) == [[], []]
    many = plots.training({str(k): history_of(scale=1.0 + k) for k in range(15)})
    assert len({str(line.get_color()) for line in many[0].lines}) == 15


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "history", ([{"loss": 1.0}], deque([{"step": 3, "seconds": torch.tensor(0.1)}]), history_of(1))
)
def test_a_single_step(history):
    axes = plots.training(history)
    axes[0].figure.draw_without_rendering()
    assert axes[0].lines[0].get_marker() == "."


def test_axes_that_are_given():
    given = plt.subplots(5)[1]
    other = plt.figure().subplots()
    axes = plots.training(history_of(), ax=given)
    assert list(axes) == list(given) and all(ax.lines for ax in given)
    assert len(plt.get_fignums()) == 2 and plt.gca() is other and not other.has_data()
    assert list(plots.training(only("loss", [1.0]), ax=other)) == [other]


LOSSES = only("loss", [1.0, 0.5])
REFUSED = {
    "no list": (lambda: plots.training(3), TypeError, "opt.history, or a dict .* found int"),
    "the text of a list": (lambda: plots.training("[]"), TypeError, "found str"),
    "one entry": (lambda: plots.training(LOSSES[0]), TypeError, "step: expected an optimizer, a list .* found int"),
    "numbers": (lambda: plots.training([1.0, 0.5]), TypeError, "a dict for each step, found float"),
    "nothing": (lambda: plots.training([]), ValueError, "history: no steps yet"),
    "no runs": (lambda: plots.training({}), ValueError, "nothing to draw"),
    "an empty run": (lambda: plots.training({"A": LOSSES, "B": []}), ValueError, "B: no steps yet"),
    "nothing known": (lambda: plots.training([{"step": 0, "Loss": 1.0}]), ValueError, "no values of loss, damping"),
    "a text as loss": (lambda: plots.training({"A": only("loss", ["half"])}), TypeError, "A: loss: expected a number"),
    "vectors": (lambda: plots.training(only("loss", [torch.ones(2)])), TypeError, "history: loss: expected a number"),
    "too few axes": (lambda: plots.training(history_of(), ax=plt.subplots(2)[1]), ValueError, "5 axes, found 2"),
    "a figure as axes": (lambda: plots.training(LOSSES, ax=plt.figure()), TypeError, "matplotlib Axes, found Figure"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    assert_refused(*REFUSED[case], own_figure="axes" in case)
