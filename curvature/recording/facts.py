"""What was verified of a model at one shape of its inputs, while the model exists: the one cache of the package."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary


@dataclass
class Facts:
    """Of a model, or another function, at one shape."""

    plans: dict[Any, Any] = field(default_factory=dict)  # how parameters are explained, by what a pass calls
    verdicts: Any = None  # whether samples meet
    losses: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)  # those checked, their settings
    is_compared: bool = False  # whether samples run alone have given the same values, before a Laplacian


FACTS: WeakKeyDictionary[Any, dict[Any, Facts]] = WeakKeyDictionary()


def facts_of(model: Any, key: Any) -> Facts:
    """What is known, to read and to add to."""
    return FACTS.setdefault(model, {}).setdefault(key, Facts())
