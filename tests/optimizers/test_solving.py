"""What is solved with: layers of one form as a stack, and what stands in where there is no curvature."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvature.kronecker import KroneckerInverse
from curvature.preconditioners import Block, BlockDiagonalCurvature, invert
from optimizers import EKFAC, KFAC
from optimizers.preconditioner import VectorSolver, mean_eigenvalue
from optimizers.steps.layer_vector import LayerVector, layout_of
from support.cases.case import Raw, seeded
from support.running_blocks import STACKS, close, measure, normal_vectors
from support.training import task, train

pytestmark = pytest.mark.fast


def transposed() -> nn.Module:
    """Axes of these weights are in another order."""
    layers = [nn.ConvTranspose1d(4, 4, 3, padding=1) for _ in range(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 2))


def inputs_first() -> nn.Module:
    """These weights are the transposes of what their factors are of."""
    return Raw(lambda m, x: (x @ m.one).tanh() @ m.two @ m.three, one=(4, 5), two=(5, 4), three=(4, 5))


MODELS = STACKS | {
    "transposed": (transposed, lambda: torch.randn(6, 4, 5), 1),
    "inputs first": (inputs_first, lambda: torch.randn(6, 4), 1),
}


def curvature_of(name: str, kind: str, damping: float | None, device: str) -> tuple[nn.Module, list[Block]]:
    make, inputs, _ = MODELS[name]
    with seeded(0):
        model, x = make().to(device, torch.float64), inputs().to(device)
    store = BlockDiagonalCurvature("expand", kind)
    for _ in range(2):
        own = x.double() if x.is_floating_point() else x
        store.update_average(measure(store, model, own, normal_vectors(2)), 0.9)
        invert(store.blocks, 0.1, damping)
    return model, store.blocks


def vector_of(model: nn.Module, blocks: list[Block], dtype: torch.dtype, apart: frozenset[str]) -> LayerVector:
    """Of numbers, in the order of the blocks; those `apart` are no part of their layer's run."""
    tensors = {name: torch.sin(9 * p.detach()).to(dtype) for name, p in model.named_parameters()}
    layers = dict.fromkeys([b.names for b in blocks] + [(k,) for k in tensors if all(k not in b.names for b in blocks)])
    return LayerVector.of(layout_of(layers, tensors, lambda name: name in apart), tensors)


def assert_solved(model: nn.Module, blocks: list[Block], vector: LayerVector, tolerance: float) -> None:
    alone = {}
    for block in blocks:
        alone |= dict(zip(block.names, block.solve([vector[name] for name in block.names]), strict=True))
    solver = VectorSolver(vector.layout, blocks)
    for _ in range(2):
        found = solver(vector)
        for name, u in found.items():
            expected = alone.get(name)
            close(u, vector[name] / mean_eigenvalue(blocks).to(u) if expected is None else expected, tolerance)
            assert u.dtype == vector[name].dtype and u.shape == vector[name].shape


@pytest.mark.parametrize("damping", [None, 0.1])
@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
@pytest.mark.parametrize("name", MODELS)
def test_together_is_alone(name: str, kind: str, damping: float | None, device: str, monkeypatch):
    model, blocks = curvature_of(name, kind, damping, device)
    sizes: list[int] = []
    stacked = KroneckerInverse.stacked
    counted = lambda own, others: sizes.append(len(others)) or stacked(own, others)
    monkeypatch.setattr(KroneckerInverse, "stacked", counted)
    assert_solved(model, blocks, vector_of(model, blocks, torch.float64, frozenset()), 1e-12)
    assert len(sizes) == MODELS[name][2]


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_without_curvature_a_gradient_is_divided_by_the_mean_eigenvalue_of_all(optimizer: type[KFAC]):
    model, loss, x, y = task("mlp", n=16)
    opt = optimizer(model)
    train(model, opt, loss, x, y, 2)
    blocks = opt.preconditioner.blocks
    mean = sum(float(b.mean_eigenvalue) * b.dimension for b in blocks) / sum(b.dimension for b in blocks)
    trained = {**opt.trained(), "extra": torch.nn.Parameter(torch.zeros(3))}
    gradients = {name: torch.arange(float(p.numel())).view_as(p) for name, p in trained.items()}
    found = opt.preconditioner.solve(gradients, trained)
    torch.testing.assert_close(found["extra"], gradients["extra"] / mean)


def test_the_mean_eigenvalue_is_that_of_the_last_renewal():
    """Of a parameter without curvature, also where nothing was inverted."""
    model, loss, x, y = task("mlp", n=16)
    opt = KFAC(model, factor_every=1, decompose_every=3)
    train(model, opt, loss, x, y, 20)
    gradients = {name: torch.ones_like(p) for name, p in opt.trained().items()} | {"extra": torch.ones(3)}
    parts, found = opt.preconditioner, []
    vector = LayerVector.of(layout_of([b.names for b in parts.blocks], gradients, lambda name: 0), gradients)
    for _ in range(4):
        parts.solve_vector(vector, opt.trained())
        x = 2 * x
        opt.zero_grad()
        loss(model(x), y).backward()
        parts.renew({}, opt.trained(), opt._context(None).options)
        opt.monitor.steps += 1
        found.append(parts.solve_vector(vector, opt.trained())["extra"])
        torch.testing.assert_close(found[-1], parts.solve(gradients, opt.trained())["extra"])
    assert len({float(u[0]) for u in found}) == 4
