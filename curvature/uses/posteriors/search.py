"""Where a function of one number, or of a few, is least: all it is asked for is its value, which may be infinite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

GOLDEN = (5**0.5 - 1) / 2
SECTIONS = 8  # of an interval, to a fortieth of it
BISECTIONS = 7
ROUNDS = 5  # over all coordinates
GAIN = 1e-4  # relative, of the last round worth another


def golden_section(value: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Where a function with one minimum in the interval is least, and its value there (Kiefer 1953)."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at = {x: value(x) for x in (left, right)}
    for _ in range(SECTIONS):
        if at[left] <= at[right]:
            high, right, left = right, left, right - GOLDEN * (right - low)
        else:
            low, left, right = left, right, left + GOLDEN * (high - left)
        for x in (left, right):
            if x not in at:
                at[x] = value(x)
    best = min(at, key=lambda x: at[x])
    return best, at[best]


def one_by_one(value: Callable[[Sequence[float]], float], start: Sequence[float], reach: float) -> list[float]:
    """Golden sections along one coordinate after the other, within `reach` of where it is, while they gain."""
    point, least = list(start), value(start)
    for _ in range(ROUNDS):
        before = least
        for k, centre in enumerate(point):
            along = lambda x, k=k: value([*point[:k], x, *point[k + 1 :]])
            x, there = golden_section(along, centre - reach, centre + reach)
            if there < least:
                point[k], least = x, there
        if len(point) == 1 or not before - least > GAIN * abs(before):
            break
    return point


def least_that_passes(passes: Callable[[float], bool], low: float, high: float) -> float:
    """By bisection, of a test that all numbers pass from some number on; `high` if none below does."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
