"""Blocks of one layout are solved as a stack: the solutions are those of each block alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from curvature.kronecker import KroneckerInverse
from curvature.preconditioners import Block, BlockDiagonalCurvature, invert
from support.cases.case import Raw, seeded
from support.running_blocks import close, measure, normal_vectors

pytestmark = pytest.mark.fast

Make = Callable[[], nn.Module]


def linear() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3))


def convolutions() -> nn.Module:
    """Two layers of one layout, with groups."""
    layers = [nn.Conv1d(4, 4, 3, groups=groups, padding=1) for groups in (2, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 2, bias=False))


def different() -> nn.Module:
    """Sides of one size, of weights that are arranged in different ways."""
    run = lambda m, x: m.linear(x) + m.convolution(x.unflatten(1, (4, 3)))[..., 0]
    return Raw(run, linear=nn.Linear(12, 4), convolution=nn.Conv1d(4, 4, 3))


def lookups() -> nn.Module:
    """The sides of embeddings are diagonals."""
    words = [nn.Embedding(5, 3) for _ in range(2)]
    run = lambda m, x: m.head((m.one(x) + m.other(x.flip(1))).tanh())
    return Raw(run, one=words[0], other=words[1], head=nn.Linear(3, 3))


def norms() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))


MODELS: dict[str, tuple[Make, Callable[[], Tensor], int]] = {  # with the number of stacks
    "linear": (
        lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)),
        lambda: torch.randn(6, 4),
        1,
    ),
    "convolutions": (convolutions, lambda: torch.randn(6, 4, 5), 1),
    "different": (different, lambda: torch.randn(6, 12), 0),
    "lookups": (lookups, lambda: torch.randint(5, (6, 4)), 1),
    "norms": (norms, lambda: torch.randn(6, 4), 1),
}


def curvature_of(name: str, kind: str, damping: float | None, device: str) -> tuple[nn.Module, list[Block]]:
    make, inputs, _ = MODELS[name]
    with seeded(0):
        model, x = make().to(device, torch.float64), inputs().to(device)
        x = x.double() if x.is_floating_point() else x
        store = BlockDiagonalCurvature("expand", kind)
        for _ in range(2):
            store.update_average(measure(store, model, x, normal_vectors(2)), 0.9)
            invert(store.blocks, 0.1, damping)
    return model, store.blocks


def solved(model: nn.Module, blocks: list[Block], dtype: torch.dtype = torch.float64) -> list[tuple[list[Tensor], ...]]:
    """The solutions of all blocks together, and of each alone."""
    parameters = dict(model.named_parameters())
    found = []
    for kind in dict.fromkeys(map(type, blocks)):
        alike = [b for b in blocks if type(b) is kind]
        gradients = [[torch.sin(9 * parameters[k].detach()).to(dtype) for k in b.names] for b in alike]
        together = kind.solve_all(alike, gradients)
        found += list(zip(together, [b.solve(own) for b, own in zip(alike, gradients, strict=True)], strict=True))
    return found


@pytest.mark.parametrize("damping", [None, 0.1])
@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
@pytest.mark.parametrize("name", MODELS)
def test_together_is_alone(name: str, kind: str, damping: float | None, device: str, monkeypatch):
    sizes: list[int] = []
    stacked = KroneckerInverse.stacked
    monkeypatch.setattr(KroneckerInverse, "stacked", lambda parts: sizes.append(len(parts)) or stacked(parts))
    model, blocks = curvature_of(name, kind, damping, device)
    for together, alone in solved(model, blocks):
        for one, other in zip(together, alone, strict=True):
            close(one, other, 1e-12)
            assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
    assert len(sizes) == MODELS[name][2]


def test_solutions_have_the_precision_of_the_gradients():
    model, blocks = curvature_of("linear", "kronecker", None, "cpu")
    for together, alone in solved(model, blocks, torch.bfloat16):
        assert all(u.dtype == torch.bfloat16 for u in (*together, *alone))
        assert all(torch.equal(u, v) for u, v in zip(together, alone, strict=True))


@pytest.mark.parametrize("size", [256, 257])
def test_large_inverses_are_not_copied(size: int):
    eye = torch.eye(size)[None]
    assert (KroneckerInverse(eye, eye[:, :3, :3]).form is None) == (size > 256)
    assert KroneckerInverse(eye[:, :, :1], eye, None, (False, False), (torch.ones(1), None)).form is None
    assert KroneckerInverse(eye[:, :3, :3], eye[:, :3, :3], None, (True, False)).form is None
