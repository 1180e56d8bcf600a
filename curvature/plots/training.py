"""An optimizer's run, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator
from numpy.typing import NDArray

from curvature.plots import style

Points = tuple[style.Array, style.Array]  # steps and values, (S,) each
Run = dict[str, Points]  # the known values by key of the history


class HasHistory(Protocol):
    """An optimizer."""

    @property
    def history(self) -> list[dict[str, Any]]: ...


History = HasHistory | Sequence[Mapping[str, Any]]

EXPECTED_HISTORY = "an optimizer, a list with a dict for each step, as opt.history, or a dict {name: one of these}"
MIN_RATIO, MAX_RATIO = -1.0, 2.0  # limits of the axis of the reduction ratio
RATIO_GUIDES = (1.0, 0.75, 0.25)  # a perfect model, and usual thresholds to decrease and increase damping
NO_POINTS: Points = (np.zeros(0), np.zeros(0))
EVENT_MARKS = {"renewed": ("o", 6.0, "factors renewed"), "inverted": ("x", 4.0, "blocks inverted")}
MANY_STEPS = 1000  # lines and marks are finer beyond
PANEL_WIDTH, PANEL_HEIGHT = 7.5, 1.7  # of a panel of a new figure, inches
LETTER_WIDTH, HANDLE_LETTERS = 0.075, 8  # of a legend: inches per letter, and letters that a line sample takes


class PlainNumbers(LogFormatter):
    """Formats numbers on a log axis as 0.2 and 1e-6, not as powers or 2e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        if not super().__call__(x, pos):
            return ""
        return f"{x:g}" if abs(x) >= 1e-3 else np.format_float_scientific(x, trim="-", exp_digits=1)


def training(history: History | Mapping[str, History], *, ax: Any = None) -> NDArray[Any]:
    """The run of an optimizer: loss, damping, step size, reduction ratio and time, each against the step.

    There is a panel for each of these that is known. The history may hold, for every step: ``step``; ``loss`` before
    the step; ``damping`` in loss / parameter²; ``step_size``; ``ratio``, the actual over the predicted reduction of the
    loss, with guides at 0.25, 0.75 and 1 and arrows for values outside the panel; ``seconds``, shown in milliseconds
    with their median and marked where factors were ``renewed`` or blocks ``inverted``; and ``accepted``, with vertical
    lines through all panels at rejected steps. All are plain numbers; None or a missing key means unknown. Legends
    count the values that an axis cannot show.

    Args:
        history: an optimizer of this project, or what its ``history`` returns, one dict per step; or several by name,
            ``{name: history}``, which share the panels. Without ``step``, steps count from 0. Other keys are ignored.
        ax: one axes per panel; None for a new figure, with the panels below each other.

    Returns:
        The axes, (panels,), in the order above.

    Raises:
        TypeError: not dicts of numbers, or not axes.
        ValueError: an empty history, a history without values to draw, or a wrong number of axes.
    """
    several = isinstance(history, Mapping)
    items = style.require_mapping(history, "history", EXPECTED_HISTORY) if several else {"history": history}
    entries_by_name: dict[Any, Any] = {k: getattr(run, "history", run) for k, run in items.items()}
    runs = {str(name): _run(entries, str(name)) for name, entries in entries_by_name.items()}
    panels = [key for key in PANELS if any(key in run for run in runs.values())]
    if not panels:
        keys = dict.fromkeys(key for run in entries_by_name.values() for entry in run for key in entry)
        raise ValueError(f"history: nothing to draw: no values of {', '.join(PANELS)}; keys are {', '.join(keys)}")
    size = PANEL_WIDTH, PANEL_HEIGHT + 0.6 / len(panels)  # room for the legend
    axes = style.axes_grid(ax, panels, ["a panel"], size, sharex=True)[:, 0]
    for item, key in zip(axes, panels, strict=True):
        is_first = item is axes[0]
        PANELS[key](item, runs, several and is_first)
        _mark_rejected(item, runs, several, is_first)
        _finish(item, np.concatenate([run["step"][0] for run in runs.values()]))
    if ax is None:
        for item in axes:
            item.label_outer()
        axes[0].figure.align_ylabels(axes)
    return axes


def _run(entries: Any, name: str) -> Run:
    """The known values of a run, checked."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError(f"{name}: expected {EXPECTED_HISTORY}, found {type(entries).__name__}")
    if not entries:
        raise ValueError(f"{name}: no steps yet: draw after the optimizer's first one")
    if wrong := [type(entry).__name__ for entry in entries if not isinstance(entry, Mapping)]:
        raise TypeError(f"{name}: expected a dict for each step, found {', '.join(dict.fromkeys(wrong))}")
    numbered = all(entry.get("step") is not None for entry in entries)
    steps = style.to_vector([entry["step"] if numbered else k for k, entry in enumerate(entries)], f"{name}: step")
    if not np.isfinite(steps).all():
        raise ValueError(f"{name}: step: expected finite numbers, found {steps[~np.isfinite(steps)][0]}")
    run = {"step": (steps, steps)}
    for key in (*PANELS, *EVENT_MARKS, "accepted"):
        given = [k for k, entry in enumerate(entries) if entry.get(key) is not None]
        if given:
            run[key] = steps[given], style.to_vector([entries[k][key] for k in given], f"{name}: {key}")
    return run


def _curves(ax: Axes, runs: Mapping[str, Run], named: bool, key: str, label: str, log: bool = True) -> None:
    """A line for each run, empty if its values are unknown, so that the legend has all names."""
    for index, (name, x, y, colour) in enumerate(_points(runs, key)):
        seen = np.isfinite(y) & ((y > 0) | (not log))
        _draw(ax, index, colour, x, np.where(seen, y, np.nan), _label(name, named, runs, y[~seen]))
    if log:
        _readable_log_scale(ax)
    ax.set_ylabel(label)


def _loss(ax: Axes, runs: Mapping[str, Run], named: bool) -> None:
    values = np.concatenate([run.get("loss", NO_POINTS)[1] for run in runs.values()])
    finite = values[np.isfinite(values)]
    _curves(ax, runs, named, "loss", "loss", log=bool(finite.size and (finite > 0).all()))


def _ratio(ax: Axes, runs: Mapping[str, Run], named: bool) -> None:
    for index, (name, x, y, colour) in enumerate(_points(runs, "ratio")):
        shown = np.clip(y, MIN_RATIO, MAX_RATIO)
        _draw(ax, index, colour, x, shown, _label(name, named, runs, y[np.isnan(y)]))
        arrows: dict[str, Any] = {"color": colour, "ms": 5 * _size_factor(x), "zorder": 3, "clip_on": False}
        for beyond, marker in ((y > MAX_RATIO, "^"), (y < MIN_RATIO, "v")):
            if beyond.any():
                ax.plot(x[beyond], shown[beyond], marker, **arrows)
    for value in RATIO_GUIDES:
        ax.axhline(value, color="grey", lw=1.0, ls="-" if value == 1 else ":", zorder=1)
    ax.set_ylim(MIN_RATIO, MAX_RATIO)
    ax.set_yticks([-1, 0, 1, 2])
    thresholds = RATIO_GUIDES[1:]
    ax.set_yticks(thresholds, map(str, thresholds), minor=True, fontsize="x-small", color="grey")
    ax.set_ylabel("reduction ratio")


def _time(ax: Axes, runs: Mapping[str, Run], named: bool) -> None:
    marked: set[str] = set()
    for index, (name, x, seconds, colour) in enumerate(_points(runs, "seconds")):
        y = np.where(np.isfinite(seconds) & (seconds > 0), 1e3 * seconds, np.nan)
        label = _label(name, named, runs, seconds[np.isnan(y)])
        ax.plot(x, y, ".", color=colour, alpha=0.5, markersize=6 if x.size < 50 else 3, label=label)
        for key, (marker, size, text) in EVENT_MARKS.items():
            steps, happened = runs[name].get(key, NO_POINTS)
            there = np.isin(x, steps[happened > 0])
            if there.any():
                marks: dict[str, Any] = {"color": colour, "mfc": "none", "alpha": 0.8, "ms": size * _size_factor(x)}
                ax.plot(x[there], y[there], marker, **marks, label=None if key in marked else text)
                marked.add(key)
        if np.isfinite(y).any():
            middle = float(np.nanmedian(y))
            text = ("" if len(runs) == 1 else f"{name}: ") + f"median {middle:.3g} ms"
            options = style.line_style(index) | {"lw": 1.0, "zorder": 3, "color": "black"}  # on top of the run's points
            ax.plot([x.min(), x.max()], [middle, middle], **options, label=text)
    _readable_log_scale(ax)
    ax.set_ylabel("time per step\n[ms]")


PANELS: dict[str, Callable[[Axes, Mapping[str, Run], bool], None]] = {
    "loss": _loss,
    "damping": partial(_curves, key="damping", label=f"damping\n{style.CURVATURE_UNIT}"),
    "step_size": partial(_curves, key="step_size", label="step size"),
    "ratio": _ratio,
    "seconds": _time,
}


def _label(name: str, named: bool, runs: Mapping[str, Run], hidden: style.Array) -> str | None:
    """The legend of the first panel names all of several runs, the others only those with a note."""
    note = style.describe_hidden(hidden)
    if note and len(runs) == 1 and not named:
        return f"not shown: {note}"
    return style.label_with_note(name, note) if named or note else None


def _points(runs: Mapping[str, Run], key: str) -> Iterator[tuple[str, style.Array, style.Array, str]]:
    """Name, steps, values and colour of each run."""
    for name, colour in style.colours(runs).items():
        yield name, *runs[name].get(key, NO_POINTS), colour


def _draw(ax: Axes, index: int, colour: str, x: style.Array, y: style.Array, label: str | None) -> None:
    options = style.line_style(index, colour)
    options["lw"] *= 0.7 * _size_factor(x)  # runs are noisy
    ax.plot(x, y, **options, marker="." if x.size < 50 else None, label=label)


def _size_factor(x: style.Array) -> float:
    return 1.0 if x.size <= MANY_STEPS else 0.5


def _readable_log_scale(ax: Axes) -> None:
    """A log scale that also labels numbers within a decade if the axis spans little more."""
    style.log_scale(ax, "y")
    ax.yaxis.set_major_locator(LogLocator(numticks=5))
    ax.yaxis.set_major_formatter(PlainNumbers())
    ax.yaxis.set_minor_formatter(PlainNumbers(labelOnlyBase=False, minor_thresholds=(1.5, 0.6)))
    ax.tick_params(axis="y", which="minor", labelsize="x-small")


def _mark_rejected(ax: Axes, runs: Mapping[str, Run], several: bool, counted: bool) -> None:
    for name, steps, accepted, colour in _points(runs, "accepted"):
        rejected = steps[accepted == 0]
        if not rejected.size:
            continue
        text = f"{rejected.size} step{'s' * (rejected.size > 1)} rejected"
        lines = LineCollection(
            [[(step, 0.0), (step, 1.0)] for step in rejected],
            colors=colour if several else style.COLOURS[1],
            linewidths=0.9,
            alpha=min(0.35, max(0.08, 15 / rejected.size)),  # many lines form a shade that the curves show through
            zorder=1.5,
            transform=ax.get_xaxis_transform(),
            label=(f"{name}: {text}" if several else text) if counted else None,
        )
        ax.add_collection(lines, autolim=False)


def _finish(ax: Axes, steps: style.Array) -> None:
    margin = 0.02 * (steps.max() - steps.min()) or 0.5
    ax.set_xlim(steps.min() - margin, steps.max() + margin)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel("step")
    ax.grid(alpha=0.3)
    drawn, texts = ax.get_legend_handles_labels()
    if texts:  # above the panel, much of which it would cover
        letters = ax.get_window_extent().width / ax.figure.dpi / LETTER_WIDTH
        columns = max(1, int(letters / (HANDLE_LETTERS + max(map(len, texts)))))  # more would narrow the panels
        location: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.1}
        made = ax.legend(ncols=columns, fontsize="small", frameon=False, handlelength=2.8, **location)
        for shown, handle in zip(drawn, made.legend_handles, strict=True):
            if isinstance(shown, LineCollection) and handle is not None:
                handle.set_alpha(0.5)  # visible even if the lines are very faint
