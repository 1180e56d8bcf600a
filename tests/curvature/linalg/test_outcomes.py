"""Decompositions by the ladder, flags and numbers that come to the host together, and failures that are counted."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvature.linalg import count_recovery, eigenvalues_of, look, qr, recovery_counts, to_host
from curvature.linalg.decompositions import (
    HOST_MAX_SIDE,
    careful_spd_inverse,
    symmetric_eigh,
    symmetric_eighs,
    try_cholesky,
    try_orthonormal,
    try_spd_inverse,
)
from support.architecture import ROOT
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


def raising(found: Any) -> Any:
    raise torch.linalg.LinAlgError("injected")


def crashing(found: Any) -> Any:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgeqrfBatched(...)`")


def silent(found: Any) -> Any:
    """What is no number, and no error."""
    return found * math.nan if isinstance(found, torch.Tensor) else tuple(x * math.nan for x in found)


FAULTS: list[Callable[[Any], Any]] = [raising, crashing, silent]


def matrix() -> torch.Tensor:
    rows = torch.randn(7, 14, generator=torch.Generator().manual_seed(0))
    return rows @ rows.T


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("calls", [1, 2])
def test_qr_by_the_ladder(fault: Callable[[Any], Any], calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, true = itertools.count(), torch.linalg.qr
    expected = true(matrix()[:, :4])
    monkeypatch.setattr(torch.linalg, "qr", lambda m: fault(true(m)) if next(left) < calls else true(m))
    with recovery_counts() as counts:
        found = qr(matrix()[:, :4])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert counts == {"retried": 1}
    monkeypatch.setattr(torch.linalg, "qr", lambda m: fault(true(m)))
    with pytest.raises(torch.linalg.LinAlgError, match="QR of a .7, 4. matrix failed"):
        qr(matrix()[:, :4])


def test_no_decomposition_goes_around_the_ladder() -> None:
    """Those that may fail are called in `curvature.linalg` alone, or in `try_decompose`."""
    calls = re.compile(
        r"(?<!partial\()torch\.linalg\.(qr|svd|eigh|eigvalsh|eig|lstsq|inv|solve|cholesky|cholesky_ex)\("
    )
    folders = [ROOT / "curvature", ROOT / "optimizers"]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    found = [f"{path.name}: {line}" for path in paths for line in path.read_text().splitlines() if calls.search(line)]
    assert found == ["decompositions.py:     values, vectors = torch.linalg.eigh(matrix)"]  # of `_eigh`, which is tried


@pytest.mark.parametrize("share", [1e-9, 0.02])
def test_eigenvectors_of_an_accelerator_that_are_not_orthogonal(
    share: float, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuSOLVER's of large singular matrices: such a matrix is decomposed again, on the host."""
    size = HOST_MAX_SIDE + 1
    rows = torch.randn(3, size, 2 * size, generator=torch.Generator().manual_seed(0))
    matrices, true = rows @ rows.mT / size, torch.linalg.eigh

    def turned(m: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = true(m)
        if m.device.type != "cpu":
            last = vectors.view(-1, size, size)[-1]
            last[:, 0] += share * last[:, 1]
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", turned)
    with recovery_counts() as counts:
        values, vectors = symmetric_eigh(matrices.to(accelerator))
    assert counts == ({"retried": 3} if share == 0.02 else {})
    restored = (vectors * values[:, None, :] @ vectors.mT).cpu()
    torch.testing.assert_close(restored, matrices, rtol=1e-4, atol=1e-4)
    products = (vectors.mT @ vectors).cpu()
    torch.testing.assert_close(products, torch.eye(size).expand(3, size, size), rtol=0, atol=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_eigenvalues_alone(fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    true = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m: fault(true(m)))
    torch.testing.assert_close(eigenvalues_of(matrix()), true(matrix()), rtol=1e-4, atol=1e-4)


def test_an_infinite_entry_has_no_inverse() -> None:
    """Of one row it would be zero, and finite."""
    for size in (1, 3):
        matrix = torch.eye(size)[None].clone()
        matrix[0, 0, 0] = torch.inf
        assert not bool(try_spd_inverse(matrix)[1])
