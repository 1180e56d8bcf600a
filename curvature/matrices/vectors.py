"""What vectors that were sent back give every parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from curvature.terms import StackedTerms, Term, TermsByVector

Terms = dict[str, list[Term]]


class Vectors(Sequence[Terms]):
    """Terms by vector and by parameter, or by parameter and by vector (`of`).

    Args:
        others: for each vector the terms of parameters that are not stacked.
        stacks: the terms of all vectors, by parameter.
    """

    def __init__(self, others: Sequence[Terms], stacks: Mapping[str, StackedTerms] | None = None) -> None:
        self.others, self.stacks = others, dict(stacks or {})

    def __len__(self) -> int:
        return len(self.others)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[j] for j in range(len(self))[k]]
        return self.others[k] | {name: stack[k] for name, stack in self.stacks.items()}

    def __iter__(self) -> Iterator[Terms]:
        return (self[k] for k in range(len(self)))

    def of(self, name: str) -> TermsByVector | None:
        """The terms of one parameter by vector; None if no output depends on it."""
        return self.stacks.get(name) or [terms[name] for terms in self.others if name in terms] or None

    def only(self, names: Collection[str]) -> Vectors:
        """The same of some parameters."""
        others = [{name: own for name, own in terms.items() if name in names} for terms in self.others]
        return Vectors(others, {name: own for name, own in self.stacks.items() if name in names})
