"""Habits are tried where the device is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cases.case import placed
from support.habits import X, Y


@pytest.fixture(autouse=True)
def data_there(device: str) -> Iterator[None]:
    with placed(device, X, Y):
        yield
