"""Errors against numbers of vectors, and quantities of matrices against epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator
from torch import Tensor

from curvature.operators import Estimate, Operator
from curvature.plots import style

MAX_TICKS = 10  # tick labels that fit below an axis
Matrix = Operator | Tensor | Mapping[str, Tensor]


def agreement(estimates: Mapping[str, Mapping[int, Any]], ax: Axes | None = None, *, exact: Any = None) -> Axes:
    """Errors of random estimators against their number of vectors, on two log axes, with the slope of 1/sqrt(k).

    Lines show the median over the seeds, bands the range. The legend counts the errors that are not shown because they
    are zero or not finite.

    Args:
        estimates: ``{estimator: {k: estimate, or a list of them for several seeds}}``: operators, tensors, dicts of
            tensors as from ``fisher_diagonal``, or results of ``xtrace`` and the like. Without `exact`, precomputed
            errors: nonnegative numbers, in any unit.
        ax: axes to draw into; None for a new figure.
        exact: the true value, in the same form. The error is ``|estimate - exact| / |exact|`` over all entries.

    Raises:
        TypeError: not dicts of numbers or, with `exact`, of matrices.
        ValueError: nothing to draw, numbers of vectors that are not positive, or negative errors; `exact` is zero, not
            finite, or of another shape.
    """
    items = style.require_mapping(estimates, "estimates", "{name: {k: estimates}}").items()
    error_of = _given_errors if exact is None else _distance_to(exact)
    table = {str(name): _by_count(str(name), rows, error_of) for name, rows in items}
    ax = style.axes_or_new(ax)
    shades = style.colours(table)
    heights: list[float] = []  # errors times sqrt(k): constant if an error falls as 1/sqrt(k)
    for index, (name, rows) in enumerate(table.items()):
        shown = {k: row[np.isfinite(row) & (row > 0)] for k, row in rows.items()}
        points = {k: (np.median(row), row.min(), row.max()) for k, row in shown.items() if row.size}
        middle, low, high = np.array(list(points.values())).reshape(-1, 3).T
        label = style.label_with_note(name, style.describe_hidden(np.concatenate(list(rows.values()))))
        options = style.line_style(index, shades[name])
        (line,) = ax.plot(list(points), middle, **options, marker="o", markersize=4, label=label)
        if any(row.size > 1 for row in shown.values()):
            ax.fill_between(list(points), low, high, color=line.get_color(), alpha=0.2, lw=0)
        heights += [error * math.sqrt(k) for k, error in zip(points, middle, strict=True)]
    counts = sorted({k for rows in table.values() for k in rows})
    if heights and len(counts) > 1:
        guide = np.exp(np.mean(np.log(heights))) / np.sqrt(counts)
        ax.plot(counts, guide, ":", color="grey", lw=1.2, label="slope of 1 / sqrt(k)", zorder=1)
    style.log_scale(ax, "x", "y")
    ax.set(xlabel="number of vectors k", ylabel="error" if exact is None else "relative error (Frobenius)")
    if len(counts) <= MAX_TICKS:
        ax.set_xticks(counts, [f"{k:g}" for k in counts])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(alpha=0.3)
    style.legend(ax, "line: median, band: all seeds")
    return ax


def drift(
    values: Mapping[str, Any],
    epochs: Any = None,
    ax: Axes | None = None,
    *,
    quantity: str = f"largest eigenvalue {style.CURVATURE_UNIT}",
) -> Axes:
    """A quantity of several matrices over the epochs, such as the trace or the largest eigenvalue, on a log axis.

    The legend counts the values that are not shown because they are negative, zero or not finite.

    Args:
        values: ``{matrix: its value at every epoch}``, for example ``{"Fisher": [1.2, 0.8], "Hessian": [1.3, 0.7]}``.
        epochs: one per value; by default 0, 1, 2, ...
        ax: axes to draw into; None for a new figure.
        quantity: the quantity and its unit, for the axis label.

    Raises:
        TypeError: not a dict of numbers; for a matrix, give its trace or another number.
        ValueError: nothing to draw, or different numbers of values and epochs.
    """
    items = style.require_mapping(values, "values", "{matrix: [number at every epoch]}").items()
    lines = {str(name): style.to_vector(numbers, str(name)) for name, numbers in items}
    shades = style.colours(lines)
    x = _epochs({name: line.size for name, line in lines.items()}, epochs)
    ax = style.axes_or_new(ax)
    for index, (name, line) in enumerate(lines.items()):
        label = style.label_with_note(name, style.describe_hidden(line))
        _draw_epochs(ax, index, x, np.where(np.isfinite(line) & (line > 0), line, np.nan), label, shades[name])
    style.log_scale(ax, "y")
    ax.set_ylabel(quantity)
    style.legend(ax)
    return ax


def apart(matrices: Mapping[str, Sequence[Matrix]], epochs: Any = None, ax: Axes | None = None) -> Axes:
    """How matrices drift apart: the angle between each pair over the epochs, in degrees.

    ``cos(angle) = <M, N> / (|M| |N|)`` over all entries. At 0 degrees, two matrices agree up to a factor (see `drift`);
    at 90 degrees, semi-definite matrices have nothing in common. Angles with a matrix that is zero or not finite are
    left out, and the legend says so.

    Args:
        matrices: ``{name: the matrix at every epoch}``: operators, which are made dense, tensors, or dicts of tensors
            as from ``fisher_diagonal``. If the model keeps training, call ``materialise()`` on matrix-free operators at
            once: they hold the model, not its matrix.
        epochs: one per matrix; by default 0, 1, 2, ...
        ax: axes to draw into; None for a new figure.

    Raises:
        TypeError: not a dict of lists of matrices.
        ValueError: fewer than two names, different numbers or shapes of matrices, or a matrix too large to make dense.
    """
    items = style.require_mapping(matrices, "matrices", "{name: [matrix at every epoch]}").items()
    if len(items) < 2:
        raise ValueError(f"matrices: expected at least two to compare, found {', '.join(map(str, matrices))} only")
    for name, series in items:
        if not isinstance(series, Sequence):
            raise TypeError(f"{name}: expected a list of matrices, one for each epoch, found {type(series).__name__}")
    x = _epochs({str(name): len(series) for name, series in items}, epochs)
    # Epoch by epoch, so that only one matrix of each name is dense at a time.
    names = {f"{one} and {other}": (one, other) for one, other in combinations(matrices, 2)}
    angles: dict[str, list[float]] = {pair: [] for pair in names}
    _, first = next(iter(items))
    for epoch in range(x.size):
        directions = {name: _direction(series[epoch], f"{name} at {epoch}", first[epoch]) for name, series in items}
        for pair, (one, other) in names.items():
            angles[pair].append(_angle(directions[one], directions[other], pair))
    ax = style.axes_or_new(ax)
    for index, (pair, line) in enumerate(angles.items()):
        missing = int(np.isnan(line).sum())
        note = f"{missing} of a matrix that is zero or not finite" if missing else ""
        _draw_epochs(ax, index, x, np.array(line), style.label_with_note(pair, note))
    ax.set(ylabel="angle between matrices [degrees]")
    ax.set_ylim(bottom=-0.03 * ax.get_ylim()[1])  # show the full width of a line at zero
    style.legend(ax)
    return ax


def _by_count(name: str, rows: Any, error_of: Callable[[Any, str], style.Array]) -> dict[float, style.Array]:
    """Errors of one estimator by number of vectors, ascending."""
    errors_by_count: dict[float, style.Array] = {}
    for k, row in style.require_mapping(rows, name, "{k: estimates}").items():
        (count,) = style.to_array([k], f"{name}: number of vectors")
        if not (count > 0 and math.isfinite(count)):
            raise ValueError(f"{name}: expected positive numbers of vectors, found {k}")
        errors_by_count[float(count)] = errors = np.atleast_1d(error_of(row, f"{name}, k={k}")).flatten()
        if not errors.size or (errors < 0).any():
            raise ValueError(f"{name}, k={k}: expected errors that are not negative, found {errors}")
    return dict(sorted(errors_by_count.items()))


def _given_errors(row: Any, what: str) -> style.Array:
    if isinstance(row, Mapping | Operator | Estimate):
        raise TypeError(f"{what}: expected errors, found {type(row).__name__}: to have them computed, give exact=")
    return style.to_array(row, what)


def _distance_to(exact: Any) -> Callable[[Any, str], style.Array]:
    """A function that gives the relative errors of an estimate or a list of them."""
    target = _entries(exact, "exact")
    norm = np.linalg.norm(target)
    if not (norm > 0 and math.isfinite(norm)):
        raise ValueError(f"exact: an error relative to it needs a norm that is finite and not zero, found {norm:.3g}")

    def errors(row: Any, what: str) -> style.Array:
        several = isinstance(row, list | tuple) and not isinstance(row, Estimate)
        vectors = [_entries(one, what, exact) for one in (row if several else [row])]
        for entries in vectors:
            _require_one_shape(entries, target, f"{what} and exact")
        return np.array([np.linalg.norm(entries - target) / norm for entries in vectors])

    return errors


def _epochs(lengths: Mapping[str, int], epochs: Any) -> style.Array:
    x = np.arange(max(lengths.values()), dtype=np.float64) if epochs is None else style.to_vector(epochs, "epochs")
    if set(lengths.values()) != {x.size} or not x.size:
        counts = ", ".join(f"{count} for {name}" for name, count in lengths.items())
        given = "" if epochs is None else f" and {x.size} epochs"
        raise ValueError(f"expected as many values for each matrix as there are epochs, found {counts}{given}")
    return x


def _draw_epochs(ax: Axes, index: int, x: style.Array, y: style.Array, label: str, colour: str | None = None) -> None:
    ax.plot(x, y, **style.line_style(index, colour), marker="o" if x.size < 50 else None, markersize=4, label=label)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(alpha=0.3)


def _entries(matrix: Any, what: str, like: Any = None) -> style.Array:
    """All entries, flattened; those of a dict in the order of its names, or of those of `like` if that is a dict."""
    if isinstance(matrix, Operator):
        matrix = matrix.to_dense()
    elif isinstance(matrix, Estimate):
        matrix = matrix.value
    parts = [matrix]
    if isinstance(matrix, Mapping):
        names = like if isinstance(like, Mapping) else matrix
        if set(names) != set(matrix):
            raise ValueError(f"{what}: expected the parameters {list(names)}, found {list(matrix)}")
        parts = [matrix[name] for name in names]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"{what}: expected an operator, a tensor or a dict of tensors, found {type(matrix).__name__}")
    return np.concatenate([style.to_array(part, what).flatten() for part in parts])


def _require_one_shape(one: style.Array, other: style.Array, what: str) -> None:
    if one.shape != other.shape:
        raise ValueError(f"{what}: expected matrices of one shape, found {one.size} and {other.size} entries")


def _direction(matrix: Any, what: str, like: Any) -> style.Array:
    """All entries, flattened and normalized; nan if the matrix is zero or not finite."""
    entries = _entries(matrix, what, like)
    norm = np.linalg.norm(entries) or math.nan
    return entries / (norm if math.isfinite(norm) else math.nan)


def _angle(one: style.Array, other: style.Array, what: str) -> float:
    """The angle in degrees; the arc cosine of the inner product would lose half the digits of small angles."""
    _require_one_shape(one, other, what)
    return math.degrees(2 * math.atan2(float(np.linalg.norm(one - other)), float(np.linalg.norm(one + other))))
