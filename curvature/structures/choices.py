"""Structures that a caller has chosen for some layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from curvature.recording import is_within
from curvature.structures.dense import DenseStructure
from curvature.structures.diagonal import DiagonalStructure
from curvature.structures.structure import Structure

Choice = str | type[Structure]
BUILT_IN: dict[str, type[Structure]] = {form.name: form for form in (DiagonalStructure, DenseStructure)}


class Choices:
    """Which structure the blocks of some layers have, by the name of a module or of a parameter.

    Args:
        structure: "dense", "diagonal", one of the `factored`, or a class of the caller's; a parameter that is named
            has a block of its own.
        names: of all parameters.
        factored: structures that are made of Kronecker factors.

    Raises:
        ValueError: a structure of another name, or no parameter is below a name.
        TypeError: neither a name nor a `Structure` that has one, or no dict.
    """

    def __init__(
        self, structure: Mapping[str, Choice] | None, names: Iterable[str], factored: tuple[str, ...] = ("kronecker",)
    ) -> None:
        if structure is not None and not isinstance(structure, Mapping):
            raise TypeError(
                f'structure: expected a dict such as {{"name of a layer": "diagonal"}}, found {structure!r:.80}'
            )
        self.chosen, names = dict(structure or {}), list(names)
        for key, choice in self.chosen.items():
            _require_structure(key, choice, factored)
            if not any(is_within(name, key) for name in names):
                layers = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
                raise ValueError(
                    f"structure: no layer {key!r} with trainable parameters; there are {', '.join(layers)}"
                )
        self.alone = self.chosen.keys() & set(names)  # parameters with a block of their own

    def of(self, names: Iterable[str]) -> Choice | None:
        """That of a block of these parameters: by the longest name that one of them is below; None without one."""
        keys = [key for key in self.chosen if any(is_within(name, key) for name in names)]
        choice = self.chosen[max(keys, key=len)] if keys else None
        return BUILT_IN.get(choice, choice) if isinstance(choice, str) else choice

    def by_name(self) -> dict[str, str]:
        """The names of the structures, for checkpoints."""
        return {key: choice if isinstance(choice, str) else choice.name for key, choice in self.chosen.items()}


def _require_structure(key: str, choice: Any, factored: Collection[str]) -> None:
    if isinstance(choice, str):
        known = (*factored, *BUILT_IN)
        if choice not in known:
            raise ValueError(f"structure: {key!r} has {choice!r}; expected one of {', '.join(known)}, or a class")
        return
    if not (isinstance(choice, type) and issubclass(choice, Structure)):
        raise TypeError(f"structure: {key!r} has {choice!r}; expected a name, or a subclass of Structure")
    if not hasattr(choice, "name"):
        raise TypeError(f"structure: {choice!r} has no name, by which checkpoints and reports tell it")
    if choice.name in factored:
        raise ValueError(f"structure: {choice!r} has the name of Kronecker factors, {choice.name!r}; choose another")
