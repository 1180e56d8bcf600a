"""Optimizers whose decompositions fail: inverses are kept, or replaced by the diagonal; counted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import curvature
from curvature.linalg.decompositions import full_precision
from curvature.preconditioners import BatchFacts, BlockDiagonalCurvature, invert, residual_blocks
from curvature.preconditioners.kronecker import KroneckerBlock
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.combinations import in_pairs, in_turn
from support.faults import FAULTS, TRUE, Fault, raising
from support.training import assert_same, closure_of, copied, curvature_of, task, train

DEGENERATE = {
    "zero": torch.zeros(1, 3, 3), "one": torch.full((1, 1, 1), 2.0), "nothing": torch.zeros(1, 1, 1),
    "rank one": torch.ones(1, 4, 4), "huge": 1e18 * torch.ones(1, 3, 3), "tiny": 1e-18 * torch.eye(3)[None],
}  # fmt: skip


@in_pairs(rows=DEGENERATE, columns=DEGENERATE, kind=["kronecker", "eigen"])
def test_degenerate_factors_have_finite_inverses(rows: str, columns: str, kind: str):
    block = block_of(DEGENERATE[rows].clone(), DEGENERATE[columns].clone(), kind)
    invert([block], 0.05)
    shape = (len(DEGENERATE[rows][0]), len(DEGENERATE[columns][0]))
    sizes = [side.diagonal(dim1=1, dim2=2).mean().item() or 1.0 for side in (DEGENERATE[rows], DEGENERATE[columns])]
    gradient = torch.ones(shape) * math.prod(sizes) ** 0.5  # of the size that belongs to such factors
    (found,) = block.solve([gradient])
    assert found.isfinite().all() and (gradient.double() * found.double()).sum() > 0


def small() -> tuple[nn.Module, Any, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))
    return model, *task("mlp", n=32)[1:]


def block_of(rows: Tensor, columns: Tensor, kind: str = "kronecker") -> KroneckerBlock:
    """A block of these factors, from a recorded pass of a layer of their size."""
    layer = nn.Linear(columns.shape[1], rows.shape[1], bias=False)
    factors = BlockDiagonalCurvature(kind=kind)
    with curvature.capture(layer) as tape:
        output = layer(torch.ones(2, columns.shape[1]))
    factors.update_average(factors.measure(tape, [output], [torch.ones(1, *output.shape)], BatchFacts(2)), 0.9)
    (block,) = factors.blocks
    assert isinstance(block, KroneckerBlock)
    block.row_side, block.column_side = (block.scheme.side(k, x) for k, x in enumerate((rows, columns)))
    return block


OPTIMIZERS: dict[str, Callable[[nn.Module], KFAC]] = {
    "kfac": KFAC, "damped": lambda m: KFAC(m, damping=1e-3), "ekfac": EKFAC,
    "damped ekfac": lambda m: EKFAC(m, damping=1e-3),
    **{s: lambda m, s=s: NaturalGradient(m, solver=s) for s in ("woodbury", "cg")},
}  # fmt: skip


@in_turn(fault=FAULTS[::2], name=OPTIMIZERS)
def test_training_goes_on_with_what_there_was(name: str, fault: Fault, faulty, monkeypatch, caplog):
    model, loss, x, y = small()
    opt = OPTIMIZERS[name](model)
    train(model, opt, loss, x, y, 4)
    for _ in range(2):
        faulty(fault)
        with caplog.at_level(logging.WARNING, "optimizers"):
            values = train(model, opt, loss, x, y, 2)
        monkeypatch.undo()
        values += train(model, opt, loss, x, y, 6)
    assert all(map(math.isfinite, values)) and opt.stats()["kept"] >= 1 and opt.steps == 20
    assert all(x.isfinite().all() for x in (copied(model) | curvature_of(opt)).values())
    assert sum("keeps the inverse" in record.message for record in caplog.records) == 1  # the first time only


@pytest.mark.training_run
@in_turn(fault=FAULTS[::2], name=OPTIMIZERS)
def test_from_the_first_step_on_the_diagonal_stands_in(name: str, fault: Fault, faulty, monkeypatch):
    model, loss, x, y = small()
    opt = OPTIMIZERS[name](model)
    faulty(fault)
    values = train(model, opt, loss, x, y, 2)
    assert opt.stats()["diagonal"] >= 1 and all(map(math.isfinite, values))
    monkeypatch.undo()
    values += train(model, opt, loss, x, y, 12)
    assert all(map(math.isfinite, values)) and values[-1] < values[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_failures_in_a_row_are_an_error_that_names_the_layer(name: str, faulty):
    model, loss, x, y = small()
    opt = OPTIMIZERS[name](model)
    train(model, opt, loss, x, y, 4)
    faulty(raising)
    before = copied(model)
    with pytest.raises(torch.linalg.LinAlgError, match="1.weight.*3 times in a row"):
        train(model, opt, loss, x, y, 8)  # the third renewal is at step 11
    assert not all(torch.equal(before[k], p) for k, p in copied(model).items())  # those before the third were taken


@pytest.mark.parametrize("fault", FAULTS)
def test_adaptive_steps_are_not_taken_without_a_decomposition(fault: Fault, faulty, monkeypatch):
    model, loss, x, y = small()
    opt = KFAC(model, adaptive=True, decompose_every=100)
    closure = closure_of(model, opt, loss, x, y)
    for _ in range(3):
        opt.step(closure)
    before = copied(model)
    faulty(fault, on=lambda matrix: len(matrix) <= 3)  # of the quadratic model
    opt.step(closure)
    assert_same(copied(model), before)
    assert not opt.history[-1]["accepted"] and opt.stats()["failures"] == 1
    monkeypatch.undo()
    opt.step(closure)
    assert opt.history[-1]["accepted"]


class Products(TorchFunctionMode):
    """Notes the precision that products and solutions are computed in."""

    names = {"matmul", "mm", "bmm", "baddbmm_", "einsum", "cholesky_solve", "linear"}

    def __init__(self, seen: dict[str, list[list[str]]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.names:
            self.seen.setdefault(func.__name__, []).append(precision())
        return func(*args, **(kwargs or {}))


def precision() -> list[str]:
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    return [place.fp32_precision for place in places]


@pytest.fixture
def reduced() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("options", [{}, {"damping": 0.1}], ids=["", "damping"])
@pytest.mark.parametrize("kind", [KFAC, EKFAC, NaturalGradient])
def test_no_product_of_a_step_is_in_reduced_precision(kind: type[KFAC], options: dict[str, Any], monkeypatch, reduced):
    """And no decomposition; what was set before is set after, also when something fails."""
    seen: dict[str, list[list[str]]] = {}
    for name in ("eigh", "cholesky_ex"):
        spy = lambda matrix, name=name: (seen.setdefault(name, []).append(precision()), TRUE[name](matrix))[1]
        monkeypatch.setattr(torch.linalg, name, spy)
    true = KroneckerBlock.measure
    spy_of = lambda *args: (seen.setdefault("moments", []).append(precision()), true(*args))[1]
    monkeypatch.setattr(KroneckerBlock, "measure", spy_of)
    expected = precision()
    assert expected != ["ieee", "ieee"]
    model, loss, x, y = small()
    opt = kind(model, **options)
    for _ in range(3):
        loss(model(x), y).backward()
        with Products(seen):
            opt.step()
    assert sum(map(len, seen.values())) > 10
    assert {name: found for name, found in seen.items() if any(own != ["ieee", "ieee"] for own in found)} == {}
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert precision() == expected and torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("matrix", ["kfac", "ekfac", "dense", "least squares", "residual blocks"])
def test_no_solution_is_in_reduced_precision(matrix: str, reduced: None):
    model, loss, x, y = small()
    seen: dict[str, list[list[str]]] = {}
    rows = curvature.Jacobian.of(model(x).square().sum(1), model)
    g = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    make = curvature.gauss_newton if matrix == "dense" else getattr(curvature, matrix, None)
    operator = None if make is None else make(model, loss, (x, y))
    operator = operator.materialise() if matrix == "dense" else operator
    with Products(seen):
        if matrix == "least squares":
            curvature.LeastSquares(rows).precondition(g, 1.0)
            curvature.LeastSquares(rows).solve(torch.ones(len(x)))
        elif matrix == "residual blocks":
            for block in residual_blocks(rows):
                block.solve(block.inverse(1.0), g)
        else:
            assert operator.solve(g, damping=1.0).keys() == g.keys()
    assert seen and all(own == ["ieee", "ieee"] for found in seen.values() for own in found), seen
