"""What was found of a loss, as long as it exists, so that it need not be tried at every call."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from curvature.losses.own_state import whose

FOUND: weakref.WeakKeyDictionary[Any, dict[Any, set[Any]]] = weakref.WeakKeyDictionary()  # by the loss, its settings
MOST_SETTINGS = 100
PLAIN = str, float, int, bool, type(None)


def found_of(loss: Any) -> set[Any]:
    """A set to read and to add to; it is forgotten where the loss has no weak references or no hash."""
    own = whose(loss)
    settings = tuple((k, v) for k, v in vars(own).items() if isinstance(v, PLAIN)) if isinstance(own, nn.Module) else ()
    try:
        found = FOUND.setdefault(own, {})
    except TypeError:
        return set()
    if len(found) >= MOST_SETTINGS:  # an attribute that counts, say
        found.clear()
    return found.setdefault(settings, set())
