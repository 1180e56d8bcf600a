"""Blocks of one layout are measured and solved as a stack: what comes out is that of each block alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvature.preconditioners.kronecker
from curvature.kronecker.applied import DenseMatrix, KroneckerInverse, LowRankMatrix
from curvature.linalg import ByDevice
from curvature.preconditioners import Block, BlockDiagonalCurvature, invert
from curvature.preconditioners.eigen import EigenBlock
from curvature.preconditioners.kronecker import KroneckerBlock
from curvature.structures import KroneckerStructure
from support.cases.case import Raw, seeded
from support.running_blocks import STACKS, close, measure, normal_vectors, rows_of

pytestmark = pytest.mark.fast

Make = Callable[[], nn.Module]


JOINED = {"linear": 1, "norms": 1}  # measurements side by side; convolutions and look-ups are measured alone


def built(name: str, device: str) -> tuple[nn.Module, Tensor]:
    make, inputs, _ = STACKS[name]
    with seeded(0):
        model, x = make().to(device, torch.float64), inputs().to(device)
    return model, x.double() if x.is_floating_point() else x


def curvature_of(name: str, kind: str, damping: float | None, device: str) -> tuple[nn.Module, list[Block]]:
    model, x = built(name, device)
    store = BlockDiagonalCurvature("expand", kind)
    for _ in range(2):
        store.update_average(measure(store, model, x, normal_vectors(2)), 0.9)
        invert(store.blocks, 0.1, damping)
    return model, store.blocks


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


def test_layers_of_several_precisions():
    run = lambda m, x: m.second(m.first(x).tanh().double())
    with seeded(0):
        model, x = Raw(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4).double()), torch.randn(6, 4)
    store = BlockDiagonalCurvature()
    for _ in range(3):
        store.update_average(measure(store, model, x, normal_vectors(2)), 0.9)
        invert(store.blocks, 0.1)
    assert [rows_of(block).dtype for block in store.blocks] == [torch.float32, torch.float64]
    assert [block.updates for block in store.blocks] == [3, 3] and not any(block.outliers for block in store.blocks)


def tensors_of(block: Block) -> dict[str, Tensor]:
    state = block.state()
    state |= {"sparsity": torch.tensor(state["sparsity"]).double()} if "sparsity" in state else {}
    return {f"{block.names[0]} {k}": t for k, t in state.items() if isinstance(t, Tensor)}


@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
def test_inverses_that_were_made_together_do_not_keep_each_other(kind: str):
    """Blocks take turns: the last one to keep its inverse must not hold the memory of all that were made with it."""
    found = [t for block in curvature_of("linear", kind, None, "cpu")[1] for t in block.inverse.tensors()]
    assert len(found) == (12 if kind == "eigen" else 8)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in found)


@pytest.mark.parametrize("size", [256, 257])
def test_large_inverses_are_not_copied(size: int):
    eye = torch.eye(size)[None]
    whole, small = DenseMatrix(eye), DenseMatrix(eye[:, :3, :3])
    assert (KroneckerInverse(whole, small).form is None) == (size > 256)
    assert KroneckerInverse(LowRankMatrix(eye[:, :, :1], torch.ones(1)), small).form is None


@pytest.mark.parametrize("kind", [KroneckerBlock, EigenBlock])
def test_sides_that_are_not_due_keep_their_inverse(kind: type):
    """Also the other way round; a block that is not named, and one that has failed, are inverted as wholes."""
    (model, x), store = built("different", "cpu"), BlockDiagonalCurvature("expand", kind.structure)
    renew = lambda seed: store.update_average(measure(store, model, x + seed, normal_vectors(2, seed)), 0.9)
    sides_of = lambda: [(b.inverse.rows.entries.clone(), b.inverse.columns.entries.clone()) for b in dense]
    renew(0)
    invert(store.blocks, 0.1)
    dense = [b for b in store.blocks if isinstance(b, kind) and b.names[0].endswith("weight")]
    for seed, sides in enumerate([(True, False), (False, True), (False, False)]):
        before, untold, failed = sides_of(), dense[0], dense[1]
        renew(seed + 1)
        failed.failures = 1
        invert(store.blocks, 0.1, None, {b.names[0]: sides for b in dense if b is not untold})
        for block, old, new in zip(dense, before, sides_of(), strict=True):
            expected = (True, True) if block in (untold, failed) else sides
            assert tuple(not torch.equal(a, b) for a, b in zip(old, new, strict=True)) == expected, block.names
        assert failed.failures == 0


def test_a_side_in_the_eigenbasis_stays_exact():
    """Where only one side turns, values are carried to the new basis; all of them, as if both had been made anew."""
    (model, x), store = built("linear", "cpu"), BlockDiagonalCurvature("expand", "eigen")
    store.update_average(measure(store, model, x, normal_vectors(2)), 0.9)
    invert(store.blocks, 0.1)
    expected = [b.inverse.condition() for b in store.blocks]
    for sides in [(True, False), (False, True), (False, False)]:  # the same factors again
        invert(store.blocks, 0.1, None, {b.names[0]: sides for b in store.blocks})
        assert [b.inverse.condition() for b in store.blocks] == pytest.approx(expected, rel=1e-8)
