"""Where every test gets its device from: the CPU, and CUDA where there is one; DEVICE names a single one.

On a device that DEVICE names only the tests run that take one. DEVICE=sim is the simulated accelerator
(`make test-device`), with torch's own settings of precision.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from support.durations import Durations
from support.faults import fail
from support.simulated_device.build import Unavailable

AVAILABLE = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DEVICES = [os.environ["DEVICE"]] if os.environ.get("DEVICE") else AVAILABLE
SIMULATED = DEVICES == ["sim"]
MISSING = ""  # why there is no simulated device

# The models are tiny: threads cost more than they bring, and the workers of pytest-xdist have the cores already.
torch.set_num_threads(1)
if not SIMULATED:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True  # runs are compared, and its other kernels add up in any order
else:
    try:
        importlib.import_module("support.simulated_device.simdev")  # registers it
    except Unavailable as error:
        MISSING = str(error)


def pytest_configure(config: pytest.Config) -> None:
    """What torch says of modules that the catalogue has on purpose."""
    for message in ("enable_nested_tensor is True", "Using padding='same'", "reduction. 'mean' divides"):
        config.addinivalue_line("filterwarnings", f"ignore:{message}:UserWarning")
    if "DURATIONS" in os.environ and not hasattr(config, "workerinput"):  # not in the processes of pytest-xdist
        config.pluginmanager.register(Durations(Path(os.environ["DURATIONS"]), " and ".join(DEVICES)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is collected is garbage: neither now nor when a test asks for a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that takes no device says nothing new on an accelerator."""
    if DEVICES != AVAILABLE and DEVICES != ["cpu"]:
        others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if MISSING:
        pytest.skip(MISSING)
    return request.param


@pytest.fixture
def double() -> Iterator[None]:
    """New tensors are in double precision; random numbers are the same in every run."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def accelerator(device: str) -> str:
    """A device that is not the CPU."""
    if device == "cpu":
        pytest.skip("no accelerator: make test-device runs this on a simulated one")
    return device


@pytest.fixture
def two_devices(accelerator: str) -> tuple[str, str]:
    """Two accelerators, the first of which is the current one."""
    if torch.get_device_module(accelerator).device_count() < 2:
        pytest.skip("one accelerator alone: make test-device has two simulated ones")
    return f"{accelerator}:0", f"{accelerator}:1"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes decompositions fail from where it is called on."""
    return functools.partial(fail, monkeypatch)
