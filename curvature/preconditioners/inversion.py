"""Prepare inverses; fall back when a decomposition fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from curvature.linalg import are_true, count_recovery, full_precision, stack, widen
from curvature.preconditioners.block import Block

MAX_FAILURES = 3  # consecutive failures of a block that raise


def invert(blocks: Sequence[Block], share: float, damping: float | None = None) -> None:
    """Prepare `Block.solve` of the blocks that have statistics, blocks of one class together.

    A block whose decomposition fails, however it is tried (see `curvature.linalg`), does not affect the others. It
    keeps its previous inverse; if it has none, it gets the inverse of its factors' diagonals. `recovery_counts` counts
    these events.

    Args:
        share: damping relative to each block's own curvature, see `curvature.kronecker.factored_inverses`.
        damping: added to the block instead.

    Raises:
        torch.linalg.LinAlgError: a block failed for the third time in a row.
        ValueError: a matrix is singular or indefinite to working precision, and damping does not change that.
    """
    seen = [leaf for block in blocks for leaf in block.leaves if leaf.updates]
    with full_precision():
        for kind in dict.fromkeys(type(b) for b in seen):
            alike = [b for b in seen if type(b) is kind]
            failed = _failing(kind, alike, share, damping)
            if len(alike) > 1:
                failed = [b for b in failed if _failing(kind, [b], share, damping)]
            for block in alike:
                block.failures = block.failures + 1 if block in failed else 0
            for block in failed:
                _rescue(kind, block, share, damping)


def _failing(kind: type[Block], blocks: Sequence[Block], share: float, damping: float | None) -> list[Block]:
    """Prepare blocks of one class together. Those for which this fails are returned, unchanged."""
    before = [dict(vars(b)) for b in blocks]
    try:
        if damping is None:
            kind.invert(blocks, share)
        else:
            kind.decompose_all(blocks, damping)
        used = [(k, t) for k, b in enumerate(blocks) for t in b.inverse_tensors]
        fine = (
            are_true(stack(widen(t.sum(dtype=torch.promote_types(t.dtype, torch.float32))) for _, t in used).isfinite())
            if used
            else []
        )
        failed = {k for (k, _), is_fine in zip(used, fine, strict=True) if not is_fine}
    except torch.linalg.LinAlgError:
        failed = set(range(len(blocks)))
    for k in failed:
        vars(blocks[k]).update(before[k])
    return [blocks[k] for k in sorted(failed)]


def _rescue(kind: type[Block], block: Block, share: float, damping: float | None) -> None:
    if block.failures >= MAX_FAILURES:
        raise torch.linalg.LinAlgError(
            f"{', '.join(block.names)}: no decomposition of the curvature succeeded, {MAX_FAILURES} times in a row, "
            "also in float64, on the CPU and with jitter on the diagonal"
        )
    if block.is_ready:
        count_recovery("kept")
        return
    count_recovery("diagonal")
    with block.without_correlations():
        left = _failing(kind, [block], share, damping)
    if left:
        raise torch.linalg.LinAlgError(f"{', '.join(block.names)}: the diagonal of the curvature cannot be inverted")
