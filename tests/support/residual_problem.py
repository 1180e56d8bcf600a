"""A Poisson equation on few points, and its Jacobian by hand."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from support.cases.case import seeded
from support.oracles import residuals as oracle_residuals

Closure = Callable[[], Tensor]


def spread(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and Laplacians (N, 1) of a tanh network, both carried forward."""
    value, rest = x, torch.cat([torch.eye(2).double().repeat_interleave(len(x), 0), torch.zeros_like(x)])
    for layer in model:
        if isinstance(layer, nn.Linear):
            value, rest = layer(value), rest @ layer.weight.T
            continue
        value = value.tanh()
        first, slopes = 1 - value**2, rest[: -len(x)].unflatten(0, (2, -1))
        bend = first * rest[-len(x) :] - 2 * value * first * slopes.square().sum(0)
        rest = torch.cat([(first * slopes).flatten(0, 1), bend])
    return value, rest[-len(x) :]


def nested(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = model(x)
    (du,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    bends = [torch.autograd.grad(du[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
    return value, sum(bends)[:, None]


def problem(seed: int = 0, way: Callable[..., tuple[Tensor, Tensor]] = spread) -> tuple[nn.Sequential, Closure]:
    """A Poisson equation on few points, which the model has as `inside` and `edge`."""
    with seeded(seed):
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        model.inside, model.edge = torch.rand(30, 2).double(), torch.rand(10, 2).double()
    return model, closure_of(model, way)


def closure_of(model: nn.Sequential, way: Callable[..., tuple[Tensor, Tensor]] = spread) -> Closure:
    def closure() -> Tensor:
        laplacian = way(model, model.inside)[1][:, 0]
        source = model.inside.prod(1).sin()
        return torch.cat([(laplacian + source) / 30**0.5, model(model.edge)[:, 0] / 10**0.5])

    return closure


def by_hand(model: nn.Module) -> tuple[Tensor, Tensor, list[list[tuple[Tensor, Tensor]]]]:
    """r, J with parameters as (o, i + 1) layer by layer, and for each layer its pairs, one for each piece."""
    pieces = [[oracle_residuals.channels(model, x, True) for x in model.inside]]
    pieces += [[oracle_residuals.channels(model, x, False) for x in model.edge]]
    scales = [30**-0.5, 10**-0.5]
    r, rows = [], []
    for (k, piece), scale in zip(enumerate(pieces), scales, strict=True):
        for x, (value, layers) in zip((model.inside, model.edge)[k], piece, strict=True):
            r.append((value + (x.prod().sin() if k == 0 else 0)) * scale)
            gradients = [sum(torch.outer(b, a) for a, b in places).flatten() for places in layers]
            rows.append(torch.cat(gradients) * scale)
    products = []
    for layer in range(len(pieces[0][0][1])):
        scaled = [
            [[(a, b * scale) for a, b in layers[layer]] for _, layers in piece]
            for piece, scale in zip(pieces, scales, strict=True)
        ]
        products.append([oracle_residuals.pairs(samples) for samples in scaled])
    return torch.stack(r), torch.stack(rows), products
