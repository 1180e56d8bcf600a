"""What differs between devices: where numbers are that belong together, how they get there, and their precision.

Products and convolutions are in the precision of their factors, whatever TF32, bfloat16 and autocast are set to.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Nest = TypeVar("Nest")  # of tensors
SHARED_MEMORY = "cpu", "mps"  # kinds of devices whose memory is that of the host


class ByDevice(NamedTuple):
    """A limit where the host computes, and on accelerators, which compute fast and start kernels slowly."""

    host: int
    accelerator: int

    def at(self, device: torch.device) -> int:
        return self.host if device.type in SHARED_MEMORY else self.accelerator


def stack(parts: Iterable[Tensor]) -> Tensor:
    """``torch.stack`` on the device of the first; those of layers on other devices come over to it."""
    first, *others = parts
    return torch.stack([first, *(part.to(first.device) for part in others)])


def cat(parts: Iterable[Tensor]) -> Tensor:
    """``torch.cat`` on the device of the first, likewise."""
    first, *others = parts
    return torch.cat([first, *(part.to(first.device) for part in others)])


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in runs of one device."""
    return [list(run) for _, run in itertools.groupby(tensors, lambda x: x.device)]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; if it comes from the host, that does not wait for it to arrive."""
    is_there = x.device.type != "cpu" or device.type in SHARED_MEMORY
    return x.to(device) if is_there else x.pin_memory().to(device, non_blocking=True)


def copy_to_host_async(flag: Tensor) -> Callable[[], bool]:
    """Send a flag to the host. To call what is returned waits for it, the first time."""
    if flag.device.type in SHARED_MEMORY:
        return functools.cache(lambda: bool(flag))
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    arrived = torch.accelerator.current_stream(flag.device).record_event()  # where the copy is, whatever is current

    @functools.cache
    def wait() -> bool:
        arrived.synchronize()
        return bool(host)

    return wait


@functools.cache
def widest(kind: str) -> torch.dtype:
    """Double precision; single precision on kinds of devices that have no other (MPS, some integrated GPUs)."""
    try:
        torch.ones((), dtype=torch.float64, device=kind).add_(1)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def widen(x: Tensor) -> Tensor:
    """The tensor in the widest precision of its device."""
    return x.to(widest(x.device.type))


def to_host(tensors: Nest) -> Nest:
    """The tensors of a list, or of a nest of tuples, lists and dicts, on the CPU, in float64, by one transfer."""
    leaves, form = pytree.tree_flatten(tensors)
    away = [x for x in leaves if x.device.type != "cpu"]
    # whole numbers alone are changed before they meet others; cat promotes the rest
    flat = [(x if x.is_floating_point() or x.dtype == torch.bool else widen(x)).reshape(-1) for x in away]
    whole = torch.cat([x.to(flat[0].device) for x in flat]).cpu().double() if away else torch.empty(0, device="cpu")
    parts = iter(whole.split([x.numel() for x in away]))
    here = [x.double() if x.device.type == "cpu" else next(parts).view(x.shape) for x in leaves]
    return cast("Nest", pytree.tree_unflatten(here, form))


def absolute_sums(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of the absolute entries of each, which is one or several tensors on one device, in few calls."""
    sums: list[Tensor] = []
    for run in by_device([tensors[0] for tensors in parts]):
        of_run = parts[len(sums) : len(sums) + len(run)]
        copied = [tensors for tensors in of_run if not _is_one_piece(tensors)]
        whole = torch.cat([x.reshape(-1) for tensors in copied for x in tensors]) if copied else run[0].new_empty(0)
        pieces = iter(whole.split([sum(x.numel() for x in tensors) for tensors in copied]))
        sums += torch._foreach_norm([x[0] if _is_one_piece(x) else next(pieces) for x in of_run], 1)
    return sums


def _is_one_piece(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) == 1 and tensors[0].is_contiguous()


def read(facts: Any) -> Any:
    """Numbers in the places of tensors, likewise."""
    is_here = all(x.device.type == "cpu" for x in pytree.tree_leaves(facts))
    return pytree.tree_map(Tensor.tolist, facts if is_here else to_host(facts))


def look(flags: Sequence[Tensor]) -> list[bool]:
    """What flags () say, by one transfer to the host."""
    place = next((x.device for x in flags if x.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([x.to(place) for x in flags]).tolist() if flags else []


INSIDE: ContextVar[bool] = ContextVar("inside_full_precision", default=False)  # of this thread
CUDNN: Any = torch.backends.cudnn
MKLDNN: Any = torch.backends.mkldnn
# torch's switches, one for each operator and library
Operator = tuple[str, str]
ALL: tuple[Operator, ...] = tuple(itertools.product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")))
PRODUCTS: tuple[Operator, ...] = ("cuda", "matmul"), ("mkldnn", "matmul")
EXACT = "none", "ieee"
OPERATORS = (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn, MKLDNN.matmul, MKLDNN.conv, MKLDNN.rnn)


def _set(operators: Sequence[str], products: str | None, cudnn: bool | None) -> None:
    if products is not None:
        torch.set_float32_matmul_precision(products)
    if cudnn is not None:
        torch._C._set_cudnn_allow_tf32(cudnn)  # the attribute refuses after `disable_global_flags()`
    for one, precision in zip(OPERATORS, operators, strict=True):
        if one.fp32_precision != precision:
            one.fp32_precision = precision


class Switch:
    """The settings are the process's: the first thread that enters changes them, the last that leaves restores them.

    Of torch's older kind there are one for products and one for cuDNN. Reading them raises where they contradict those
    of the newer kind; then they are not set either.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entered = 0
        self.operators: list[str] = []
        self.products: str | None = None
        self.cudnn: bool | None = None

    def enter(self) -> None:
        with self.lock:
            if not self.entered:
                self.operators = [one.fp32_precision for one in OPERATORS]
                self.products = self.cudnn = None
                with suppress(RuntimeError):
                    _ = torch.backends.cuda.matmul.allow_tf32  # raises where the next line does not
                    self.products = torch.get_float32_matmul_precision()
                with suppress(RuntimeError):
                    self.cudnn = CUDNN.allow_tf32
                exact = ["ieee"] * len(OPERATORS)
                _set(exact, self.products and "highest", None if self.cudnn is None else False)
            self.entered += 1

    def leave(self) -> None:
        with self.lock:
            self.entered -= 1
            if not self.entered:
                _set(self.operators, self.products, self.cudnn)


SWITCH = Switch()


@contextmanager
def full_precision(operators: Sequence[Operator] = ALL) -> Iterator[None]:
    """Switch off TF32 and bfloat16, which keep three digits, in all threads if one of the operators would round."""
    if INSIDE.get():
        yield
        return
    # settings that another thread has switched may be switched back meanwhile
    is_switched = bool(SWITCH.entered) or _any_rounds(operators)
    if is_switched:
        SWITCH.enter()
    token = INSIDE.set(True)
    try:
        yield
    finally:
        INSIDE.reset(token)
        if is_switched:
            SWITCH.leave()


def _any_rounds(operators: Sequence[Operator]) -> bool:
    """Whether one does on a device that there is; torch's setting for cuDNN is TF32 from the start."""
    kinds = ("cuda", "mkldnn") if torch.accelerator.is_available() else ("mkldnn",)
    return any(torch._C._get_fp32_precision_getter(*one) not in EXACT for one in operators if one[0] in kinds)


def product_rounding(device: torch.device) -> float:
    """The relative error of a product or convolution of single precision on a device, as the settings now are."""
    operators = OPERATORS[3:] if device.type == "cpu" else OPERATORS[:3]
    errors = {"tf32": 2.0**-10, "bf16": torch.finfo(torch.bfloat16).eps}
    return max(errors.get(one.fp32_precision, torch.finfo(torch.float32).eps) for one in operators)


def own_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, products on the device of x have their factors' precision, whatever autocast and TF32 settings say."""
    if INSIDE.get() and not torch.is_autocast_enabled(x.device.type):
        return nullcontext()  # to enter a context costs more than a small product
    stack = ExitStack()
    stack.enter_context(torch.autocast(x.device.type, enabled=False))
    stack.enter_context(full_precision())
    return stack


def without_autocast(devices: Iterable[torch.device]) -> AbstractContextManager[Any]:
    """Inside, autocast is off on devices of these kinds."""
    stack = ExitStack()
    for kind in dict.fromkeys(device.type for device in devices):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in their own precision, whatever autocast and TF32 settings say."""
    with own_precision(left):
        return left @ right


def rounding_tolerance(x: Tensor) -> float:
    """Relative difference that rounding explains, even if parts of the model compute in single precision."""
    return max(float(torch.finfo(x.dtype).eps), float(torch.finfo(torch.float32).eps)) ** 0.5


def noise_floor(tensors: Iterable[Tensor | None]) -> Tensor:
    """Norm () below which a tensor is rounding noise, given all of its kind: a gradient may cancel to zero."""
    # in half precision less than a hundred roundings: nearly everything would be noise, and no check would fail
    share = lambda eps: min(100 * eps, eps**0.5 / 4)
    floors = [widen(share(torch.finfo(t.dtype).eps) * t.norm()) for t in tensors if t is not None]
    return stack(floors).amax() if floors else torch.zeros((), device="cpu")
