"""Blocks of one layout are measured and solved as a stack: what comes out is that of each block alone."""

import pytest
import torch
from torch import Tensor, nn

import curvature.preconditioners.kronecker
from curvature.kronecker.applied import DenseMatrix, KroneckerInverse, LowRankMatrix
from curvature.linalg import ByDevice
from curvature.preconditioners import Block, BlockDiagonalCurvature, invert
from curvature.preconditioners.kronecker import EigenBlock, KroneckerBlock
from curvature.structures import KroneckerStructure
from support.cases.case import seeded
from support.running_blocks import STACKS, close, measure, normal_vectors

pytestmark = pytest.mark.fast


JOINED = {"linear": 1, "norms": 1}  # measurements side by side; convolutions and look-ups are measured alone


def built(name: str, device: str) -> tuple[nn.Module, Tensor]:
    make, inputs, _ = STACKS[name]
    with seeded(0):
        model, x = make().to(device, torch.float64), inputs().to(device)
    return model, x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [KroneckerBlock, EigenBlock])
@pytest.mark.parametrize("name", STACKS)
def test_measured_together_is_measured_alone(name: str, kind: type, sharing: str, device: str, monkeypatch):
    """Before there is an inverse and in its basis; and statistics go on to add up."""
    joined: list[int] = []
    join = KroneckerStructure.joined
    noted = lambda structure, others: joined.append(len(others)) or join(structure, others)
    monkeypatch.setattr(KroneckerStructure, "joined", noted)
    model, x = built(name, device)
    found = []
    for most in (1 << 16, 0):
        monkeypatch.setattr(curvature.preconditioners.kronecker, "MAX_JOINED", ByDevice(most, most))
        store = BlockDiagonalCurvature(sharing, kind.structure)
        for seed in (1, 2):
            total = measure(store, model, x, normal_vectors(2, seed))
            total.add_(measure(store, model, x, normal_vectors(1, seed)))
            store.update_average(total, 0.9)
            invert(store.blocks, 0.1)
        found.append({k: t for block in store.blocks for k, t in tensors_of(block).items()})
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        close(tensor, found[1][key], 1e-10)
    assert len(joined) == 6 * JOINED.get(name, 0)


def tensors_of(block: Block) -> dict[str, Tensor]:
    state = block.state()
    state |= {"sparsity": torch.tensor(state["sparsity"]).double()} if "sparsity" in state else {}
    return {f"{block.names[0]} {k}": t for k, t in state.items() if isinstance(t, Tensor)}


@pytest.mark.parametrize("size", [256, 257])
def test_large_inverses_are_not_copied(size: int):
    eye = torch.eye(size)[None]
    whole, small = DenseMatrix(eye), DenseMatrix(eye[:, :3, :3])
    assert (KroneckerInverse(whole, small).form is None) == (size > 256)
    assert KroneckerInverse(LowRankMatrix(eye[:, :, :1], torch.ones(1)), small).form is None


def test_a_side_in_the_eigenbasis_stays_exact():
    """Where only one side turns, values are carried to the new basis; all of them, as if both had been made anew."""
    (model, x), store = built("linear", "cpu"), BlockDiagonalCurvature("expand", "eigen")
    store.update_average(measure(store, model, x, normal_vectors(2)), 0.9)
    invert(store.blocks, 0.1)
    expected = [b.inverse.condition() for b in store.blocks]
    for sides in [(True, False), (False, True), (False, False)]:  # the same factors again
        invert(store.blocks, 0.1, None, {b.names[0]: sides for b in store.blocks})
        assert [b.inverse.condition() for b in store.blocks] == pytest.approx(expected, rel=1e-8)
