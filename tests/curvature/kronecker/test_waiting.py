"""Moments of activations that are computed when they are averaged: the same numbers, of copies of the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import curvature.kronecker.waiting as waiting
from curvature.preconditioners import BlockDiagonalCurvature
from curvature.recording import capture
from optimizers import KFAC

NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(40, 3), (40,)),
    "no_bias": (lambda: nn.Linear(40, 3, bias=False), (40,)),
    "places": (lambda: nn.Linear(40, 3), (2, 40)),
    "convolution": (lambda: nn.Conv2d(6, 3, 3, stride=2, padding=1), (6, 4, 4)),
    "groups": (lambda: nn.Conv1d(12, 6, 5, groups=2), (12, 6)),
}


def measured(
    name: str, kind: str, sharing: str, least: float, monkeypatch: pytest.MonkeyPatch, batches: int = 1
) -> Any:
    """Statistics of a layer, and the input of the last batch."""
    monkeypatch.setattr(waiting, "LEAST_SAVED", least)
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, store, total = make().double(), BlockDiagonalCurvature(sharing, kind), None
    for _ in range(batches):
        x = torch.randn(4, *shape, dtype=torch.float64)
        with capture(model) as tape:
            out = model(x)
        found = store.measure(tape, [out], [torch.randn(1, *out.shape, dtype=torch.float64)], 4)
        if total is None:
            total = found
        else:
            total.add_(found)
    assert total is not None
    return store, total, x


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_numbers(name: str, kind: str, sharing: str, batches: int, monkeypatch: pytest.MonkeyPatch):
    found = []
    for least in (0, torch.inf):
        store, total, x = measured(name, kind, sharing, least, monkeypatch, batches)
        total.secure()
        (own,) = total.blocks.values()
        assert bool(own.waiting) == (least == 0 and batches == 1)
        x.mul_(2)  # what the loop does with its batch afterwards does not matter
        store.update_average(total, 0.9)
        store.update_average(total, 0.9)  # as after a decomposition that failed
        found.append([*store.blocks[0].sides, *own.sums(0, 1).values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(*(side if isinstance(side, torch.Tensor) else side.entries for side in (one, other)))


def test_only_where_inputs_are_smaller(monkeypatch: pytest.MonkeyPatch):
    """A moment of 41 inputs has 41^2 entries, the batch 160; at four places, with the same number of entries, 10^2."""
    for name, kept in (("linear", 4), ("places", 8)):
        _, total, _ = measured(name, "kronecker", "expand", 2, monkeypatch)
        ((terms,),) = [[kept.terms for kept in own.waiting.values()] for own in total.blocks.values()]
        assert [term.a.shape for term in terms] == [(4, kept // 4, 1, 40)]
        assert all(term.b.untyped_storage().nbytes() == 8 for term in terms)
    _, total, _ = measured("linear", "kronecker", "expand", 11, monkeypatch)
    assert not any(own.waiting for own in total.blocks.values())


def test_inputs_that_have_changed_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Autograd refuses the backward pass; without one the last pass counts."""
    store, total, x = measured("linear", "kronecker", "expand", 0, monkeypatch)
    x.zero_()
    for use in (total.secure, lambda: store.update_average(total, 0.9)):
        with pytest.raises(RuntimeError, match=r"shape \(3, 40\) was changed in place"):
            use()


def test_a_batch_may_be_overwritten_after_the_backward_pass():
    """Even where the loop has one tensor for all batches."""
    found = []
    for reused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(40, 3)
        opt, x = KFAC(model), torch.empty(4, 40)
        for _ in range(3):
            batch = x.normal_() if reused else torch.randn(4, 40)
            model(batch).square().mean().backward()
            if reused:
                batch.fill_(torch.nan)
            opt.step()
            opt.zero_grad()
        found.append(model.weight)
    assert torch.equal(*found)
