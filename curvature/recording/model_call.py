"""A model as it was handed in: which parameters count, how it is called, its state, which stays as it was, and what was
verified of it.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from threading import RLock
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from curvature.arguments import check_module
from curvature.functional import ContiguousNorms

TURNS = RLock()
# How many calls of ours go on in this thread: hooks of optimizers take no notice of the passes of a builder.
OURS = ContextVar("OURS", default=0)
ORDER = " (the order is model, loss, data)"
REENTRANT_CHECKPOINT = "CheckpointFunction"  # the autograd function behind a reentrant checkpoint
GRAPH_IS_FREED = "through the graph a second time"  # in the words of torch


@cache
def warn_once(message: str, *args: Any, logger: str = "curvature") -> None:
    """Log a warning once, however often its cause recurs."""
    logging.getLogger(logger).warning(message, *args)


def unwrap_compiled(model: Any) -> Any:
    """The module that ``torch.compile(module)`` was given; anything else as it is."""
    dynamo = sys.modules.get("torch._dynamo")
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = model._orig_mod
    return model


def trained_parameters(model: Any, chosen: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient; with `chosen` those of these names, or in the modules of these names."""
    model = unwrap_compiled(model)
    check_module(model, ORDER)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if isinstance(p, UninitializedParameter):
            raise ValueError(f"model: {name} has no shape yet; call model(x) once, which gives it one")
        if p.is_inference():
            raise ValueError(
                f"model: {name} was made in torch.inference_mode(), which gradients cannot leave; make it outside"
            )
        if p.is_meta:
            raise ValueError(f"model: {name} is on the meta device, without numbers; load the model to a real one")
    if not trained:
        empty = next(model.parameters(), None) is None
        which = f"; the first argument is a {type(model).__name__}, which has none{ORDER}" if empty else ""
        raise ValueError(f"model: no parameter requires a gradient{which}")
    if chosen is None:
        return trained
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        hint, what = (f", as in [{chosen!r}]", "a string") if isinstance(chosen, str) else ("", repr(chosen))
        raise TypeError(f"parameters: expected names of parameters or modules{hint}, found {what:.80}")
    chosen = list(chosen)
    if not chosen:
        raise ValueError("parameters: there is no name")
    chosen_ids: set[int] = set()
    for key in chosen:
        if not isinstance(key, str):
            raise TypeError(
                f"parameters: expected names of parameters or modules, found one of type {type(key).__name__}"
            )
        chosen_ids |= {id(trained[key])} if key in trained else _below(model, key)
    return {name: p for name, p in trained.items() if id(p) in chosen_ids}


def _below(model: nn.Module, key: str) -> set[int]:
    """The parameters of this name, or below the module of this name, that require a gradient, by `id`."""
    named = list(model.named_parameters(remove_duplicate=False))
    inside = [p for name, p in named if is_within(name, key)]
    ids = {id(p) for p in inside if p.requires_grad}
    if inside and not ids:
        raise ValueError(f"parameters: nothing of {key!r} requires a gradient")
    if not ids:
        paths = [name.split(".") for name, p in named if p.requires_grad]
        known = dict.fromkeys(".".join(path[:k]) for path in paths for k in range(1, len(path) + 1))
        near = difflib.get_close_matches(str(key), known, n=5, cutoff=0.4) or list(known)[:5]
        raise ValueError(f"parameters: no parameter or module is called {key!r}; near are {', '.join(near)}")
    return ids


def is_within(name: str, key: str) -> bool:
    """Whether a parameter has the name `key`, or is below the module of that name."""
    return name == key or name.startswith(key + ".")


def logits(output: Any) -> Any:
    """The tensor that the loss takes: ``output.logits`` where there is one, but of a distribution the distribution."""
    return output if isinstance(output, Distribution) else getattr(output, "logits", output)


def call_model(model: Callable[..., Any], x: Any) -> Any:
    """Run the model on a tensor or packed sequence, or on `as_arguments`: a tuple of positional ones or a dict."""
    is_mapping = isinstance(x, Mapping)
    is_sequence = isinstance(x, tuple | list) and not isinstance(x, PackedSequence)
    args, kwargs = ((), x) if is_mapping else (x if is_sequence else (x,), {})
    with ContiguousNorms():
        try:
            return model(*args, **kwargs)
        except TypeError as error:
            if _takes(model, args, kwargs):  # an error of the model's own code
                raise
            if is_mapping and "unexpected keyword argument" in str(error):
                what = "x: its entries are passed as keyword arguments; if the model takes a dict, pass x=(that dict,)"
            elif is_sequence and "positional arguments but" in str(error):
                what = (
                    f"x: its {len(x)} entries are passed as positional arguments; samples are one tensor: pad what "
                    "differs in size and stack it, or pass batches of one: [(a[None], b[None]) for a, b in zip(x, y)]"
                )
            elif "required positional argument" in str(error):
                what = "x: all inputs of the model are a tuple, as in ((a, b), y), or a dict by name"
            else:
                raise
            raise TypeError(f"{error}. {what}") from error
        except RuntimeError as error:
            what = _mismatch(model, (args, kwargs), str(error)) if type(error) is RuntimeError else ""
            if not what:
                raise
            raise RuntimeError(f"{error}. x: {what}") from error


def _mismatch(model: Any, inputs: Any, said: str) -> str:
    """What an input has that no parameter has, of what torch's message is about; empty if that is nothing."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    held = [] if not isinstance(model, nn.Module) else [*model.parameters(), *model.buffers()]
    if not leaves or not held:
        return ""
    first, devices = leaves[0], {t.device for t in held}
    if "device" in said and first.device not in devices:
        return f"it is on {first.device}, the model on {held[0].device}; pass x.to({str(held[0].device)!r})"
    dtypes = [p.dtype for p in held if p.is_floating_point()]
    named = re.search(rf"\b{first.type().split('.')[-1].removesuffix('Tensor')}(Tensor)?\b", said, re.IGNORECASE)
    if "type" in said and named and dtypes and first.dtype not in dtypes and not first.is_complex():
        swapped = "" if first.is_floating_point() else ", unless x and y are exchanged (the order is model, loss, x, y)"
        return f"it is {first.dtype}, the parameters {dtypes[0]}; pass x.to({dtypes[0]}){swapped}"
    if "cannot be multiplied" in said:
        return f"it has the shape {tuple(first.shape)}, where axis 0 is that of the samples"
    return ""


def _takes(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the model has a parameter for each argument; what goes into ``*args`` may be another's."""
    try:
        signature = inspect.signature(getattr(unwrap_compiled(model), "forward", model))
        named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        signature.replace(parameters=named).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it does not fit; nobody knows the parameters of what is not written in Python
        return False
    return True


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """`torch.func.functional_call`, which leaves its tensors in a module that the model holds under two names."""
    owners: list[dict[str, Any]] = [entries for m in model.modules() for entries in (m._parameters, m._buffers)]
    held = [dict(entries) for entries in owners]
    try:
        return functional_call(model, dict(tensors), args, kwargs)
    finally:
        for entries, before in zip(owners, held, strict=True):
            entries.update(before)


def as_arguments(model: Callable[..., Any], x: Mapping[str, Any]) -> Any:
    """A dict that can only be one positional argument, since the model's forward has none of its keys, in a tuple."""
    signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    try:
        signature.bind(**x)
    except TypeError:
        try:
            signature.bind(x)
        except TypeError:
            return x  # the call says what is wrong
        return (x,)
    return x


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A copy of a tree, also of mappings, dataclasses, objects with ``.logits``, with ``function(x)`` for tensors."""
    if isinstance(tree, Tensor):
        return function(tree)

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not isinstance(leaf, type) and (is_dataclass(leaf) or hasattr(leaf, "logits")):
            new = copy.copy(leaf)
            for name in [f.name for f in fields(leaf)] if is_dataclass(leaf) else list(vars(leaf)):
                object.__setattr__(new, name, map_tensors(function, getattr(leaf, name)))
            return new
        return {k: map_tensors(function, x) for k, x in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(mapped, tree)


class RandomState:
    """The state of torch's random numbers on the CPU and on the devices of the modules of a model, to come back to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        held = (kept.values() for m in modules for kept in (m._parameters, m._buffers) if kept)
        devices = {t.device for tensors in held for t in tensors if t is not None}
        self.devices = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
        self.states = self.now()

    def now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(_of(d).get_rng_state(*_index(d)) for d in self.devices)]

    def differs(self, states: list[Tensor] | None = None) -> bool:
        """From other states, by default from those `now`: whether random numbers were drawn since."""
        return any(not torch.equal(a, b) for a, b in zip(self.states, states or self.now(), strict=True))

    def restore(self, states: list[Tensor] | None = None) -> None:
        """Come back to it, or to other states that were `now`."""
        states = states or self.states
        torch.set_rng_state(states[0])
        for device, state in zip(self.devices, states[1:], strict=True):
            _of(device).set_rng_state(state, *_index(device))


@contextmanager
def fresh_random_numbers(model: nn.Module) -> Iterator[None]:
    """Run with random numbers of their own, from a seed that torch's generator of the CPU draws; it alone moves on."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    state = RandomState(model.modules())
    state.restore([torch.Generator(d).manual_seed(seed).get_state() for d in (torch.device("cpu"), *state.devices)])
    try:
        yield
    finally:
        state.restore()


def _of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device, and no argument for it


class SavedBuffer:
    """A buffer, a copy of it, and the version of the buffer that was known to have these values."""

    def __init__(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        self.module, self.name, self.buffer = module, name, buffer
        self.value = None if buffer is None else buffer.clone()
        self.version = _version(buffer)

    def restore(self) -> None:
        buffer, value = self.buffer, self.value
        self.module._buffers[self.name] = buffer  # the model may have put another in its place
        if buffer is None or value is None:
            return
        if self.version is None:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        elif _version(buffer) == self.version:
            buffer.data.copy_(value)  # what has changed it unseen is undone unseen, and nobody waits to learn of it
        else:
            buffer.copy_(value)
            self.version = _version(buffer)


def _version(x: Tensor | None) -> int | None:
    return None if x is None or x.is_inference() else x._version


class ModelState:
    """The buffers of a model and the random state of its devices, to come back to."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.buffers = [SavedBuffer(m, name, buffer) for m in modules for name, buffer in m._buffers.items()]
        self.random = RandomState(modules)

    def is_of_one_pass(self) -> bool:
        """Whether another pass now would be of another function: random numbers were drawn since, or buffers moved, as
        far as torch has noted (kernels of norms go unseen)."""
        return self.random.differs() or any(
            saved.module._buffers.get(saved.name) is not saved.buffer or _version(saved.buffer) != saved.version
            for saved in self.buffers
        )

    def unchanged(self) -> list[Tensor] | None:
        """Flags (), all true if no random number was drawn and no buffer changed since; None if one surely has."""
        if self.is_of_one_pass():
            return None
        both = [(saved.buffer, saved.value) for saved in self.buffers]
        return [(buffer == value).all() for buffer, value in both if buffer is not None and value is not None]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A pass from this state, on copies of the buffers, which an earlier graph may hold; what is now comes back."""
        now = [(saved.module._buffers, saved.name, saved.module._buffers.get(saved.name)) for saved in self.buffers]
        numbers = self.random.now()
        try:
            for saved in self.buffers:
                saved.module._buffers[saved.name] = None if saved.value is None else saved.value.clone()
            self.random.restore()
            yield
        finally:
            for buffers, name, buffer in now:
                buffers[name] = buffer
            self.random.restore(numbers)

    @torch.no_grad()
    def restore(self, numbers: bool = True) -> None:
        """Come back to it, to the random state only if `numbers`."""
        for saved in self.buffers:
            saved.restore()
        if numbers:
            self.random.restore()


@contextmanager
def in_turn() -> Iterator[None]:
    """One thread at a time, outside of inference mode: hooks of modules, dual numbers and random state are shared."""
    with TURNS, torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


# What contexts here have set and not yet undone. They need not end in the reverse order of their start: the garbage
# collector may end one of them while another is active.
ACTIVE_STANCES: list[Any] = []
REPLACED_CHECKPOINTS: list[Any] = []  # the first is torch's own
NON_REENTRANT = SimpleNamespace(
    apply=lambda function, preserve, *args: checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve
    )
)


@contextmanager
def force_eager(nonreentrant: bool = False) -> Iterator[None]:
    """Inside, compiled code runs as it was written. Does nothing of this if nothing was compiled in this process.

    If `nonreentrant`, checkpoints take that form, too: the reentrant one runs the forward pass without gradients.
    """
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
    if stance is not None:
        ACTIVE_STANCES.append(stance)
    if nonreentrant:
        REPLACED_CHECKPOINTS.append(getattr(checkpoint, REENTRANT_CHECKPOINT))
        setattr(checkpoint, REENTRANT_CHECKPOINT, NON_REENTRANT)
    try:
        yield
    finally:
        function = REPLACED_CHECKPOINTS.pop() if nonreentrant else None
        if nonreentrant and not REPLACED_CHECKPOINTS:
            setattr(checkpoint, REENTRANT_CHECKPOINT, function)
        if stance is not None:
            ACTIVE_STANCES.remove(stance)
            if stance.stance is _current_stance():  # do not end somebody else's
                stance.__exit__(None, None, None)
            for later in ACTIVE_STANCES:
                if later.prev is stance.stance:
                    later.prev = stance.prev


def _current_stance() -> Any:
    """The stance that is set; torch tells it only to whoever sets another."""
    probe = torch.compiler.set_stance()
    probe.__exit__(None, None, None)
    return probe.prev


@contextmanager
def preserve_state(
    model: nn.Module, trained: Collection[str] | None = None, is_heard: bool = False
) -> Iterator[ModelState]:
    """Run `in_turn`, with gradients enabled and nothing compiled; restore buffers, attributes that are tensors and
    random state, come what may. Of the parameters only the `trained` ones require a gradient inside (None: as outside).
    No `Listener` hears the passes inside, unless their result is part of the user's loss (`is_heard`).
    """
    with in_turn():
        state = ModelState(model)
        named = () if trained is None else [(p, name in trained) for name, p in model.named_parameters()]
        changed = [(p, required) for p, required in named if p.requires_grad != required]
        attributes = [(vars(module), vars(module).copy()) for module in model.modules()]
        # inside `parametrize.cached()` all passes would share the graph of the weights, and others' parameters
        cached, parametrize._cache_enabled = parametrize._cache_enabled, 0
        OURS.set(OURS.get() + (not is_heard))
        try:
            for p, required in changed:
                p.requires_grad_(required)
            with torch.enable_grad(), force_eager(nonreentrant=True):
                yield state
        except RuntimeError as error:
            kept = _find_graphs(model) if GRAPH_IS_FREED in str(error) else []
            if not kept:
                raise
            raise RuntimeError(
                f"{', '.join(kept[:3])}: the model keeps it from pass to pass with its graph, which a backward pass "
                "has freed: let every pass compute it anew (a forward pre-hook can empty a cache)"
            ) from error
        finally:
            OURS.set(OURS.get() - (not is_heard))
            parametrize._cache_enabled = cached
            for p, required in changed:
                p.requires_grad_(not required)
            state.restore()
            for present, before in attributes:
                # names of frameworks begin with _
                for name in [k for k, value in present.items() if value is not before.get(k, present) and k[0] != "_"]:
                    if name not in before and _holds_tensors(present[name]):
                        del present[name]
                    elif name in before and _holds_tensors((present[name], before[name])):
                        present[name] = before[name]


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _find_graphs(model: nn.Module) -> list[str]:
    """Attributes of modules, and entries of their dicts and lists, that hold tensors with a graph."""
    named = [(f"{path}.{k}".lstrip("."), v) for path, module in model.named_modules() for k, v in vars(module).items()]
    has_graph = lambda leaf: isinstance(leaf, Tensor) and leaf.grad_fn is not None
    return [name for name, value in named if any(map(has_graph, pytree.tree_leaves(value)))]


@contextmanager
def moved(moves: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Parameters moved by these; what they were comes back bit by bit, and autograd does not see it."""
    kept = [(p, p.detach().clone(), move) for p, move in moves]
    try:
        for p, _, move in kept:
            p.data.add_(move)
        yield
    finally:
        for p, before, _ in kept:
            p.data.copy_(before)


@dataclass
class Facts:
    """What was verified of a model, or another function, at one shape of its inputs."""

    plans: dict[Any, Any] = field(default_factory=dict)  # how parameters are explained, by what a pass calls
    verdicts: Any = None  # whether samples meet
    losses: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)  # those checked, their settings
    is_compared: bool = False  # whether samples run alone have given the same values, before a Laplacian


FACTS: WeakKeyDictionary[Any, dict[Any, Facts]] = (
    WeakKeyDictionary()
)  # while models exist: the one cache of the package


def facts_of(model: Any, key: Any) -> Facts:
    """What is known, to read and to add to."""
    return FACTS.setdefault(model, {}).setdefault(key, Facts())


class FunctionModel(nn.Module):
    """A function of parameters by name, ``function(parameters, *inputs)``, as a module with these parameters.

    For models that are written as such functions (as those of ``torch.func``), with everything that takes a module.

    Args:
        function: takes a dict of tensors by name, then the model's inputs.
        parameters: floating point tensors are trained; `nn.Parameter`s are taken as they are, other tensors share their
            memory. Tensors of integers become buffers. Names may have dots; ``named_parameters()`` has those with one
            after those without.

    Raises:
        TypeError: something else than a tensor among the parameters.
        KeyError: a name is taken by something else in a module ("forward"), or is a prefix of another.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a tensor, found {type(value).__name__}")
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            if isinstance(value, nn.Parameter):
                owner.register_parameter(last, value)
            elif value.is_floating_point() or value.is_complex():
                owner.register_parameter(last, nn.Parameter(value.detach()))
            else:
                owner.register_buffer(last, value)
        self.names = list(parameters)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function({name: attrgetter(name)(self) for name in self.names}, *inputs, **options)
