"""The picture of the demo: the loss by step and by second, and reconstructed digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from _demo_race import Run

COLOURS = {"KFAC": "#0072B2", "SGD": "#D55E00", "AdamW": "#009E73"}  # told apart by colour-blind readers too
PER_CLASS = 2  # images shown of each digit


def draw_curves(axes: Any, runs: Sequence[Run], steps: int, by: str) -> None:
    for run in runs:
        points = [p for p in run.points if by == "seconds" or p.step <= steps]
        losses = [p.loss if p.loss < math.inf else math.nan for p in points]
        axes.plot([getattr(p, by) for p in points], losses, color=COLOURS[run.kind], label=run.name)
    ends = [run.at_step(steps) for run in runs if run.at_step(steps) < math.inf]
    axes.set_ylim(min(ends, default=0) - 1, 30)  # all start at 44
    axes.set_xlim(0)
    axes.set_xlabel("steps" if by == "step" else "seconds of training")
    axes.set_ylabel("loss on held-out digits [nats per image]")
    axes.set_title("after the same steps" if by == "step" else "after the same time")
    axes.grid(alpha=0.3)


def draw_images(axes: Any, runs: Sequence[Run], steps: int) -> None:
    """Held-out digits, and below them what each autoencoder makes of them after the same number of steps."""
    data = runs[0].data
    chosen = torch.cat([(data.labels == digit).nonzero()[:PER_CLASS, 0] for digit in range(10)])
    rows, names = [data.test[chosen]], ["original"]
    for run in runs:
        if run.outputs is not None:
            rows.append(torch.sigmoid(run.outputs[chosen]).nan_to_num())
            names.append(f"{run.kind}\n{run.at_step(steps):.1f} nats")
    images = torch.stack(rows).cpu().unflatten(2, (8, 8))
    framed = torch.nn.functional.pad(1 - images, (0, 1, 0, 1), value=1.0)  # white lines between them
    axes.imshow(framed.permute(0, 2, 1, 3).flatten(0, 1).flatten(1).numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_yticks([9 * k + 3.5 for k in range(len(rows))], names)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"Held-out digits through a code of 16 numbers, after {steps} steps")


def draw(runs: Sequence[Run], steps: int, path: Path) -> None:
    figure = plt.figure(figsize=(9, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 0.55])
    for k, by in enumerate(("step", "seconds")):
        draw_curves(figure.add_subplot(grid[0, k]), runs, steps, by)
    figure.axes[0].legend()
    draw_images(figure.add_subplot(grid[1, :]), runs, steps)
    figure.suptitle("A deep autoencoder: KFAC with its defaults, SGD and AdamW with their best learning rates")
    figure.savefig(path, dpi=110)
    plt.close(figure)
