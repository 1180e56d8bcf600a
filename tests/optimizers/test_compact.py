"""Curvature in 16 bits: nearly the same steps, and all that an optimizer has to do with its state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature.kronecker.packing as packing
from curvature.kronecker.packing import Packed, as_packed, halve, is_halved, pack
from optimizers import EKFAC, KFAC
from support.cases.case import seeded

MAKERS: dict[str, Any] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "damped": partial(KFAC, damping=1e-3),
    "blocks": partial(KFAC, block_size=5),
    "EKFAC_blocks": partial(EKFAC, block_size=5),
}
each_maker = pytest.mark.parametrize("name", MAKERS)
with seeded(0):
    X, Y = torch.randn(64, 9), torch.randint(3, (64,))


@pytest.fixture(autouse=True)
def small_triangles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packing, "PACKED_MIN_SIDE", 4)
    yield


def started(name: str, compact: bool, steps: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, KFAC]:
    with seeded(1):
        layers = [nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 9, bias=False), nn.Tanh(), nn.Linear(9, 3)]
        model = nn.Sequential(*layers).to(dtype)
    opt = MAKERS[name](model, compact=compact)
    train(model, opt, steps)
    return model, opt


def train(model: nn.Module, opt: KFAC, steps: int) -> float:
    x, loss = X.to(next(model.parameters())), torch.zeros(())
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), Y)
        loss.backward()
        opt.step()
    return float(loss.detach())


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("cut", [(9,), (5, 4)])
def test_halves_are_right_to_their_precision(cut: tuple[int, ...], scale: float, dtype: torch.dtype):
    x = torch.randn(2, 9, 20, dtype=dtype) * torch.logspace(0, -2, 9, dtype=dtype)[:, None]
    side = x @ x.mT * scale
    full = Packed.of(side, cut).whole()
    kept = halve(pack(side, cut), cut)
    found = as_packed(kept, cut, dtype)
    assert kept.dtype == torch.float16 and isinstance(found, Packed) and found.dtype == dtype
    allowed = 2.0**-11 * full.abs() + 2.0**-24 * full.abs().amax((1, 2), keepdim=True)
    assert ((found.whole() - full).abs() <= allowed).all()
    assert torch.equal(found.diagonal(), found.whole().diagonal(dim1=1, dim2=2))
    assert torch.equal(halve(kept.double(), cut), kept) and is_halved(kept.float(), cut)
    zeros = as_packed(halve(torch.zeros_like(pack(side, cut)), cut), cut, dtype)
    assert isinstance(zeros, Packed) and not zeros.whole().any()


@each_maker
def test_steps_are_nearly_the_same(name: str):
    (model, opt), (other, compact) = (started(name, flag, 12) for flag in (False, True))
    start = started(name, False, 0)[0]
    moved = [p - q for p, q in zip(weights(model), weights(start), strict=True)]
    off = [p - q for p, q in zip(weights(model), weights(other), strict=True)]
    ratio = torch.cat([x.flatten() for x in off]).norm() / torch.cat([x.flatten() for x in moved]).norm()
    assert 0 < ratio < 0.03, ratio  # of a few thousandths
    sizes = [sum(block.bytes for block in one.store.blocks) for one in (opt, compact)]
    assert sizes[1] < (0.75 if "EKFAC" in name or name == "damped" else 0.5) * sizes[0]
    for block in compact.store.blocks:
        assert name == "damped" or block.bytes <= block.expected_bytes  # which takes damping for factored
        assert {side.entries.dtype for side in block.sides if isinstance(side, Packed)} <= {torch.float16}
        assert block.structure != "eigen" or block.values.dtype == torch.bfloat16
    assert all(x > 0 for x in compact.stats()["conditions"].values())


@pytest.mark.parametrize("how", ["load", "deepcopy"])
@each_maker
def test_copies_go_on_alike(name: str, how: str):
    model, opt = started(name, True, 7)
    if how == "load":
        copied, other = started(name, True, 0)
        copied.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    else:
        copied, other = copy.deepcopy((model, opt))
    for one, two in zip(opt.store.blocks, other.store.blocks, strict=True):
        assert [t.dtype for t in one.inverse_tensors] == [t.dtype for t in two.inverse_tensors]
    assert train(model, opt, 6) == train(copied, other, 6)
    assert all(map(torch.equal, weights(model), weights(copied)))


@each_maker
def test_parameters_that_change_their_precision(name: str):
    model, opt = started(name, True, 7)
    wide, other = copy.deepcopy((model, opt))
    before = [[block.inverse.opened(k, torch.float64) for k in (0, 1)] for block in other.store.blocks]
    train(wide.double(), other, 0)
    other.zero_grad()
    other.step()
    after = [[block.inverse.opened(k, torch.float64) for k in (0, 1)] for block in other.store.blocks]
    assert all(map(torch.equal, itertools.chain(*before), itertools.chain(*after)))
    assert train(wide, other, 6) < train(*started(name, True, 0), 1)


def test_refusals():
    opt = started("KFAC", True, 3)[1]
    with pytest.raises(ValueError, match="compact"):
        started("KFAC", False, 3)[1].load_state_dict(opt.state_dict())
    with pytest.raises(TypeError, match="compact"):
        KFAC(nn.Linear(2, 2), compact=1)  # type: ignore[arg-type]
    model = nn.Linear(9, 1)
    opt = KFAC(model, compact=True)
    with pytest.raises(ValueError, match="compact: nothing is kept of the factors of residuals"):
        opt.step(lambda: model(X)[:, 0])
