"""Batch and instance norms where strides do not tell their layout: torch's own gradients are wrong there on a CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw

LOSS = nn.CrossEntropyLoss()
SHAPES = {"images": (3, 6, 6), "rows": (3, 3, 6)}  # after a convolution (N, 4, 4, 4) and (N, 4, 1, 4)


def batch_norm(m: nn.Module, x: Tensor) -> Tensor:
    return F.batch_norm(x, m.mean, m.var, m.scale, m.shift)


def batch_norm_written_out(m: nn.Module, x: Tensor) -> Tensor:
    channels = lambda t: t[:, None, None]
    return (x - channels(m.mean)) / channels(m.var + 1e-5).sqrt() * channels(m.scale) + channels(m.shift)


def instance_norm(m: nn.Module, x: Tensor) -> Tensor:
    return F.instance_norm(input=x, weight=m.scale, bias=m.shift)


def instance_norm_written_out(m: nn.Module, x: Tensor) -> Tensor:
    mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, unbiased=False)
    return (x - mean) / (var + 1e-5).sqrt() * m.scale[:, None, None] + m.shift[:, None, None]


NORMS = {
    "batch": (batch_norm, batch_norm_written_out),
    "instance": (instance_norm, instance_norm_written_out),
}


def tokens_of(norm: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Pixels become tokens, as in many vision transformers: what comes back has its channels last."""
    run = lambda m, x: m.head(m.token(norm(m, m.conv(x)).flatten(2).transpose(1, 2)).tanh().mean(1))
    layers = {"conv": nn.Conv2d(3, 4, 3), "token": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
    statistics = {"mean": torch.randn(4), "var": torch.rand(4) + 0.5}
    return Raw(run, **layers, **statistics, scale=(4,), shift=(4,)).double()


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("norms", NORMS.values(), ids=list(NORMS))
def test_gradients_of_norms_whose_layout_is_ambiguous(norms, shape, count):
    model, written_out = map(tokens_of, norms)
    written_out.load_state_dict(model.state_dict())
    x, y = torch.randn(count, *shape).double(), torch.arange(count) % 3
    found = curvature.per_sample_gradients(model, LOSS, x, y)
    for n in range(count):
        expected = torch.autograd.grad(LOSS(written_out(x[n : n + 1]), y[n : n + 1]), list(written_out.parameters()))
        for name, g in zip(found, expected, strict=True):
            torch.testing.assert_close(found[name][n], g, msg=lambda text, name=name: f"{name}: {text}")
    curvature.check_gradients(model, LOSS, x, y)
