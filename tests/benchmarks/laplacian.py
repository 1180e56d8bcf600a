"""Value, gradient and Laplacian of an MLP: `curvature.laplacian` against nested gradients and torch.func.

    python tests/benchmarks/laplacian.py

Each way is first checked against the others. "forward" gives the three results, "loss" is forward and backward of the
mean of ``(laplacian + u - |grad|^2)^2`` by the parameters. All ways in turn, medians.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

import torch
from _networks import mlp
from _report import options_of, printed
from _rows import in_turns, timed
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import curvature

Result = tuple[Tensor, Tensor, Tensor]
Way = Callable[[nn.Module, Tensor], Result]
ROUNDS = 11
CASES = "2-64-64-1", "10-64-64-1", "2-256-256-256-1"


def nested(model: nn.Module, x: Tensor) -> Result:
    """One inner gradient for the gradient, d for the Laplacian."""
    x = x.detach().requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(du[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(x.shape[1])]
    return u, du[:, None], sum(seconds[1:], seconds[0])[:, None]


def _alone(model: nn.Module) -> Callable[[Tensor], Tensor]:
    parameters = dict(model.named_parameters())
    return lambda row: functional_call(model, parameters, (row[None],))[0, 0]


def forward_over_reverse(model: nn.Module, x: Tensor) -> Result:
    """vmap over samples and inputs of jvp of grad."""
    f = _alone(model)
    eye = torch.eye(x.shape[1], dtype=x.dtype)

    def one(row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        du, columns = vmap(lambda v: jvp(grad(f), (row,), (v,)))(eye)
        return f(row), du[0], columns.diagonal().sum()

    u, du, second = vmap(one)(x)
    return u[:, None], du[:, None], second[:, None]


def hessian_trace(model: nn.Module, x: Tensor) -> Result:
    """vmap over samples of torch.func.hessian."""
    f = _alone(model)
    u, du, second = vmap(lambda row: (f(row), grad(f)(row), hessian(f)(row).diagonal().sum()))(x)
    return u[:, None], du[:, None], second[:, None]


WAYS: dict[str, Way] = {
    "curvature.laplacian": curvature.laplacian,
    "nested torch.autograd.grad": nested,
    "vmap(jvp(grad))": forward_over_reverse,
    "vmap(hessian)": hessian_trace,
}


def loss(way: Way, model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    u, du, second = way(model, x)
    value = (second + u - du.square().sum(-1)).square().mean()
    return torch.autograd.grad(value, list(model.parameters()))


def made(case: str, activation: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    widths = [int(width) for width in case.split("-")]
    return mlp(*widths, activation=activation).double(), torch.rand(900, widths[0]).double()


def medians(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds."""
    ways = {name: lambda run=run: timed(run)[1] for name, run in runs.items()}
    in_turns(ways, range(2))
    return {name: 1000 * statistics.median(found) for name, found in in_turns(ways, range(ROUNDS)).items()}


def rows(case: str, activation: type[nn.Module]) -> Iterator[list[str]]:
    """Of the table, checked first."""
    model, x = made(case, activation)
    expected = (*nested(model, x), *loss(nested, model, x))
    for way in WAYS.values():
        for a, b in zip((*way(model, x), *loss(way, model, x)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    plain = medians({"": lambda: model(x)})[""]
    forward = {name: lambda way=way: way(model, x) for name, way in WAYS.items()}
    both = {name: lambda way=way: loss(way, model, x) for name, way in WAYS.items()}
    for what, runs in (("forward", forward), ("loss", both)):
        found = medians(runs)
        cells = [f"{ms:.2f}{' †' if ms == min(found.values()) else ''}" for ms in found.values()]
        yield [f"{case}, {activation.__name__}", what, f"{plain:.2f}", *cells]


def main() -> None:
    options_of(__doc__)
    found = (rows(case, kind) for case, kind in itertools.product(CASES, (nn.Tanh, nn.SiLU)))
    printed(["model", "what", "the model alone, ms", *WAYS], itertools.chain.from_iterable(found))


if __name__ == "__main__":
    main()
