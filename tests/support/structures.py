"""Random small matrices of every structure, each with the same matrix as torch alone builds it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.operators import BlockDiagonal, Dense, Diagonal, Operator, Scaled, Space, Sum
from curvature.operators.kronecker import EigenKronecker, Kronecker
from curvature.operators.matrix_free import Inverse, MatrixFree
from curvature.terms.basic import AffineLayout

# How layers lie in (g, o, i): plain, with a bias, grouped convolution, transposed matrix, grouped transposed
# convolution, scale and shift of a normalisation.
ARRANGEMENTS = {
    "matrix": AffineLayout(((3, 4),), 1, 3),
    "bias": AffineLayout(((3, 4), (3,)), 1, 3),
    "grouped": AffineLayout(((4, 3, 2), (4,)), 2, 2),
    "transposed": AffineLayout(((4, 3), (3,)), 1, 3, (1, 3, 4), (0, 2, 1)),
    "grouped transposed": AffineLayout(((4, 3, 2), (6,)), 2, 3, (2, 3, 2, 2), (0, 2, 1, 3)),
    "scale": AffineLayout(((5,), (5,)), 5, 1),
}


@dataclass
class Source:
    """Random tensors from a seed, on a device."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).to(self.device, self.dtype)

    def positive(self, *shape: int) -> Tensor:
        return 0.2 + self.normal(*shape).square()

    def definite(self, *batch: int, d: int, rank: int | None = None) -> Tensor:
        """Positive definite, or of a given rank."""
        factor = self.normal(*batch, d, rank or d + 2)
        return factor @ factor.mT / factor.shape[-1]

    def orthogonal(self, *batch: int, d: int) -> Tensor:
        return torch.linalg.qr(self.normal(*batch, d, d)).Q

    def space(self, **shapes: tuple[int, ...]) -> Space:
        return Space(tuple(shapes), tuple(shapes.values()), self.dtype, torch.device(self.device))

    def layer(self, arrangement: AffineLayout) -> Space:
        return self.space(**dict(zip(("weight", "bias"), arrangement.shapes, strict=False)))


Pair = tuple[Operator, Tensor]


def dense(source: Source) -> Pair:
    matrix = source.definite(d=8)
    return Dense(source.space(a=(3, 2), b=(), c=(1,)), matrix), matrix


def diagonal(source: Source) -> Pair:
    values = source.positive(8)
    return Diagonal(source.space(a=(3, 2), b=(2,)), values), values.diag()


def matrix_free(source: Source) -> Pair:
    matrix = source.definite(d=8)
    return MatrixFree(source.space(a=(3, 2), b=(2,)), lambda V: matrix @ V), matrix


def exact_ways(source: Source) -> Pair:
    matrix = source.definite(d=8)
    ways = {"diagonal": matrix.diagonal, "dense": lambda: matrix, "trace": matrix.trace}
    return MatrixFree(source.space(a=(3, 2), b=(2,)), lambda V: matrix @ V, **ways), matrix


def inverse(source: Source) -> Pair:
    inner, matrix = matrix_free(source)
    return Inverse(inner, 0.5), torch.linalg.inv(matrix + 0.5 * torch.eye(8).to(matrix))


def scaled(source: Source) -> Pair:
    inner, matrix = dense(source)
    return Scaled(inner, 2.5, 0.25), 2.5 * matrix + 0.25 * torch.eye(8).to(matrix)


def reflected(source: Source) -> Pair:
    """A negative factor, with a shift that makes it definite again."""
    inner, matrix = dense(source)
    return Scaled(inner, -0.1, 5.0), 5 * torch.eye(8).to(matrix) - 0.1 * matrix


def total(source: Source) -> Pair:
    (first, one), (second, two) = matrix_free(source), diagonal(source)
    return Sum([first, second]), one + two


def places(arrangement: AffineLayout, device: str) -> Tensor:
    """Where in the flat vector the entries (g, o, i) are."""
    sizes = [torch.Size(shape).numel() for shape in arrangement.shapes]
    flat = torch.arange(arrangement.dimension, device=device).split(sizes)
    shaped = [part.reshape(shape) for part, shape in zip(flat, arrangement.shapes, strict=True)]
    return arrangement.to_matrices(shaped)


def entries(arrangement: AffineLayout, rows: Tensor, columns: Tensor) -> Tensor:
    """``kron(rows, columns)`` of full factors entry by entry."""
    where = places(arrangement, "cpu").tolist()
    matrix = rows.new_zeros(arrangement.dimension, arrangement.dimension)
    for g, group in enumerate(where):
        for o, first in enumerate(group):
            for p, second in enumerate(group):
                matrix[torch.tensor(first)[:, None], torch.tensor(second)] = rows[g, o, p] * columns[g]
    return matrix


def kronecker(
    arrangement: AffineLayout, diagonal_rows: bool = False, diagonal_columns: bool = False
) -> Callable[[Source], Pair]:
    def build(source: Source) -> Pair:
        g, o, i = places(arrangement, "cpu").shape
        rows, columns = source.definite(g, d=o), source.definite(g, d=i)
        rows = rows.diagonal(dim1=1, dim2=2) if diagonal_rows else rows
        columns = columns.diagonal(dim1=1, dim2=2) if diagonal_columns else columns
        whole = [side.diag_embed() if side.ndim == 2 else side for side in (rows, columns)]
        return Kronecker(source.layer(arrangement), arrangement, rows, columns), entries(arrangement, *whole)

    return build


def eigen(arrangement: AffineLayout, rows: bool = True, columns: bool = True) -> Callable[[Source], Pair]:
    def build(source: Source) -> Pair:
        g, o, i = places(arrangement, "cpu").shape
        U = source.orthogonal(g, d=o) if rows else None
        V = source.orthogonal(g, d=i) if columns else None
        values = source.positive(g, o, i)
        eye = [torch.eye(d).to(values).expand(g, d, d) for d in (o, i)]
        Q = entries(arrangement, eye[0] if U is None else U, eye[1] if V is None else V)
        spread = values.new_zeros(arrangement.dimension)
        spread[places(arrangement, source.device)] = values
        return EigenKronecker(source.layer(arrangement), arrangement, U, V, values), Q @ spread.diag() @ Q.T

    return build


def blocks(source: Source) -> Pair:
    """Parameters of the blocks interleave in the flat vector, and the blocks come in another order."""
    space = source.space(w=(3, 4), scale=(2, 2), b=(3,), rest=(3,), shift=(1,))
    rows, columns = source.definite(1, d=3), source.definite(1, d=5)
    full, values = source.definite(d=5), source.positive(3)
    parts = [
        Dense(space.subspace(["shift", "scale"]), full),
        Kronecker(space.subspace(["w", "b"]), ARRANGEMENTS["bias"], rows, columns),
        Diagonal(space.subspace(["rest"]), values),
    ]
    where = torch.tensor([22, *range(12, 16), *range(12), *range(16, 19), *range(19, 22)])
    matrix = full.new_zeros(space.size, space.size)
    middle = entries(ARRANGEMENTS["bias"], rows, columns)
    matrix[where[:, None], where] = torch.block_diag(full, middle, values.diag())
    return BlockDiagonal(space, parts), matrix


def structures() -> dict[str, Callable[[Source], Pair]]:
    """All of them by name."""
    found = {
        f.__name__: f for f in (dense, diagonal, matrix_free, exact_ways, inverse, scaled, reflected, total, blocks)
    }
    for name, arrangement in ARRANGEMENTS.items():
        found[f"kronecker {name}"] = kronecker(arrangement)
        found[f"eigen {name}"] = eigen(arrangement)
    for side in ((True, False), (False, True), (True, True)):
        found[f"kronecker diagonal {side}"] = kronecker(ARRANGEMENTS["grouped transposed"], *side)
        found[f"eigen identity {side}"] = eigen(ARRANGEMENTS["grouped transposed"], *(not s for s in side))
    return found
