"""What renewals measure along steps, and what the next ones make of it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

import curvature
from curvature.preconditioners import BlockDiagonalCurvature
from curvature.preconditioners.diagonal import DiagonalBlock
from optimizers import EKFAC, KFAC
from optimizers.steps.calibration import DECAY, LARGEST_SCALE, calibrate, scales, underestimate
from optimizers.steps.stacks import Stack

pytestmark = pytest.mark.fast

one = functools.partial(torch.tensor, dtype=torch.float64)


class Tokens(nn.Module):
    """Each kind of term: rows of a table, products over places, a convolution, a scale entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.norm, self.conv = nn.LayerNorm(4), nn.Conv1d(4, 6, 2, stride=2, groups=2)
        self.grown = nn.ConvTranspose1d(6, 4, 2, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.mix(self.table(x))))
        h = torch.tanh(self.conv(h.transpose(1, 2)))
        return self.head(self.grown(h)[..., :2].flatten(1))


def test_changes_along_a_displacement_are_those_of_forward_differentiation() -> None:
    torch.manual_seed(0)
    model = Tokens().double()
    x = torch.randint(7, (5, 5))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    u = {name: torch.randn_like(p) for name, p in parameters.items()}
    vectors = torch.randn(2, 5, 3, dtype=torch.float64)
    store = BlockDiagonalCurvature()
    with curvature.capture(model) as tape:
        output = model(x)
    found = store.measure(tape, [output], [vectors], len(x), displacement=u).along

    def squares(names: Any) -> float:
        own = {name: d if name in names else torch.zeros_like(d) for name, d in u.items()}
        change = jvp(lambda p: functional_call(model, p, (x,)), (parameters,), (own,))[1]
        return float((vectors * change).sum(2).square().sum())

    assert found.keys() == {"", *(block.names[0] for block in store.blocks)}
    for block in store.blocks:
        assert found[block.names[0]].item() == pytest.approx(squares(block.names), rel=1e-9), block.names
    assert found[""].item() == pytest.approx(squares(u), rel=1e-9)


def block(name: str) -> DiagonalBlock:
    return DiagonalBlock(name, (3,), torch.float64, "")


def test_layers_are_scaled_by_what_their_curvature_misses() -> None:
    blocks = [block("a"), block("b"), block("c"), block("unused")]
    assert scales(blocks) is None
    along = {"a": one(8.0), "b": one(8.0), "c": one(400.0), "": one(900.0)}
    joint = calibrate(blocks, along, {"a": one(8.0), "b": one(2.0), "c": one(4.0)}, one([0.0, 0.0]))
    mean = 416 / 14
    expected = [min(mean, LARGEST_SCALE), min(mean / 4, LARGEST_SCALE), max(mean / 100, 1 / LARGEST_SCALE), 1.0]
    found = scales(blocks)
    assert found is not None and found.tolist() == pytest.approx(expected)
    assert underestimate(*joint.unbind()).item() == pytest.approx((900 / 14) ** 0.5)


def test_energies_decay_and_bad_ones_do_not_count() -> None:
    own = block("a")
    joint = calibrate([own], {"a": one(8.0), "": one(8.0)}, {"a": one(2.0)}, one([0.0, 0.0]))
    for bad in (float("nan"), 0.0, float("inf")):
        joint = calibrate([own], {"a": one(bad), "": one(bad)}, {"a": one(1.0)}, joint)
    joint = calibrate([own], {"a": one(1.0), "": one(1.0)}, {"a": one(1.0)}, joint)
    assert own.energies is not None and own.energies.tolist() == pytest.approx([1 + 8 * DECAY, 1 + 2 * DECAY])
    assert joint.tolist() == own.energies.tolist()
    assert calibrate([own], {}, {}, joint) is joint and underestimate(one(0.0), one(0.0)) == 1


def test_a_longer_direction_is_steeper_and_has_more_energy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    opt = KFAC(model, momentum=0.0)
    for _ in range(2):
        opt.zero_grad()
        nn.functional.cross_entropy(model(torch.ones(5, 6).double()), torch.arange(5) % 3).backward()
        opt.step()
    context, found = opt._context(None), []
    for energies in ([8.0, 8.0], [16.0, 4.0]):  # as measured; four each as predicted
        for own, measured in zip(opt.store.blocks, energies, strict=True):
            own.energies = one([measured, 4.0])
        gradients = context.gradients()
        stack = Stack.of(context.layout(gradients), gradients)
        found.append(opt.rule.descent(context, stack, *(2 * [torch.tensor(True)])))
    plain, scaled = found
    scale = one([2.5 / 4, 2.5])
    torch.testing.assert_close(scaled.scales, scale)
    torch.testing.assert_close(scaled.slopes.double(), plain.slopes.double() * scale)
    torch.testing.assert_close(scaled.energies.double(), plain.energies.double() * scale.square())


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_a_step_knows_what_it_changed(kind: type[KFAC]) -> None:
    """The energy that a linear layer predicts is what it measures; that of a layer read at many places is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(2048, 6).double(), torch.randint(3, (2048,))
    opt = kind(model)
    for _ in range(4):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    energies = [own.energies for own in opt.store.blocks]
    assert all(pair is not None and 0.3 < float(pair[0] / pair[1]) < 3 for pair in energies), energies


def test_many_places_that_pull_together_are_found_out() -> None:
    """A layer read at 16 places of equal activations changes outputs by 16 times the energy that its factors say."""
    torch.manual_seed(0)
    inner = nn.Linear(5, 4, bias=False).double()

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[:, None].expand(-1, 16, -1)).sum(1)

    x, y = torch.randn(4096, 5).double(), torch.randn(4096, 4).double()
    opt = KFAC(model := Repeated())
    for _ in range(3):
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    found = opt.store.blocks[0].energies
    # not 16 exactly: the factor of the inputs comes from some of the samples
    assert found is not None and 10 < float(found[0] / found[1]) < 26
    saved = copy.deepcopy(opt.state_dict())
    other = KFAC(Repeated())
    other.load_state_dict(saved)
    assert torch.equal(other.store.blocks[0].energies, found)
