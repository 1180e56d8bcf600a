"""Decompositions that retry when they fail, how often they did, and the one criterion for positive definite.

What may fail returns a flag () beside its result. Callers collect flags, and look at all of them once: on an
accelerator each look waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from curvature.linalg.devices import SHARED_MEMORY, full_precision, look, matmul, to_device, to_host, widen

# Computed eigenvalues of singular matrices reach about 4 eps times the largest, at every size that we tried.
ROUNDING_FACTOR = 10.0
# as their errors name themselves; CUDA has the first three, ROCm the others but the last, XPU the last
LIBRARIES = "cusolver", "cublas", "magma", "hipsolver", "rocsolver", "hipblas", "rocblas", "onemkl"
HOST_MAX_SIDE = 128  # rows up to which the host decomposes a matrix in less time than an accelerator, which also waits
RELATIVE_JITTERS = 1e-10, 1e-8, 1e-6, 1e-4  # relative to the mean eigenvalue
# "retried": decompositions that needed more than one attempt. "kept": blocks that kept their previous inverse because
# every attempt failed. "diagonal": blocks without a previous inverse, which got that of their diagonal.
RECOVERIES: ContextVar[Counter[str] | None] = ContextVar("recoveries", default=None)


class NotDefinite(ValueError):
    """A matrix that should be positive definite is not, to working precision.

    Args:
        what: name of the matrix.
        values: its eigenvalues, or the smallest one.
        rounding: their uncertainty.
        damping: the damping that did not suffice.

    Attributes:
        damping: likewise.
        needed: a damping that suffices.
    """

    def __init__(self, what: str, values: Tensor, rounding: Tensor, damping: float) -> None:
        indefinite = bool((values + damping < -rounding).any())
        state = "indefinite" if indefinite else "singular to working precision"
        with_damping = f" with damping {damping:.3g}" if damping else ""
        self.damping, self.needed = float(damping), 2 * float((rounding - values).max().clamp(min=0))
        super().__init__(
            f"{what} is {state}{with_damping}: its least eigenvalue is {float(values.min()):.3g} without damping. "
            f"Use a damping above {self.needed:.3g}"
        )


@contextmanager
def recovery_counts() -> Iterator[Counter[str]]:
    """Count the failures inside the context that were recovered from.

    "retried": decompositions that needed more than one attempt. "kept": blocks that kept their previous inverse because
    every attempt failed. "diagonal": blocks without a previous inverse, which got that of their diagonal.
    """
    counts: Counter[str] = Counter()
    token = RECOVERIES.set(counts)
    try:
        yield counts
    finally:
        RECOVERIES.reset(token)


def count_recovery(what: str) -> None:
    """Add one to an entry of `recovery_counts`."""
    if (counts := RECOVERIES.get()) is not None:
        counts[what] += 1


def try_decompose(decompose: Callable[[], Any]) -> tuple[Any, Tensor]:
    """The result, one tensor or several, and a flag (): whether it is finite; None and false if the library raises."""
    try:
        parts = decompose()
    except RuntimeError as error:
        known = isinstance(error, torch.linalg.LinAlgError | NotImplementedError)  # it may not exist for the device
        if not known and not any(library in str(error).lower() for library in LIBRARIES):
            raise
        return None, torch.zeros((), dtype=torch.bool, device="cpu")
    tensors = [parts] if isinstance(parts, Tensor) else list(parts)
    # sums are quick; where those of finite entries overflow, the next attempt is looked at entry by entry
    total = reduce(torch.add, [x.sum() for x in tensors if x.is_floating_point()])
    codes = [x.sum() for x in tensors if not x.is_floating_point()]  # of libraries: zero says that all is well
    return parts, total - total == (reduce(torch.add, codes) if codes else 0)  # what is finite less itself is zero


def _first_good(
    decompose: Callable[[Tensor], Any], attempts: Iterable[Tensor], like: Tensor, failure: str
) -> tuple[Tensor, Tensor]:
    """The ladder: the first result that is finite."""
    for k, attempt in enumerate(attempts):
        pair, ok = try_decompose(partial(decompose, attempt))
        if pair is not None and (bool(ok) or all(bool(x.isfinite().all()) for x in pair)):
            if k:
                count_recovery("retried")
            return pair[0].to(like), pair[1].to(like)
    raise torch.linalg.LinAlgError(failure)


def _first_or_nan(matrix: Tensor, decompose: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    parts, ok = try_decompose(decompose)
    return torch.full_like(matrix, math.nan) if parts is None else parts[0], ok


def _with_jitter(matrix: Tensor) -> Iterator[Tensor]:
    """A matrix (d, d) in float64 on the CPU, without and with ever more on the diagonal."""
    here = matrix.cpu().double()
    here = (here + here.mT) / 2
    jitter = here.diagonal().mean().abs() * torch.eye(len(here), device="cpu")
    return (here + share * jitter for share in (0.0, *RELATIVE_JITTERS))


def _small_on_host(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Matrices (..., d, d), small ones of accelerators as copies on the host: there `eigh` waits at each call."""
    away = [x.device.type not in SHARED_MEMORY and x.shape[-1] <= HOST_MAX_SIDE for x in matrices]
    copies = iter(to_host([x for x, is_away in zip(matrices, away, strict=True) if is_away]))
    return [next(copies).to(x.dtype) if is_away else x for x, is_away in zip(matrices, away, strict=True)]


def symmetric_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors (columns) of symmetric matrices (..., d, d)."""
    return symmetric_eighs([matrix])[0]


@full_precision()
def symmetric_eighs(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`symmetric_eigh` of several; the host asks once whether all have succeeded."""
    here = _small_on_host(matrices)
    tried = [try_decompose(partial(_eigh, _symmetric(x))) for x in here]
    fine = look([ok for _, ok in tried])
    each = zip(tried, fine, here, strict=True)
    pairs = [pair if is_fine else _careful_eigh(_symmetric(x)) for (pair, _), is_fine, x in each]
    back = lambda x, matrix: to_device(x.to(matrix.dtype), matrix.device)
    return [(back(pair[0], m), back(pair[1], m)) for pair, m in zip(pairs, matrices, strict=True)]


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, NaN where an accelerator's eigenvectors are not orthogonal, and eigenvectors."""
    values, vectors = torch.linalg.eigh(matrix)
    # cuSOLVER's were two per cent off for a singular matrix of 4,608 rows in single precision
    if matrix.device.type not in SHARED_MEMORY:
        products = vectors.mT @ vectors
        products.diagonal(dim1=-2, dim2=-1).sub_(1)
        fine = products.abs().amax((-2, -1)) <= torch.finfo(matrix.dtype).eps ** 0.5
        values = values.masked_fill(~fine[..., None], math.nan)
    return values, vectors


def _symmetric(matrix: Tensor) -> Tensor:
    """In double precision on accelerators, where that costs no more."""
    symmetric = (matrix + matrix.mT).mul_(0.5)
    # for up to 512 rows in single precision torch takes Jacobi's algorithm on CUDA, which starts a thousand kernels
    if matrix.device.type not in SHARED_MEMORY:
        return widen(symmetric)
    return symmetric if symmetric.dtype in (torch.float32, torch.float64) else symmetric.float()


@full_precision()
def eigenvalues_of(matrix: Tensor) -> Tensor:
    """The eigenvalues alone, ascending: `symmetric_eigh` where the quicker way fails."""
    values, ok = try_decompose(partial(torch.linalg.eigvalsh, matrix))
    return values if bool(ok) else symmetric_eigh(matrix)[0]


def _careful_eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """`symmetric_eigh` of matrices (..., d, d) after a first failure."""
    shape, size = matrices.shape, matrices.shape[-1]
    values, vectors = zip(*map(_careful_eigh_of_one, matrices.reshape(-1, size, size)), strict=True)
    return torch.stack(values).reshape(shape[:-1]), torch.stack(vectors).reshape(shape)


def _careful_eigh_of_one(matrix: Tensor) -> tuple[Tensor, Tensor]:
    is_finite = bool(matrix.isfinite().all())
    attempts = [matrix, *_with_jitter(matrix)] if is_finite else []
    state = "also in float64, on the CPU and with jitter" if is_finite else "for it is not finite"
    failure = f"eigendecomposition of a {tuple(matrix.shape)} matrix failed, {state}"
    return _first_good(_eigh, attempts, matrix, failure)


@full_precision()
def qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of (..., m, n); if that fails or is not finite, in float64, then on the CPU."""
    attempts = (lambda: matrix, lambda: widen(matrix), lambda: matrix.cpu().double())
    failure = f"QR of a {tuple(matrix.shape)} matrix failed, also in float64 and on the CPU"
    return _first_good(torch.linalg.qr, (make() for make in attempts), matrix, failure)


def psd_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`symmetric_eigh` of positive semi-definite matrices: eigenvalues are clamped at zero."""
    return psd_eighs([matrix])[0]


def psd_eighs(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`psd_eigh` of several; the host asks once whether all have succeeded."""
    return [(values.clamp(min=0), vectors) for values, vectors in symmetric_eighs(matrices)]


@full_precision()
def try_orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q of a QR decomposition (m, n), m >= n, and a flag () as for `try_cholesky`."""
    return _first_or_nan(matrix, partial(torch.linalg.qr, matrix))


@full_precision()
def try_cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factors of matrices (..., d, d), and a flag (): whether all are positive definite, else of no use."""
    return _first_or_nan(matrix, partial(torch.linalg.cholesky_ex, matrix))


@full_precision()
def try_spd_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Inverses from lower triangles (g, d, d), row by row in memory, and a flag () as for `try_cholesky`."""
    factor = partial(torch.linalg.cholesky_ex, matrix)

    def decompose() -> tuple[Tensor, ...]:
        root, error = factor()
        if root.device.type in SHARED_MEMORY:
            return torch.cholesky_inverse(root).mT, error
        # CUDA's libraries invert from the root one matrix after the other
        whole = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
        inverse = torch.linalg.solve_triangular(root, whole, upper=False)
        return inverse.mT @ inverse, error

    return _first_or_nan(matrix, decompose)


@full_precision()
def careful_spd_inverse(matrix: Tensor) -> Tensor:
    """`try_spd_inverse` after a failure: by Cholesky in float64 on the CPU, else by eigenvalues above rounding."""
    count_recovery("retried")
    double = matrix.cpu().double()
    inverse, ok = try_spd_inverse((double + double.mT) / 2)
    if bool(ok):
        return inverse.to(matrix)
    values, vectors = psd_eigh(matrix)
    largest = values.amax(-1, keepdim=True)
    floor = eigenvalue_rounding(largest).clamp(min=torch.finfo(values.dtype).tiny)
    return (vectors / torch.maximum(values, floor)[:, None, :]) @ vectors.mT


def eigenvalue_rounding(largest: Tensor) -> Tensor:
    """How far rounding moves the eigenvalues of symmetric matrices, given their largest absolute eigenvalues."""
    return ROUNDING_FACTOR * torch.finfo(largest.dtype).eps * largest


def damp_eigenvalues(values: Tensor, rounding: Tensor, damping: float, what: str) -> Tensor:
    """Eigenvalues plus damping, all positive; one within `rounding` of zero counts as zero if it is negative."""
    unsure = values.abs() <= rounding
    trusted = torch.where(unsure, torch.zeros_like(values), values)
    if not (trusted + damping > rounding / ROUNDING_FACTOR).all():
        raise NotDefinite(what, values, rounding, damping)
    return torch.where(unsure, values.clamp(min=0), values) + damping


@full_precision()
def cholesky(matrix: Tensor, damping: float, what: str) -> Tensor:
    """Lower triangular L with ``L L^T = matrix + damping I``, for a symmetric (d, d) matrix."""
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    root, ok = try_cholesky(damped)
    if not bool(ok):
        values = symmetric_eigh(matrix)[0]
        rounding = eigenvalue_rounding(values.abs().max())
        if not bool((values + damping > rounding / ROUNDING_FACTOR).all()):
            raise NotDefinite(what, values, rounding, damping)
        return cholesky_with_jitter(damped, what)
    # Cholesky's algorithm often succeeds on a singular matrix, because of rounding; its solutions are then noise.
    least, largest = _extremes(damped, root)
    damp_eigenvalues(least - damping, eigenvalue_rounding(largest), damping, what)
    return root


def cholesky_with_jitter(matrix: Tensor, what: str) -> Tensor:
    """The Cholesky factor of one positive definite matrix (d, d) after a first failure."""
    count_recovery("retried")
    tried = map(try_cholesky, _with_jitter(matrix))
    root = next((root for root, ok in tried if bool(ok)), None)
    if root is None:
        raise torch.linalg.LinAlgError(f"{what}: Cholesky's algorithm failed, also with jitter")
    return root.to(matrix)


def _extremes(matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest eigenvalue to within a small factor, given the Cholesky factor."""
    generator = torch.Generator(matrix.device).manual_seed(0)
    start = torch.randn(len(matrix), 2, dtype=matrix.dtype, device=matrix.device, generator=generator)
    small = large = start
    for _ in range(4):
        small = torch.cholesky_solve(small / small.norm(dim=0), root)
        large = matrix @ (large / large.norm(dim=0))
    return 1 / small.norm(dim=0).max(), large.norm(dim=0).max()


def largest_eigenpairs(
    product: Callable[[Tensor], Tensor], starts: Tensor, rtol: float | None = None, max_products: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues, ascending, and eigenvectors (P, k), from random columns (P, k) and products alone.

    Block Lanczos with full reorthogonalization (Golub and Van Loan, Matrix Computations, chapter 10): multiplicities up
    to k are found, and a residual ``||M u - theta u||`` bounds the distance from theta to an eigenvalue.
    """
    size, k = starts.shape
    rtol = torch.finfo(starts.dtype).eps ** 0.5 if rtol is None else rtol
    most = min(size, max(300, 20 * k) if max_products is None else max_products)
    block = qr(starts)[0]
    basis = image = block[:, :0]
    core = basis.mT @ image
    while True:
        basis, image = torch.cat([basis, block], 1), torch.cat([image, product(block)], 1)
        border = basis.mT @ image[:, -block.shape[1] :]
        core = torch.cat([torch.cat([core, border[: len(core)].mT]), border], 1)
        values, rotation = symmetric_eigh(core)
        values, rotation = values[-k:], rotation[:, -k:]
        vectors = basis @ rotation
        scale = torch.linalg.matrix_norm(core, 2).clamp(min=torch.finfo(core.dtype).tiny)
        residual = ((image @ rotation - values * vectors) / scale).norm(dim=0).max()  # squares may underflow
        if residual <= rtol or basis.shape[1] == size:
            return values, vectors
        if basis.shape[1] >= most:
            raise RuntimeError(
                f"lanczos reached a relative residual of {float(residual):.3g}, not {rtol:.3g}, with {basis.shape[1]} "
                "products: allow more by lanczos_eigenvalues(..., max_products=), or a larger rtol"
            )
        block = _next_block(basis, image[:, -block.shape[1] :])


def _next_block(basis: Tensor, image: Tensor) -> Tensor:
    """Orthonormal columns that span the part of `image` outside the basis; if there is none, rounding supplies some."""
    width = min(image.shape[1], len(basis) - basis.shape[1])
    for _ in range(2):
        for _ in range(2):  # rounding leaves a rest after the first time
            image = image - basis @ (basis.mT @ image)
        image = qr(image)[0][:, :width]
    return image


def symmetrize(matrix: Tensor, what: str) -> Tensor:
    """``(M + M^T) / 2`` of matrices (..., d, d) that are symmetric up to sqrt(eps) times the largest entry."""
    if not matrix.numel() or _is_symmetric(matrix):
        return matrix
    allowed = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().amax((-2, -1), keepdim=True)
    difference = (matrix - matrix.mT).abs()
    if not (difference <= allowed).all():
        raise ValueError(f"{what} is not symmetric: an entry and its mirror image differ by {difference.max():.3g}")
    return (matrix + matrix.mT) / 2 if difference.any() else matrix


def _is_symmetric(matrix: Tensor) -> bool:
    """Whether products with it and its transpose agree up to rounding: much faster than comparing all entries."""
    size = matrix.shape[-1]
    generator = torch.Generator(matrix.device).manual_seed(0)
    probe = torch.randn(size, 1, dtype=matrix.dtype, device=matrix.device, generator=generator)
    difference = (matmul(matrix, probe) - matmul(matrix.mT, probe)).abs().amax((-2, -1))
    largest = torch.maximum(matrix.amax((-2, -1)), -matrix.amin((-2, -1)))
    return bool((difference <= 10 * torch.finfo(matrix.dtype).eps * size**0.5 * largest).all())


def require_finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"a matrix times or plus {number} is not a matrix")
    return float(number)
