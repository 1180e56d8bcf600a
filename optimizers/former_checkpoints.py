"""Version 4 of checkpoints: steps were tensors, energies in the blocks, inverses of thin layers Cholesky roots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


def from_version_4(joint: State) -> State:
    """What belongs to no parameter alone, of version 4, as a dict of its own; refuses curvature in 16 bits."""
    if joint["kind"].get("compact"):
        raise ValueError(
            "state_dict: of an optimizer with compact True, an option that was removed; 16 bits are no longer read"
        )
    energies: dict[str, Tensor] = {}  # measured and predicted (2,), by parameter
    curvature = {name: _block(entry, energies) for name, entry in joint["curvature"].items()}
    factor_every, decompose_every = joint["intervals"]
    outputs = joint["recorder"]["output_scale"], joint["recorder"]["output_size"]
    scale, size = (0.0 if x is None else float(x) for x in outputs)
    return joint | {
        "kind": {key: value for key, value in joint["kind"].items() if key != "compact"},
        "intervals": {"factor_every": factor_every, "decompose_every": decompose_every},
        "recorder": joint["recorder"] | {"output_scale": scale, "output_size": size, "class_axis": 0},
        "rule": _rule(joint["rule"], energies),
        "curvature": curvature,
    }


def _rule(state: Any, energies: Mapping[str, Tensor]) -> Any:
    """The state of a step rule, in which that of another may be."""
    if not isinstance(state, Mapping):
        return state
    found = {key: _rule(value, energies) for key, value in state.items()}
    if isinstance(state.get("energies"), Mapping):
        own = {name: (energies[name].tolist() if name in energies else [0.0, 0.0]) for name in state["energies"]}
        found["energies"] = {
            name: {"last": float(last), "measured": own[name][0], "predicted": own[name][1]}
            for name, last in state["energies"].items()
        }
    return found


def _block(entry: State, energies: dict[str, Tensor]) -> State:
    """The state of a block, in which those of ranges of rows may be; notes its energies."""
    found = {key: value for key, value in entry.items() if key != "energies"}
    if entry.get("energies") is not None:
        energies |= dict.fromkeys(entry["names"], entry["energies"])
    if "parts" in found:
        found["parts"] = {name: _block(part, energies) for name, part in found["parts"].items()}
    if "scheme" in found:
        found["scheme"] = {key: value for key, value in found["scheme"].items() if key != "compact"}
    if isinstance(inverse := found.get("inverse"), Mapping):
        roots = zip(("rows", "columns"), inverse.get("roots", ()), strict=False)
        sides = {side: torch.cholesky_inverse(inverse[side]) for side, is_root in roots if is_root}
        found["inverse"] = {k: x for k, x in inverse.items() if k not in ("roots", "packed")} | sides
    return found
