"""Isotropic vectors reach the layer that makes the model's output as they are: its row side is a diagonal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from curvature import propagated
from optimizers import KFAC
from support.cases.case import Raw
from support.running_blocks import rows_of

is_diagonal = lambda side: torch.equal(side, torch.diag_embed(side.diagonal(dim1=1, dim2=2)))


def made(head: nn.Module, end: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A body of 3 outputs, a head of 4, and what the model makes of them."""
    return Raw(lambda m, x: end(m.head(h := m.body(x).tanh()), h), body=nn.Linear(2, 3), head=head)


def row_side(model: nn.Module, **settings: object) -> Tensor:
    """Of the head, after a renewal."""
    torch.manual_seed(0)
    x = torch.randn(50, 2)
    opt = KFAC(model, **settings)
    model(x).square().mean().backward()
    opt.step()
    (found,) = [rows_of(block) for block in opt.store.blocks if block.names[0] == "head.weight"]
    return found


DIRECT = {
    "as it is": lambda out, body: out,
    "reshaped": lambda out, body: out.view(-1, 2, 2),
    "in another precision": lambda out, body: out.double(),
    "beside others": lambda out, body: torch.cat([out, body], 1),
}
INDIRECT = {
    "summed": lambda out, body: out.sum(1, keepdim=True),  # all backprops of a sample are one number
    "summed over halves": lambda out, body: out.view(-1, 2, 2).sum(1),
    "used twice": lambda out, body: torch.cat([out, out.flip(1)], 1),
    "in another precision, and used again": lambda out, body: out.double() + 0 * out.flip(1).double(),
    "twice as large": lambda out, body: 2 * out,
    "flipped, in another precision": lambda out, body: (out + out.flip(1)).double(),
    "cut out": lambda out, body: out[:, 1:3],  # a diagonal, too, which nobody tells
}


@pytest.mark.parametrize("end", DIRECT.values(), ids=DIRECT)
def test_the_output_layer_has_a_diagonal(end):
    side = row_side(made(nn.Linear(3, 4), end))
    assert is_diagonal(side)
    means = side.diagonal(dim1=1, dim2=2)  # of 50 squared normal numbers
    torch.testing.assert_close(means, torch.ones(1, 4), rtol=0, atol=0.9)


@pytest.mark.parametrize("end", INDIRECT.values(), ids=INDIRECT)
def test_what_is_not_the_output_itself_has_none(end):
    assert not is_diagonal(row_side(made(nn.Linear(3, 4), end)))


def test_vectors_that_know_the_loss_have_none():
    model, loss = made(nn.Linear(3, 4), DIRECT["as it is"]), nn.CrossEntropyLoss()
    assert not is_diagonal(row_side(model, inject=propagated(), loss=loss))


def test_convolutions():
    pixels = lambda m, x: m.head(x.view(-1, 1, 1, 2).expand(-1, 1, 4, 2))
    assert is_diagonal(row_side(Raw(pixels, head=nn.Conv2d(1, 3, 2))))


def test_tied_weights_have_none():
    """An autoencoder whose decoder is the transposed encoder."""
    tied = lambda m, x: m.head(x).tanh() @ m.head.weight
    assert not is_diagonal(row_side(Raw(tied, head=nn.Linear(2, 3, bias=False))))
