"""What `curvature` does with models under ``torch.compile``: numbers and names as uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.compiled import assert_close, batch, draw, net


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    return model


loss = nn.CrossEntropyLoss()
FUNCTIONS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "per_sample_gradients": lambda m, x, y: curvature.per_sample_gradients(m, loss, x, y),
    "kfac": lambda m, x, y: {"": curvature.kfac(m, loss, (x, y)).to_dense()},
    "gauss_newton": lambda m, x, y: {"": curvature.gauss_newton(m, loss, (x, y)) @ torch.ones(count(m), 1).to(x)},
    "hessian": lambda m, x, y: {"": curvature.hessian(m, loss, (x, y)) @ torch.ones(count(m), 1).to(x)},
    "laplacian": lambda m, x, y: dict(zip("ugl", curvature.laplacian(m, x), strict=True)),
    "residual_jacobian": lambda m, x, y: curvature.residual_jacobian(m, lambda m, x: m(x)[:, 0], x),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


PAIRS = [(name, wrapped) for name in FUNCTIONS]
PAIRS += [(name, how) for name in ("per_sample_gradients", "laplacian") for how in (compiled_in_place, compiled_blocks)]


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_functions_of_a_compiled_model(name: str, how: Callable[[nn.Module], nn.Module]):
    x, y = batch(1)
    expected = FUNCTIONS[name](net(), x, y)
    model = how(net())
    assert_close(FUNCTIONS[name](model, x, y), expected)
    model(x)  # compiled with nothing of ours
    assert_close(FUNCTIONS[name](model, x, y), expected)


@pytest.mark.parametrize("how", [wrapped, compiled_in_place, compiled_blocks])
def test_capture(how: Callable[[nn.Module], nn.Module]):
    x, _ = batch(1)
    plain, model = net(), how(net())
    with curvature.capture(plain) as one:
        expected = plain(x)
    model(x)
    with curvature.capture(model) as two:
        output = model(x)
    assert [use.names for use in one.uses] == [use.names for use in two.uses]
    vectors = draw(2, *output.shape)
    for b, c in zip(one.backprops(expected, vectors), two.backprops(output, vectors), strict=True):
        torch.testing.assert_close(b, c)
