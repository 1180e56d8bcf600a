"""Fewer samples where there are more places than a running mean of activations needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from curvature.terms import IndexedRows

ROWS_PER_INPUT = 8  # rows of activations, per column of their moment, that a running mean needs
MIN_SUBSAMPLE = 16  # samples that these rows come from, at least


def subsample_samples(terms: Sequence[Any], sharing: str, rank: int = 0, world_size: int = 1) -> Sequence[Any]:
    """Every k-th sample if there are many places for each input: the mean of `a a^T` needs no more.

    The mean over a batch is an estimate anyway, and enters a running mean. With several processes, whose parts of the
    batch are equal, the chosen samples together are those that one process would choose from the whole batch.
    """
    whole = [term for term in terms if not isinstance(term, IndexedRows)]
    if not whole:
        return terms
    inputs = math.prod(whole[0].shape) // (whole[0].groups * whole[0].outputs)
    rows = world_size * sum(len(term) * (term.places if sharing == "expand" else 1) for term in whole)
    stride = rows // (ROWS_PER_INPUT * inputs)
    stride = min([stride, *(world_size * len(term) // MIN_SUBSAMPLE for term in whole)])
    if stride < 2:
        return terms
    some = lambda term: term.samples(slice(-rank * len(term) % stride, None, stride))
    return [term if isinstance(term, IndexedRows) else some(term) for term in terms]
