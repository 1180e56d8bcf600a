"""Where every test gets its device from: the CPU, and CUDA where there is one; DEVICE names a single one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

AVAILABLE = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DEVICES = [os.environ["DEVICE"]] if os.environ.get("DEVICE") else AVAILABLE

# The models are tiny: threads cost more than they bring, and the workers of pytest-xdist have the cores already.
torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False


def pytest_configure(config: pytest.Config) -> None:
    """What torch says of modules that the catalogue has on purpose."""
    for message in ("enable_nested_tensor is True", "Using padding='same'", "reduction. 'mean' divides"):
        config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is collected is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
