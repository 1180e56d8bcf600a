"""Matrices in other precisions, and in files that are mapped into memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.operators import BlockDiagonal, Operator, Space, load
from curvature.operators.kronecker import EigenKronecker, Kronecker
from support.cases.case import seeded
from support.structures import ARRANGEMENTS, Source, structures

D = 0.7
PRODUCTS = ("matrix_free", "exact_ways", "inverse", "total")  # known by them alone
BFLOAT16 = 2.0**-8  # half of the distance from one to the next number


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.to(expected) - expected).norm() / expected.norm())


@pytest.mark.parametrize("structure", structures())
def test_precisions(structure: str, device: str, tmp_path: Path) -> None:
    op, matrix = structures()[structure](Source(device))
    if structure in PRODUCTS:
        with pytest.raises(TypeError, match="materialise"):
            op.to(torch.float32)
        with pytest.raises(TypeError, match=r"MatrixFree|Inverse"):
            op.save(tmp_path / "whole.pt")
        return
    single = op.to(torch.float32)
    assert type(single) is type(op) and single.space.dtype == torch.float32 and op.to(torch.float64) is op
    assert error(single.to_dense(), matrix) < 1e-6
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    assert error(single.solve(eye.float(), D), torch.linalg.inv(matrix + D * eye)) < 1e-5
    half = op.to(torch.bfloat16)
    assert half.space == op.space
    assert error(half.to_dense(), matrix) < 3 * BFLOAT16
    half.save(tmp_path / "half.pt")
    op.save(tmp_path / "whole.pt")
    for again in (load(tmp_path / "half.pt"), load(tmp_path / "half.pt", lazily=True)):
        assert torch.equal(again.to_dense(), half.to_dense()) and repr(again) == repr(half)
    whole = load(tmp_path / "whole.pt")
    assert type(whole) is type(op) and whole.space == op.space and repr(whole) == repr(op)
    for again in (whole, load(tmp_path / "whole.pt", lazily=True)):
        torch.testing.assert_close(again.to_dense(), matrix)
        assert again.to_dense().device == matrix.device
    moved = load(tmp_path / "whole.pt", device="cpu")
    assert moved.space.device == moved.to_dense().device == torch.device("cpu")


METHODS = {
    "product": lambda op, v: op @ v,
    "solve": lambda op, v: op.solve(v, D),
    "inverse": lambda op, v: op.inverse(D) @ v,
    "logdet": lambda op, v: op.logdet(D),
    "sample": lambda op, v: op.sample(2, damping=D),
    "diagonal": lambda op, v: op.diagonal(),
    "trace": lambda op, v: op.trace(),
    "frobenius_norm": lambda op, v: op.frobenius_norm(),
    "eigenvalues": lambda op, v: op.eigenvalues(),
    "largest": lambda op, v: op.eigenvalues(2),
    "scaled": lambda op, v: (2 * op).damped(D).to_dense(),
    "factored": lambda op, v: op.factored_damping(D).to_dense(),
    "compact": lambda op, v: op.compact().to_dense(),
    "sum": lambda op, v: (op + op).to_dense(),
    "again": lambda op, v: op.to(torch.float32).to_dense(),
}


def layers() -> BlockDiagonal:
    source = Source()
    blocks: list[Operator] = []
    for name, arrangement in (("a", ARRANGEMENTS["bias"]), ("b", ARRANGEMENTS["matrix"])):
        names = [f"{name}.weight", f"{name}.bias"][: len(arrangement.shapes)]
        space = source.space(**dict(zip(names, arrangement.shapes, strict=True)))
        inputs = space.size // 3
        blocks.append(Kronecker(space, arrangement, source.definite(1, d=3), source.definite(1, d=inputs)))
    names = [name for block in blocks for name in block.space.names]
    shapes = [shape for block in blocks for shape in block.space.shapes]
    return BlockDiagonal(Space(tuple(names), tuple(shapes), torch.float64), blocks)


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_what_is_mapped(method: str, tmp_path: Path) -> None:
    op = layers()
    op.save(tmp_path / "K.pt")
    v = Source().normal(op.space.size)
    lazily = load(tmp_path / "K.pt", lazily=True)
    torch.testing.assert_close(METHODS[method](lazily, v), METHODS[method](op, v))


def test_kronecker_factors_are_kept_in_their_eigenbasis() -> None:
    """Of a factor of low rank, rounding to 16 bits makes an indefinite one; of its eigenvalues it does not."""
    source, arrangement = Source(dtype=torch.float32), ARRANGEMENTS["matrix"]
    space = source.layer(arrangement)
    op = Kronecker(space, arrangement, source.definite(1, d=3, rank=1), source.definite(1, d=4, rank=2))
    kept = op.to(torch.bfloat16)._decomposed()
    assert isinstance(kept, EigenKronecker) and (kept.values > -1e-6).all()
    v = source.normal(space.size)
    assert error(op.to(torch.bfloat16).solve(v, 1e-4), op.solve(v, 1e-4)) < 4 * BFLOAT16


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"expected float64, float32 or bfloat16, found torch\.float16"):
        layers().to(torch.float16)


def test_factors_of_a_model_in_single_precision_can_be_widened() -> None:
    """They are symmetric up to rounding, which is that of single precision."""
    with seeded(0):
        model, x, y = nn.Linear(12, 5), torch.randn(60, 12), torch.randint(5, (60,))
    K = curvature.kfac(model, nn.CrossEntropyLoss(), (x, y))
    wide = K.to(torch.float64)
    torch.testing.assert_close(wide.to_dense(), K.to_dense().double(), rtol=1e-5, atol=1e-8)
    tilted = K["weight"].A.clone()
    tilted[0, 0, 1] += 1e-7 * tilted[0, 0, 0]
    block = Kronecker(K["weight"].space, K["weight"].arrangement, K["weight"].B, tilted, is_symmetric=True)
    assert torch.equal(block.to(torch.float64).A, block.to(torch.float64).A.mT)
