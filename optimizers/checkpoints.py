"""Checkpoints: the form of `state_dict`, how older forms are read, and what is refused before anything is changed.

The form is that of any optimizer of torch: "state" by parameter, and "param_groups". What belongs to no parameter
alone (the curvature, counts, the generator of random vectors) is in the state of the first one that is trained, as a
tuple of one dict: `torch.distributed.checkpoint` keeps a tuple whole, whatever is in it, so that an optimizer that has
seen nothing yet has a place for it. All leaves are tensors, numbers, strings and None.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from curvature.preconditioners import Block
from optimizers.arguments import check_numbers
from optimizers.model_optimizer import ModelOptimizer

VERSION = 2
WHOLE = "kfac"  # key of what belongs to no parameter alone
OPTIONAL = {"adaptive", "residuals"}  # there in some states only

State = dict[str, Any]


def packed(opt: ModelOptimizer, state: State, kind: Mapping[str, Any], blank: Callable[[Tensor], State]) -> State:
    """The public form of a state.

    Args:
        state: as torch has it, and with "kfac" and "curvature" beside.
        kind: what a state must have in common with the optimizer that it is loaded into.
        blank: what the state of a parameter has at least; states that are alike can be loaded in place.
    """
    state = dict(state)
    whole = state.pop("kfac") | {"curvature": state.pop("curvature"), "kind": dict(kind), "version": VERSION}
    whole["kept"] = {opt._names[id(p)]: sorted(opt.state[p]) for p in _parameters(opt) if p in opt.state}
    entries = {key: dict(entry) for key, entry in state["state"].items()}
    trained = [(k, p) for k, p in enumerate(_parameters(opt)) if p.requires_grad]
    for k, p in trained:
        entries[k] = blank(p) | entries.get(k, {})
    first = trained[0][0] if trained else 0
    entries[first] = entries.get(first, {}) | {WHOLE: (_plain(whole),)}
    return state | {"state": entries}


def unpacked(opt: ModelOptimizer, given: Any, kind: Mapping[str, Any], own: State) -> State:
    """What `packed` was given, of tensors of its own, with only what is known to be right.

    Args:
        own: the optimizer's own "kfac", for what an older state does not have.

    Raises:
        TypeError: not a dict.
        ValueError: the state of another optimizer or model, newer than this code, or damaged; what was found is said.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"state_dict: expected a dict, found {type(given).__name__}")
    own = {key: value for key, value in own.items() if key not in OPTIONAL}
    state, whole = _separated(given)
    whole = _upgraded(whole, own)
    missing = sorted((own.keys() | {"curvature", "kind", "kept"}) - whole.keys())
    if missing:
        raise ValueError(f"state_dict: damaged; it has no {missing[0]!r}, found {sorted(whole)}")
    for key, here in kind.items():
        there = whole["kind"].get(key, here)
        if there != here:
            raise ValueError(f"state_dict: of an optimizer with {key} {there!r}, and this one has {here!r}")
    opt._check_shapes(whole["shapes"])
    named = _by_name(opt, state)
    for name, p in opt._trained().items():
        _check_entry(name, p, named[name], [] if whole["kept"] is None else whole["kept"].get(name, []))
    curvature = {name: _block(opt, name, entry) for name, entry in whole.pop("curvature").items()}
    for name, entry in named.items() if whole["kept"] is not None else ():
        for key in entry.keys() - set(whole["kept"].get(name, [])):
            del entry[key]
    state["state"] = {key: entry for key, entry in state["state"].items() if entry}
    known = {key: whole[key] for key in own.keys() | (OPTIONAL & whole.keys())}
    return state | {"kfac": known, "curvature": curvature}


def _separated(given: Mapping[str, Any]) -> tuple[State, State]:
    """A state as torch has it, and what belongs to no parameter alone; of tensors of their own."""
    absent = [key for key in ("state", "param_groups") if key not in given]
    if absent:
        raise ValueError(
            f"state_dict: expected the state_dict of an optimizer, found the keys {sorted(map(str, given))}"
        )
    state = _own(dict(given))
    curvature = state.pop("curvature", None)
    whole = state.pop(WHOLE, None)  # before version 2
    if whole is not None:
        return state, whole | {"curvature": curvature, "version": 1}
    for key in [key for key in state["state"] if isinstance(key, str) and key.isdigit() and int(key) in state["state"]]:
        state["state"][int(key)] |= state["state"].pop(key)  # where torch.distributed.checkpoint puts what is no tensor
    found = [entry.pop(WHOLE) for entry in state["state"].values() if WHOLE in entry]
    if len(found) != 1 or not isinstance(found[0], tuple | list) or len(found[0]) != 1:
        keys = sorted({str(key) for entry in state["state"].values() for key in entry})
        raise ValueError(
            f"state_dict: not of KFAC, EKFAC or NaturalGradient, or without their curvature; found {keys} by parameter"
        )
    return state, dict(found[0][0])


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
    return {opt._names[id(p)]: state["state"].setdefault(key, {}) for key, p in pairs}


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


def _block(opt: ModelOptimizer, name: str, entry: State) -> State:
    """The curvature of some parameters in the precision that they have here."""
    shapes, problem = opt._shapes(), None
    try:
        dtype = dict(opt.model.named_parameters())[name].dtype
        entry = _in_precision(entry, torch.promote_types(dtype, torch.float32))
        block = Block.restore(entry, torch.device("cpu"))
        size = sum(torch.Size(shapes[own]).numel() for own in block.names)
        if block.dimension != size:
            problem = f"of {block.dimension} entries, where there are {size}"
        elif not all(bool(torch.isfinite(value).all()) for value in _tensors(block.state())):
            problem = "not finite"
    except Exception as error:  # whatever is wrong with it
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise ValueError(f"state_dict: damaged; the curvature of {name} is {problem}")
    return entry


def _in_precision(value: Any, dtype: torch.dtype) -> Any:
    """All but a whole matrix, which is in double precision anyhow."""
    if isinstance(value, Mapping):
        found = {key: x if key == "matrix" else _in_precision(x, dtype) for key, x in value.items()}
        return found | ({"dtype": dtype} if "dtype" in value else {})
    if isinstance(value, tuple | list):
        return type(value)(_in_precision(x, dtype) for x in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _parameters(opt: ModelOptimizer) -> Iterator[Tensor]:
    return (p for group in opt.param_groups for p in group["params"])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for x in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(x)


def _plain(value: Any) -> Any:
    """With dtypes as strings."""
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value)) if isinstance(value, tuple) else list(map(_plain, value))
    return str(value) if isinstance(value, torch.dtype) else value


def _own(value: Any, key: Any = None) -> Any:
    """A copy, with dtypes as they were."""
    if isinstance(value, Mapping):
        return {key: _own(x, key) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(_own, value)) if isinstance(value, tuple) else list(map(_own, value))
    if isinstance(value, Tensor):
        return value.detach().clone()
    return getattr(torch, value.removeprefix("torch."), value) if key == "dtype" and isinstance(value, str) else value


# -- older forms


def _upgraded(whole: State, own: State) -> State:
    """A state of any version as one of this."""
    version = whole.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"state_dict: damaged; expected a version, 1 to {VERSION}, found {version!r:.80}")
    if version > VERSION:
        raise ValueError(f"state_dict: of version {version}, saved by newer code; this reads 1 to {VERSION}")
    for upgrade in UPGRADES[version - 1 :]:
        whole = upgrade(whole, own)
    return whole


def _from_1(whole: State, own: State) -> State:
    """Version 1 had no number and grew: what came later is as it is in an optimizer that has seen nothing."""
    unseen = {key: None if isinstance(value, Tensor) else value for key, value in own.items()}
    found = unseen | {key: value for key, value in whole.items() if key in own.keys() | OPTIONAL}
    curvature = whole["curvature"] or {}
    if not all("structure" in entry for entry in curvature.values()):
        warnings.warn("state_dict: of an early form, whose curvature cannot be read; it is learnt anew", stacklevel=6)
        curvature, found["steps"] = {}, 0
    curvature = {name: READ.get(entry["structure"], dict)(entry) for name, entry in curvature.items()}
    schemes = [entry["scheme"] for entry in curvature.values() if "scheme" in entry]
    structures = {entry["structure"] for entry in curvature.values()}
    kind = {"adaptive": "adaptive" in whole} | ({"sharing": schemes[0]["sharing"]} if schemes else {})
    for structure, name in KINDS.items():
        if structure in structures and not (structure == "kronecker" and all(any(s["few"]) for s in schemes)):
            kind["curvature"] = name
            break
    return found | {"curvature": curvature, "kind": kind, "kept": None}


def _kronecker_from_1(entry: State) -> State:
    """Decompositions that were kept in another form are made anew."""
    entry = {key: value for key, value in entry.items() if key not in SIDES}
    if "scheme" not in entry:
        arrangement = {key: entry.pop(key) for key in ("shapes", "groups", "outputs", "sizes", "order")}
        diagonal = tuple(entry[side].ndim == 2 for side in ("rows", "columns"))
        arrangement["shapes"] = tuple(arrangement["shapes"])
        scheme = {"arrangement": arrangement, "diagonal": diagonal, "dtype": entry.pop("dtype"), "sharing": "expand"}
        entry["scheme"] = scheme
    return {"inverse": {}} | entry | {"scheme": {"few": (False, False)} | entry["scheme"]}


def _eigen_from_1(entry: State) -> State:
    return entry | {"scheme": {"few": (False, False)} | entry["scheme"]}


def _diagonal_from_1(entry: State) -> State:
    return {"inverse": None} | {key: value for key, value in entry.items() if key != "smoothed"}


SIDES = "row_values", "row_vectors", "column_values", "column_vectors"  # of a decomposition of before
READ: dict[str, Callable[[State], State]] = {
    "kronecker": _kronecker_from_1, "eigen": _eigen_from_1, "diagonal": _diagonal_from_1,
}  # fmt: skip
KINDS = {
    "woodbury": "woodbury", "cg": "cg", "dense": "dense", "whole diagonal": "diagonal",
    "eigen": "eigen", "kronecker": "kronecker",
}  # fmt: skip
UPGRADES: list[Callable[[State, State], State]] = [_from_1]  # from version 1 to 2, and so on
