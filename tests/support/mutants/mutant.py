"""A line of code and a wrong version of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, which is in `file` once, becomes `new`; `tests` are files and folders below tests/ that should fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.old}  ->  {self.new}"


def broken(file: str, tests: str, *changes: tuple[str, str]) -> Iterator[Mutant]:
    for old, new in changes:
        yield Mutant(file, old, new, tuple(tests.split()))
