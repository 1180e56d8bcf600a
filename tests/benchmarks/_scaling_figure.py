"""The figure of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from _scaling_model import Costs, Network, step
from _scaling_networks import DEPTHS, FAMILY_RANKS, FRACTIONS, NETWORKS, RANKS, SUPPOSED, WIDTHS, divided, mlp
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

COLOURS = dict(zip(NETWORKS, ("C0", "C1", "C2", "C3", "C4"), strict=True))
STYLES = dict(zip(FRACTIONS, (":", "--", "-"), strict=True))
WIDTHS_OF_LINES = {":": 1.4, "--": 1.8, "-": 3.2}  # lines that coincide show through each other's gaps
SHOWN = ("MLP 16 x 1,024", "ResNet-50, 224x224", "GPT-2 small")


def draw(costs: Costs, network: Network, path: Path) -> None:
    """Six panels: step time by ranks, on the machine measured and a supposed one, and by width; efficiency; bytes."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.4), constrained_layout=True)
    supposed = costs.faster(*SUPPOSED)
    _by_ranks(axes[0, 0], costs, network, "Measured processor core")
    _by_ranks(axes[0, 1], supposed, network, f"Supposed: products x {SUPPOSED[0]:g}, decompositions x {SUPPOSED[1]:g}")
    _by_width(axes[0, 2], costs, supposed, network)
    _efficiency(axes[1, 0], supposed, network)
    for panel, name, label in (
        (axes[1, 1], "received", "MB received per step and rank"),
        (axes[1, 2], "memory", "MB of inverses"),
    ):
        _amounts(panel, supposed, network, name, label)
    colours = [Line2D([], [], color=COLOURS[name], label=name) for name in SHOWN]
    fractions = [
        Line2D([], [], color="black", linestyle=style, lw=WIDTHS_OF_LINES[style], label=f"f = {f}")
        for f, style in STYLES.items()
    ]
    others = [Line2D([], [], color="black", linestyle="-.", label="SGD (efficiency)")]
    figure.legend(handles=[*colours, *fractions, *others], loc="outside lower center", ncols=7)
    axes[1, 1].set_title("Communication")
    axes[1, 2].set_title("Memory for inverses, of the busiest rank")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _by_ranks(panel: Axes, costs: Costs, network: Network, title: str) -> None:
    for name in SHOWN:
        layers, samples = NETWORKS[name]
        for fraction, style in STYLES.items():
            found = [step(layers, samples, p, FRACTIONS[fraction], costs, network) for p in RANKS]
            _line(panel, [s.seconds / s.sgd for s in found], style, name)
    panel.set_yscale("log")
    ticks = (1, 1.2, 1.5, 2, 3, 4, 6)
    panel.set_yticks(ticks, [f"{y:g}" for y in ticks])
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_ylim(1, 7)
    _finish(panel, title, "time of a K-FAC step / of an SGD step")


def _line(panel: Axes, values: Sequence[float | None], style: str, name: str) -> None:
    panel.plot(RANKS, values, style, color=COLOURS[name], lw=WIDTHS_OF_LINES[style], alpha=0.6 if style == "-" else 1)


def _by_width(panel: Axes, costs: Costs, supposed: Costs, network: Network) -> None:
    """Lines of more layers are thinner, since they nearly coincide."""
    for depth, colour, lw in zip(DEPTHS, ("#56B4E9", "#D55E00", "black"), (4.5, 2.2, 0.9), strict=True):
        for own, style, title in ((costs, "o-", "measured"), (supposed, "s--", "supposed")):
            found = [step(mlp(depth, width), 128, FAMILY_RANKS, 1.0, own, network) for width in WIDTHS]
            label = f"{depth} layers, {title}"
            panel.plot(
                WIDTHS, [s.seconds / s.sgd for s in found], style, color=colour, lw=lw, ms=2 + 2 * lw, label=label
            )
    panel.set_ylim(bottom=1)
    panel.legend(fontsize=8, loc="upper left")
    _finish(panel, f"MLPs, batch 128 a rank, {FAMILY_RANKS} ranks, f = 1", "time of a K-FAC step / of an SGD step")
    panel.set_xlabel("width; sides above 2,048 are sketches")
    panel.set_xticks(WIDTHS, [f"{width:,}" for width in WIDTHS])


def _efficiency(panel: Axes, costs: Costs, network: Network) -> None:
    for name in SHOWN:
        for what, style in (("SGD", "-."), ("K-FAC", "-")):
            seconds = divided(NETWORKS[name][0], costs, network, what)
            values = [seconds[0] / (p * s) for p, s in zip(RANKS, seconds, strict=True)]
            panel.plot(RANKS, values, style, color=COLOURS[name])
    _finish(panel, "1,024 samples divided over the ranks, supposed, f = 1", "efficiency: time(1) / (ranks x time)")


def _amounts(panel: Axes, costs: Costs, network: Network, what: str, label: str) -> None:
    for name in SHOWN:
        layers, samples = NETWORKS[name]
        for fraction, style in STYLES.items():
            found = [step(layers, samples, p, FRACTIONS[fraction], costs, network) for p in RANKS]
            _line(panel, [getattr(s, what) / 1e6 or None for s in found], style, name)
    panel.set_yscale("log")
    _finish(panel, "", label)


def _finish(panel: Axes, title: str, label: str) -> None:
    panel.set_title(title)
    panel.set_xlabel("ranks")
    panel.set_ylabel(label)
    panel.set_xscale("log", base=2)
    if panel.get_lines()[0].get_xdata()[0] == 1:
        panel.set_xticks(RANKS[::2], [f"{p:,}" for p in RANKS[::2]])
    panel.grid(alpha=0.3)
