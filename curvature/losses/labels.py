"""Labels that torch's loss of classes refuses, refused by name with what to pass instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["naming_labels", "require_labels"]

BY_CLASS = nn.CrossEntropyLoss, nn.NLLLoss
BY_ENTRY = nn.BCEWithLogitsLoss, nn.BCELoss


def require_labels(loss: Any, output: Any, y: Any) -> None:
    """Raise ValueError for labels of a dtype or shape that torch's loss takes beside no output of this shape."""
    if not isinstance(y, Tensor) or not isinstance(output, Tensor) or output.ndim < 2:
        return
    name = type(loss).__name__
    if type(loss) in BY_ENTRY and y.dtype == torch.bool:
        raise ValueError(f"y: {name} takes numbers from 0 to 1, found torch.bool; pass y.float()")
    if type(loss) not in BY_CLASS:
        return
    indices = (output.shape[0], *output.shape[2:])
    beside = f"{name} at an output {tuple(output.shape)}"
    if not y.is_floating_point():
        if y.shape == output.shape:
            advice = "y.argmax(1) or y.float()" if type(loss) is nn.CrossEntropyLoss else "y.argmax(1)"
            raise ValueError(f"y: {beside} takes class indices {indices}, found {y.dtype} one-hot; pass {advice}")
        if y.shape == (*indices, 1):
            raise ValueError(f"y: {beside} takes class indices {indices}, found {tuple(y.shape)}; pass y.squeeze(-1)")
    elif y.shape == indices:
        raise ValueError(f"y: {beside} takes class indices as whole numbers, found {y.dtype}; pass y.long()")


@contextmanager
def naming_labels(loss: Any, output: Any) -> Iterator[None]:
    """Torch's IndexError for a class that is not there says how many there are."""
    try:
        yield
    except IndexError as error:
        if type(loss) not in BY_CLASS or "out of bounds" not in str(error) or output.ndim < 2:
            raise
        raise IndexError(
            f"y: {error} The output {tuple(output.shape)} has {output.shape[1]} classes, from 0 to "
            f"{output.shape[1] - 1}; a label that does not count is {loss.ignore_index} (ignore_index)"
        ) from error
