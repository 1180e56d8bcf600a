"""The matrix of habits and optimizers, see `habits`."""

from __future__ import annotations

import pytest

import support.habits.functions
import support.habits.loops
import support.habits.models
import support.habits.objects  # noqa: F401
from support.habits.table import HABITS, MAKERS

CELLS = [(habit, maker) for habit, (_, makers) in HABITS.items() for maker in makers]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit", "ignore:None of the inputs")
@pytest.mark.parametrize("habit, maker", CELLS, ids=[f"{habit}-{maker}" for habit, maker in CELLS])
def test_habit(habit: str, maker: str):
    HABITS[habit][0](MAKERS[maker])
