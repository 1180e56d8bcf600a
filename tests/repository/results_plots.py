"""The lines, images and texts of the pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import torch
from results_models import Entries
from results_operators import OPERATORS
from results_training import Training, plain
from torch import Tensor

from curvature import plots
from optimizers import KFAC


def cases() -> dict[str, Callable[[], Entries]]:
    return {"plots": pictures}


def pictures() -> Entries:
    matplotlib.use("Agg")
    K, E = (OPERATORS[name]() for name in ("kfac", "ekfac"))
    run = Training("mlp", KFAC)
    for step in range(6):
        plain(run, step)
    history = [{name: value for name, value in entry.items() if name != "seconds"} for entry in run.opt.history]
    drawn: dict[str, Callable[[], Any]] = {
        "matrix": lambda: plots.matrix(K),
        "factors": lambda: plots.factors(K),
        "factors of a layer": lambda: plots.factors(K, "2"),
        "spectra": lambda: plots.spectra({"kfac": K, "ekfac": E}),
        "spectra of layers": lambda: plots.spectra(K),
        "training": lambda: plots.training(history),
        "no layer": lambda: plots.factors(K, "head"),
    }
    for name, draw in drawn.items():
        yield name, functools.partial(shown, draw)


def shown(draw: Callable[[], Any]) -> list[dict[str, Any]]:
    axes = np.atleast_1d(draw()).flatten()
    return [contents(ax) for ax in axes]


def contents(ax: Any) -> dict[str, Any]:
    legend = ax.get_legend()
    return {
        "texts": str([ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale(), ax.get_yscale()]),
        "legend": str([text.get_text() for text in legend.get_texts()] if legend else []),
        "lines": [tensor_of(line.get_xydata()) for line in ax.lines],
        "images": [tensor_of(image.get_array()) for image in ax.images],
    }


def tensor_of(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))
