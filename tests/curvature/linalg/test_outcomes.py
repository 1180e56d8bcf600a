"""Decompositions by the ladder, flags and numbers that come to the host together, and failures that are counted."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvature.linalg import count_recovery, qr, recovery_counts
from curvature.linalg.decompositions import (
    HOST_MAX_SIDE,
    careful_spd_inverse,
    symmetric_eigh,
    try_spd_inverse,
)
from support.architecture import ROOT
from support.faults import FAULTS, TRUE, Fault, raising

pytestmark = pytest.mark.fast


def spd(size: int = 5, count: int = 2) -> Tensor:
    rows = torch.randn(count, size, 2 * size, generator=torch.Generator().manual_seed(0))
    return rows @ rows.mT / (2 * size)


def test_events_count_in_the_innermost_context(monkeypatch: pytest.MonkeyPatch) -> None:
    count_recovery("kept")  # nobody counts
    with recovery_counts() as counts:
        count_recovery("kept")
        monkeypatch.setattr(torch.linalg, "cholesky_ex", raising)
        careful_spd_inverse(spd())
        with recovery_counts() as inner:
            count_recovery("diagonal")
    assert counts == {"kept": 1, "retried": 1} and inner == {"diagonal": 1}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("calls", [1, 2])
def test_qr_by_the_ladder(fault: Fault, calls: int, faulty: Callable[..., None]) -> None:
    matrix = spd(7)[0, :, :4]
    expected = torch.linalg.qr(matrix)
    faulty(fault, calls, names=["qr"])
    with recovery_counts() as counts:
        found = qr(matrix)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert counts == {"retried": 1}
    faulty(fault, names=["qr"])
    with pytest.raises(torch.linalg.LinAlgError, match="QR of a .7, 4. matrix failed"):
        qr(matrix)


# what torch says of other libraries than LAPACK
MESSAGES = {
    "cublas": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasDgetrfBatched(...)`",
    "magma": "MAGMA error: internal error, error code: -112",
    "rocsolver": "hipsolver error: HIPSOLVER_STATUS_INTERNAL_ERROR, when calling `hipsolverDnSsyevd(...)`",
    "missing": "The operator 'aten::_linalg_eigh.eigenvalues' is not currently implemented for the MPS device",
}


def spd_inverse(matrix: Tensor) -> Tensor:
    found, ok = try_spd_inverse(matrix)
    return found if bool(ok) else careful_spd_inverse(matrix)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_eigenvalues_by_the_ladder(fault: Fault, calls: int, faulty: Callable[..., None]) -> None:
    matrix = spd(6)[0]
    expected = torch.linalg.eigh(matrix.double())[0].float()
    faulty(fault, calls)
    with recovery_counts() as counts:
        values, vectors = symmetric_eigh(matrix)
    is_double = calls in (2, 3)  # no jitter, nor single precision
    torch.testing.assert_close(values, expected, rtol=1e-7 if is_double else 1e-3, atol=0 if is_double else 1e-5)
    torch.testing.assert_close(vectors @ values.diag() @ vectors.mT, matrix, rtol=1e-3, atol=1e-3)
    assert counts["retried"] == (calls > 1)  # alone, the matrix as it is may do


@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_matrix_of_a_batch_leaves_the_others(fault: Fault, faulty: Callable[..., None]) -> None:
    batch = spd(5, 3)
    expected = symmetric_eigh(batch)
    is_bad = lambda matrix: bool((matrix.reshape(-1, 5, 5)[:, 0, 0] == batch[1, 0, 0].to(matrix)).any())
    faulty(fault, on=lambda matrix: matrix.dtype == torch.float32 and is_bad(matrix))
    with recovery_counts() as counts:
        values, vectors = symmetric_eigh(batch)
    assert torch.equal(values[::2], expected[0][::2]) and torch.equal(vectors[::2], expected[1][::2])
    torch.testing.assert_close(values[1], expected[0][1])
    assert counts == {"retried": 1}


@pytest.mark.parametrize("library", MESSAGES)
def test_errors_of_every_library_are_tried_again(library: str, faulty: Callable[..., None]) -> None:
    matrix = spd(6)[0]
    kind = NotImplementedError if library == "missing" else RuntimeError

    def fails(found: Any) -> Any:
        raise kind(MESSAGES[library])

    faulty(fails, 2)
    torch.testing.assert_close(symmetric_eigh(matrix)[0], TRUE["eigh"](matrix)[0])
    faulty(fails, 1)
    torch.testing.assert_close(spd_inverse(matrix[None])[0], torch.linalg.inv(matrix), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("message", ["CUDA error: an illegal memory access was encountered", "injected"])
def test_other_errors_pass(message: str, faulty: Callable[..., None]) -> None:
    def fails(found: Any) -> Any:
        raise RuntimeError(message)

    faulty(fails)
    with pytest.raises(RuntimeError, match=message):
        symmetric_eigh(spd(4)[0])


def test_nothing_helps(faulty: Callable[..., None]) -> None:
    faulty(raising)
    with pytest.raises(torch.linalg.LinAlgError, match="float64.*CPU.*jitter"):
        symmetric_eigh(spd(4)[0])
    with pytest.raises(torch.linalg.LinAlgError, match="not finite"):
        symmetric_eigh(torch.full((4, 4), math.nan))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_inverses_by_the_ladder(fault: Fault, calls: int, faulty: Callable[..., None]) -> None:
    matrix = spd()
    expected = torch.linalg.inv(matrix.double()).float()
    faulty(fault, calls)
    with recovery_counts() as counts:
        torch.testing.assert_close(spd_inverse(matrix), expected, rtol=1e-3, atol=1e-3)
    assert counts["retried"]


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
