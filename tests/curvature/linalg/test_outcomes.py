"""Questions to the device that are asked together, at the end of what was done in good faith."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from curvature.linalg import are_true, count_recovery, on_host, optimistically, recovery_counts, soon
from curvature.linalg.decompositions import spd_inverse, symmetric_eigh, try_cholesky
from support.cases.case import seeded
from support.host_waits import Waits

pytestmark = pytest.mark.fast

YES, NO = torch.tensor([True]), torch.tensor([False])


def spd() -> Tensor:
    with seeded(0):
        rows = torch.randn(2, 5, 9)
    return rows @ rows.mT


def test_all_is_asked_at_the_end() -> None:
    mixed = torch.tensor([True, False])
    assert optimistically(lambda: are_true(mixed)) is None
    assert optimistically(lambda: 7, [YES, NO]) is None and optimistically(lambda: 7, [YES, torch.tensor(True)]) == 7
    assert optimistically(lambda: are_true(torch.tensor([True, True])), [YES]) == [True, True]
    assert optimistically(lambda: are_true(mixed[:0])) == []
    assert are_true(mixed) == [True, False]


def test_decompositions_do_not_make_the_host_wait() -> None:
    matrix = spd()
    with Waits() as waits:
        found = optimistically(lambda: (waits.count, spd_inverse(matrix), symmetric_eigh(matrix), waits.count))
    assert found is not None and found[0] == found[3] == 0
    torch.testing.assert_close(found[1], spd_inverse(matrix))
    torch.testing.assert_close(found[2], symmetric_eigh(matrix))


@pytest.mark.parametrize("bad", [-torch.eye(3)[None], torch.full((1, 3, 3), torch.nan)], ids=["indefinite", "nan"])
def test_a_decomposition_that_has_failed(bad: Tensor) -> None:
    assert try_cholesky(bad) is None
    assert optimistically(lambda: spd_inverse(bad)) is None
    assert optimistically(lambda: symmetric_eigh(bad)) is None or bad.isfinite().all()


def test_an_error_that_comes_of_a_failure_is_none() -> None:
    def fail(flag: Tensor) -> None:
        are_true(flag)
        raise ValueError("mine")

    assert optimistically(lambda: fail(NO)) is None
    with pytest.raises(ValueError, match="mine"):
        optimistically(lambda: fail(YES))


def test_events_count_once_it_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("injected")

    with recovery_counts() as counts:
        assert optimistically(lambda: count_recovery("kept"), [NO]) is None
        assert not counts
        optimistically(lambda: count_recovery("kept"), [YES])
        assert counts == {"kept": 1}
        monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
        assert optimistically(lambda: spd_inverse(spd())) is None
        assert counts == {"kept": 1}
        spd_inverse(spd())
        assert counts == {"kept": 1, "retried": 1}


def test_numbers_that_the_host_reads_bring_the_answers() -> None:
    numbers = [torch.arange(6).reshape(2, 3), torch.ones((), dtype=torch.float32)]

    def run(flag: Tensor) -> list[Tensor]:
        are_true(flag)
        found = on_host(numbers)
        reached.append(flag)
        return found

    reached: list[Tensor] = []
    assert optimistically(lambda: run(NO)) is None and not reached
    found = optimistically(lambda: run(YES))
    assert found is not None and len(reached) == 1
    for own, x in zip(found, numbers, strict=True):
        assert own.dtype == torch.float64 and torch.equal(own, x.double())
    assert on_host([]) == [] and optimistically(lambda: on_host([])) == []


def test_a_number_comes_with_the_next_transfer() -> None:
    x = torch.tensor(2.5)

    def run() -> tuple[float, int, float]:
        sooner, later = soon(x), soon(x + 1)
        on_host([x])
        before = waits.count
        return sooner(), waits.count - before, later()

    with Waits() as waits:
        assert optimistically(run) == (2.5, 0, 3.5)
    assert soon(x)() == 2.5 and optimistically(lambda: soon(x)()) == 2.5
