"""Ordinary steps from a graph, or their passes: the same parameters, bit by bit, as by a loop without one."""

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


# -- whole steps


class Whole(Loop):
    """The loop of the guide that replays steps, too.

    Args:
        clipped: whether gradients are clipped in the graph.
        scaled: whether a `GradScaler` makes the step.
        options: of the optimizer.

    Attributes:
        captures: how often a graph was captured.
    """

    def __init__(self, kind: Any, name: str, device: str, with_graph: bool, clipped: bool = False, scaled: bool = False,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(lambda model: kind(model, weight_decay=0.1, **options), name, device, with_graph)
        self.clipped, self.captures = clipped, 0
        self.scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=5) if scaled else None
        self.model.eval()  # a bad batch would stay in the statistics of BatchNorm

    def passes_and_step(self) -> None:
        loss = self.loss(self.model(self.x), self.y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.clipped:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()

    def step(self, number: int) -> None:
        part = (torch.arange(16, device=self.x.device) + number) % len(self.data[0])
        self.x.copy_(self.data[0][part]).mul_(torch.inf if number in BAD_STEPS else 1)
        self.y.copy_(self.data[1][part])
        if self.graph is None or not self.opt.can_replay():
            self.opt.zero_grad(set_to_none=False)
            self.passes_and_step()
        else:
            if self.opt.needs_capture():
                self.opt.zero_grad()
                self.graph, self.captures = Graph(), self.captures + 1
                with self.graph:
                    self.passes_and_step()
            self.opt.before_replay()
            self.graph.replay()
            self.replayed.append(number)
        self.scheduler.step()


BAD_STEPS = 15, 27, 31, 32  # the last two in a row, after which the last displacement is undone


def compared(graphed: Whole, plain: Whole, numbers: range) -> None:
    for number in numbers:
        for loop in (plain, graphed):
            loop.step(number)
        assert all(map(torch.equal, plain.parameters(), graphed.parameters())), number


WHOLE = {
    "kfac": (KFAC, "cnn", {}),
    "ekfac": (EKFAC, "mlp", {}),
    "clipped": (KFAC, "mlp", {"clipped": True, "damping": 1e-3}),
    "scaled": (KFAC, "mlp", {"scaled": True}),
}


@pytest.mark.parametrize("case", WHOLE)
def test_replayed_steps(case: str, device: str) -> None:
    """Over renewals, with a scheduler, with bad batches."""
    kind, name, options = WHOLE[case]
    plain, graphed = (Whole(kind, name, device, with_graph, **options) for with_graph in (False, True))
    compared(graphed, plain, range(44))
    assert graphed.captures == 1 and len(graphed.replayed) > 15
    assert set(BAD_STEPS) & set(graphed.replayed)
    assert plain.opt.skipped == graphed.opt.skipped == len(BAD_STEPS) and plain.opt.steps == graphed.opt.steps
    without = lambda entry: {k: x for k, x in entry.items() if k != "seconds"}
    assert list(map(without, plain.opt.history)) == list(map(without, graphed.opt.history))


def test_a_whole_step_after_a_checkpoint(device: str) -> None:
    """The first step is an eager one; the graph of the optimizer before is of no use to it."""
    first, second = Whole(KFAC, "mlp", device, True), Whole(KFAC, "mlp", device, True)
    for number in range(24):
        first.step(number)
    for loop in second, first:  # into another optimizer, and into the same
        loop.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
        loop.opt.load_state_dict(copy.deepcopy(first.opt.state_dict()))
        loop.scheduler.load_state_dict(first.scheduler.state_dict())
        assert loop.opt.needs_capture() and not loop.opt.can_replay()
    plain = Whole(KFAC, "mlp", device, False)
    for number in range(24):
        plain.step(number)
    for number in range(24, 40):
        for loop in (plain, first, second):
            loop.step(number)
    assert (first.captures, second.captures) == (2, 1)
    for loop in (first, second):
        assert all(map(torch.equal, plain.parameters(), loop.parameters()))


def test_groups_that_part_are_captured_again(device: str) -> None:
    """A graph moves layers of one form together; then one of the groups gets a rate of its own."""
    loops = []
    for with_graph in (False, True):
        loop = Whole(lambda model, **own: in_groups(model, own), "mlp", device, with_graph)
        loops.append(loop)
    plain, graphed = loops
    for start, lr in ((0, 1.0), (30, 0.5)):
        for loop in loops:
            loop.opt.param_groups[1]["lr"] *= lr
        compared(graphed, plain, range(start, start + 30))
    assert graphed.captures == 2


def unfreeze(loop: Whole) -> None:
    """The first layer, which was frozen from the beginning."""
    for p in list(loop.model.parameters())[:2]:
        p.requires_grad_(True)


def regroup(loop: Whole) -> None:
    """The last norm goes over to the group of the head."""
    first, second = (group["params"] for group in loop.opt.param_groups)
    moved = [first.pop(), first.pop()]
    second[:0] = moved[::-1]


@pytest.mark.parametrize("change", [unfreeze, regroup])
def test_parameters_that_are_thawed_or_regrouped(change: Any, device: str) -> None:
    """The loop of the guide goes on by itself."""
    loops = []
    for with_graph in (False, True):
        loop = Whole(lambda model, **own: in_groups(model, own), "cnn", device, with_graph)
        loops.append(loop)
        loop.opt.param_groups[1]["weight_decay"] = 0.5
        if change is unfreeze:
            for p in list(loop.model.parameters())[:2]:
                p.requires_grad_(False)
    plain, graphed = loops
    compared(graphed, plain, range(30))
    for loop in loops:
        change(loop)
    replayed = len(graphed.replayed)
    compared(graphed, plain, range(30, 60))
    assert graphed.captures > 1 and len(graphed.replayed) > replayed + 10


def in_groups(model: torch.nn.Module, options: dict[str, Any]) -> KFAC:
    opt = KFAC(model, **options)
    names = dict(model.named_parameters())
    last = list(names.values())[-2:]
    opt.param_groups[0]["params"] = list(names.values())[:-2]
    opt.add_param_group({"params": last})
    return opt


def test_what_cannot_be_replayed_says_so(device: str) -> None:
    loop = Whole(KFAC, "mlp", device, True)
    loop.step(0)
    assert not loop.opt.can_replay() and loop.opt.needs_capture()
    with pytest.raises(RuntimeError, match="captured in a CUDA graph, but the next step cannot"), Graph():
        loop.opt.step()
    with pytest.raises(RuntimeError, match=r"before_replay: .* ask can_replay"):
        loop.opt.before_replay()
    number = 1
    while not loop.opt.can_replay():
        loop.step(number := number + 1)
    loop.step(number)
    while not loop.opt.can_replay():
        loop.step(number := number + 1)
    list(loop.model.parameters())[0].grad = None
    with pytest.raises(RuntimeError, match="with other gradients than at the last step"), Graph():
        loop.opt.step()
