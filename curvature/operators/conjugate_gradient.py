"""Linear systems from products alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.linalg import copy_to_host_async
from curvature.operators.base import Given, Operator
from curvature.operators.block_diagonal import Curvature, as_operator

Preconditioner = Operator | Callable[[Tensor], Tensor]
# Stop when the relative progress per iteration is smaller, over this window or a tenth of all iterations.
MIN_PROGRESS, PROGRESS_WINDOW = 5e-4, 10
MAX_ITERATIONS = 250
ITERATIONS_AHEAD = 2  # of an accelerator, that the host issues before it looks whether the one before them was the last


def conjugate_gradient(
    op: Curvature,
    v: Given,
    damping: float = 0.0,
    *,
    preconditioner: Preconditioner | None = None,
    rtol: float | None = None,
    max_iter: int | None = None,
) -> Given:
    """Solve ``(M + damping I) x = v`` by conjugate gradients (Hestenes and Stiefel 1952, doi:10.6028/jres.049.044).

    Columns share products but have their own step sizes; a converged column no longer changes. A final product checks
    the residual of the recursion and restarts the iteration if rounding made it wrong. On a singular matrix, a
    consistent system gets its solution of least norm. The result has the form of v.

    Args:
        op: positive definite with the damping.
        v: (P,), columns (P, c), or a dict by parameter name.
        damping: added to the matrix.
        preconditioner: a positive definite approximation of ``(M + damping I)^-1``: an operator, such as
            ``kfac.inverse(damping)``, or a function of columns.
        rtol: allowed norm of the residual of each column relative to that of v; by default 1e-10 in float64, 1e-4 in
            float32; at least the rounding of the precision.
        max_iter: maximum number of iterations, one product each; by default the smaller of 10 P and 5000.

    Raises:
        ValueError: the iteration met a direction of non-positive curvature, or rtol is below the rounding.
        RuntimeError: no convergence; the message gives the residual reached.
    """
    op = as_operator(op)
    rtol = (1e-10 if op.space.dtype == torch.float64 else 1e-4) if rtol is None else rtol
    if not rtol >= (eps := torch.finfo(op.space.dtype).eps):
        raise ValueError(f"rtol: expected at least {eps:.2g}, the rounding of {op.space.dtype}, found {rtol}")
    limit = min(10 * op.space.size, 5000) if max_iter is None else max_iter
    check_whole("max_iter", limit)
    if not (preconditioner is None or isinstance(preconditioner, Operator) or callable(preconditioner)):
        raise TypeError(f"preconditioner: expected an operator or a function of columns, found {preconditioner!r:.80}")
    is_ours = preconditioner is None or isinstance(preconditioner, Operator)
    if preconditioner is None:
        preconditioner = lambda V: V
    apply = preconditioner.__matmul__ if isinstance(preconditioner, Operator) else preconditioner
    with op._one_call() if is_ours else nullcontext():
        return op.by_columns(lambda V: _solve(op, V, float(damping), apply, rtol, limit), v)


def _solve(
    op: Operator, V: Tensor, damping: float, precondition: Callable[[Tensor], Tensor], rtol: float, limit: int
) -> Tensor:
    """Solve for columns (P, c) by rounds of iterations, until the true residual is small."""

    def product(x: Tensor) -> Tensor:
        return op @ x + damping * x

    target = rtol * V.norm(dim=0)
    x, residual, used = torch.zeros_like(V), V, 0
    while True:
        before = residual.norm(dim=0)
        if (before <= target).all():
            return x
        step, count = _round(product, residual, target, precondition, limit - used)
        x, used = x + step, used + count
        residual = V - product(x)
        after = residual.norm(dim=0)
        # A round that gains less than a factor of two is limited by rounding.
        failed = ~(after <= target) & ~((after < before / 2) & (used < limit))
        if failed.any():
            worst = float((after / V.norm(dim=0).clamp(min=torch.finfo(V.dtype).tiny)).max())
            raise RuntimeError(
                f"conjugate gradients reached a relative residual of {worst:.3g}, not {rtol:.3g}, in {used} iterations "
                f"with damping {damping:.3g}. Use more damping, a preconditioner such as kfac(...).inverse(damping), a "
                "larger rtol or max_iter, or materialise() the matrix if it is small"
            )


def _round(
    product: Callable[[Tensor], Tensor],
    residual: Tensor,
    target: Tensor,
    precondition: Callable[[Tensor], Tensor],
    limit: int,
) -> tuple[Tensor, int]:
    """Iterate from zero until the residuals of the recursion are below `target`; return x and the iterations."""
    x = torch.zeros_like(residual)
    z = precondition(residual)
    p, gain = z, (residual * z).sum(0)
    active = ~(residual.norm(dim=0) <= target)
    for count in range(limit):
        if not active.any():
            return x, count
        if not (gain[active] > 0).all():
            raise ValueError("the preconditioner is not positive definite, or the vector is not finite")
        image = product(p)
        curvature = (p * image).sum(0)
        if not (curvature[active] > 0).all():
            least = float((curvature / p.square().sum(0))[active].min())
            raise ValueError(
                f"conjugate gradients met a direction of curvature {least:.3g}, damping included: the matrix is "
                "singular or indefinite. Use a larger damping (-lanczos_eigenvalues(-M, 1) is the least eigenvalue)"
            )
        step = torch.where(active, gain / curvature, torch.zeros_like(gain))
        x = x + step * p
        residual = residual - step * image
        z = precondition(residual)
        fresh = (residual * z).sum(0)
        active = active & ~(residual.norm(dim=0) <= target)
        p = torch.where(active, z + fresh / gain * p, p)
        gain = torch.where(active, fresh, gain)
    return x, limit


def truncated_conjugate_gradient(
    product: Callable[[Tensor], Tensor], right: Tensor, start: Tensor | None, precondition: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Solve ``M x = right`` by conjugate gradients until progress is small; return x and the number of iterations ().

    The quadratic model ``1/2 x^T M x - right^T x`` falls with every iteration. Stop when the last k iterations gained
    less than k * 5e-4 of the total, k the larger of 10 and a tenth of the iterations (Martens 2010, section 4.4).

    An accelerator tells late whether to stop, so that its queue is never empty; x no longer changes meanwhile.
    """
    x = torch.zeros_like(right) if start is None else start
    rest = right.clone() if start is None else right - product(x)
    z = precondition(rest)
    direction, inner = z, rest @ z
    is_active, count = inner > 0, torch.zeros_like(inner)
    values: list[Tensor] = []
    ahead = 0 if right.device.type == "cpu" else ITERATIONS_AHEAD
    answers: deque[Callable[[], bool]] = deque()
    for k in range(1, MAX_ITERATIONS + 1):
        answers.append(copy_to_host_async(is_active))
        if len(answers) > ahead and not answers.popleft()():
            break
        image = product(direction)
        length = torch.where(is_active, inner / (direction @ image), 0)
        x = x + length * direction
        rest = rest - length * image
        count = count + is_active
        values.append(-(x @ (right + rest)) / 2)
        window = max(PROGRESS_WINDOW, k // 10)
        if k > window:
            gained = values[-1] - values[-1 - window]
            is_active = is_active & ~((values[-1] < 0) & (gained > window * MIN_PROGRESS * values[-1]))
        z = precondition(rest)
        last, inner = inner, rest @ z
        is_active = is_active & (inner > 0)
        direction = torch.where(is_active, z + (inner / last) * direction, direction)
    return x, count
