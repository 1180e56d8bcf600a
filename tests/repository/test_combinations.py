"""The combinations that tests of options run over."""

from __future__ import annotations

import itertools

import pytest

from support.combinations import member, pairwise


def test_each_two_values_meet_in_few_rows() -> None:
    factors = ("abcdefg", range(5), "xy", (False, True))
    rows = pairwise(*factors)
    for i, j in itertools.combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(factors[i], factors[j]))
    assert len(rows) == 35 and rows == pairwise(*factors)


def test_values_take_turns_where_no_pair_asks_for_one() -> None:
    rows = pairwise(range(6), range(6), "xy")
    assert len(rows) == 36 and 15 <= sum(row[2] == "x" for row in rows) <= 21


def test_a_member_that_fails_is_named() -> None:
    for failure in (lambda: pytest.fail("no"), lambda: {}["no"]):
        with pytest.raises(AssertionError, match="the second: .*no"), member("the second"):
            failure()
    with pytest.raises(pytest.skip.Exception), member("the third"):
        pytest.skip("not here")
