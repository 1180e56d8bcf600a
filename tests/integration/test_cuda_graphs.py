"""Passes of ordinary steps from a graph: the same parameters, bit by bit, as by a loop without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import EKFAC, KFAC
from support.graph import Graph
from support.training import task

STEPS = 36
BAD = 27, 31  # batches that are not finite, in replayed and recorded passes


class Loop:
    """The loop of the guide, with or without a graph.

    Attributes:
        replayed: numbers of the steps whose passes came from the graph.
    """

    def __init__(self, kind: Any, name: str, device: str, with_graph: bool) -> None:
        torch.manual_seed(0)
        self.model, self.loss, x, y = task(name, device)
        self.opt, self.graph = kind(self.model), None if not with_graph else Graph()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.98)
        self.data, self.x, self.y = (x, y), x[:16].clone(), y[:16].clone()
        self.replayed: list[int] = []

    def passes(self) -> None:
        self.loss(self.model(self.x), self.y).backward()

    def step(self, number: int) -> None:
        part = torch.arange(16, device=self.x.device) + number
        self.x.copy_(self.data[0][part]).mul_(torch.inf if number in BAD else 1)
        self.y.copy_(self.data[1][part])
        if self.graph is None or self.opt.records_next_pass():
            self.opt.zero_grad(set_to_none=False)
            self.passes()
        else:
            if not self.graph.calls:
                self.opt.zero_grad()
                with self.graph:
                    self.passes()
            self.graph.replay()
            self.replayed.append(number)
        self.opt.step()
        self.scheduler.step()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize(("kind", "name"), [(KFAC, "cnn"), (EKFAC, "mlp")])
def test_replayed_passes(kind: Any, name: str, device: str) -> None:
    plain, graphed = (Loop(kind, name, device, with_graph) for with_graph in (False, True))
    if name == "cnn":
        for loop in (plain, graphed):
            loop.model.eval()  # a bad batch would stay in the statistics of BatchNorm
    for number in range(STEPS):
        for loop in (plain, graphed):
            loop.step(number)
    assert all(map(torch.equal, plain.parameters(), graphed.parameters()))
    assert plain.opt.skipped == graphed.opt.skipped == len(BAD)
    assert set(BAD) & set(graphed.replayed) and set(BAD) - set(graphed.replayed)
    assert len(graphed.replayed) > STEPS // 3
    assert [e["renewed"] for e in plain.opt.history if "renewed" in e] == [
        e["renewed"] for e in graphed.opt.history if "renewed" in e
    ]


def test_a_checkpoint_goes_on_with_a_graph_of_its_own(device: str) -> None:
    first, second = Loop(KFAC, "mlp", device, True), Loop(KFAC, "mlp", device, True)
    for number in range(20):
        first.step(number)
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.opt.load_state_dict(copy.deepcopy(first.opt.state_dict()))
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    for number in range(20, STEPS):
        first.step(number)
        second.step(number)
    assert second.replayed and all(map(torch.equal, first.parameters(), second.parameters()))


def test_a_pass_that_is_recorded_must_not_be_captured(device: str) -> None:
    """The stand-in sees what a GPU would refuse: random vectors are drawn where the curvature is renewed."""
    loop = Loop(KFAC, "mlp", device, True)
    assert loop.opt.records_next_pass()
    with pytest.raises(RuntimeError, match="captured region"), Graph():
        loop.passes()


def test_passes_are_recorded_where_the_step_renews(device: str) -> None:
    loop, asked = Loop(KFAC, "mlp", device, False), []
    for number in range(STEPS):
        asked.append(loop.opt.records_next_pass())
        with torch.no_grad():
            assert not loop.opt.records_next_pass()
        loop.step(number)
        if number not in BAD:
            assert asked[-1] == loop.opt.history[-1]["renewed"]
    assert 0 < sum(asked) < STEPS
