"""Numbers that the host reads of several tensors, wherever they are."""

from typing import Any, NamedTuple

import pytest
import torch

from curvature.linalg import read, to_host

pytestmark = pytest.mark.fast


class Facts(NamedTuple):
    size: Any
    counts: Any
    flags: Any


def test_numbers_are_where_their_tensors_were(device: str) -> None:
    """Those of another precision, of whole numbers and of flags among them; an empty nest stays one."""
    big = 2**24 + 1  # no number of single precision
    counts = {"a": [torch.tensor([big, 2], device=device), torch.tensor(0.1, device="cpu")], "b": []}
    facts = Facts(torch.tensor(0.5, device=device), counts, (torch.tensor(True, device=device),))
    assert read(facts) == Facts(0.5, {"a": [[big, 2], pytest.approx(0.1)], "b": []}, (1.0,))
    assert isinstance(read(facts), Facts) and read({}) == {}
    (moved,) = to_host([facts.size])
    assert moved.device.type == "cpu" and moved.dtype == torch.float64
