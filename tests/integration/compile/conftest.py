"""Tests that compile do not see one another."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No code compiled by another test, and no stance left behind."""
    torch._dynamo.reset()
    yield
    gc.collect()
    stance = torch.compiler.set_stance()
    stance.__exit__(None, None, None)
    assert stance.prev.stance == "default"
