"""Matrices as heat maps, eigenvalues by rank, an optimizer's run step by step.

In heat maps positive entries are red, negative ones blue, zero is white.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from curvature.linalg import eigenvalue_rounding
from curvature.operators import (
    BlockDiagonal,
    Curvature,
    Diagonal,
    EigenKronecker,
    Kronecker,
    Operator,
    Space,
    as_operator,
    blocks_of,
    in_memory,
)

UNIT = "[loss / parameter²]"
MANY_LINES = 8  # more take the colours of a scale, in order, and have their legend beside the axes
LINEAR_THRESHOLD = 1e-2  # the colour scale is linear below this share of the largest entry
MIN_LABEL_GAP = 0.05  # of the side of a picture: closer layer names would overlap
MAX_GROUPS = 16  # of a layer; more cannot be told apart
Spectrum = Operator | Tensor
Array = NDArray[np.float64]
PANELS = {
    "loss": "loss", "damping": f"damping\n{UNIT}", "step_size": "step size", "ratio": "reduction ratio",
    "seconds": "time per step\n[s]",
}  # fmt: skip
MIN_RATIO, MAX_RATIO = -1.0, 2.0  # of the axis of the reduction ratio
RATIO_GUIDES = {1.0: "-", 0.75: ":", 0.25: ":"}  # a perfect model; usual thresholds to decrease and increase damping
RUN = "an optimizer, a list with a dict for each step, as opt.history, or a dict {name: one of these}"


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


def matrix(M: Curvature | Tensor, ax: Axes | None = None) -> Axes:
    """A heat map of a matrix, with the boundaries and names of the layers.

    Colours are logarithmic down to a hundredth of the largest entry and linear below. For others, change the image:
    ``plots.matrix(G).images[0].set_norm(matplotlib.colors.CenteredNorm())``.

    Args:
        M: an operator, which is made dense, a diagonal by parameter name (`fisher_diagonal`), or a two-dimensional
            tensor, which has no names.
        ax: axes to draw into; None for a new figure.

    Returns:
        The axes. If layers are too close for all names, the largest are named.

    Raises:
        TypeError: neither an operator nor a tensor, or not axes.
        ValueError: not two-dimensional, entries that are not finite, or too large to make dense.
    """
    M = as_operator(M) if isinstance(M, Mapping) else M
    if not isinstance(M, Operator | Tensor):
        raise TypeError(f"M: expected an operator of curvature or a tensor, found {type(M).__name__}")
    entries = (M.to_dense() if isinstance(M, Operator) else M.detach()).cpu().double()
    if entries.ndim != 2 or not entries.numel():
        raise ValueError(f"M: expected a matrix, found shape {tuple(entries.shape)}")
    if wrong := int((~entries.isfinite()).sum()):
        raise ValueError(f"M: {wrong} of {entries.numel()} entries are not finite")
    limit = float(entries.abs().max()) or 1.0
    ax = axes_grid(ax)[0, 0]
    image = _draw(ax, entries, SymLogNorm(limit * LINEAR_THRESHOLD, vmin=-limit, vmax=limit, base=10))
    ax.set(xlabel="column", ylabel="row")
    if isinstance(M, Operator):
        _name_layers(ax, M.space)
    ax.figure.colorbar(image, ax=ax, label=f"entry {UNIT}" if isinstance(M, Operator) else "entry")
    return ax


def factors(kfac: Operator, layer: str | None = None, ax: Any = None) -> NDArray[Any]:
    """Heat maps of the Kronecker factors: A of the layer's inputs on the left, B of its outputs on the right.

    Groups of a layer follow each other along the diagonal, the first 16 of many. A diagonal factor, such as A of an
    embedding, is a curve. A bias is the last input. Each picture has its own linear colour scale.

    Args:
        kfac: what ``curvature.kfac`` or ``curvature.ekfac`` returns, or one of its ``blocks``. Of an EKFAC block, A has
            the means of its eigenvalues over outputs, B those over inputs, relative to the mean of all; both have its
            eigenvectors, and ``kron(B, A)`` has its trace.
        layer: name of a module or parameter; None for all layers with Kronecker factors.
        ax: two axes per layer; None for a new figure.

    Returns:
        The axes, (layers, 2).

    Raises:
        TypeError: not an operator, or not axes.
        ValueError: no such layer, no Kronecker factors, or not two axes per layer.
    """
    chosen = _with_factors(kfac, layer)
    axes = axes_grid(ax, len(chosen), 2, (4.2, 3.5))
    for (name, block), pair in zip(chosen.items(), axes, strict=True):
        sides = zip(pair, _factors_with_units(block), "AB", ("input", "output"), strict=True)
        for item, (factor, unit), side, index in sides:
            _draw_factor(item, factor.detach().cpu().double(), f"entry {unit}", index)
            groups = f", first {MAX_GROUPS} of {len(factor)} groups" if len(factor) > MAX_GROUPS else ""
            item.set_title(f"{name}: {side}{groups}", fontsize="medium")
    return axes


def _draw(ax: Axes, entries: Tensor, norm: Normalize) -> AxesImage:
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    # if a picture has fewer points than the matrix, average entries, not colours
    return ax.imshow(entries.numpy(), cmap="RdBu_r", norm=norm, interpolation_stage="data")


def _draw_boundaries(ax: Axes, sizes: list[int]) -> None:
    for edge in np.cumsum(sizes)[:-1] - 0.5:
        ax.axhline(edge, color="black", alpha=0.4, lw=0.5)
        ax.axvline(edge, color="black", alpha=0.4, lw=0.5)


def _name_layers(ax: Axes, space: Space) -> None:
    spans = spans_of(space)
    sizes = [size for _, size in spans]
    _draw_boundaries(ax, sizes)
    middles = np.cumsum(sizes) - np.divide(sizes, 2) - 0.5
    positions: dict[str, float] = {}
    for k in np.argsort(np.negative(sizes), kind="stable"):
        if all(abs(middles[k] - other) >= MIN_LABEL_GAP * sum(sizes) for other in positions.values()):
            positions[spans[k][0]] = float(middles[k])
    kind = "layer" if set(positions) - set(space.names) else "parameter"
    ax.set(xlabel=kind, ylabel=kind)
    ax.set_xticks(list(positions.values()), list(positions), rotation=90, fontsize="small")
    ax.set_yticks(list(positions.values()), list(positions), fontsize="small")


def _with_factors(kfac: Operator, layer: str | None) -> dict[str, Kronecker | EigenKronecker]:
    """The chosen layers with Kronecker factors."""
    if not isinstance(kfac, Operator):
        raise TypeError(f"kfac: expected what curvature.kfac returns, or a block of it, found {type(kfac).__name__}")
    layers = layers_of(kfac)
    is_below = lambda name: layer is None or f"{name}.".startswith(f"{layer}.")
    chosen = {name: block for name, block in layers.items() if any(map(is_below, block.space.names))}
    if not chosen:
        raise ValueError(f"layer: none is called {layer!r}; there are {', '.join(layers)}")
    factored = {name: block for name, block in chosen.items() if isinstance(block, Kronecker | EigenKronecker)}
    if not factored:
        kinds = ", ".join(f"{name} ({type(block).__name__})" for name, block in chosen.items())
        raise ValueError(f"no Kronecker factors A and B in {kinds}")
    return factored


def _factors_with_units(block: Kronecker | EigenKronecker) -> tuple[tuple[Tensor, str], tuple[Tensor, str]]:
    if isinstance(block, Kronecker):
        return (block.A, "[activation²]"), (block.B, "[loss / output²]")
    in_basis = lambda V, values: values if V is None else V * values.unsqueeze(1) @ V.mT
    mean = block.values.mean((1, 2)).unsqueeze(1)
    A = in_basis(block.column_vectors, block.values.mean(1))
    return (A, UNIT), (in_basis(block.row_vectors, block.values.mean(2) / mean), "[of the mean]")


def _draw_factor(ax: Axes, factor: Tensor, label: str, index: str) -> None:
    """Draw a factor (g, d, d), or (g, d) if it is diagonal."""
    shown = factor[:MAX_GROUPS]
    ax.set_xlabel(index)
    if factor.ndim == 2:
        ax.plot(shown.flatten(), lw=1.0, marker="." if shown.numel() < 50 else None)
        ax.set_ylabel(f"diagonal {label}")
        return
    ax.set_ylabel(index)
    limit = float(shown.abs().max()) or 1.0
    image = _draw(ax, torch.block_diag(*shown), Normalize(-limit, limit))
    if shown.shape[1] > 1:
        _draw_boundaries(ax, [shown.shape[1]] * len(shown))
    ax.figure.colorbar(image, ax=ax, label=label)


class HasHistory(Protocol):
    """An optimizer."""

    @property
    def history(self) -> list[dict[str, Any]]: ...


History = HasHistory | Sequence[Mapping[str, Any]]


def spectra(matrix: Spectrum | Mapping[str, Spectrum], ax: Axes | None = None) -> Axes:
    """Eigenvalues, largest first, against their rank, on two log axes: one line for each layer.

    Negative eigenvalues are triangles of the same colour at their absolute value. What is zero up to rounding in the
    decomposition is left out.

    Args:
        matrix: an operator, one line per block if it has blocks (``fisher_blocks``, ``kfac``, ``ekfac``). Or a dict of
            operators or tensors by name, one line each: matrices to compare, the result of ``fisher_diagonal``, or
            eigenvalues, which count as exact. Or a tensor of eigenvalues, (P,).
        ax: axes to draw into; None for a new figure.

    Raises:
        TypeError: any other type.
        ValueError: no eigenvalues, some that are not finite, a tensor that looks like a matrix instead of its
            eigenvalues, or an operator too large for all eigenvalues (see ``curvature.spectral_density``).
    """
    items: Any = matrix
    if isinstance(matrix, Operator):
        items = layers_of(matrix)
    elif isinstance(matrix, Tensor):
        items = {"eigenvalues": matrix}
    elif not isinstance(matrix, Mapping):
        raise TypeError(f"matrix: expected an operator, a tensor or a dict of them, found {type(matrix).__name__}")
    lines = {str(name): _eigenvalues(item, str(name)) for name, item in items.items()}
    if not lines:
        raise ValueError("matrix: expected {name: operator or tensor}, found an empty dict")
    ax = axes_grid(ax)[0, 0]
    set_colours(ax, len(lines))
    ax.set(xscale="log", yscale="log", xlabel="rank (1 is the largest)", ylabel=f"eigenvalue {UNIT}")
    for name, (values, rounding) in lines.items():
        order = np.argsort(-values)
        ranks, values, rounding = np.arange(1, len(order) + 1), values[order], rounding[order]
        is_positive, is_negative = values > rounding, values < -rounding
        (line,) = ax.plot(ranks[is_positive], values[is_positive], marker="." if len(order) < 50 else None, label=name)
        if is_negative.any():
            options: dict[str, Any] = {"ms": 3, "color": line.get_color(), "label": f"{name}, negative"}
            ax.plot(ranks[is_negative], -values[is_negative], "v", **options)
    ax.grid(alpha=0.3)
    add_legend(ax, "layer" if isinstance(matrix, BlockDiagonal) else None)
    return ax


def training(history: History | Mapping[str, History], *, ax: Any = None) -> NDArray[Any]:
    """The run of an optimizer: loss, damping, step size, reduction ratio and time, each against the step.

    There is a panel for each of these that is known. The history may hold, for every step: ``step``; ``loss`` before
    the step; ``damping`` in loss / parameter²; ``step_size``; ``ratio``, the actual over the predicted reduction of the
    loss, with guides at 0.25, 0.75 and 1, drawn at the edge where it is outside of [-1, 2]; ``seconds``; and
    ``accepted``, with vertical lines through all panels at rejected steps. All are plain numbers; None or a missing key
    means unknown. An axis is logarithmic where all its values are positive.

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
    named: Any = history if isinstance(history, Mapping) else {"history": history}
    runs = {str(name): _columns(getattr(run, "history", run), str(name)) for name, run in named.items()}
    panels = [key for key in PANELS if any(key in run for run in runs.values())]
    if not panels:
        raise ValueError(f"history: nothing to draw: no values of {', '.join(PANELS)}")
    axes = axes_grid(ax, len(panels), 1, (7.5, 1.9), sharex=True)[:, 0]
    for item, key in zip(axes, panels, strict=True):
        set_colours(item, len(runs))
        for name, run in runs.items():
            steps, values = run.get(key, (np.zeros(0), np.zeros(0)))
            shown = np.clip(values, MIN_RATIO, MAX_RATIO) if key == "ratio" else values
            (line,) = item.plot(steps, shown, "." if key == "seconds" else "-", lw=1.2, ms=3, label=name)
            if len(steps) == 1:
                line.set_marker(".")
            rejected = [step for step, accepted in zip(*run.get("accepted", ((), ())), strict=True) if not accepted]
            colour = line.get_color() if len(runs) > 1 else "tab:red"
            item.vlines(rejected, 0, 1, colors=colour, alpha=0.3, lw=0.8, transform=item.get_xaxis_transform())
        _finish_panel(item, key)
    if len(runs) > 1:
        add_legend(axes[0])
    axes[-1].set_xlabel("step")
    return axes


def _finish_panel(ax: Axes, key: str) -> None:
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.lines])
    finite = drawn[np.isfinite(drawn)]
    if key == "ratio":
        for value, style in RATIO_GUIDES.items():
            ax.axhline(value, color="grey", lw=1.0, ls=style, zorder=1)
        ax.set_ylim(MIN_RATIO - 0.1, MAX_RATIO + 0.1)
    elif finite.size and (finite > 0).all():
        ax.set_yscale("log")
    ax.set_ylabel(PANELS[key])
    ax.grid(alpha=0.3)


def _columns(entries: Any, name: str) -> dict[str, tuple[Array, Array]]:
    """Steps and values, (S,) each, of what is known of a run, by key."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError(f"{name}: expected {RUN}, found {type(entries).__name__}")
    if not entries:
        raise ValueError(f"{name}: no steps yet: draw after the optimizer's first one")
    if wrong := [type(entry).__name__ for entry in entries if not isinstance(entry, Mapping)]:
        raise TypeError(f"{name}: expected a dict for each step, found {', '.join(dict.fromkeys(wrong))}")
    numbered = all(entry.get("step") is not None for entry in entries)
    steps = [entry["step"] if numbered else k for k, entry in enumerate(entries)]
    columns = {}
    for key in (*PANELS, "accepted"):
        pairs = [(s, entry[key]) for s, entry in zip(steps, entries, strict=True) if entry.get(key) is not None]
        if pairs:
            try:
                array = np.array([[float(x) for x in pair] for pair in pairs])
            except (TypeError, ValueError, RuntimeError):  # of a text, of a tensor with several entries
                raise TypeError(f"{name}: {key}: expected a number for each step") from None
            columns[key] = array[:, 0], array[:, 1]
    return columns


def _eigenvalues(item: Any, name: str) -> tuple[Array, Array]:
    """Eigenvalues and the rounding error of each."""
    if isinstance(item, Operator):
        values, rounding = _spectrum(item)
    elif isinstance(item, Tensor):
        values, rounding = item, torch.zeros_like(item)
    else:
        raise TypeError(f"{name}: expected an operator of curvature or a tensor, found {type(item).__name__}")
    # the diagonal of a weight is two-dimensional, too, but hardly ever symmetric
    if values.ndim == 2 and len(values) == len(values.T) > 1 and values.any() and torch.allclose(values, values.T):
        raise ValueError(
            f"{name}: expected eigenvalues or a diagonal, found a symmetric matrix {tuple(values.shape)}. Give the "
            "operator or torch.linalg.eigvalsh of the matrix; if it is a diagonal after all, flatten it"
        )
    finite = int(values.isfinite().sum())
    if not finite or finite < values.numel():
        raise ValueError(f"{name}: expected finite eigenvalues, found {finite} of {values.numel()}")
    to_array = lambda t: t.detach().flatten().cpu().double().numpy()
    return to_array(values), to_array(rounding)


def _spectrum(matrix: Operator) -> tuple[Tensor, Tensor]:
    """Eigenvalues and their rounding errors; by default those of a decomposition that mixes all eigenvalues."""
    if isinstance(matrix, BlockDiagonal):
        parts = [[t.flatten() for t in _spectrum(block)] for block in matrix.blocks.values()]
        return torch.cat([values for values, _ in parts]), torch.cat([rounding for _, rounding in parts])
    if isinstance(matrix, Diagonal):
        return matrix.values, torch.zeros_like(matrix.values)
    if isinstance(matrix, Kronecker | EigenKronecker):
        eigen = matrix.eigen if isinstance(matrix, Kronecker) else matrix
        return eigen.values, eigen.rounding
    values = matrix.eigenvalues()
    return values, eigenvalue_rounding(values.abs().max()).expand(values.shape)
