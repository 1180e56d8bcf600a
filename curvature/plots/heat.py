"""Matrices as heat maps: red entries are positive, blue ones negative, white is zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from curvature.kronecker import Kronecker
from curvature.operators import Operator
from curvature.plots.drawing import COLOURS, UNIT, Array, grid_of_axes, layers_of, numbers, one_axes, spans_of

MAP = "RdBu_r"
FAINTEST = 1e-2  # of the largest entry: where the logarithmic part of a colour scale ends
CLOSEST = 0.05  # of the side of a picture: names of layers nearer than that would overlap


def matrix(M: Operator | Tensor, ax: Axes | None = None) -> Axes:
    """A heat map of a matrix, with the boundaries and names of the layers.

    Colours are logarithmic in the size of the entries down to a hundredth of the largest, and linear between there and
    zero. For others, change the image in the axes returned, as to linear ones:
    ``plots.matrix(G).images[0].set_norm(matplotlib.colors.CenteredNorm())``.

    Args:
        M: an operator, which is made dense, or a tensor of two dimensions, which has no names.
        ax: axes to draw into; None for a new figure.

    Returns:
        The axes. Of layers that lie too close for all names, the largest are named; every boundary is drawn.

    Raises:
        TypeError: no operator and no tensor, or no axes.
        ValueError: not of two dimensions, entries that are not finite, or too large to be made dense.
    """
    entries = _entries(M, "M")
    ax = one_axes(ax)
    image = _image(ax, entries, _logarithmic(_largest(entries)))
    _name_layers(ax, M)
    ax.figure.colorbar(image, ax=ax, label=_label(M))
    return ax


def factors(kfac: Operator, layer: str | None = None, ax: Any = None) -> NDArray[Any]:
    """Heat maps of the Kronecker factors: A of the layer's inputs on the left, B of its outputs on the right.

    The factors of a layer with several groups lie along the diagonal, one group after the other. A factor that is
    diagonal, as A of an embedding, is drawn as a curve. Each picture has a linear colour scale of its own.

    Args:
        kfac: what ``curvature.kfac`` returns, or one of its ``blocks``.
        layer: name of a module or of a parameter; None for all layers that have Kronecker factors.
        ax: two axes for each layer; None for a new figure.

    Returns:
        The axes, (layers, 2).

    Raises:
        TypeError: no operator, or no axes.
        ValueError: there is no such layer, it has no Kronecker factors, or there are not two axes for each.
    """
    chosen, left_out = _with_factors(kfac, layer)
    axes = grid_of_axes(ax, list(chosen), ["A", "B"])
    for name, block, pair in zip(chosen, chosen.values(), axes, strict=True):
        groups = f", {block.sides[0]} groups" if block.sides[0] > 1 else ""
        _draw_factor(pair[0], block.A, f"{name}: A{groups}", "input", "[activation²]")
        _draw_factor(pair[1], block.B, f"{name}: B{groups}", "output", "[loss / output²]")
    if ax is None and left_out:
        axes[0, 0].figure.suptitle("without Kronecker factors: " + ", ".join(left_out), fontsize="small", wrap=True)
    return axes


def comparison(exact: Operator | Tensor, approximation: Operator | Tensor, ax: Any = None) -> NDArray[Any]:
    """A matrix, its approximation and their difference side by side, all on one colour scale, that of `matrix`.

    Above the difference stands ``|approximation - exact| / |exact|`` in Frobenius norm.

    Args:
        exact: an operator or a tensor of two dimensions, for example a block of ``curvature.fisher_blocks``.
        approximation: likewise, for example the same block of ``curvature.kfac``.
        ax: three axes of one figure; None for a new figure.

    Returns:
        The axes, (3,).

    Raises:
        TypeError: no operator and no tensor, or no axes.
        ValueError: different shapes or parameters, entries that are not finite, not three axes, or of several figures.
    """
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
    axes = grid_of_axes(ax, ["matrix"], ["exact", "approximation", "difference"], (3.2, 3.5))[0]
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
    """The matrix as an array, checked; `what` names it in errors."""
    if not isinstance(M, Operator | Tensor):
        raise TypeError(f"{what}: expected an operator of curvature or a tensor, found {type(M).__name__}")
    entries = numbers(M.to_dense() if isinstance(M, Operator) else M, what)
    if entries.ndim != 2 or not entries.size:
        raise ValueError(f"{what}: expected a matrix, found shape {entries.shape}")
    if not np.isfinite(entries).all():
        raise ValueError(f"{what}: {int((~np.isfinite(entries)).sum())} of {entries.size} entries are not finite")
    return entries


def _label(M: Operator | Tensor) -> str:
    return f"entry {UNIT}" if isinstance(M, Operator) else "entry"


def _largest(entries: Array) -> float:
    return float(np.abs(entries).max())


def _image(ax: Axes, entries: Array, norm: Normalize) -> AxesImage:
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    # Where a picture has less points than the matrix, a point is the mean of entries, not of their colours.
    return ax.imshow(entries, cmap=MAP, norm=norm, interpolation_stage="data")


def _linear(largest: float) -> Normalize:
    """Zero in the middle, also for a matrix of zeros."""
    return Normalize(-(largest or 1.0), largest or 1.0)


def _logarithmic(largest: float) -> Normalize:
    """Likewise; the entries of curvature matrices span many decades, of which a linear scale shows one."""
    limit = largest or 1.0
    return SymLogNorm(limit * FAINTEST, vmin=-limit, vmax=limit, base=10)


def _boundaries(ax: Axes, sizes: Sequence[int]) -> None:
    for edge in np.cumsum(sizes)[:-1] - 0.5:
        ax.axhline(edge, color="black", alpha=0.5, lw=0.5)
        ax.axvline(edge, color="black", alpha=0.5, lw=0.5)


def _name_layers(ax: Axes, M: Operator | Tensor, rows: bool = True) -> None:
    if not isinstance(M, Operator):
        return
    spans = spans_of(M.space)
    sizes = [size for _, size in spans]
    _boundaries(ax, sizes)
    ends = np.cumsum(sizes)
    places: dict[str, float] = {}
    for k in sorted(range(len(spans)), key=lambda k: -sizes[k]):
        place = float(ends[k] - sizes[k] / 2 - 0.5)
        if all(abs(place - other) >= CLOSEST * ends[-1] for other in places.values()):
            places[spans[k][0]] = place
    ticks, names = list(places.values()), list(places)
    ax.set_xticks(ticks, names, rotation=90, fontsize="small")
    ax.set_yticks(ticks, names if rows else [""] * len(names), fontsize="small")
    ax.tick_params(length=2)


def _with_factors(kfac: Operator, layer: str | None) -> tuple[dict[str, Kronecker], list[str]]:
    """The chosen layers that have Kronecker factors, and the names of those that have none."""
    if not isinstance(kfac, Operator):
        raise TypeError(f"kfac: expected what curvature.kfac returns, or a block of it, found {type(kfac).__name__}")
    layers = layers_of(kfac)
    chosen = {
        name: block
        for name, block in layers.items()
        if layer is None or any(f"{inner}.".startswith(f"{layer}.") for inner in block.space.names)
    }
    if not chosen:
        raise ValueError(f"layer: none is called {layer!r}; there are {', '.join(layers)}")
    found = {name: block for name, block in chosen.items() if isinstance(block, Kronecker)}
    if not found:
        kinds = ", ".join(f"{name} ({type(block).__name__})" for name, block in chosen.items())
        have = [name for name, block in layers.items() if isinstance(block, Kronecker)]
        raise ValueError(f"no Kronecker factors A and B in {kinds}; layers that have them: {', '.join(have) or 'none'}")
    return found, [name for name in chosen if name not in found]


def _draw_factor(ax: Axes, factor: Tensor, title: str, index: str, unit: str) -> None:
    """A factor (g, d, d), or (g, d) where it is diagonal."""
    values = numbers(factor, title)
    groups, size = values.shape[:2]
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel(index)
    if values.ndim == 2:
        ax.plot(values.flatten(), color=COLOURS[0], lw=1.0, marker="." if values.size < 50 else None)
        ax.set_ylabel(f"diagonal entry {unit}")
        return
    ax.set_ylabel(index)
    entries = np.zeros((groups, size, groups, size))
    entries[range(groups), :, range(groups), :] = values
    image = _image(ax, entries.reshape(groups * size, groups * size), _linear(_largest(values)))
    if size > 1:
        _boundaries(ax, [size] * groups)
    ax.figure.colorbar(image, ax=ax, label=f"entry {unit}")
