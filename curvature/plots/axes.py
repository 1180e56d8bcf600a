"""What all figures share: axes, and the names of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from numpy.typing import NDArray

from curvature.operators import BlockDiagonal, Operator, Space, blocks_of, in_memory

UNIT = "[loss / parameter²]"
MANY_LINES = 8  # more take the colours of a scale, in order, and have their legend beside the axes


def axes_grid(
    ax: Any, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.8), sharex: bool = False
) -> NDArray[Any]:
    """The given axes as an array (rows, columns), or those of a new figure, `size` inches each."""
    if ax is None:
        figsize = size[0] * columns, size[1] * rows
        return plt.subplots(rows, columns, figsize=figsize, sharex=sharex, squeeze=False, layout="constrained")[1]
    axes = np.asarray(ax, dtype=object)
    if wrong := [type(item).__name__ for item in axes.flat if not isinstance(item, Axes)]:
        raise TypeError(f"ax: expected matplotlib Axes, found {', '.join(dict.fromkeys(wrong))}")
    if axes.size != rows * columns:
        raise ValueError(f"ax: expected {rows * columns} axes, found {axes.size}: plt.subplots({rows}, {columns})")
    return axes.reshape(rows, columns)


def set_colours(ax: Axes, count: int) -> None:
    """For so many lines: matplotlib's, or those of a scale, since matplotlib's recur."""
    if count > MANY_LINES:
        ax.set_prop_cycle(color=colormaps["viridis"](np.linspace(0, 0.92, count)))  # the last ones are too pale


def add_legend(ax: Axes, title: str | None = None) -> None:
    """A legend where it covers least, or beside the axes if there are many lines."""
    count = len(ax.get_legend_handles_labels()[1])
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if count > MANY_LINES else {}
    ax.legend(title=title, fontsize="small", title_fontsize="small", ncols=1 + (count - 1) // 25, **place)


def name_of_layer(names: Sequence[str]) -> str:
    """The module of these parameters; if they have several, the first and the last parameter."""
    modules = {name.rpartition(".")[0] for name in names}
    if len(names) > 1 and (len(modules) > 1 or "" in modules):
        return f"{names[0]} to {names[-1]}"
    return modules.pop() or names[0]


def layers_of(matrix: Operator) -> dict[str, Operator]:
    """The blocks by layer, in the order of the parameters; several of one layer are named by their first parameter."""
    if not isinstance(matrix, BlockDiagonal):
        return {name_of_layer(matrix.space.names): in_memory(matrix)}
    names = list(matrix.space.names)
    ordered = sorted(blocks_of(matrix), key=lambda block: names.index(block.space.names[0]))
    blocks = [part for block in ordered for part in getattr(block, "blocks", {"": block}).values()]
    modules = [name_of_layer(block.space.names) for block in blocks]
    twice = {module for module, count in Counter(modules).items() if count > 1}
    named = zip(modules, blocks, strict=True)
    return {block.space.names[0] if module in twice else module: block for module, block in named}


def spans_of(space: Space) -> list[tuple[str, int]]:
    """Names of the layers and their numbers of rows, in order; with a single layer, of its parameters."""
    parts = list(zip(space.names, space.sizes, strict=True))
    modules = groupby(parts, lambda part: name_of_layer(part[:1]))
    merged = [(module, sum(size for _, size in group)) for module, group in modules]
    return merged if len(merged) > 1 else parts
