"""`empirical()` where a loop divides its losses by the number of its backward passes before a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvature import empirical
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded

pytestmark = pytest.mark.fast
N, C = 12, 3
OPTIMIZERS: dict[str, Any] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "NaturalGradient": lambda model, **options: NaturalGradient(model, solver="dense", **options),
}
Loss = Callable[[Any, Tensor], Tensor]
ENTROPY = F.cross_entropy
PADDED = lambda o, y: F.cross_entropy(o, y.masked_fill(y == 0, -100))
parts = lambda k: [slice(n, n + N // k) for n in range(0, N, N // k)]
over = lambda k, loss=ENTROPY: lambda o, y: loss(o, y) / k


def measured(
    kind: str, steps: Sequence[Sequence[tuple[Loss, slice]]], scale: float = 1.0, make: Any = None
) -> dict[str, Tensor]:
    """The running curvature after steps of some losses each, of these samples."""
    with seeded(3):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)) if make is None else make()
        x, y = torch.randn(N, 4).double(), torch.randint(C, (N,))
    model = model.double()
    opt = OPTIMIZERS[kind](model, inject=empirical(), damping=0.1)
    opt.grad_scale = None if scale == 1 else torch.tensor(scale)
    for losses in steps:
        opt.zero_grad()
        for loss, some in losses:
            (loss(model(x[some]), y[some]) * scale).backward()
        opt.step()
    found = {pytree.keystr(k): v for k, v in pytree.tree_flatten_with_path(opt.store.state_dict())[0]}
    tensors = {k: v for k, v in found.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return tensors | {"outputs": torch.as_tensor(opt.recorder.outputs.rms)}


@pytest.mark.parametrize("scale", [1.0, 256.0])
@pytest.mark.parametrize("k", [2, 4, 12])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_means_over_parts_are_the_mean_over_the_batch(kind: str, k: int, scale: float) -> None:
    found = measured(kind, [[(over(k), some) for some in parts(k)]], scale)
    torch.testing.assert_close(found, measured(kind, [[(ENTROPY, slice(N))]]))
    found = measured(kind, [[(lambda o, y: ENTROPY(o, y) * (1 / k), some) for some in parts(k)]], scale)
    torch.testing.assert_close(found, measured(kind, [[(ENTROPY, slice(N))]]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fewer_parts_at_the_end_of_the_data_are_divided_by_as_much(kind: str) -> None:
    four = [(over(4), some) for some in parts(4)]
    for rest in (1, 3):
        found = measured(kind, [four, four[:rest]])
        together = slice(rest * N // 4)
        torch.testing.assert_close(found, measured(kind, [[(ENTROPY, slice(N))], [(ENTROPY, together)]]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_that_are_not_divided_stay_as_they_are(kind: str) -> None:
    found = measured(kind, [[(ENTROPY, some) for some in parts(3)]])
    torch.testing.assert_close(found, measured(kind, [[(ENTROPY, slice(N))]]))


# Losses that are the user's own as they stand: the mean of the losses of single samples is the oracle.
OWN: dict[str, list[tuple[Loss, slice]]] = {
    "half, once": [(over(2), slice(N))],
    "halves of three": [(over(2), some) for some in parts(3)],
    "unequal": [(over(4), slice(6)), (over(4 / 3), slice(6, 12))],
}


def alone(loss: Loss) -> Loss:
    return lambda o, y: torch.stack([loss(o[n : n + 1], y[n : n + 1]) for n in range(len(o))]).mean()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_losses_that_are_scaled_otherwise(kind: str, name: str) -> None:
    found = measured(kind, [OWN[name]])
    torch.testing.assert_close(found, measured(kind, [[(alone(loss), some) for loss, some in OWN[name]]]))


@pytest.mark.parametrize("kind", ["KFAC", "EKFAC"])
def test_two_losses_of_one_output_are_no_two_parts(kind: str) -> None:
    def twice(first: Loss, second: Loss) -> dict[str, Tensor]:
        with seeded(3):
            model, x = nn.Linear(4, C).double(), torch.randn(N, 4).double()
            y = torch.randint(C, (2, N))
        opt = OPTIMIZERS[kind](model, lr=0.0, inject=empirical(), damping=0.1)
        o = model(x)
        first(o, y[0]).backward(retain_graph=True)
        second(o, y[1]).backward()
        opt.step()
        found = {pytree.keystr(k): v for k, v in pytree.tree_flatten_with_path(opt.store.state_dict())[0]}
        return {k: v for k, v in found.items() if isinstance(v, Tensor) and v.is_floating_point()}

    torch.testing.assert_close(twice(over(2), over(2)), twice(alone(over(2)), alone(over(2))))


@pytest.mark.parametrize("kind", ["KFAC", "EKFAC"])
def test_two_heads_are_no_two_parts(kind: str) -> None:
    def heads() -> nn.Module:
        return Raw(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, C), b=nn.Linear(4, C))

    both = lambda loss: lambda o, y: loss(o[0], y) / 2 + loss(o[1], y) / 2
    found = measured(kind, [[(both(ENTROPY), slice(N))]], make=heads)
    torch.testing.assert_close(found, measured(kind, [[(both(alone(ENTROPY)), slice(N))]], make=heads))
