"""Matrices as heat maps: positive entries are red, negative ones blue, zero is white."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from curvature.operators import Curvature, EigenKronecker, Kronecker, Operator, Space, as_operator
from curvature.plots.axes import UNIT, axes_grid, layers_of, spans_of

LINEAR_THRESHOLD = 1e-2  # the colour scale is linear below this share of the largest entry
MIN_LABEL_GAP = 0.05  # of the side of a picture: closer layer names would overlap
MAX_GROUPS = 16  # of a layer; more cannot be told apart


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
