"""Matrices as heat maps: positive entries are red, negative ones blue, zero is white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from curvature.operators import Curvature, EigenKronecker, Kronecker, Operator, as_operator
from curvature.plots.style import COLOURS, CURVATURE_UNIT, Array, axes_grid, axes_or_new, layers_of, spans_of, to_array

COLOUR_MAP = "RdBu_r"
LINEAR_THRESHOLD = 1e-2  # the colour scale is linear below this share of the largest entry
MIN_LABEL_GAP = 0.05  # of the side of a picture: closer layer names would overlap
MAX_POINTS = 2000  # along a side of a picture; a screen shows fewer
MAX_GROUPS = 16  # of a layer; more are not distinguishable
MAX_LAYERS = 40  # in one figure


def matrix(M: Curvature | Tensor, ax: Axes | None = None) -> Axes:
    """A heat map of a matrix, with the boundaries and names of the layers.

    Colours are logarithmic down to a hundredth of the largest entry and linear below. If there are more entries than
    points, each point shows the mean of its entries.

    For other colours, change the image in the returned axes, for example to a linear scale:
    ``plots.matrix(G).images[0].set_norm(matplotlib.colors.CenteredNorm())``.

    Args:
        M: an operator, which is made dense, a diagonal by parameter name (`fisher_diagonal`), or a two-dimensional
            tensor, which has no names.
        ax: axes to draw into; None for a new figure.

    Returns:
        The axes. All boundaries are drawn; if layers are too close for all names, the largest are named.

    Raises:
        TypeError: neither an operator nor a tensor, or not axes.
        ValueError: not two-dimensional, entries that are not finite, or too large to make dense.
    """
    M = as_operator(M) if isinstance(M, Mapping) else M
    entries = _entries(M, "M")
    ax = axes_or_new(ax)
    image = _image(ax, entries, _logarithmic(_largest(entries)))
    _name_layers(ax, M)
    ax.figure.colorbar(image, ax=ax, label=_label(M))
    return ax


def factors(kfac: Operator, layer: str | None = None, ax: Any = None) -> NDArray[Any]:
    """Heat maps of the Kronecker factors: A of the layer's inputs on the left, B of its outputs on the right.

    Groups of a layer follow each other along the diagonal; of many groups only the first are shown, and the title says
    how many. A diagonal factor, such as A of an embedding, is drawn as a curve. A bias is the last input. Each picture
    has its own linear colour scale.

    Args:
        kfac: what ``curvature.kfac`` or ``curvature.ekfac`` returns, or one of its ``blocks``. Of an EKFAC block, A has
            the means of its eigenvalues over outputs, B those over inputs, relative to the mean of all; both have its
            eigenvectors, and ``kron(B, A)`` has its trace.
        layer: name of a module or parameter; None for all layers with Kronecker factors.
        ax: two axes per layer; None for a new figure, with at most 40 layers.

    Returns:
        The axes, (layers, 2).

    Raises:
        TypeError: not an operator, or not axes.
        ValueError: no such layer, no Kronecker factors, not two axes per layer, or too many layers for one figure.
    """
    chosen, left_out = _with_factors(kfac, layer)
    if ax is None and len(chosen) > MAX_LAYERS:
        raise ValueError(
            f"{len(chosen)} layers are more than the {MAX_LAYERS} that fit into one figure: choose with layer=, which "
            "may be a module that holds several, or give axes"
        )
    axes = axes_grid(ax, list(chosen), ["A", "B"])
    for (name, block), (left, right) in zip(chosen.items(), axes, strict=True):
        (A, unit_of_A), (B, unit_of_B) = _factors_with_units(block)
        _draw_factor(left, A, f"{name}: A", "input", unit_of_A)
        _draw_factor(right, B, f"{name}: B", "output", unit_of_B)
    if ax is None and left_out:
        axes[0, 0].figure.suptitle("without Kronecker factors: " + ", ".join(left_out), fontsize="small", wrap=True)
    return axes


def comparison(exact: Curvature | Tensor, approximation: Curvature | Tensor, ax: Any = None) -> NDArray[Any]:
    """A matrix, its approximation and their difference side by side, on a common colour scale as in `matrix`.

    The title of the difference gives ``|approximation - exact| / |exact|`` in Frobenius norm.

    Args:
        exact: an operator, a diagonal by parameter name, or a two-dimensional tensor, for example a block of
            ``curvature.fisher_blocks``.
        approximation: likewise, for example the same block of ``curvature.kfac``.
        ax: three axes of one figure; None for a new figure.

    Returns:
        The axes, (3,).

    Raises:
        TypeError: neither an operator nor a tensor, or not axes.
        ValueError: different shapes or parameters, entries that are not finite, not three axes, or axes of several
            figures.
    """
    exact, approximation = (as_operator(M) if isinstance(M, Mapping) else M for M in (exact, approximation))
    one, other = _entries(exact, "exact"), _entries(approximation, "approximation")
    if one.shape != other.shape:
        raise ValueError(f"expected two matrices of one shape, found {one.shape} and {other.shape}")
    if isinstance(exact, Operator) and isinstance(approximation, Operator):
        names = [list(M.space.names) for M in (exact, approximation)]
        if names[0] != names[1]:
            raise ValueError(f"expected two matrices over the same parameters, found {names[0]} and {names[1]}")
    difference, norm = other - one, np.linalg.norm(one)
    distance = np.linalg.norm(difference)
    error = f"relative error {distance / norm:.3g}" if norm else f"error {distance:.3g}, exact is zero"
    titles = ["exact", "approximation", f"approximation - exact\n{error} (Frobenius)"]
    axes = axes_grid(ax, ["matrix"], ["exact", "approximation", "difference"], (3.2, 4.1))[0]
    if len({item.figure for item in axes}) > 1:
        raise ValueError("ax: expected axes of one figure, which share a colour scale, found several figures")
    named = exact if isinstance(exact, Operator) else approximation
    largest = max(map(_largest, (one, other, difference)))
    for item, entries, title in zip(axes, (one, other, difference), titles, strict=True):
        image = _image(item, entries, _logarithmic(largest))
        item.set_title(title, fontsize="medium")
        _name_layers(item, named, rows=item is axes[0])
    axes[0].figure.colorbar(image, ax=list(axes), label=_label(named))
    return axes


def _entries(M: Operator | Tensor, what: str) -> Array:
    """The matrix as a checked array."""
    if not isinstance(M, Operator | Tensor):
        raise TypeError(f"{what}: expected an operator of curvature or a tensor, found {type(M).__name__}")
    entries = to_array(M.to_dense() if isinstance(M, Operator) else M, what)
    if entries.ndim != 2 or not entries.size:
        raise ValueError(f"{what}: expected a matrix, found shape {entries.shape}")
    if not np.isfinite(entries).all():
        raise ValueError(f"{what}: {int((~np.isfinite(entries)).sum())} of {entries.size} entries are not finite")
    return entries


def _label(M: Operator | Tensor) -> str:
    return f"entry {CURVATURE_UNIT}" if isinstance(M, Operator) else "entry"


def _largest(entries: Array) -> float:
    return float(np.abs(entries).max())


def _image(ax: Axes, entries: Array, norm: Normalize) -> AxesImage:
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    # If a picture has fewer points than the matrix, average entries, not colours.
    rows, columns = entries.shape
    corners = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    return ax.imshow(_downsample(entries), cmap=COLOUR_MAP, norm=norm, interpolation_stage="data", extent=corners)


def _downsample(entries: Array) -> Array:
    """Average neighbours if a side is longer than `MAX_POINTS`, since matplotlib copies what it draws."""
    for axis, size in enumerate(entries.shape):
        if size > MAX_POINTS:
            edges = np.arange(MAX_POINTS) * size // MAX_POINTS
            counts = np.diff(edges, append=size)
            entries = np.add.reduceat(entries, edges, axis) / (counts if axis else counts[:, None])
    return entries


def _logarithmic(largest: float) -> Normalize:
    """Zero in the middle: entries of curvature matrices span many decades, of which a linear scale shows one."""
    limit = largest or 1.0
    return SymLogNorm(limit * LINEAR_THRESHOLD, vmin=-limit, vmax=limit, base=10)


def _boundaries(ax: Axes, sizes: Sequence[int]) -> None:
    for edge in np.cumsum(sizes)[:-1] - 0.5:
        ax.axhline(edge, color="black", alpha=0.4, lw=0.5)
        ax.axvline(edge, color="black", alpha=0.4, lw=0.5)


def _name_layers(ax: Axes, M: Operator | Tensor, rows: bool = True) -> None:
    if not isinstance(M, Operator):
        ax.set(xlabel="column", ylabel="row" if rows else "")
        return
    layers, sizes = zip(*spans_of(M.space), strict=True)
    _boundaries(ax, sizes)
    middles = np.cumsum(sizes) - np.divide(sizes, 2) - 0.5
    positions: dict[str, float] = {}
    for k in np.argsort(np.negative(sizes), kind="stable"):
        if all(abs(middles[k] - other) >= MIN_LABEL_GAP * sum(sizes) for other in positions.values()):
            positions[layers[k]] = float(middles[k])
    ticks, names = list(positions.values()), list(positions)
    kind = "layer" if set(names) - set(M.space.names) else "parameter"
    ax.set(xlabel=kind, ylabel=kind if rows else "")
    ax.set_xticks(ticks, names, rotation=90, fontsize="small")
    ax.set_yticks(ticks, names if rows else [""] * len(names), fontsize="small")
    ax.tick_params(length=2)


def _factors_with_units(block: Kronecker | EigenKronecker) -> tuple[tuple[Tensor, str], tuple[Tensor, str]]:
    if isinstance(block, Kronecker):
        return (block.A, "[activation²]"), (block.B, "[loss / output²]")
    in_basis = lambda V, values: values if V is None else V * values.unsqueeze(1) @ V.mT
    mean = block.values.mean((1, 2)).unsqueeze(1)
    A = in_basis(block.column_vectors, block.values.mean(1))
    return (A, CURVATURE_UNIT), (in_basis(block.row_vectors, block.values.mean(2) / mean), "[of the mean]")


def _with_factors(kfac: Operator, layer: str | None) -> tuple[dict[str, Kronecker | EigenKronecker], list[str]]:
    """The chosen layers with Kronecker factors, and the names of those without."""
    if not isinstance(kfac, Operator):
        raise TypeError(f"kfac: expected what curvature.kfac returns, or a block of it, found {type(kfac).__name__}")
    layers = layers_of(kfac)
    is_below = lambda name: layer is None or f"{name}.".startswith(f"{layer}.")
    chosen = {name: block for name, block in layers.items() if any(map(is_below, block.space.names))}
    if not chosen:
        raise ValueError(f"layer: none is called {layer!r}; there are {', '.join(layers)}")
    factored = {name: block for name, block in layers.items() if isinstance(block, Kronecker | EigenKronecker)}
    shown = {name: block for name, block in factored.items() if name in chosen}
    if not shown:
        kinds = ", ".join(f"{name} ({type(block).__name__})" for name, block in chosen.items())
        have = ", ".join(factored) or "none"
        raise ValueError(f"no Kronecker factors A and B in {kinds}; layers that have them: {have}")
    return shown, [name for name in chosen if name not in shown]


def _draw_factor(ax: Axes, factor: Tensor, title: str, index: str, unit: str) -> None:
    """Draw a factor (g, d, d), or (g, d) if it is diagonal."""
    groups, size = factor.shape[:2]
    diagonal = factor.ndim == 2
    shown = groups if diagonal else min(groups, MAX_GROUPS, max(1, MAX_POINTS // size))
    values = to_array(factor[:shown], title)
    note = f", first {shown} of {groups} groups" if shown < groups else f", {groups} groups" if groups > 1 else ""
    ax.set_title(title + note, fontsize="medium")
    ax.set_xlabel(index)
    if diagonal:
        ax.plot(values.flatten(), color=COLOURS[0], lw=1.0, marker="." if values.size < 50 else None)
        ax.set_ylabel(f"diagonal entry {unit}")
        return
    ax.set_ylabel(index)
    entries = np.zeros((shown, size, shown, size))
    entries[range(shown), :, range(shown), :] = values
    limit = _largest(values) or 1.0  # also of zeros
    image = _image(ax, entries.reshape(shown * size, shown * size), Normalize(-limit, limit))
    if size > 1:
        _boundaries(ax, [size] * shown)
    ax.figure.colorbar(image, ax=ax, label=f"entry {unit}")
