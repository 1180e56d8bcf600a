"""Factors that are cut into diagonal blocks: whole factors with the rest set to zero, entry by entry."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature.preconditioners import Block, invert
from optimizers import EKFAC, KFAC
from support.cases.case import seeded
from support.running_blocks import MODELS, block_of, close, columns_of, full, recorded, rows_of
from support.training import train

pytestmark = pytest.mark.fast

SHARE = 0.3
PLAIN = ["linear", "places", "no_bias", "conv", "grouped_conv", "transformers_conv1d", "tied_autoencoder"]


def by_hand(side: Tensor, size: int, has_bias: bool) -> Tensor:
    """Entries of rows and columns in one run of `size` stay; a bias, the last row, belongs to the last run."""
    found = torch.zeros_like(side)
    last = side.shape[1] - 1 - has_bias
    for r in range(side.shape[1]):
        for c in range(side.shape[1]):
            if min(r, last) // size == min(c, last) // size:
                found[:, r, c] = side[:, r, c]
    return found


def pair(name: str, size: int, device: str = "cpu", **options: Any) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """A model, its first block, cut, and the factors by hand."""
    make, inputs = MODELS[name]
    with seeded(0):
        model, x = make().to(device, torch.float64), inputs().double().to(device)
    whole = block_of(recorded(model, x), model)
    cut = block_of(recorded(model, x, block_size=size, **options), model)
    return model, cut, (by_hand(rows_of(whole), size, False), by_hand(columns_of(whole), size, len(cut.names) > 1))


def damped(side: Tensor, share: float) -> Tensor:
    eye = torch.eye(side.shape[1], dtype=side.dtype, device=side.device)
    return torch.stack([m + share * m.trace() / len(m) * eye for m in side])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", PLAIN)
def test_factors_and_steps_are_those_of_the_blocks(name: str, size: int, device: str):
    """With damping of either kind."""
    model, block, (rows, columns) = pair(name, size, device)
    close(rows_of(block), rows)
    close(columns_of(block), columns)
    gradients = [torch.sin(7 * dict(model.named_parameters())[k].detach()) for k in block.names]
    right = block.scheme.arrangement.to_matrices(gradients)

    def solved() -> Tensor:
        return block.scheme.arrangement.to_matrices(block.solve(gradients))

    invert([block], SHARE)
    shares = block.shares(SHARE)  # of the largest diagonal block of a side
    close(solved(), torch.linalg.solve(damped(rows, shares[0]), right) @ torch.linalg.inv(damped(columns, shares[1])))
    invert([block], 0.0, 0.1)
    found = solved()
    for b, a, g, u in zip(rows, columns, right, found, strict=True):
        matrix = torch.kron(b, a)
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        close(u.flatten(), torch.linalg.solve(matrix + 0.1 * eye, g.flatten()))


@pytest.mark.parametrize("name", ["linear", "places", "grouped_conv"])
def test_eigenbases_are_those_of_the_blocks(name: str):
    _, block, (rows, columns) = pair(name, 2, kind="eigen")
    assert block.structure == "eigen"
    invert([block], 0.0, 0.1)
    for side, values, basis in (
        (rows, block.row_values, block.basis.rows),
        (columns, block.column_values, block.basis.columns),
    ):
        close(basis.mT @ side @ basis, full(values))
        assert not basis[by_hand(torch.ones_like(side), 2, side is columns and len(block.names) > 1) == 0].any()


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_checkpoints_keep_the_blocks(kind: type[KFAC]):
    with seeded(1):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x, (opt, other) = torch.linspace(-1, 1, 32).reshape(8, 4), (kind(model, block_size=2) for _ in range(2))
    train(model, opt, lambda output, _: output.square().mean(), x, x, 3)
    state = opt.state_dict()
    other.load_state_dict(state)
    for one, two in zip(opt.store.blocks, other.store.blocks, strict=True):
        assert isinstance(two, Block) and [x.sizes for x in one.sides] == [x.sizes for x in two.sides]
        assert torch.equal(rows_of(one), rows_of(two))
    with pytest.raises(ValueError, match="block_size"):
        kind(model).load_state_dict(state)


def test_what_block_size_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="block_size: expected a whole number"):
        KFAC(model, block_size=1.5)
    with pytest.raises(ValueError, match="block_size: expected a whole number from 1"):
        KFAC(model, block_size=0)
    with pytest.raises(ValueError, match="block_size: factors of residuals"):
        KFAC(model, block_size=1).step(lambda: model(torch.ones(3, 2))[:, 0])
