"""Eigenvalues: all of them by rank, layer by layer, or their density."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from curvature.kronecker import EigenKronecker, Kronecker
from curvature.linalg import rounding_of
from curvature.operators import Diagonal, Operator
from curvature.plots.drawing import (
    UNIT,
    Array,
    hidden,
    label_with,
    layers_of,
    legend,
    line_of_numbers,
    look,
    named,
    numbers,
    one_axes,
    shade,
)

Spectrum = Operator | Tensor
FAINTEST = 1e-10  # relative to the largest density: less than one eigenvalue in a network of any usual size


def spectra(matrix: Spectrum | Mapping[str, Spectrum], ax: Axes | None = None) -> Axes:
    """Eigenvalues, largest first, against their rank, on two log axes: one line for each layer.

    The legend says how many eigenvalues of each layer are not shown because they are negative, or zero up to the
    rounding of the decomposition.

    Args:
        matrix: with blocks, as of ``fisher_blocks``, ``kfac`` and ``ekfac``: one line each. Any other operator is one
            line. A dict of operators or tensors by name is one line each: matrices to compare, the tensors that
            ``fisher_diagonal`` returns, or eigenvalues, which are taken as exact.
        ax: axes to draw into; None for a new figure.

    Returns:
        The axes.

    Raises:
        TypeError: something else was given.
        ValueError: no eigenvalues, or a matrix too large for them.
    """
    if isinstance(matrix, Operator):
        items: Mapping[str, Any] = layers_of(matrix)
    elif isinstance(matrix, Tensor):
        items = {"eigenvalues": matrix}
    else:
        items = named(matrix, "matrix", "an operator, a tensor or a dict {name: operator or tensor}")
    lines = {name: _eigenvalues(item, name) for name, item in items.items()}
    ax = one_axes(ax)
    for index, (name, (values, rounding)) in enumerate(lines.items()):
        shown = np.sort(values[np.isfinite(values) & (values > rounding)])[::-1]
        label = label_with(str(name), hidden(values, rounding))
        marker = "." if shown.size < 50 else None
        ax.plot(np.arange(1, shown.size + 1), shown, **shade(index, len(lines)), marker=marker, label=label)
    ax.set(xscale="log", yscale="log", xlabel="rank", ylabel=f"eigenvalue {UNIT}")
    ax.grid(True, which="major", alpha=0.3)
    legend(ax, loc="lower left")
    return ax


def spectral_density(grid: Any, density: Any, ax: Axes | None = None, *, label: str | None = None) -> Axes:
    """The density of eigenvalues against the eigenvalue, on a log axis: ``spectral_density(*estimate)``.

    The axis ends a decade below the lowest peak: a single eigenvalue among P is a peak of 1/P of the whole, so the
    height of a peak says how many eigenvalues it holds.

    Args:
        grid: eigenvalues, (G,), ascending; what ``curvature.estimators.spectral_density`` returns first.
        density: on the grid, (G,), per unit of eigenvalue; what it returns second.
        ax: axes to draw into, for example those of another density to compare with; None for a new figure.
        label: for the legend.

    Returns:
        The axes.

    Raises:
        TypeError: no numbers, or no axes.
        ValueError: different lengths, a grid that does not ascend, or a density that is negative, zero or not finite.
    """
    x, y = line_of_numbers(grid, "grid"), line_of_numbers(density, "density")
    if x.shape != y.shape:
        raise ValueError(f"expected grid and density of the same length, found {x.size} and {y.size}")
    if not (np.diff(x) > 0).all():
        raise ValueError("grid: expected ascending eigenvalues; is the order of the arguments (grid, density)?")
    if not (np.isfinite(y).all() and (y >= 0).all() and y.max() > 0):
        raise ValueError(f"density: expected positive numbers, found a range from {y.min():.3g} to {y.max():.3g}")
    ax = one_axes(ax)
    before = ax.get_ylim()[0] if ax.has_data() else np.inf
    ax.set_yscale("log", nonpositive="clip")
    ax.plot(x, y, **look(len(ax.lines)), label=label)
    ax.set_ylim(bottom=min(before, _lowest_peak(y) / 10))
    ax.set(xlabel=f"eigenvalue {UNIT}", ylabel="density of eigenvalues [1 / eigenvalue]")
    ax.grid(True, which="major", alpha=0.3)
    if label is not None:
        legend(ax)
    return ax


def _lowest_peak(density: Array) -> float:
    """Of those that may hold an eigenvalue."""
    bounded = np.concatenate([[0.0], density, [0.0]])
    peaks = density[(density >= bounded[:-2]) & (density > bounded[2:])]
    return float(min(peaks[peaks > FAINTEST * density.max()].min(), density.max() / 100))


def _eigenvalues(item: Any, name: str) -> tuple[Array, Array]:
    """Eigenvalues and how far rounding may have moved each."""
    if isinstance(item, Operator):
        values, rounding = _spectrum(item)
        return numbers(values, name).flatten(), numbers(rounding, name).flatten()
    if not isinstance(item, Tensor):
        raise TypeError(f"{name}: expected an operator of curvature or a tensor, found {type(item).__name__}")
    found = numbers(item, name).flatten()
    if not found.size:
        raise ValueError(f"{name}: no eigenvalues, found shape {tuple(item.shape)}")
    return found, np.zeros_like(found)


@singledispatch
def _spectrum(matrix: Operator) -> tuple[Tensor, Tensor]:
    """Eigenvalues and their rounding, of one shape; of a decomposition that mixes all of them unless known better."""
    values = matrix.eigenvalues()
    return values, rounding_of(values.abs().max()).expand(values.shape)


@_spectrum.register
def _(matrix: Diagonal) -> tuple[Tensor, Tensor]:
    return matrix.values, torch.zeros_like(matrix.values)


@_spectrum.register
def _(matrix: EigenKronecker) -> tuple[Tensor, Tensor]:
    return matrix.values, matrix.rounding


@_spectrum.register
def _(matrix: Kronecker) -> tuple[Tensor, Tensor]:
    return _spectrum(matrix.eigen)
