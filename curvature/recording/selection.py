"""Which parameters of a model count: those that require a gradient, or some of them by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from torch import nn

from curvature.recording.compiled import unwrap_compiled

ORDER = " (the order is model, loss, data)"


def trained_parameters(model: Any, chosen: Iterable[str] | None = None) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, in the order of ``named_parameters()``.

    Args:
        chosen: names of parameters, or of modules for all that are below them; None: all. A shared parameter has any of
            its names. Of a module, parameters that do not require a gradient are left out.

    Raises:
        TypeError: `model` is no module, or `chosen` a string.
        ValueError: no parameter requires a gradient, or none of a name that was chosen.
    """
    model = unwrap_compiled(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}{ORDER}")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        empty = next(model.parameters(), None) is None
        which = f"; the first argument is a {type(model).__name__}, which has none{ORDER}" if empty else ""
        raise ValueError(f"model: no parameter requires a gradient{which}")
    if chosen is None:
        return trained
    if isinstance(chosen, str):
        raise TypeError(f"parameters: expected names of parameters or modules, as in [{chosen!r}], found a string")
    chosen = list(chosen)
    if not chosen:
        raise ValueError("parameters: there is no name")
    found: set[int] = set()
    for key in chosen:
        found |= {id(trained[key])} if key in trained else _below(model, key)
    return {name: p for name, p in trained.items() if id(p) in found}


def _below(model: nn.Module, key: str) -> set[int]:
    """The parameters of this name, or below the module of this name, that require a gradient, by `id`."""
    named = list(model.named_parameters(remove_duplicate=False))
    own = [p for name, p in named if is_within(name, key)]
    found = {id(p) for p in own if p.requires_grad}
    if own and not found:
        raise ValueError(f"parameters: nothing of {key!r} requires a gradient")
    if not found:
        known = dict.fromkeys(part for name, p in named if p.requires_grad for part in _prefixes(name))
        near = difflib.get_close_matches(str(key), known, n=5, cutoff=0.4) or list(known)[:5]
        raise ValueError(f"parameters: no parameter or module is called {key!r}; near are {', '.join(near)}")
    return found


def is_within(name: str, key: str) -> bool:
    """Whether a parameter has the name `key`, or is below the module of that name."""
    return name == key or name.startswith(key + ".")


def _prefixes(name: str) -> list[str]:
    """``"a.b.weight"`` to ``["a", "a.b", "a.b.weight"]``."""
    parts = name.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]
