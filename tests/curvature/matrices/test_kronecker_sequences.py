"""Kronecker factors of recurrent layers and of attention, against the linear layers that they are made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, floats, seeded
from support.comparisons import check_operator, matches
from support.oracles import brute_force as oracle
from support.oracles.kronecker import affine_layers, kronecker

pytestmark = pytest.mark.fast

sharings = pytest.mark.parametrize("sharing", ["expand", "reduce"])


class Unrolled(nn.Module):
    """A recurrent layer as the loop over its steps, each of its two weights a Linear."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.ih, self.hh = (nn.Linear(*w.T.shape).double() for w in (layer.weight_ih_l0, layer.weight_hh_l0))
        self.kind, self.size = type(layer), layer.hidden_size
        names = {
            "ih.weight": "weight_ih_l0",
            "hh.weight": "weight_hh_l0",
            "ih.bias": "bias_ih_l0",
            "hh.bias": "bias_hh_l0",
        }
        self.load_state_dict({name: layer.state_dict()[other] for name, other in names.items()})

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(len(x), self.size)
        outputs = []
        for step in x.unbind(1):
            one, two = self.ih(step), self.hh(hidden)
            if self.kind is nn.RNN:
                hidden = (one + two).tanh()
            elif self.kind is nn.GRU:
                (r, z, n), (s, y, m) = one.chunk(3, 1), two.chunk(3, 1)
                new = (n + (r + s).sigmoid() * m).tanh()
                hidden = new + (z + y).sigmoid() * (hidden - new)
            else:
                i, f, g, o = (one + two).chunk(4, 1)
                cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                hidden = o.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)


@sharings
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_are_shared_over_their_steps(kind: type[nn.RNNBase], sharing: str):
    with seeded(0):
        layer = kind(2, 3, batch_first=True).double()
        data = floats(4, 2)(3).double(), floats(4, 3)(3).double()
    model, other = Raw(lambda m, x: m.layer(x)[0], layer=layer), Unrolled(layer)
    expected = kronecker(affine_layers(oracle.Matrices(other, nn.MSELoss(), data)), sharing)
    where = oracle.positions(other)
    order = [where[name].flatten() for name in ("ih.weight", "hh.weight", "ih.bias", "hh.bias")]  # as in torch's layer
    found = curvature.kfac(model, nn.MSELoss(), data, sharing=sharing).to_dense()
    matches(found, expected[torch.cat(order)][:, torch.cat(order)])


@sharings
def test_attention_has_the_factors_of_its_projections(sharing: str):
    with seeded(0):
        layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
        data = floats(5, 4)(3).double(), floats(5, 4)(3).double()
    model = Raw(lambda m, x: m.layer(x, x, x, need_weights=False)[0], layer=layer)

    def attend(m: nn.Module, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in m.enter(x).chunk(3, -1))
        return m.leave(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    other = Raw(attend, enter=nn.Linear(4, 12).double(), leave=nn.Linear(4, 4).double())
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    expected = kronecker(affine_layers(oracle.Matrices(other, nn.MSELoss(), data)), sharing)
    matches(curvature.kfac(model, nn.MSELoss(), data, sharing=sharing).to_dense(), expected)


@sharings
@pytest.mark.parametrize("builder", ["kfac", "ekfac"])
def test_projections_of_other_inputs_have_factors_of_their_own(builder: str, sharing: str):
    """Queries, keys and values are rows of one weight, which each read another input."""
    with seeded(0):
        layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
        data = tuple(floats(t, 4)(20).double() for t in (2, 3, 3)), floats(2, 4)(20).double()
    model = Raw(lambda m, x, y, z: m.layer(x, y, z, need_weights=False)[0], layer=layer)

    def attend(m: nn.Module, *inputs: Tensor) -> Tensor:
        projected = [linear(x) for linear, x in zip((m.q, m.k, m.v), inputs, strict=True)]
        heads = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in projected)
        return m.leave(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    other = Raw(attend, **{name: nn.Linear(4, 4).double() for name in ("q", "k", "v", "leave")})
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    ones = [p for pair in zip(weights, biases, strict=True) for p in pair]
    with torch.no_grad():
        for p, q in zip(other.parameters(), [*ones, *layer.out_proj.parameters()], strict=True):
            p.copy_(q)
    where = oracle.positions(other)
    names = ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias", "leave.weight", "leave.bias"]
    order = torch.cat([where[name].flatten() for name in names])
    found = getattr(curvature, builder)(model, nn.MSELoss(), data, sharing=sharing)
    expected = getattr(curvature, builder)(other, nn.MSELoss(), data, sharing=sharing).to_dense()
    if builder == "kfac":
        matches(expected, kronecker(affine_layers(oracle.Matrices(other, nn.MSELoss(), data)), sharing))
    dense = found.to_dense()
    matches(dense, expected[order][:, order], 1e-8)
    check_operator(model, found)
