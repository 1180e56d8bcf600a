"""The matrix of habits and optimizers, see `habits`."""

from __future__ import annotations

import pytest

import support.habits.functions
import support.habits.loops
import support.habits.models
import support.habits.objects  # noqa: F401
from support.cases.case import placed
from support.habits.table import HABITS, MAKERS, X, Y

# What the simulated device has not, by habit.
LACKING = {"sparse_embeddings": "sparse tensors", "evaluation_between_steps": "views in inference mode"}
LACKING |= {"data_parallel": "copies of a model, as torch makes them for several CUDA devices"}
CELLS = [(habit, maker) for habit, (_, makers) in HABITS.items() for maker in makers]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit", "ignore:None of the inputs")
@pytest.mark.parametrize("habit, maker", CELLS, ids=[f"{habit}-{maker}" for habit, maker in CELLS])
def test_habit(habit: str, maker: str, device: str):
    if device == "sim" and habit in LACKING:
        pytest.skip(f"the simulated device has no {LACKING[habit]}")
    with placed(device, X, Y):
        HABITS[habit][0](MAKERS[maker])
