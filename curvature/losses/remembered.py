"""What was found of a loss, as long as it exists, so that it need not be tried at every call."""

from __future__ import annotations

import weakref
from typing import Any

from curvature.losses.own_state import whose

FOUND: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def found_of(loss: Any) -> set[Any]:
    """A set to read and to add to; it is forgotten where the loss has no weak references or no hash."""
    try:
        return FOUND.setdefault(whose(loss), set())
    except TypeError:
        return set()
