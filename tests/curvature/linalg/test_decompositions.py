"""QR decompositions and eigenvalues alone by the ladder, and that nothing goes around it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from curvature.linalg import eigenvalues_of, qr, recovery_counts
from support.architecture import ROOT


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
    assert not [
        f"{path.name}: {line}" for path in paths for line in path.read_text().splitlines() if calls.search(line)
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_eigenvalues_alone(fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    true = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m: fault(true(m)))
    torch.testing.assert_close(eigenvalues_of(matrix()), true(matrix()), rtol=1e-4, atol=1e-4)
