"""An accelerator that is not there: device "sim", host memory and the CPU's kernels behind the rules of CUDA.

    import simdev                       # builds simdev.cpp once, registers the device
    x = torch.randn(3, device="sim")    # sim:0; there are SIM_DEVICES of them (2)
    x @ torch.randn(3)                  # RuntimeError: Expected all tensors to be on the same device ...
    with simdev.syncs() as found:       # what the host waited for, and where
        x.sum().item()
    found.count, found.uploads, found.places("/path/of/package")

Every operator that has a kernel for CUDA and one for the CPU runs the latter on the same memory, after CUDA's check of
devices; the others decompose as on CUDA. Memory that was not written holds NaN. Copies to pinned memory that do not
block arrive when the host waits for that device, or for an event recorded on it after them.

    SIM_DEVICES=2    how many there are
    SIM_TF32=1       convolutions and products of float32 in TF32 where torch's switches for CUDA allow that

The import raises `Unavailable` where the kernels cannot be compiled. They are kept with torch's other extensions
(TORCH_EXTENSIONS_DIR), one build for each version of torch and of simdev.cpp, whatever the checkout.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from support.simulated_device.build import NAME, built

# a kernel for both, but not one that can stand for the other
BY_HAND = {"empty.memory_format", "empty_strided", "_efficientzerotensor", "record_stream", "_copy_from", "_pin_memory"}


def rules(text: str) -> tuple[list[str], set[str]]:
    """Of native_functions.yaml: the operators with kernels for CPU and CUDA, and those that CUDA lets check devices."""
    own: dict[str, set[str]] = {}
    delegate: dict[str, str] = {}
    loose: set[str] = set()
    name = ""
    dispatch = False
    for line in text.splitlines():
        if found := re.match(r"- func: ([\w.]+)\(", line):
            name, dispatch = found[1], False
            own[name] = set()
        elif re.match(r"  \S", line):
            dispatch = line.startswith("  dispatch:")
            if line.startswith("  device_check: NoCheck"):
                loose.add(name)
            elif found := re.match(r"  structured_delegate: (\S+)", line):
                delegate[name] = found[1]
        elif dispatch and (found := re.match(r"    ([\w, ]+):", line)):
            own[name] |= {key.strip() for key in found[1].split(",")}
    both = [k for k in own if own[delegate.get(k, k)] >= {"CPU", "CUDA"} and k not in BY_HAND]
    return both, loose


def _load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what the host waited for
@dataclass
class Sync:
    """One wait of the host: its kind ("wait", "upload", "event"), the operator, the Python frames, innermost first."""

    kind: str
    operator: str
    frames: list[str]

    def place(self, *roots: str) -> str:
        """The innermost frame under a root, as file:line function."""
        mine = [f for f in self.frames if any(r in f for r in roots)] if roots else self.frames
        return mine[0] if mine else (self.frames[0] if self.frames else "a thread of autograd, no Python frame")


@dataclass
class Found:
    """`count`: waits for values of the device; `uploads`: blocking copies to it; `events`: waits for an event."""

    all: list[Sync] = field(default_factory=list)

    def _of(self, kind: str) -> list[Sync]:
        return [s for s in self.all if s.kind == kind]

    @property
    def count(self) -> int:
        return len(self._of("wait"))

    @property
    def uploads(self) -> int:
        return len(self._of("upload"))

    @property
    def events(self) -> int:
        return len(self._of("event"))

    @property
    def stacks(self) -> list[list[str]]:
        return [s.frames for s in self._of("wait")]

    def places(self, *roots: str) -> Counter[tuple[str, str, str]]:
        """How often each (kind, operator, innermost frame under a root) occurred."""
        return Counter((s.kind, s.operator, s.place(*roots)) for s in self.all)


_listening: list[Found] = []


def _heard(kind: str, operator: str) -> None:
    frames = []
    frame = sys._getframe().f_back if _listening else None  # none in a thread of autograd
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    for found in _listening:
        found.all.append(Sync(kind, operator, frames))


@contextmanager
def syncs() -> Iterator[Found]:
    """Record every wait of the host for the device."""
    found = Found()
    _listening.append(found)
    kernels.listen(_heard)
    try:
        yield found
    finally:
        _listening[:] = [f for f in _listening if f is not found]
        if not _listening:
            kernels.listen(None)


@contextmanager
def without_float64() -> Iterator[None]:
    """As on MPS, nothing is in double precision inside."""
    kernels.set_double(False)
    try:
        yield
    finally:
        kernels.set_double(True)


# -- cells of recurrent networks: torch has them fused, for CUDA alone
def _lstm(igates, hgates, cx, b_i=None, b_h=None):
    gates = igates + hgates if b_i is None else igates + b_i + hgates + b_h
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    c = grad_hy * o * (1 - t * t) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat([c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), grad_hy * t * o * (1 - o)], 1)
    return gates, c * f, gates.sum(0) if has_bias else None


def _gru(igates, hgates, hx, b_i=None, b_h=None):
    if b_i is not None:
        igates, hgates = igates + b_i, hgates + b_h
    (ri, zi, ni), (rh, zh, nh) = igates.chunk(3, 1), hgates.chunk(3, 1)
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    n = (ni + r * nh).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, nh], 1)


def _gru_backward(grad_hy, workspace, has_bias):
    r, z, n, hx, nh = workspace.chunk(5, 1)
    gn = grad_hy * (1 - z) * (1 - n * n)
    gz = grad_hy * (hx - n) * z * (1 - z)
    gr = gn * nh * r * (1 - r)
    gi, gh = torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1)
    return gi, gh, grad_hy * z, gi.sum(0) if has_bias else None, gh.sum(0) if has_bias else None


# -- torch.sim
def _index(device=None) -> int:
    if device is None or isinstance(device, int):
        return -1 if device is None else device
    found = torch.device(device).index
    return -1 if found is None else found


class device:
    """The current device within a block."""

    def __init__(self, device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = kernels.current_device()
        kernels.set_device(self.index)

    def __exit__(self, *_) -> None:
        kernels.set_device(self.before)


def _synchronize(device_=None) -> None:
    with device(device_):
        kernels.synchronize()


def _module() -> types.ModuleType:
    m = types.ModuleType("torch.sim")
    m.device, m.is_available, m.is_initialized, m._is_in_bad_fork = device, lambda: True, lambda: True, lambda: False
    m.device_count, m.current_device = kernels.device_count, kernels.current_device
    m.set_device = lambda d: kernels.set_device(_index(d))
    m.synchronize = _synchronize
    m.init = m._lazy_init = m.empty_cache = lambda: None
    generator = lambda d="sim": kernels.default_generator(_index(d))
    m.get_rng_state = lambda device="sim": generator(device).get_state()
    m.set_rng_state = lambda state, device="sim": generator(device).set_state(state)
    m.manual_seed = lambda seed: generator().manual_seed(seed)
    m.manual_seed_all = lambda seed: [generator(i).manual_seed(seed) for i in range(kernels.device_count())]
    m.initial_seed = lambda: generator().initial_seed()
    m.default_generators = tuple(generator(i) for i in range(kernels.device_count()))
    m.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    m.is_bf16_supported = lambda *_: True
    m.Event = lambda *a, **k: torch.Event("sim")
    m.current_stream = lambda device=None: torch.Stream(device="sim")
    m.stream = lambda stream: nullcontext()  # there is one alone
    return m


# -- p.data = q across devices, which is how a module moves and its parameters stay who they are
_data, _compatible = torch.Tensor.data, torch._has_compatible_shallow_copy_type
_OURS = {"cpu", "sim"}


def _set_data(self, value) -> None:
    if self.device.type != value.device.type and {self.device.type, value.device.type} == _OURS:
        kernels.adopt(self, value)
    else:
        _data.__set__(self, value)


def _may_set_data(input, from_):
    return {input.device.type, from_.device.type} == _OURS or _compatible(input, from_)


# as dynamo expects them
_may_set_data.__annotations__ = {"input": torch.Tensor, "from_": torch.Tensor, "return": bool}

kernels = _load()
torch.Tensor.data = property(_data.__get__, _set_data)
torch._has_compatible_shallow_copy_type = _may_set_data
torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
kernels.install(
    *rules((importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text())
)
_library = torch.library.Library("aten", "IMPL", "PrivateUse1")
_library.impl("_thnn_fused_lstm_cell", _lstm)
_library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_backward)
_library.impl("_thnn_fused_gru_cell", _gru)
_library.impl("_thnn_fused_gru_cell_backward", _gru_backward)
