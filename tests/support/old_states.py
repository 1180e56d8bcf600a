"""States in the forms of earlier code, made from today's: what `state_dict` gave at some of its commits."""

from __future__ import annotations

import copy
from typing import Any

import torch

State = dict[str, Any]


def first(opt: torch.optim.Optimizer, state: State) -> State:
    """Version 1, of 8ff7b94: the curvature and all else at the top, no version, dtypes as they are."""
    state = copy.deepcopy(state)
    ((whole,),) = [entry.pop("kfac") for entry in state["state"].values() if "kfac" in entry]
    kept, curvature = whole.pop("kept"), whole.pop("curvature")
    del whole["version"], whole["kind"]
    names = [name for name, _ in opt.model.named_parameters()]
    for k, entry in state["state"].items():
        for key in entry.keys() - set(kept.get(names[k], [])):
            del entry[key]
    for block in curvature.values():
        with_dtype = block.get("scheme", block)
        if "dtype" in with_dtype:
            with_dtype["dtype"] = getattr(torch, with_dtype["dtype"].removeprefix("torch."))
    return state | {"kfac": whole, "curvature": curvature}


def without_shapes(opt: torch.optim.Optimizer, state: State) -> State:
    """Of 72ff867: neither shapes of parameters, nor sides by few directions, nor shifts of inverses."""
    state = first(opt, state)
    del state["kfac"]["shapes"]
    for block in state["curvature"].values():
        block.get("scheme", {}).pop("few", None)
        if isinstance(block.get("inverse"), dict):
            block["inverse"].pop("shifts", None)
    return state | {"kfac": state["kfac"] | {"curved": torch.ones(())}}


def decomposed(opt: torch.optim.Optimizer, state: State) -> State:
    """Of 77bfe9b: eigenvalues and eigenvectors where there is an inverse now, no health, no bound on lengths."""
    state = without_shapes(opt, state)
    for key in ("health", "intervals", "longest", "curved"):
        del state["kfac"][key]
    state["kfac"]["decomposed_at"] = 2
    for block in state["curvature"].values():
        del block["inverse"]
        if "rows" in block:
            for side in ("row", "column"):
                values, vectors = torch.linalg.eigh(block[f"{side}s"])
                block |= {f"{side}_values": values, f"{side}_vectors": vectors}
        else:
            block["smoothed"] = block["values"]
    return state


def flat(opt: torch.optim.Optimizer, state: State) -> State:
    """Of 7adf284: the arrangement of a block's parameters among all else."""
    state = decomposed(opt, state)
    for block in state["curvature"].values():
        scheme = block.pop("scheme", None)
        if scheme is not None:
            block |= scheme["arrangement"] | {"shapes": list(scheme["arrangement"]["shapes"]), "dtype": scheme["dtype"]}
    return state


def nameless(opt: torch.optim.Optimizer, state: State) -> State:
    """Of 7c17018: not said of what the blocks are."""
    state = flat(opt, state)
    kept = {"updates", "rows", "columns", "row_values", "row_vectors", "column_values", "column_vectors", "values"}
    for name, block in state["curvature"].items():
        state["curvature"][name] = {key: value for key, value in block.items() if key in kept}
    del state["kfac"]["last_change"]
    return state
