"""Numbers against numbers of vectors and against epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator
from torch import Tensor

from curvature.operators import Operator
from curvature.plots.drawing import Array, hidden, label_with, legend, line_of_numbers, look, named, numbers, one_axes

MOST_TICKS = 10  # numbers that have room below an axis
Matrix = Operator | Tensor | Mapping[str, Tensor]


def agreement(errors: Mapping[str, Mapping[int, Any]], ax: Axes | None = None) -> Axes:
    """Errors of random estimators against their number of vectors, on two log axes, with the slope of 1/sqrt(k).

    A line goes through the medians over the seeds; a band reaches from the least to the largest. The legend says how
    many errors are not shown because they are zero or not finite.

    Args:
        errors: ``{estimator: {k: error, or errors of several seeds}}``, relative or in any unit, not negative.
        ax: axes to draw into; None for a new figure.

    Returns:
        The axes.

    Raises:
        TypeError: something else than dicts of numbers.
        ValueError: nothing to draw, numbers of vectors that are not positive, or negative errors.
    """
    table = {str(name): _by_count(name, rows) for name, rows in named(errors, "errors", "{name: {k: errors}}").items()}
    ax = one_axes(ax)
    heights: list[
        float
    ] = []  # of errors times sqrt(k), which are level for an estimator whose error falls as 1/sqrt(k)
    for index, (name, rows) in enumerate(table.items()):
        shown = {k: row[np.isfinite(row) & (row > 0)] for k, row in rows.items()}
        points = {k: (np.median(row), row.min(), row.max()) for k, row in shown.items() if row.size}
        middle, low, high = np.array(list(points.values())).reshape(-1, 3).T
        label = label_with(name, hidden(np.concatenate(list(rows.values()))))
        (line,) = ax.plot(list(points), middle, **look(index), marker="o", markersize=4, label=label)
        if any(row.size > 1 for row in shown.values()):
            ax.fill_between(list(points), low, high, color=line.get_color(), alpha=0.2, lw=0)
        heights += [error * math.sqrt(k) for k, error in zip(points, middle, strict=True)]
    counts = sorted({k for rows in table.values() for k in rows})
    if heights and len(counts) > 1:
        guide = np.exp(np.mean(np.log(heights))) / np.sqrt(counts)
        ax.plot(counts, guide, ":", color="grey", lw=1.2, label="slope of 1 / sqrt(k)", zorder=1)
    ax.set(xscale="log", yscale="log", xlabel="number of vectors k", ylabel="error")
    if len(counts) <= MOST_TICKS:
        ax.set_xticks(counts, [f"{k:g}" for k in counts])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(True, which="major", alpha=0.3)
    legend(ax, "line: median, band: all seeds")
    return ax


def drift(
    values: Mapping[str, Any], epochs: Any = None, ax: Axes | None = None, *, quantity: str = "largest eigenvalue"
) -> Axes:
    """A number of each of several matrices over the epochs, such as the trace or the largest eigenvalue, on a log axis.

    The legend says how many values are not shown because they are negative, zero or not finite.

    Args:
        values: ``{matrix: its number at every epoch}``, for example ``{"Fisher": [1.2, 0.8], "Hessian": [1.3, 0.7]}``.
        epochs: one for each value; by default 0, 1, 2, ...
        ax: axes to draw into; None for a new figure.
        quantity: what the numbers are, for the label of the axis.

    Returns:
        The axes.

    Raises:
        TypeError: no dict of numbers.
        ValueError: nothing to draw, or different numbers of values and epochs.
    """
    items = named(values, "values", "{matrix: [number at every epoch]}").items()
    lines = {str(name): line_of_numbers(found, str(name)) for name, found in items}
    x = _epochs({name: line.size for name, line in lines.items()}, epochs)
    ax = one_axes(ax)
    for index, (name, line) in enumerate(lines.items()):
        label = label_with(name, hidden(line))
        _draw_epochs(ax, index, x, np.where(np.isfinite(line) & (line > 0), line, np.nan), label)
    ax.set(yscale="log", ylabel=quantity)
    legend(ax)
    return ax


def apart(matrices: Mapping[str, Sequence[Matrix]], epochs: Any = None, ax: Axes | None = None) -> Axes:
    """How several matrices drift apart: the angle between each two of them over the epochs, in degrees.

    With ``cos(angle) = <M, N> / (|M| |N|)`` of all entries. At 0 degrees, two are the same up to a factor (which
    `drift` shows); semi-definite ones reach 90 degrees where they have nothing in common. No angle is drawn where a
    matrix is zero or not finite, and the legend says so.

    Args:
        matrices: ``{name: the matrix at every epoch}``: operators, which are made dense, tensors, or dicts of tensors
            as of ``fisher_diagonal``.
        epochs: one for each matrix; by default 0, 1, 2, ...
        ax: axes to draw into; None for a new figure.

    Returns:
        The axes.

    Raises:
        TypeError: something else than a dict of lists of matrices.
        ValueError: less than two names, different numbers or shapes of matrices, or too large to be made dense.
    """
    items = named(matrices, "matrices", "{name: [matrix at every epoch]}").items()
    if len(items) < 2:
        raise ValueError(f"matrices: expected at least two to compare, found {', '.join(map(str, matrices))} only")
    for name, found in items:
        if not isinstance(found, Sequence):
            raise TypeError(f"{name}: expected a list of matrices, one for each epoch, found {type(found).__name__}")
    x = _epochs({str(name): len(found) for name, found in items}, epochs)
    # Epoch by epoch, so that no more than one of each is dense at a time.
    names = {f"{one} and {other}": (one, other) for one, other in combinations(matrices, 2)}
    angles: dict[str, list[float]] = {pair: [] for pair in names}
    for epoch in range(x.size):
        directions = {name: _direction(found[epoch], f"{name} at {epoch}") for name, found in items}
        for pair, (one, other) in names.items():
            angles[pair].append(_angle(directions[one], directions[other], pair))
    ax = one_axes(ax)
    for index, (pair, found) in enumerate(angles.items()):
        missing = int(np.isnan(found).sum())
        note = f"{missing} of a matrix that is zero or not finite" if missing else ""
        _draw_epochs(ax, index, x, np.array(found), label_with(pair, note))
    ax.set(ylabel="angle between matrices [degrees]")
    ax.set_ylim(bottom=-0.03 * ax.get_ylim()[1])  # so that a line at zero is not cut in half
    legend(ax)
    return ax


def _by_count(name: str, rows: Any) -> dict[float, Array]:
    """The errors of one estimator by number of vectors, ascending."""
    found: dict[float, Array] = {}
    for k, row in named(rows, str(name), "{k: errors}").items():
        (count,) = numbers([k], f"{name}: number of vectors")
        if not (count > 0 and math.isfinite(count)):
            raise ValueError(f"{name}: expected positive numbers of vectors, found {k}")
        found[float(count)] = np.atleast_1d(numbers(row, f"{name}, k={k}")).flatten()
        if not found[float(count)].size or (found[float(count)] < 0).any():
            raise ValueError(f"{name}, k={k}: expected errors that are not negative, found {row}")
    return dict(sorted(found.items()))


def _epochs(lengths: Mapping[str, int], epochs: Any) -> Array:
    """One epoch for each value.

    Raises:
        ValueError: different numbers of them.
    """
    different = len(set(lengths.values())) > 1
    x = np.arange(max(lengths.values()), dtype=np.float64) if epochs is None else line_of_numbers(epochs, "epochs")
    if different or x.size not in lengths.values() or not x.size:
        counts = ", ".join(f"{count} for {name}" for name, count in lengths.items())
        given = "" if epochs is None else f" and {x.size} epochs"
        raise ValueError(f"expected as many values for each matrix as there are epochs, found {counts}{given}")
    return x


def _draw_epochs(ax: Axes, index: int, x: Array, y: Array, label: str) -> None:
    ax.plot(x, y, **look(index), marker="o" if x.size < 50 else None, markersize=4, label=label)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(True, which="major", alpha=0.3)


def _direction(matrix: Any, what: str) -> Array:
    """All entries in a row, of norm one; not a number where the matrix is zero or not finite."""
    if isinstance(matrix, Operator):
        matrix = matrix.to_dense()
    parts = [matrix[name] for name in sorted(matrix)] if isinstance(matrix, Mapping) else [matrix]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"{what}: expected an operator, a tensor or a dict of tensors, found {type(matrix).__name__}")
    entries = np.concatenate([numbers(part, what).flatten() for part in parts])
    norm = np.linalg.norm(entries) or math.nan
    return entries / (norm if math.isfinite(norm) else math.nan)


def _angle(one: Array, other: Array, what: str) -> float:
    """In degrees; the arc cosine of the inner product would lose half of the digits of a small angle."""
    if one.shape != other.shape:
        raise ValueError(f"{what}: expected matrices of one shape, found {one.size} and {other.size} entries")
    return math.degrees(2 * math.atan2(float(np.linalg.norm(one - other)), float(np.linalg.norm(one + other))))
