"""Checkpoints: the form of `state_dict`, and what is refused before anything is changed.

The form is torch's: "state" by parameter, and "param_groups". What belongs to no parameter alone is in the state of the
first one that is trained, as a tuple of one dict: `torch.distributed.checkpoint` keeps a tuple whole, so that an
optimizer that has seen nothing yet has a place for it. All leaves are tensors, numbers, strings and None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.preconditioners import Block
from optimizers.model_optimizer import ModelOptimizer, check_numbers

VERSION = 5
JOINT = "kfac"  # key of what belongs to no parameter alone
PLAIN_PARTS = "monitor", "recorder", "rule"  # those whose states always have the same keys

State = dict[str, Any]


def pack(opt: ModelOptimizer, kind: State, parts: State, empty_state: Callable[[Tensor], State]) -> State:
    """The state in its public form, with `empty_state` of each parameter before the first step, to load in place."""
    parameters = list(_parameters(opt))
    kept = {opt.name_of(p): sorted(opt.state[p]) for p in parameters if p in opt.state}
    joint = parts | {"version": VERSION, "kind": kind, "shapes": opt.shapes(), "kept": kept}
    state = torch.optim.Optimizer.state_dict(opt)
    # hooks may have put in anything, beside the parameters
    entries = {key: dict(entry) if isinstance(entry, Mapping) else entry for key, entry in state["state"].items()}
    trained = [(k, p) for k, p in enumerate(parameters) if p.requires_grad]
    for k, p in trained:
        entries[k] = empty_state(p) | entries.get(k, {})
    first = trained[0][0] if trained else 0
    # every loader of checkpoints takes strings
    joint = pytree.tree_map_only(torch.dtype, str, joint)
    entries[first] = entries.get(first, {}) | {JOINT: (joint,)}
    return state | {"state": entries}


def unpack(opt: ModelOptimizer, given: Any, kind: State, parts: State) -> tuple[State, State]:
    """A state as torch has it, and those of the parts, checked, of tensors of their own; arguments as for `pack`."""
    if not isinstance(given, Mapping):
        raise TypeError(f"state_dict: expected a dict, found {type(given).__name__}")
    state, joint = _separate(given)
    _check_version(joint.get("version"))
    _check_keys({"kept", "kind", "shapes", *parts}, joint)
    for key, value in kind.items():
        if (other := joint["kind"].get(key, value)) != value:
            raise ValueError(f"state_dict: of an optimizer with {key} {other!r}, and this one has {value!r}")
    for name in PLAIN_PARTS:
        _check_keys(parts[name].keys(), joint[name])
    here, there = opt.shapes(), joint["shapes"]
    for name in [*here, *there]:
        shape, other = here.get(name, "nowhere"), there.get(name, "nowhere")
        if shape != other:
            raise ValueError(f"state_dict: of another model; {name} has shape {other} there and {shape} here")
    named = _by_name(opt, state)
    for name, p in opt.trained().items():
        _check_entry(name, p, named[name], joint["kept"].get(name, []))
    joint["curvature"] = {name: _block(opt, name, entry) for name, entry in joint["curvature"].items()}
    for name, entry in named.items():
        for key in entry.keys() - set(joint["kept"].get(name, [])):
            del entry[key]
    state["state"] = {key: entry for key, entry in state["state"].items() if entry != {}}
    return state, {name: joint[name] for name in parts}


def _check_version(version: Any) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"state_dict: damaged; expected version {VERSION}, found {version!r:.80}")
    if version != VERSION:
        code = "newer code" if version > VERSION else "code from before the first release"
        raise ValueError(f"state_dict: of version {version}, saved by {code}; this reads version {VERSION}")


def _check_keys(expected: Iterable[str], entries: Mapping[str, Any]) -> None:
    missing = sorted(set(expected) - entries.keys())
    if missing:
        raise ValueError(f"state_dict: damaged; it has no {missing[0]!r}, found {sorted(entries)}")


def _separate(given: Mapping[str, Any]) -> tuple[State, State]:
    """A state as torch has it, and what belongs to no parameter alone; of tensors of their own."""
    absent = [key for key in ("state", "param_groups") if key not in given]
    if absent:
        raise ValueError(
            f"state_dict: expected the state_dict of an optimizer, found the keys {sorted(map(str, given))}"
        )
    state = _own(dict(given))
    for key in [key for key in state["state"] if isinstance(key, str) and key.isdigit() and int(key) in state["state"]]:
        state["state"][int(key)] |= state["state"].pop(key)  # where torch.distributed.checkpoint puts what is no tensor
    entries = [entry for entry in state["state"].values() if isinstance(entry, dict)]
    joint = [entry.pop(JOINT) for entry in entries if JOINT in entry]
    if len(joint) != 1 or not isinstance(joint[0], tuple | list) or len(joint[0]) != 1:
        keys = sorted({str(key) for entry in entries for key in entry})
        raise ValueError(
            f"state_dict: not of KFAC, EKFAC or NaturalGradient, or without their curvature; found {keys} by parameter"
        )
    return state, dict(joint[0][0])


def _by_name(opt: ModelOptimizer, state: State) -> dict[str, State]:
    """The state of each parameter, by its name here."""
    sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], opt.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"state_dict: its parameter groups have {sizes[0]} parameters, those here {sizes[1]}")
    for group in state["param_groups"]:
        absent = sorted({"lr", "damping", "momentum", "weight_decay"} - group.keys())
        if absent:
            raise ValueError(f"state_dict: damaged; a parameter group has no {absent[0]!r}, found {sorted(group)}")
        check_numbers(group)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    pairs = zip(keys, _parameters(opt), strict=True)
    return {opt.name_of(p): state["state"].setdefault(key, {}) for key, p in pairs}


def _check_entry(name: str, p: Tensor, entry: State, kept: list[str]) -> None:
    absent = [key for key in kept if key not in entry]
    if absent:
        raise ValueError(
            f"state_dict: damaged, or not loaded as a whole; {name} has no {absent[0]!r}, found {sorted(entry)}"
        )
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.shape != p.shape:
            raise ValueError(f"state_dict: {key} of {name} has shape {list(value.shape)}, expected {list(p.shape)}")
        if isinstance(value, Tensor) and not bool(torch.isfinite(value).all()):
            raise ValueError(f"state_dict: damaged; {key} of {name} is not finite")


def curvature_of(opt: ModelOptimizer, state: State) -> State:
    """The state of a store of curvature in the precision that the parameters have now, by the first of each block."""
    dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in opt.model.named_parameters()}
    return {name: _in_precision(entry, dtypes[name]) if name in dtypes else entry for name, entry in state.items()}


def _block(opt: ModelOptimizer, name: str, entry: State) -> State:
    """The curvature of some parameters in the precision that they have here."""
    shapes, problem = opt.shapes(), None
    try:
        dtype = dict(opt.model.named_parameters())[name].dtype
        entry = _in_precision(entry, torch.promote_types(dtype, torch.float32))
        block = Block.restore(entry, torch.device("cpu"))
        size = sum(torch.Size(shapes[member]).numel() for member in block.names)
        if block.dimension != size:
            problem = f"of {block.dimension} entries, where there are {size}"
        elif not all(bool(x.isfinite().all()) for x in pytree.tree_leaves(block.state()) if isinstance(x, Tensor)):
            problem = "not finite"
    except Exception as error:  # whatever is wrong with it
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ValueError(f"state_dict: damaged; the curvature of {name} is {problem}")
    return entry


def _in_precision(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Mapping):
        entries = {key: _in_precision(x, dtype) for key, x in value.items()}
        return entries | ({"dtype": dtype} if "dtype" in value else {})
    if isinstance(value, tuple | list):
        return type(value)(_in_precision(x, dtype) for x in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _parameters(opt: ModelOptimizer) -> Iterator[Tensor]:
    return (p for group in opt.param_groups for p in group["params"])


def _own(value: Any, key: Any = None) -> Any:
    """A copy, with dtypes as they were."""
    if isinstance(value, Mapping):
        return {key: _own(x, key) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_own(x, key) for x in value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    return getattr(torch, value.removeprefix("torch."), value) if key == "dtype" and isinstance(value, str) else value
