"""What comes back when the buffers of a model are restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvature.recording import ModelState

pytestmark = pytest.mark.fast


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("fixed", torch.ones(2))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(x)


def test_changes_that_torch_sees_and_does_not_see_are_undone() -> None:
    model, x = Counting(), torch.randn(5, 3)
    state, before = ModelState(model), {name: b.clone() for name, b in model.named_buffers()}
    for _ in range(2):
        loss = model(x).square().sum()
        assert state.unchanged() is None
        state.restore()
        loss.backward()  # the running mean is among what the graph keeps
        for name, own in model.named_buffers():
            assert torch.equal(own, before[name]), name


def test_what_may_have_changed_unseen_is_asked() -> None:
    model, x = nn.BatchNorm1d(3), torch.randn(5, 3)
    model.num_batches_tracked = None
    state = ModelState(model)
    flags = state.unchanged()
    assert flags is not None and all(flags)
    model(x)
    flags = state.unchanged()
    assert flags is not None and not all(flags)
    torch.rand(1)
    assert state.unchanged() is None


def test_a_pass_from_an_earlier_state_leaves_no_trace() -> None:
    """Not even in the graph of a pass that has saved the buffers themselves."""
    model, x = Counting(), torch.randn(5, 3)
    state = ModelState(model)
    out, drawn = model(x) * model.count.sum(), torch.rand(2)
    buffers, now = dict(model.named_buffers()), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(KeyError), state.again():
            assert torch.equal(model(x) * model.count.sum(), out)
            assert torch.equal(torch.rand(2), drawn)
            raise KeyError
        assert all(own is buffers[name] for name, own in model.named_buffers())
        assert torch.equal(torch.get_rng_state(), now)
    out.square().sum().backward()
