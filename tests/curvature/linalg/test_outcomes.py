"""Flags and numbers that come to the host together, and failures that are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvature.linalg import count_recovery, look, recovery_counts, to_host
from curvature.linalg.decompositions import (
    careful_spd_inverse,
    symmetric_eigh,
    symmetric_eighs,
    try_cholesky,
    try_orthonormal,
    try_spd_inverse,
)
from support.cases.case import seeded
from support.host_waits import Waits

pytestmark = pytest.mark.fast

YES, NO = torch.tensor(True), torch.tensor(False)
BAD = {"indefinite": -torch.eye(3)[None], "nan": torch.full((1, 3, 3), torch.nan), "zero": torch.zeros(1, 3, 3)}


def spd(size: int = 5) -> Tensor:
    with seeded(0):
        rows = torch.randn(2, size, 9)
    return rows @ rows.mT


def test_flags_are_looked_at_together(device: str) -> None:
    assert look([]) == [] and look([YES, NO]) == [True, False]
    assert look([NO, YES.to(device), NO.to(device)]) == [False, True, False]


@pytest.mark.parametrize("attempt", [try_cholesky, try_spd_inverse])
def test_what_is_above_the_diagonal_is_not_looked_at(
    attempt: Callable[[Tensor], tuple[Tensor, Tensor]], device: str
) -> None:
    whole, lower = spd().to(device), spd().to(device)
    lower += torch.full_like(lower, torch.nan).triu(1)
    for found, expected in zip(attempt(lower), attempt(whole), strict=True):
        assert torch.equal(found, expected)


def test_numbers_come_in_double_precision(device: str) -> None:
    numbers = [torch.arange(6).reshape(2, 3), torch.ones((), dtype=torch.float32, device=device), YES.to(device)]
    for own, x in zip(to_host(numbers), numbers, strict=True):
        assert own.dtype == torch.float64 and own.device.type == "cpu" and torch.equal(own, x.cpu().double())
    assert to_host([]) == []


@pytest.mark.parametrize("attempt", [try_cholesky, try_spd_inverse, try_orthonormal])
def test_an_attempt_does_not_make_the_host_wait(attempt: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    with Waits() as waits:
        found, ok = attempt(spd())
    assert not waits.count and bool(ok) and found.isfinite().all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("attempt", [try_cholesky, try_spd_inverse])
def test_an_attempt_that_fails_says_so(attempt: Callable[[Tensor], tuple[Tensor, Tensor]], bad: str) -> None:
    found, ok = attempt(BAD[bad])
    assert not bool(ok) and found.shape == BAD[bad].shape


@pytest.mark.parametrize("attempt", [try_cholesky, try_spd_inverse, try_orthonormal])
def test_a_library_that_raises_has_failed(
    attempt: Callable[[Tensor], tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("injected")

    for name in ("cholesky_ex", "qr"):
        monkeypatch.setattr(torch.linalg, name, failing)
    found, ok = attempt(spd())
    assert not bool(ok) and found.shape == spd().shape


def test_several_are_what_each_is_alone() -> None:
    matrices = [spd(), spd(4)[0], spd(3).double()]
    for found, matrix in zip(symmetric_eighs(matrices), matrices, strict=True):
        for one, other in zip(found, symmetric_eigh(matrix), strict=True):
            assert torch.equal(one, other) and one.dtype == matrix.dtype


def test_events_count_in_the_innermost_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: Tensor) -> Any:
        raise torch.linalg.LinAlgError("injected")

    count_recovery("kept")  # nobody counts
    with recovery_counts() as counts:
        count_recovery("kept")
        monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
        careful_spd_inverse(spd())
        with recovery_counts() as inner:
            count_recovery("diagonal")
    assert counts == {"kept": 1, "retried": 1} and inner == {"diagonal": 1}
