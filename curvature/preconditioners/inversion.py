"""Prepare inverses; fall back when a decomposition fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from curvature.linalg import count_recovery, full_precision
from curvature.preconditioners.block import Block, Due, grouped

MAX_FAILURES = 3  # consecutive failures of a block that raise


def invert(blocks: Sequence[Block], share: float, damping: float | None = None, due: Due | None = None) -> None:
    """Prepare `Block.solve` of the blocks that have statistics, blocks of one class together.

    A block whose decomposition fails, however it is tried (see `curvature.linalg`), does not affect the others. It
    keeps its previous inverse; if it has none, it gets the inverse of its factors' diagonals. `recovery_counts` counts
    these events.

    Args:
        share: damping relative to each block's own curvature, see `curvature.kronecker.factored_inverses`.
        damping: added to the block instead; None: the share.
        due: which of its sides to invert, by a block's first parameter; of others, and of those that have no inverse
            of this kind yet, all.

    Raises:
        torch.linalg.LinAlgError: a block failed for the third time in a row.
        ValueError: a matrix is singular or indefinite to working precision, and damping does not change that.
    """
    seen = [leaf for block in blocks for leaf in block.leaves if leaf.updates]
    with full_precision():
        for places in grouped([type(b) for b in seen]):
            alike = [seen[k] for k in places]
            failed: list[Block] = []
            if not _succeeds(alike, share, damping, due):
                failed = [b for b in alike if len(alike) == 1 or not _succeeds([b], share, damping, due)]
            for block in alike:
                block.failures = block.failures + 1 if block in failed else 0
            for block in failed:
                _rescue(block, share, damping)


def _succeeds(blocks: Sequence[Block], share: float, damping: float | None, due: Due | None = None) -> bool:
    """Prepare blocks of one class together; where a decomposition fails, they stay as they were."""
    try:
        blocks[0].invert(blocks, share, damping, due or {})
    except torch.linalg.LinAlgError:
        return False
    return True


def _rescue(block: Block, share: float, damping: float | None) -> None:
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
        is_ready = _succeeds([block], share, damping)
    if not is_ready:
        raise torch.linalg.LinAlgError(f"{', '.join(block.names)}: the diagonal of the curvature cannot be inverted")
