"""Eigenvalues by rank, layer by layer, or their density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from curvature import operators
from curvature.linalg import eigenvalue_rounding
from curvature.operators import BlockDiagonal, Diagonal, EigenKronecker, Kronecker, Operator
from curvature.plots import style

Spectrum = Operator | Tensor
Density = Operator | tuple[Tensor, Tensor]
MIN_PEAK = 1e-10  # relative to the largest density: less than one eigenvalue in any usual network


def spectra(matrix: Spectrum | Mapping[str, Spectrum], ax: Axes | None = None) -> Axes:
    """Eigenvalues, largest first, against their rank, on two log axes: one line for each layer.

    The legend counts the eigenvalues that are not shown because they are negative, or zero up to the rounding of the
    decomposition.

    Args:
        matrix: an operator, one line per block if it has blocks (``fisher_blocks``, ``kfac``, ``ekfac``). Or a dict of
            operators or tensors by name, one line each: matrices to compare, the result of ``fisher_diagonal``, or
            eigenvalues, which count as exact. Or a tensor of eigenvalues, (P,).
        ax: axes to draw into; None for a new figure.

    Raises:
        TypeError: any other type.
        ValueError: no eigenvalues, a tensor that looks like a matrix instead of its eigenvalues, or an operator too
            large for all eigenvalues (see `spectral_density`).
    """
    if isinstance(matrix, Operator):
        items: Mapping[str, Any] = style.layers_of(matrix)
    elif isinstance(matrix, Tensor):
        if matrix.ndim != 1:
            raise ValueError(f"matrix: expected an operator or eigenvalues (P,), found shape {tuple(matrix.shape)}")
        items = {"eigenvalues": matrix}
    else:
        items = style.require_mapping(matrix, "matrix", "an operator, a tensor or a dict {name: operator or tensor}")
    lines = {name: _eigenvalues(item, name) for name, item in items.items()}
    ax = style.axes_or_new(ax)
    styles = style.ordered_line_styles([str(name) for name in lines])
    for options, (name, (values, rounding)) in zip(styles, lines.items(), strict=True):
        shown = np.sort(values[np.isfinite(values) & (values > rounding)])[::-1]
        label = style.label_with_note(str(name), style.describe_hidden(values, rounding))
        marker = "." if shown.size < 50 else None
        ax.plot(np.arange(1, shown.size + 1), shown, **options, marker=marker, label=label)
    style.log_scale(ax, "x", "y")
    ax.set(xlabel="rank (1 is the largest)", ylabel=f"eigenvalue {style.CURVATURE_UNIT}")
    ax.grid(alpha=0.3)
    style.legend(ax, "layer" if isinstance(matrix, BlockDiagonal) else None, loc="lower left")
    return ax


def spectral_density(matrix: Density | Mapping[str, Density], ax: Axes | None = None) -> Axes:
    """The smoothed density of eigenvalues against the eigenvalue, on a log axis.

    Each eigenvalue is a bell; a single eigenvalue among P holds 1/P of the area, so the height of a peak tells how many
    eigenvalues it holds. The axis ends a decade below the lowest peak.

    Args:
        matrix: an operator, whose density is estimated by ``curvature.spectral_density`` with its defaults (80 products
            with ten vectors; for a matrix-free operator, 80 passes over the data); or the result of that function,
            ``(grid, density)``, (G,) each; or a dict of them by name, one line each.
        ax: axes to draw into, which may already show another density; None for a new figure.

    Raises:
        TypeError: neither an operator nor a pair (grid, density), or not axes.
        ValueError: grid and density of different lengths, a grid that does not ascend, or a density that is negative,
            zero everywhere or not finite.
    """
    by_name = isinstance(matrix, Mapping)
    expected = "{name: operator or (grid, density)}"
    items = style.require_mapping(matrix, "matrix", expected) if by_name else {"matrix": matrix}
    lines = {str(name): _density(item, str(name)) for name, item in items.items()}
    ax = style.axes_or_new(ax)
    limits = list(ax.get_ylim()) if ax.has_data() else []
    ax.set_yscale("log", nonpositive="clip")
    shades = style.colours([*(str(line.get_label()) for line in ax.lines), *lines])
    for name, (x, y) in lines.items():
        options = style.line_style(len(ax.lines), shades[name] if by_name else None)
        ax.plot(x, y, **options, label=name if by_name else None)
        limits += [_lowest_peak(y) / 10, 3 * y.max()]
    ax.set_ylim(min(limits), max(limits))
    ax.set(xlabel=f"eigenvalue {style.CURVATURE_UNIT}", ylabel="density of eigenvalues [parameter² / loss]")
    ax.grid(alpha=0.3)
    if by_name:
        style.legend(ax)
    return ax


def _density(item: Any, name: str) -> tuple[style.Array, style.Array]:
    pair = operators.spectral_density(item) if isinstance(item, Operator) else item
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise TypeError(f"{name}: expected an operator or a pair (grid, density), found {type(item).__name__}")
    x, y = style.to_vector(pair[0], f"{name}: grid"), style.to_vector(pair[1], f"{name}: density")
    if x.shape != y.shape:
        raise ValueError(f"{name}: expected grid and density of the same length, found {x.size} and {y.size}")
    if not (np.diff(x) > 0).all():
        raise ValueError(f"{name}: expected ascending eigenvalues; is the order (grid, density)?")
    if not (np.isfinite(y).all() and (y >= 0).all() and y.max() > 0):
        raise ValueError(f"{name}: expected a positive density, found a range from {y.min():.3g} to {y.max():.3g}")
    return x, y


def _lowest_peak(density: style.Array) -> float:
    """The height of the lowest peak that may hold an eigenvalue."""
    bounded = np.concatenate([[0.0], density, [0.0]])
    peaks = density[(density >= bounded[:-2]) & (density > bounded[2:])]
    return float(min(peaks[peaks > MIN_PEAK * density.max()].min(), density.max() / 100))


def _eigenvalues(item: Any, name: str) -> tuple[style.Array, style.Array]:
    """Eigenvalues and the rounding error of each."""
    if isinstance(item, Operator):
        values, rounding = _spectrum(item)
        return style.to_array(values, name).flatten(), style.to_array(rounding, name).flatten()
    if not isinstance(item, Tensor):
        raise TypeError(f"{name}: expected an operator of curvature or a tensor, found {type(item).__name__}")
    entries = style.to_array(item, name)
    if not entries.size:
        raise ValueError(f"{name}: no eigenvalues, found shape {tuple(item.shape)}")
    # The diagonal of a weight is two-dimensional, too, but hardly ever symmetric.
    is_square = entries.ndim == 2 and entries.shape == entries.shape[::-1] != (1, 1)
    if is_square and entries.any() and np.allclose(entries, entries.T):
        raise ValueError(
            f"{name}: expected eigenvalues or a diagonal, found a symmetric matrix {tuple(item.shape)}. Give the "
            "operator or torch.linalg.eigvalsh of the matrix; if it is a diagonal after all, flatten it"
        )
    return entries.flatten(), np.zeros(entries.size)


def _spectrum(matrix: Operator) -> tuple[Tensor, Tensor]:
    """Eigenvalues and their rounding errors; by default those of a decomposition that mixes all eigenvalues."""
    if isinstance(matrix, BlockDiagonal):
        values, rounding = zip(*map(_spectrum, matrix.blocks.values()), strict=True)
        return torch.cat([part.flatten() for part in values]), torch.cat([part.flatten() for part in rounding])
    if isinstance(matrix, Diagonal):
        return matrix.values, torch.zeros_like(matrix.values)
    if isinstance(matrix, Kronecker | EigenKronecker):
        eigen = matrix.eigen if isinstance(matrix, Kronecker) else matrix
        return eigen.values, eigen.rounding
    found = matrix.eigenvalues()
    return found, eigenvalue_rounding(found.abs().max()).expand(found.shape)
