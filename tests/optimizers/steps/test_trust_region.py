"""The trust region: whole steps in numbers that can be worked out by hand, and what it asks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvature.preconditioners import SquaredChange
from optimizers import EKFAC, KFAC
from optimizers.recording.model_outputs import OutputScale
from optimizers.schedule import Schedule
from optimizers.steps.directions import HORIZON, Direction
from optimizers.steps.layer_vector import LayerVector, layout_of
from optimizers.steps.rule import StepContext
from optimizers.steps.trust_region import (
    TrustRegionConstants,
    TrustRegionStep,
    TrustState,
    _bound_rows,
    relative_lengths,
    within_trust,
)
from support.cases.case import Raw
from support.training import backward, task

pytestmark = pytest.mark.fast

C = TrustRegionConstants()
Tensors = Mapping[str, Tensor]


def test_no_layer_moves_by_more_than_a_share_of_its_norm() -> None:
    """Norms (3, 4), (0, 0) and (6, 8) of weight and bias; where they are less than one, one stands in."""
    layers = [("aw", "ab"), ("bw", "bb"), ("cw", "cb")]
    layout = layout_of(layers, {name: torch.zeros(1) for layer in layers for name in layer}, lambda name: None)
    norms = [3.0, 4.0, 0.0, 0.0, 6.0, 8.0]
    moves = relative_lengths(layout, [10.0, 10.0, 5.0], norms)
    assert moves == pytest.approx([2, 10 / 2**0.5, 0.5])
    assert within_trust(0.1, moves) == pytest.approx([0.05, 0.1 * 2**0.5 / 10, 0.2])
    # a direction that is not finite is none
    assert within_trust(0.1, [math.nan, math.inf, 0.0]) == [0, 0, math.inf]


def test_parts_of_a_block_are_cut_together() -> None:
    """Its weight and bias have options of their own: lengths 3 and 4 beside norms 6 and 8 are 5 beside 10."""
    tensors = {"w": torch.zeros(1), "b": torch.zeros(1), "other": torch.zeros(1)}
    layout = layout_of([("w", "b"), ("other",)], tensors, lambda name: name == "b")
    assert layout.layers == [("w",), ("other",), ("b",)]
    rates = within_trust(0.1, relative_lengths(layout, [3.0, 1.0, 4.0], [6.0, 1.0, 8.0]))
    assert rates == pytest.approx([0.2, 0.1, 0.2])


def test_each_row_of_a_table_is_cut() -> None:
    """Rows of norm 5 and 1, whose root mean square is 3.6: no row moves by more than a tenth of the larger of both."""
    tensors = {"table": torch.tensor([[3.0, 4.0], [0.0, 1.0]]).double(), "w": torch.tensor([[3.0, 4.0]]).double()}
    directions = {"table": torch.tensor([[0.0, 0.2], [0.0, 1.0]]).double(), "w": torch.tensor([[9.0, 9.0]]).double()}
    blocks = [SimpleNamespace(names=(name,), has_separate_rows=name == "table") for name in tensors]
    context: Any = SimpleNamespace(trained=tensors, preconditioner=SimpleNamespace(blocks=blocks))
    d = LayerVector.of(layout_of([("table",), ("w",)], tensors, lambda name: None), directions)
    _bound_rows(context, d, 0.1, [26**0.5, 5.0])
    torch.testing.assert_close(d["table"], torch.tensor([[0.0, 0.2], [0.0, 0.1 * 13**0.5]]).double())
    assert torch.equal(d["w"], directions["w"])


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_tables_of_zeros_move(kind: Any) -> None:
    """Biases of users and items begin at zero, as in every recommender."""
    model = nn.Sequential(nn.Embedding(6, 1), nn.Flatten(0)).double()
    nn.init.zeros_(model[0].weight)
    opt, x, y = kind(model), torch.arange(6).repeat(4), torch.arange(6).repeat(4).double() - 2
    for _ in range(60):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    assert (model(x) - y).square().mean() < 0.1  # 3.2 at the start


# -- steps


class Given:
    """Directions `u` for right-hand sides `right`, or the gradients themselves for both."""

    def __init__(self, u: Tensors | None = None, right: Tensors | None = None) -> None:
        self.u, self.right, self.kept = u, right, 0

    def __call__(self, context: StepContext, g: LayerVector, unit: float) -> Direction:
        def keep() -> None:
            self.kept += 1

        u, right = (LayerVector.of(g.layout, g if x is None else x) for x in (self.u, self.right))
        return Direction(u, right, right, [0.0] * len(g.layout.layers), keep)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {}


class Stepped:
    """Parameters of no model's, whose optimizer takes given directions for given gradients."""

    def __init__(
        self,
        start: Tensors,
        direction: Given,
        rms: float,
        entries: float,
        constants: TrustRegionConstants = C,
        **options: Any,
    ) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(x.clone()) for name, x in start.items()})
        own = {name: {k: v[name] for k, v in options.items()} for name in start}
        groups = [{"params": [p], **own[name]} for name, p in self.model.items()]
        self.rule = TrustRegionStep(direction, constants)
        self.opt = KFAC(self.model, groups=groups, step_rule=self.rule)
        self.opt.recorder.outputs.rms, self.opt.recorder.outputs.entries_per_sample = rms, entries

    def step(self, **gradients: Tensor) -> dict[str, Any]:
        for name, p in self.model.items():
            p.grad = gradients[name].clone() if name in gradients else None
        self.opt.step()
        return self.opt.history[-1]

    def close(self, **expected: Sequence[float]) -> None:
        for name, x in expected.items():
            torch.testing.assert_close(self.model[name].detach(), torch.tensor(x).double())

    def go_on(self, other: Stepped) -> None:
        """From a checkpoint of the other."""
        self.opt.load_state_dict(copy.deepcopy(other.opt.state_dict()))
        self.model.load_state_dict(other.model.state_dict())

    @property
    def overshoots(self) -> int:
        return int(self.opt.stats()["overshoots"])

    @property
    def known(self) -> TrustState:
        assert self.rule.state is not None
        return self.rule.state


def test_gradients_of_zero_change_nothing() -> None:
    """But for a decay that is a number. However many there were, the first that is none is the usual one."""
    run = two_layers()
    for _ in range(3):
        assert run.step(**{name: torch.zeros(2).double() for name in "ab"})["step_size"] == 0
    assert run.rule.state is None
    run.close(a=[3.0, 4.0], b=[0.9**3, 0.0])  # the decay of the second goes on
    run.step(**GOOD)
    assert run.known.norm == 2 and run.known.spread == 0
    before = run.known
    run.step(**{name: torch.zeros(2).double() for name in "ab"})
    assert run.known == before


def two_layers(**more: Any) -> Stepped:
    """With slopes 2 and 3, movements 2 and 0.2, and energies that predict a change of 1.5, for step size one.

    The least movement is such that the first size is 0.2; movements are not evened out, but where `more` says so.
    """
    one = lambda *x: torch.tensor(x).double()
    given = Given({"a": one(0.0, 10.0), "b": one(0.2, 0.0)}, {"a": one(0.0, 0.2), "b": one(15.0, 0.0)})
    options: Any = {"lr": {"a": 1.0, "b": 0.5}, "weight_decay": {"a": 0.0, "b": 200.0}}
    constants = {"constants": replace(C, even=0.0, least=0.2 * 0.4**0.5)}
    return Stepped({"a": one(3.0, 4.0), "b": one(1.0, 0.0)}, given, 1.0, 5 / 2.25, **constants | options | more)


GOOD = {"a": torch.ones(2).double(), "b": torch.ones(2).double()}
BAD = {"a": torch.tensor([1.0, math.nan]).double(), "b": torch.ones(2).double()}


def test_a_step_of_two_layers() -> None:
    """The first is cut back to 0.15 of its length, the second decays and has a rate of its own."""
    run = two_layers()
    entry = run.step(**GOOD)
    run.close(a=[3.0, 4.0 - 0.75], b=[0.9 - 0.02, 0.0])
    assert entry["step_size"] == pytest.approx(0.2) and entry["accepted"] and entry["overshoots"] == 0
    assert run.known.change == pytest.approx(1.5)
    assert run.known.slope == pytest.approx(-(0.075 * 2 + 0.1 * 3))
    assert run.known.kept == pytest.approx(0.45 / 0.7) and run.known.norm == 2
    assert run.rule.energies == pytest.approx({"a": 0.075**2 * 2, "b": 0.1**2 * 3})
    for name, expected in (("a", [0.0, -0.75]), ("b", [-0.02, 0.0])):
        found = run.opt.state[run.model[name]]["displacement"]
        torch.testing.assert_close(found, torch.tensor(expected).double())


def test_layers_move_by_more_alike_shares_of_their_norms() -> None:
    """Ten to one becomes the root of that, around the same geometric mean; lr is the least where nothing bounds it."""
    run = two_layers(constants=replace(C, least=1e-3), weight_decay={"a": 0.0, "b": 0.0}, lr={"a": 1.0, "b": 1.0})
    run.step(**GOOD)
    moved_a, moved_b = (4 - run.model["a"][1].item()) / 5, 1 - run.model["b"][0].item()
    assert moved_a / moved_b == pytest.approx(10**0.5)
    assert moved_a * moved_b == pytest.approx(1e-6)


def test_a_bad_batch_changes_nothing_and_the_second_undoes_the_last_step() -> None:
    run = two_layers()
    run.step(**GOOD)
    before = run.known
    entry = run.step(**BAD)
    run.close(a=[3.0, 3.25], b=[0.88, 0.0])
    assert run.known == before and (run.opt.steps, run.opt.skipped) == (1, 1)
    assert entry == {"step": 1, "accepted": False} and run.rule.direction.kept == 1  # type: ignore[attr-defined]
    run.step(**BAD)
    run.close(a=[3.0, 4.0], b=[0.9, 0.0])
    assert run.known.slope == 0 and run.overshoots == 1 and (run.opt.steps, run.opt.skipped) == (1, 2)
    assert run.known.size == 0
    run.step(**BAD)  # there is nothing left to undo
    run.close(a=[3.0, 4.0], b=[0.9, 0.0])


def test_an_overshoot_is_steep_and_has_a_long_gradient() -> None:
    """A small data set in epochs has steep negative slopes, too, but its gradients are of the usual length."""

    def after(along: float, norm: float, usual: float = 0.0, **known: float) -> Stepped:
        """A second step whose gradient of that norm has that slope along the first step, where one is usual."""
        run = two_layers()
        run.step(**GOOD)
        run.rule.state = run.known._replace(starts=-1.0, ends=-usual, **known)
        g = -along * run.known.slope / 0.75  # along the step of layer a, (0, -0.75)
        rest = math.sqrt(norm**2 - g * g)
        unit = run.known.norm
        run.step(a=unit * torch.tensor([rest, g]).double(), b=torch.zeros(2).double())
        return run

    for ratio, norm, usual in ((-1.9, 1.6, 0.0), (-2.1, 1.4, 0.0), (-2.1, 1.6, -0.2), (-1.9, 1.6, 0.2)):
        run = after(ratio, norm, usual)
        assert run.overshoots == 0 and run.opt.steps == 2 and run.rule.direction.kept == 2  # type: ignore[attr-defined]
    assert after(-2.3, 1.6, -0.2).overshoots == 1
    for ratio, usual in ((-4.1, -9.0), (-2.1, 9.0)):  # means of slopes that have almost cancelled
        assert after(ratio, 2.5, usual).overshoots == 1
    # where a few samples make the gradient of their batch long
    assert after(-2.1, 2.2, spread=0.5).overshoots == 0 and after(-2.1, 2.3, spread=0.5).overshoots == 1
    run = after(-2.1, 1.6)
    run.close(a=[3.0, 4.0], b=[0.9, 0.0])
    assert run.overshoots == 1 and run.opt.steps == 2 and run.rule.direction.kept == 1  # type: ignore[attr-defined]
    assert run.opt.history[-1]["overshoots"] == 1 and run.known.slope == 0
    assert not any(own["displacement"].any() for own in run.opt.state.values())


def test_the_step_size_of_an_undone_step_is_that_in_force() -> None:
    """That of the secant; where data turn, the least one, with which the next step is made."""
    for ends, is_turn in ((0.0, False), (-0.5, True)):
        run = two_layers()
        run.step(**GOOD)
        run.rule.state = run.known._replace(starts=-1.0, ends=ends, size=1e3)
        far = 1.6 * run.known.norm * torch.tensor([0.0, -1.0]).double()
        shown = run.step(a=far, b=torch.zeros(2).double())["step_size"]
        assert run.overshoots == 1 and shown > 0
        if is_turn:
            assert run.known.size == 0 and run.step(**GOOD)["step_size"] == pytest.approx(shown, rel=0.1)
        else:
            assert shown == run.known.size


def test_a_step_is_undone_once_after_a_checkpoint_too() -> None:
    run, other = two_layers(), two_layers()
    run.step(**GOOD)
    run.step(**BAD)
    other.go_on(run)
    for _ in range(3):
        other.step(**BAD)
    other.close(a=[3.0, 4.0], b=[0.9, 0.0])


def test_a_step_is_undone_once_where_a_layer_has_no_gradient_any_more() -> None:
    """The last step of that layer stays."""
    run = two_layers()
    run.step(**GOOD)
    for _ in range(4):
        run.step(a=BAD["a"])
    run.close(a=[3.0, 4.0], b=[0.88, 0.0])
    run.step(**BAD)
    run.close(a=[3.0, 4.0], b=[0.88, 0.0])


def test_a_long_gradient_enters_the_mean_clipped() -> None:
    """The mean is in units of the usual norm: one, then two."""
    model, loss, x, y = task("mlp")
    opt = KFAC(model, momentum=0.5)
    backward(model, opt, loss, x, y)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in first.values()]).norm()
    opt.step()
    for name, p in model.named_parameters():
        p.grad = 10 * first[name]
    opt.step()
    for name, p in model.named_parameters():
        mean = (0.5 * first[name] + 2 * first[name]) / 1.5
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], mean / norm)


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1e4])
def test_training_does_not_depend_on_units(optimizer: type[KFAC], scale: float) -> None:
    """The outputs times `scale` and the loss as before, or the loss times `scale`: the same losses."""

    def losses(outputs: float, loss: float) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
        model = Raw(lambda m, x: outputs * m.net(x), net=net).double()
        opt, values = optimizer(model), []
        x = torch.randn(64, 10).double()
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3]], 1)
        for _ in range(12):
            opt.zero_grad()
            error = (model(x) / outputs - y).square().mean()
            (loss * error).backward()
            opt.step()
            values.append(error.item())
        return values

    one = losses(1.0, 1.0)
    assert losses(scale, 1.0) == pytest.approx(one, rel=1e-5)
    assert losses(1.0, scale) == pytest.approx(one, rel=1e-5)
    assert one[-1] < 0.5 * one[0]


def test_a_gradient_that_is_clipped_counts_in_full_as_a_sign_of_instability() -> None:
    """Ten times the mean, which no clipped one is; a tenth of it points back along the last step."""
    run = Stepped({"p": torch.full((2,), 100.0).double()}, Given(), 100.0, 200.0)
    run.step(p=torch.tensor([1.0, 0.0]).double())
    run.rule.state = run.known._replace(spread=1.0, longest=1e9)
    before = run.known
    run.step(p=torch.tensor([-0.1, 10.0]).double())
    shrunk = math.exp(-0.1 * C.growth / HORIZON)
    assert run.known.size / run.known.norm == pytest.approx(shrunk * before.size / before.norm, rel=1e-3)


class Reads(TorchFunctionMode):
    """Counts calls that bring numbers to the host."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.found += [name] * (name in self.NAMES)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_an_ordinary_step_reads_once(optimizer: type[KFAC]) -> None:
    """Another time where the gradient is so long that it is clipped."""
    model, loss, x, y = task("transformer")
    opt, ordinary = optimizer(model, weight_decay=0.01), {1: 0, 2: 0}
    for k in range(40):
        backward(model, opt, loss, x, y)
        for p in model.parameters() if k % 13 == 12 else ():
            p.grad.mul_(10)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        is_long = k > 0 and bool(norm > C.most * opt.rule.state.norm)  # type: ignore[attr-defined]
        with Reads() as reads:
            opt.step()
        if not opt.history[-1]["renewed"] and not opt.history[-1]["inverted"]:
            ordinary[1 + is_long] += 1
            assert reads.found == ["tolist"] * (1 + is_long)
    assert all(ordinary.values())


# -- energies along steps

USUAL = TrustState(size=2.0, change=0.5, norm=1.0, longest=1.0, lr=1.0)


def test_output_change_is_that_of_one_entry() -> None:
    """Two samples of three entries each, which a step of energy 12 changes by 2 in the root mean square."""
    outputs, rule = OutputScale(), TrustRegionStep(Given())
    outputs.update(OutputScale.of([torch.ones(2, 3)]), SquaredChange())
    context: Any = SimpleNamespace(outputs=outputs)
    assert rule._change(context, [2.0], [3.0]) == 2 and outputs.rms == 1
    rule.state = USUAL._replace(measured=6.0, predicted=2.0)
    assert rule._change(context, [2.0], [3.0]) == pytest.approx(12**0.5)


def compared(rule: TrustRegionStep, change: float, *reached: str) -> tuple[float, float]:
    """Sums after a renewal that has measured this along the last step; one block has two parameters apart."""
    blocks = [SimpleNamespace(names=names) for names in (("a",), ("b", "c"), ("head",))]
    part = SimpleNamespace(blocks=blocks, schedule=Schedule(None, None))
    outputs = SimpleNamespace(squared_change=change, reached=frozenset(reached))
    rule._compare_energies(SimpleNamespace(preconditioner=part, outputs=outputs))  # type: ignore[arg-type]
    assert rule.state is not None
    return rule.state.measured, rule.state.predicted


def test_energies_decay_and_bad_ones_do_not_count() -> None:
    rule = TrustRegionStep(Given())
    rule.state, rule.energies = USUAL, {"a": 2.0}
    assert compared(rule, 8.0, "a") == (8, 2)
    rule.energies = {"a": 1.0}
    for bad in (math.nan, 0.0, math.inf):
        assert compared(rule, bad, "a") == (8, 2)
    assert compared(rule, 0.0) == (8, 2)  # a renewal that has measured nothing
    assert compared(rule, 1.0, "a") == pytest.approx((1 + 8 * C.energy_decay, 1 + 2 * C.energy_decay))


def test_blocks_that_the_batch_has_not_reached_do_not_count() -> None:
    """As where heads alternate: what the last step did to the other head changes none of these outputs."""
    rule = TrustRegionStep(Given())
    rule.state, rule.energies = USUAL, {"a": 2.0, "b": 1.0, "c": 1.0, "head": 100.0}
    assert compared(rule, 12.0, "a", "b") == (12, 4)


def underestimate(opt: KFAC) -> float:
    return opt.rule.state.underestimate  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_step_knows_what_it_changed(kind: type[KFAC]) -> None:
    """The energy that a linear layer predicts is what it measures; that of a layer read at many places is not."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    x, y = torch.randn(2048, 6).double(), torch.randint(3, (2048,))
    opt = kind(model)
    for _ in range(4):
        backward(model, opt, nn.CrossEntropyLoss(), x, y)
        opt.step()
    assert 0.3 < underestimate(opt) < 3 and opt.rule.state.measured  # type: ignore[attr-defined]


def test_many_places_that_pull_together_are_found_out() -> None:
    """A layer read at 16 places of equal activations changes outputs by 16 times the energy that its factors say."""
    torch.manual_seed(0)
    inner = nn.Linear(5, 4, bias=False).double()

    repeated = lambda: Raw(lambda m, x: m.inner(x[:, None].expand(-1, 16, -1)).sum(1), inner=inner)
    x, y = torch.randn(4096, 5).double(), torch.randn(4096, 4).double()
    opt = KFAC(model := repeated())
    for _ in range(3):
        backward(model, opt, nn.MSELoss(), x, y)
        opt.step()
    # not 16 exactly: the factor of the inputs comes from some of the samples
    assert 10 < underestimate(opt) < 26
    other = KFAC(repeated())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert underestimate(other) == underestimate(opt)
