"""The picture of the demo: loss curves by step and by second, and reconstructed digits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from demo_race import Run
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from torch import Tensor

COLOURS = {"KFAC": "#0072B2", "SGD": "#D55E00", "AdamW": "#009E73"}  # told apart by colour-blind readers too
PER_CLASS = 2  # images shown of each digit
SIDE, GAP = 8, 1


def draw_curves(axes: Any, runs: Sequence[Run], steps: int, by: str) -> None:
    """Training (solid) and test loss (dashed) above the least possible loss, against steps or seconds."""
    problem = runs[0].problem
    for run in runs:
        points = [p for p in run.points if p.step > 0 and (by == "seconds" or p.step <= steps)]
        for what, floor, style in zip(("train", "test"), problem.floors, ("-", "--"), strict=True):
            x = [getattr(p, by) for p in points]
            y = [getattr(p, what) - floor for p in points]
            y = [value if 0 < value < math.inf else math.nan for value in y]
            label = run.name if what == "train" else None
            axes.loglog(x, y, style, color=COLOURS[run.kind], label=label, lw=1.8 if what == "train" else 1.0)
    axes.set_xlabel("steps" if by == "step" else "training time of the run itself [s]")
    above = f" above the least possible ({problem.floors[0]:.4g})" if problem.floors[0] else ""
    axes.set_ylabel(f"loss{above}\n[{problem.unit}]")
    low, high = axes.get_ylim()
    if high < 300 * low:  # few powers of ten: numbers between them too
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{problem.name}, by {'step' if by == 'step' else 'second'}")
    axes.grid(True, which="major", alpha=0.3)
    axes.plot([], [], "-", color="grey", label="training part")
    axes.plot([], [], "--", color="grey", lw=1.0, label="test part")
    axes.legend(fontsize=8, loc="lower left")


def mosaic(rows: Sequence[Tensor]) -> np.ndarray:
    """Rows of images, white lines between them."""
    cell = SIDE + GAP
    canvas = np.ones((len(rows) * cell - GAP, len(rows[0]) * cell - GAP))
    for i, images in enumerate(rows):
        for k, image in enumerate(images):
            canvas[i * cell : i * cell + SIDE, k * cell : k * cell + SIDE] = 1 - image.reshape(SIDE, SIDE).cpu().numpy()
    return canvas


def draw_images(axes: Any, runs: Sequence[Run], labels: Tensor, steps: int) -> None:
    """Test images, and below them what each optimizer's autoencoder makes of them after the same number of steps."""
    images = runs[0].problem.test[0]
    chosen = torch.cat([(labels == digit).nonzero()[:PER_CLASS, 0] for digit in range(10)])
    rows, names = [images[chosen]], ["original"]
    for run in runs:
        if run.snapshot is not None:
            rows.append(torch.sigmoid(run.snapshot[chosen]).nan_to_num())
            loss = run.at_step(steps, "test")
            names.append(f"{run.kind}: {loss:.2f}" if loss < math.inf else f"{run.kind}: diverged")
    axes.imshow(mosaic(rows), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_yticks([i * (SIDE + GAP) + SIDE / 2 - 0.5 for i in range(len(rows))], names)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    floor = runs[0].problem.floors[1]
    axes.set_title(
        f"test images and their reconstructions after {steps} steps "
        f"(test loss [{runs[0].problem.unit}], least possible {floor:.2f})"
    )


def draw(races: Sequence[Sequence[Run]], labels: Tensor, steps: int, path: Path) -> None:
    """Write the picture. The first race is the autoencoder's; `labels` are those of the test part."""
    figure = plt.figure(figsize=(11, 11), layout="constrained")
    grid = figure.add_gridspec(len(races) + 1, 2, height_ratios=[1] * len(races) + [0.75])
    for i, runs in enumerate(races):
        for k, by in enumerate(("step", "seconds")):
            draw_curves(figure.add_subplot(grid[i, k]), runs, steps, by)
    draw_images(figure.add_subplot(grid[len(races), :]), races[0], labels, steps)
    figure.suptitle("KFAC(model) with its defaults against tuned SGD with momentum and tuned AdamW: 1,797 real digits")
    figure.savefig(path, dpi=110)
    plt.close(figure)
