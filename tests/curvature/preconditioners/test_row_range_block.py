"""A weight of which ranges of rows are read apart, as in cross attention: a Kronecker product for each range."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.preconditioners import Block, BlockDiagonalCurvature, invert
from optimizers import EKFAC, KFAC
from support.cases.case import Raw, seeded
from support.running_blocks import block_of, close, measure, unit_vectors
from support.training import train

N, E = 6, 4
INPUTS = {"query apart": (0, 4, 12), "all apart": (0, 4, 8, 12)}  # first rows of what is read together


def attention(name: str, bias: bool = True) -> tuple[nn.Module, Tensor, Tensor]:
    """Queries from some places, keys and values from others; values apart from keys or not."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        key = x[:, 2:]
        value = key if name == "query apart" else key.flip(2)
        return m.head(m.attention(x[:, :2], key, value)[0].mean(1))

    with seeded(0):
        layer = nn.MultiheadAttention(E, 2, bias=bias, kdim=E, vdim=E, batch_first=True)
        model = Raw(run, attention=layer, head=nn.Linear(E, 3)).double()
        for p in model.parameters():
            nn.init.normal_(p, std=0.5)
        return model, torch.randn(N, 5, E).double(), torch.randn(N, 3).double()


def measured(model: nn.Module, x: Tensor, kind: str, sharing: str = "expand") -> tuple[BlockDiagonalCurvature, Any]:
    store = BlockDiagonalCurvature(sharing, kind)
    store.update_average(measure(store, model, x, unit_vectors), 0.9)
    return store, block_of(store, model, "attention.in_proj_weight")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.sin(7 * p.detach()) for name, p in model.named_parameters()}


def solution(block: Block, g: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(block.names, block.solve([g[name] for name in block.names]), strict=True))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_solutions_are_those_of_the_builder(name: str, bias: bool, kind: str, sharing: str):
    """The Hessian of a sum of squares is twice the identity, and `kfac` then sums over samples."""
    model, x, y = attention(name, bias)
    store, block = measured(model, x, kind, sharing)
    operator = curvature.kfac(model, nn.MSELoss(reduction="sum"), [(x, y)], sharing=sharing)
    g, names = gradients(model), ["attention.in_proj_weight"] + ["attention.in_proj_bias"] * bias
    assert block.names == tuple(names) and block.dimension == sum(g[k].numel() for k in names)
    invert([block], 0.0, 0.3)
    expected = operator.solve(g, damping=2 * N * 0.3)
    for k, found in solution(block, g).items():
        close(found, 2 * N * expected[k])
    diagonal = operator.space.split(operator.diagonal())
    trace = torch.stack([diagonal[k].sum() for k in names]).sum() / (2 * N)
    close(block.mean_eigenvalue * block.dimension, trace)
    if kind == "eigen" and sharing == "expand":  # and then in its basis; that of "reduce" is not unique here
        store.update_average(measure(store, model, x, unit_vectors), 0.0)
        invert([block], 0.0, 0.3)
        expected = curvature.ekfac(model, nn.MSELoss(reduction="sum"), [(x, y)], sharing=sharing).solve(
            g, damping=2 * N * 0.3
        )
        for k, found in solution(block, g).items():
            close(found, 2 * N * expected[k])


@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
def test_inverses_with_a_share_of_damping_and_a_checkpoint(kind: str):
    """Each range is damped by a share of its own mean eigenvalues, as a layer of its own would be."""
    model, x, _ = attention("query apart")
    _, block = measured(model, x, kind)
    invert([block], 0.05)
    g = gradients(model)
    found = solution(block, g)
    for start, stop in ((0, 4), (4, 12)):
        (own,) = (leaf for leaf in block.leaves if leaf.names[0].endswith(f"[{start}:{stop}]"))
        rows = own.solve([g[name][start:stop] for name in block.names])
        for name, part in zip(block.names, rows, strict=True):
            torch.testing.assert_close(found[name][start:stop], part, rtol=0, atol=0)
    again = Block.restore(copy.deepcopy(block.state()), torch.device("cpu"))
    assert again.bytes == block.bytes > 0 and again.describe() == block.describe() and again.updates == block.updates
    for name, part in solution(again, g).items():
        assert torch.equal(part, found[name])


def test_a_batch_that_reads_other_rows_together_is_left_out():
    model, x, _ = attention("query apart")
    store, block = measured(model, x, "kronecker")
    before = block.updates
    other, _, _ = attention("all apart")
    other.load_state_dict(model.state_dict())
    found = measure(store, other, x, unit_vectors)
    store.update_average(found, 0.9)
    assert block.updates == before and block_of(store, model, "head.weight").updates == 2


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
@pytest.mark.parametrize("name", INPUTS)
def test_training(name: str, optimizer: type[KFAC]):
    """The report names the ranges; a run goes on bitwise from its checkpoint."""
    model, x, y = attention(name)
    opt = optimizer(model)
    losses = train(model, opt, F.mse_loss, x, y, 13)
    row = opt.report().split("attention.in_proj_weight")[1].split("attention.out_proj")[0]
    for start, stop in zip(INPUTS[name], INPUTS[name][1:], strict=False):
        assert f"rows {start}:{stop} B {stop - start}x{stop - start}, A 5x5" in row
    assert "attention.in_proj_bias" in row and "diagonal" not in row
    other = copy.deepcopy(model)
    again = optimizer(other)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    own = train(model, opt, F.mse_loss, x, y, 12)
    assert train(other, again, F.mse_loss, x, y, 12) == own and own[-1] < losses[0]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert again.report() == opt.report() and again.stats()["conditions"] == opt.stats()["conditions"]
