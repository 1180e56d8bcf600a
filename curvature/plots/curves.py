"""Eigenvalues by rank, and an optimizer's run step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from curvature.linalg import eigenvalue_rounding
from curvature.operators import BlockDiagonal, Diagonal, EigenKronecker, Kronecker, Operator
from curvature.plots.axes import UNIT, add_legend, axes_grid, layers_of, set_colours

Spectrum = Operator | Tensor
Array = NDArray[np.float64]
PANELS = {
    "loss": "loss", "damping": f"damping\n{UNIT}", "step_size": "step size", "ratio": "reduction ratio",
    "seconds": "time per step\n[s]",
}  # fmt: skip
MIN_RATIO, MAX_RATIO = -1.0, 2.0  # of the axis of the reduction ratio
RATIO_GUIDES = {1.0: "-", 0.75: ":", 0.25: ":"}  # a perfect model; usual thresholds to decrease and increase damping
RUN = "an optimizer, a list with a dict for each step, as opt.history, or a dict {name: one of these}"


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
