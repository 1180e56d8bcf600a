"""What all figures share: axes, colours, conversion to arrays, names of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, groupby
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from curvature.operators import BlockDiagonal, Operator, Space, blocks_of, in_memory

Array = NDArray[np.float64]

# The colours of Okabe and Ito, which are safe for colour-blind readers, without yellow, which is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# What keeps its colour from figure to figure, by a part of its name in lower case; the longest that fits counts.
FIXED = {
    "kfac": 0, "naturalgradient": 1, "natural gradient": 1, "reconfiguration": 1, "adam": 2, "l-bfgs": 5, "lbfgs": 5,
    "ekfac": 4, "sgd": 3, "gradient descent": 6,
    "gauss-newton": 0, "fisher": 1, "empirical": 2, "isotropic": 3, "hessian": 4, "diagonal": 2, "exact": 6,
    "sampled": 0, "propagat": 1,
}  # fmt: skip
LINE_STYLES = (("-", 2.2), ((0, (4, 3)), 1.4), ((0, (6, 2, 1, 2)), 1.4), ((0, (1, 2)), 1.8))  # with widths
CURVATURE_UNIT = "[loss / parameter²]"
INNER_LEGEND_LINES, MAX_LEGEND_LINES = 5, 25  # legend lines that fit inside the axes, and beside them


def axes_or_new(ax: Axes | None) -> Axes:
    """The given axes, or those of a new figure."""
    if ax is None:
        return plt.subplots(layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise TypeError(f"ax: expected one matplotlib Axes, found {type(ax).__name__}")
    return ax


def axes_grid(
    ax: Any, rows: Sequence[str], columns: Sequence[str], size: tuple[float, float] = (4.2, 3.5), sharex: bool = False
) -> NDArray[Any]:
    """The given axes as an array (rows, columns), or those of a new figure, `size` inches each."""
    shape = len(rows), len(columns)
    if ax is None:
        figsize = size[0] * shape[1], size[1] * shape[0]
        return plt.subplots(*shape, figsize=figsize, sharex=sharex, squeeze=False, layout="constrained")[1]
    axes = np.asarray(ax, dtype=object)
    if wrong := [type(item).__name__ for item in axes.flat if not isinstance(item, Axes)]:
        raise TypeError(f"ax: expected matplotlib Axes, found {', '.join(dict.fromkeys(wrong))}")
    if axes.size != len(rows) * len(columns):
        panels = " and ".join(columns) + (f" for each of {', '.join(rows)}" if len(rows) > 1 else "")
        raise ValueError(
            f"ax: expected {len(rows) * len(columns)} axes for {panels}, found {axes.size}. "
            f"Make them with plt.subplots{shape}"
        )
    return axes.reshape(shape)


def log_scale(ax: Axes, *names: str) -> None:
    """Set log scales of the axes "x" or "y", with limits if nothing is drawn, since matplotlib then finds none."""
    for name in names:
        getattr(ax, f"set_{name}scale")("log")
        if not np.isfinite(getattr(ax.dataLim, f"minpos{name}")):
            getattr(ax, f"set_{name}lim")(0.1, 1.0)


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, the same in every figure for the methods and matrices that are best known.

    ``"Adam, lr=0.01"`` has Adam's colour, ``"empirical Fisher"`` that of the empirical Fisher. Other names, and the
    second of two that would share a colour, take the colours that are left, in order. The colours are told apart by
    colour-blind readers.

    Args:
        names: of lines in one figure, in the order in which they are drawn.

    Returns:
        ``{name: "#rrggbb"}``.
    """
    chosen: dict[str, str] = {}
    for name in dict.fromkeys(map(str, names)):
        fitting = [part for part in FIXED if part in name.lower()]
        fixed = COLOURS[FIXED[max(fitting, key=len)]] if fitting else ""
        chosen[name] = "" if fixed in chosen.values() else fixed
    left = cycle([colour for colour in COLOURS if colour not in chosen.values()] or COLOURS)
    return {name: colour or next(left) for name, colour in chosen.items()}


def line_style(index: int, colour: str | None = None) -> dict[str, Any]:
    """Colour and style of a line; lines that overlap stay visible, beside or through the dashes of each other."""
    style, width = LINE_STYLES[index % len(LINE_STYLES)]
    order = 2 + 0.1 * (index % len(LINE_STYLES))  # wide solid lines at the back
    return {"color": colour or COLOURS[index % len(COLOURS)], "ls": style, "lw": width, "zorder": order}


def ordered_line_styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """Likewise for ordered lines: few have `colours`, many follow a colour scale."""
    if len(names) <= len(COLOURS):
        return [line_style(index, colour) for index, colour in enumerate(colours(names).values())]
    shades = np.linspace(0, 0.92, len(names))  # the last colours are too pale
    return [{"color": colormaps["viridis"](shade), "lw": 1.2} for shade in shades]


def legend(ax: Axes, title: str | None = None, loc: str = "best") -> None:
    """A legend inside the axes, or to their right if there are many lines."""
    count = len(ax.get_legend_handles_labels()[1])
    options: dict[str, Any] = {"loc": loc, "fontsize": "small", "title_fontsize": "small"}
    if count > INNER_LEGEND_LINES:
        options = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0, "fontsize": "x-small"}
        options |= {"title_fontsize": "x-small", "ncols": 1 + (count - 1) // MAX_LEGEND_LINES}
    ax.legend(title=title, handlelength=3.2, **options)


def to_array(values: Any, what: str) -> Array:
    """A tensor on any device, an array, a number or a sequence of them as an array of float64; `what` is for errors."""
    if isinstance(values, Tensor):
        if values.is_complex():
            raise TypeError(f"{what}: expected real numbers, found {values.dtype}")
        return values.detach().cpu().double().numpy()
    if isinstance(values, str | Mapping):
        raise TypeError(f"{what}: expected numbers, found {type(values).__name__}")
    if isinstance(values, Iterable) and not isinstance(values, np.ndarray):
        parts = [to_array(value, what) for value in values]
        if len({part.shape for part in parts}) > 1:
            raise TypeError(f"{what}: expected numbers, found shapes {sorted({part.shape for part in parts})}")
        return np.stack(parts) if parts else np.zeros(0)
    try:
        return np.asarray(values).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError):
        raise TypeError(f"{what}: expected numbers, found {type(values).__name__}") from None


def to_vector(values: Any, what: str) -> Array:
    """Like `to_array`, for one dimension; ValueError for an empty one."""
    vector = to_array(values, what)
    if vector.ndim != 1 or not vector.size:
        raise ValueError(f"{what}: expected a list of numbers, found shape {vector.shape}")
    return vector


def require_mapping(values: Any, what: str, expected: str) -> Mapping[Any, Any]:
    """The given mapping; TypeError for anything else, ValueError for an empty one."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what}: expected {expected}, found {type(values).__name__}")
    if not values:
        raise ValueError(f"{what}: expected {expected}, found an empty one")
    return values


def describe_hidden(values: Array, rounding: Array | float = 0.0) -> str:
    """Describe the values that a log axis cannot show; empty if it shows all."""
    finite, unsure = np.isfinite(values), np.abs(values) <= rounding
    negative = values[finite & ~unsure & (values < 0)]
    notes = []
    if count := int((finite & unsure).sum()):
        notes.append(f"{count} zero")
    if negative.size:
        notes.append(f"{negative.size} negative down to {negative.min():.2g}")
    if count := int((~finite).sum()):
        notes.append(f"{count} not finite")
    return ", ".join(notes)


def label_with_note(name: str, note: str) -> str:
    return f"{name} (not shown: {note})" if note else name


def module_of(names: Sequence[str]) -> str:
    """The module of these parameters; if they have several, the first and the last parameter."""
    modules = {name.rpartition(".")[0] for name in names}
    if len(names) > 1 and (len(modules) > 1 or "" in modules):
        return f"{names[0]} to {names[-1]}"
    return modules.pop() or names[0]


def layers_of(matrix: Operator) -> dict[str, Operator]:
    """The blocks by layer, in the order of the parameters; several of one layer are named by their first parameter."""
    if not isinstance(matrix, BlockDiagonal):
        return {module_of(matrix.space.names): in_memory(matrix)}
    names = list(matrix.space.names)
    ordered = sorted(blocks_of(matrix), key=lambda block: names.index(block.space.names[0]))
    blocks = [part for block in ordered for part in getattr(block, "blocks", {"": block}).values()]
    modules = [module_of(block.space.names) for block in blocks]
    twice = {module for module, count in Counter(modules).items() if count > 1}
    named = zip(modules, blocks, strict=True)
    return {block.space.names[0] if module in twice else module: block for module, block in named}


def spans_of(space: Space) -> list[tuple[str, int]]:
    """Names of the layers and their numbers of rows, in order; with a single layer, of its parameters."""
    parts = list(zip(space.names, space.sizes, strict=True))
    modules = groupby(parts, lambda part: module_of(part[:1]))
    merged = [(module, sum(size for _, size in group)) for module, group in modules]
    return merged if len(merged) > 1 else parts
