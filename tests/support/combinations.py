"""Many cases in few tests: options in which each two values meet, and members of one test that are named."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def pairwise(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each factor, so that each two values of different factors are in one row at least.

    Always the same rows: each starts with the first pair that no row has yet; of every other factor it takes the value
    that adds most pairs, among equal ones the one that was taken least.
    """
    values = [list(factor) for factor in factors]
    sizes = [len(value) for value in values]
    missing = dict.fromkeys(
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    )
    taken: Counter[tuple[int, int]] = Counter()
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor, size in enumerate(sizes):
            if factor not in row:
                news = [(factor, value) for value in range(size)]
                row[factor] = max(news, key=lambda new: (_gain(row, new, missing), -taken[new]))[1]
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        taken.update(row.items())
        rows.append(tuple(values[factor][row[factor]] for factor in range(len(sizes))))
    return rows


def _gain(row: dict[int, int], new: tuple[int, int], missing: dict[Any, None]) -> int:
    """How many pairs are missing that the row would have with one more value."""
    return sum(tuple(sorted([old, new])) in missing for old in row.items())


def in_pairs(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """`parametrize` over pairwise combinations of the arguments' values."""
    return pytest.mark.parametrize(list(factors), pairwise(*factors.values()))


def in_turn(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """`parametrize` over as many rows as the longest factor has values; shorter ones begin again.

    For factors of which each matters, but not which of one meets which of another.
    """
    values = [list(factor) for factor in factors.values()]
    rows = [tuple(v[k % len(v)] for v in values) for k in range(max(map(len, values)))]
    return pytest.mark.parametrize(list(factors), rows)


@contextlib.contextmanager
def member(name: object) -> Iterator[None]:
    """One of many things that a test goes through: a failure inside says which."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{name}: {error}") from error
