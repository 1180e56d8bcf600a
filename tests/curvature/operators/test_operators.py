"""Every fast way of every structure against torch's dense linear algebra, and the forms, errors and files of all."""

import importlib.util
import itertools
import math
import sys

import pytest
import torch

from curvature.operators import BlockDiagonal, Dense, Diagonal, Space, load
from curvature.operators import space as space_module
from curvature.operators.kronecker import Kronecker
from curvature.operators.matrix_free import MatrixFree
from curvature.operators.space import MAX_DIRECT_SIZE
from support.combinations import member
from support.structures import ARRANGEMENTS, Source, blocks, dense, diagonal, kronecker, matrix_free, structures, total

D = 0.3
DTYPES = (torch.float64, torch.float32)


eye = lambda op: torch.eye(op.space.size, dtype=op.space.dtype, device=op.space.device)
shifted = lambda matrix, damping: matrix + damping * torch.eye(len(matrix)).to(matrix)
inverted = lambda matrix, damping: torch.linalg.inv(shifted(matrix, damping))


def square_of_root(op, damping):
    root = op._inverse_root(eye(op), damping)
    return root @ root.T


METHODS = {
    "product": (lambda op: op @ eye(op), lambda M: M),
    "dense": (lambda op: op.to_dense(), lambda M: M),
    "materialise": (lambda op: op.materialise().matrix, lambda M: M),
    "diagonal": (lambda op: op.diagonal(), lambda M: M.diagonal()),
    "trace": (lambda op: op.trace(), lambda M: M.trace()),
    "eigenvalues": (lambda op: op.eigenvalues(), torch.linalg.eigvalsh),
    "eigenvalues, largest": (lambda op: op.eigenvalues(3), lambda M: torch.linalg.eigvalsh(M)[-3:]),
    "negative, largest": (lambda op: (-op).eigenvalues(2), lambda M: torch.linalg.eigvalsh(-M)[-2:]),
    "norm": (lambda op: op.frobenius_norm(), torch.linalg.matrix_norm),
    "shifted, norm": (lambda op: (-op).damped(D).frobenius_norm(), lambda M: shifted(-M, D).norm()),
    "det": (lambda op: op.det(), torch.det),
    "negative, det damped": (lambda op: (-op).det(D), lambda M: torch.det(shifted(-M, D))),
    "solve": (lambda op: op.solve(eye(op)), lambda M: inverted(M, 0)),
    "solve damped": (lambda op: op.solve(eye(op), D), lambda M: inverted(M, D)),
    "inverse": (lambda op: op.inverse() @ eye(op), lambda M: inverted(M, 0)),
    "inverse damped": (lambda op: op.inverse(D).to_dense(), lambda M: inverted(M, D)),
    "inverse of inverse": (lambda op: op.inverse(D).solve(eye(op)), lambda M: shifted(M, D)),
    "inverse, solved": (lambda op: op.inverse(D).solve(eye(op), 2.0), lambda M: inverted(inverted(M, D), 2.0)),
    "inverse, logdet": (lambda op: op.inverse(D).logdet(), lambda M: -torch.logdet(shifted(M, D))),
    "inverse, eigenvalues": (lambda op: op.inverse(D).eigenvalues(), lambda M: torch.linalg.eigvalsh(inverted(M, D))),
    "logdet": (lambda op: op.logdet(), torch.logdet),
    "logdet damped": (lambda op: op.logdet(D), lambda M: torch.logdet(shifted(M, D))),
    "root": (lambda op: square_of_root(op, 0.0), lambda M: inverted(M, 0)),
    "root damped": (lambda op: square_of_root(op, D), lambda M: inverted(M, D)),
    "scaled": (lambda op: (2 * op).solve(eye(op), D), lambda M: inverted(2 * M, D)),
    "scaled, logdet": (lambda op: (op / 4).logdet(D), lambda M: torch.logdet(M / 4 + D * torch.eye(len(M)).to(M))),
    "scaled, root": (lambda op: square_of_root(op * 3.0, D), lambda M: inverted(3 * M, D)),
    "scaled, inverse": (lambda op: (op * 3.0).inverse(D).to_dense(), lambda M: inverted(3 * M, D)),
    "scaled, trace": (lambda op: (3 * op).trace(), lambda M: 3 * M.trace()),
    "negative": (lambda op: (-op).eigenvalues(), lambda M: torch.linalg.eigvalsh(-M)),
    "negative, solved": (lambda op: (-op).solve(eye(op), 50.0), lambda M: inverted(-M, 50.0)),
    "negative, logdet": (lambda op: (-2 * op).logdet(80.0), lambda M: torch.logdet(shifted(-2 * M, 80.0))),
    "nothing": (lambda op: (0 * op).solve(eye(op), D), lambda M: torch.eye(len(M)).to(M) / D),
    "damped": (lambda op: op.damped(D).to_dense(), lambda M: shifted(M, D)),
    "damped, solved": (lambda op: op.damped(D).solve(eye(op), D), lambda M: inverted(M, 2 * D)),
    "damped, scaled": (lambda op: (2 * op.damped(D)).diagonal(), lambda M: 2 * M.diagonal() + 2 * D),
    "sum": (lambda op: (op + op).to_dense(), lambda M: 2 * M),
    "sum, diagonal": (lambda op: (op + 2 * op).diagonal(), lambda M: 3 * M.diagonal()),
    "sum, solved": (lambda op: (op + op).solve(eye(op), D), lambda M: inverted(2 * M, D)),
    "sum, damped": (lambda op: (op + op + op).damped(D) @ eye(op), lambda M: shifted(3 * M, D)),
    "difference": (lambda op: (op - 3 * op) @ eye(op), lambda M: -2 * M),
    "difference, trace": (lambda op: (2 * (op - 3 * op)).trace(), lambda M: -4 * M.trace()),
    "scipy": (lambda op: torch.from_numpy(op.to_scipy() @ eye(op).cpu().numpy()).to(op.space.device), lambda M: M),
}


@pytest.mark.parametrize("structure", structures())
def test_as_dense(structure, device):
    there = [method for method in METHODS if method != "scipy" or importlib.util.find_spec("scipy")]
    for method, dtype in itertools.product(there, DTYPES):
        with member(f"{method} in {dtype}"):
            op, matrix = structures()[structure](Source(device, dtype))
            of_operator, of_matrix = METHODS[method]
            actual, expected = of_operator(op), of_matrix(matrix.double())
            assert actual.dtype == dtype and actual.device == op.space.device
            tolerance, scale = 1e-10, expected.abs().max()
            if dtype == torch.float32:
                tolerance, scale = 1e-4, scale * torch.linalg.cond(matrix.double()).clamp(min=1)
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(scale))


def first(device):
    op, matrix = dense(Source(device))
    return op.space, matrix


def test_files_that_are_no_matrix(tmp_path):
    torch.save({"a": 1}, tmp_path / "other.pt")
    torch.save({"structure": "Unheard"}, tmp_path / "new.pt")
    (tmp_path / "text.pt").write_text("matrix")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    for lazily in (False, True):
        for name in ("other.pt", "text.pt", "module.pt"):
            with pytest.raises(ValueError, match=f"{name} holds no matrix"):
                load(tmp_path / name, lazily=lazily)
        with pytest.raises(ValueError, match="unknown structure 'Unheard'"):
            load(tmp_path / "new.pt", lazily=lazily)


@pytest.mark.parametrize("structure", structures())
def test_samples(structure, device):
    """Their second moments within five standard errors; new draws each time; the global random state untouched."""
    op, matrix = structures()[structure](Source(device))
    state = torch.get_rng_state()
    draws = op.sample(20_000, damping=D)
    assert torch.equal(torch.get_rng_state(), state)
    assert draws.shape == (20_000, op.space.size) and op.sample(damping=D).shape == (op.space.size,)
    assert not torch.equal(op.sample(damping=D), op.sample(damping=D))
    seeded = [op.sample(damping=D, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*seeded)
    expected = inverted(matrix, D)
    moments = draws.T @ draws / len(draws)
    spread = expected.diagonal()
    error = ((expected.square() + spread[:, None] * spread) / len(draws)).sqrt()
    assert ((moments - expected).abs() <= 5 * error).all()
    assert (draws.mean(0).abs() <= 5 * (spread / len(draws)).sqrt()).all()


def test_arithmetic_of_different_spaces(device):
    op, other = dense(Source(device))[0], diagonal(Source(device))[0]
    with pytest.raises(ValueError, match="same space"):
        op + other
    with pytest.raises(ValueError, match="same space"):
        op - dense(Source(device, torch.float32))[0]
    with pytest.raises(TypeError):
        op + 1
    with pytest.raises(TypeError):
        op * "2"
    with pytest.raises(ValueError, match="times or plus nan"):
        op * math.nan
    with pytest.raises(ValueError, match="times or plus inf"):
        diagonal(Source(device))[0].damped(math.inf)


@pytest.mark.parametrize(
    ("vector", "error", "text"),
    [
        (torch.zeros(7).double(), ValueError, r"shape \(8,\), found \(7,\)"),
        (torch.zeros(2, 8).double(), ValueError, r"shape \(8, 8\), found \(2, 8\)"),
        (torch.zeros(8, 1, 1).double(), ValueError, r"shape \(8, 1\), found \(8, 1, 1\)"),
        (torch.zeros(()).double(), ValueError, r"shape \(8,\), found \(\)"),
        (torch.zeros(8, dtype=torch.complex128), ValueError, "found torch.complex128"),
        (torch.zeros(8, device="meta"), ValueError, "found meta"),
        ([0.0] * 8, TypeError, "found list"),
        ({"a": torch.zeros(3, 2)}, KeyError, "b is missing, c is missing"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(()), "c": torch.zeros(1), "d": 0}, KeyError, "d is unknown"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(1)}, ValueError, r"a should .* \(3, 2\)"),
        ({"a": torch.zeros(1, 3, 2), "b": torch.zeros(1), "c": torch.zeros(1, 1)}, ValueError, r"flattened .*\(1, 8\)"),
    ],
)
def test_vectors_that_do_not_fit(vector, error, text):
    op, _ = dense(Source())
    for call in (op.__matmul__, op.solve):
        with pytest.raises(error, match=text):
            call(vector)


def test_space(device):
    weight, bias = torch.zeros(2, 3, device=device, dtype=torch.bfloat16), torch.zeros(2, device=device)
    space = Space.of({"w": weight, "b": bias})
    assert (space.names, space.shapes, space.sizes, space.size) == (("w", "b"), ((2, 3), (2,)), (6, 2), 8)
    assert space.dtype == torch.float32 and space.device == bias.device
    assert Space.of({"w": weight.double()}).dtype == Space.of({"b": bias}, torch.float64).dtype == torch.float64
    flat = torch.arange(16.0, device=device).reshape(2, 8)
    assert space.split(flat)["w"].shape == (2, 2, 3)
    assert torch.equal(space.flatten(dict(reversed(space.split(flat).items()))), flat)
    swapped = space.subspace(["b", "w"])
    assert swapped.names == ("b", "w") and swapped.size == 8 and swapped != space
    assert torch.equal(flat[0][space.positions(["b", "w"])], swapped.flatten(space.split(flat[0])))
    assert Space.restore(space.state()) == space and hash(space) == hash(Space.restore(space.state()))
    with pytest.raises(KeyError, match=r"no parameters \['x'\]"):
        space.subspace(["x"])
    with pytest.raises(ValueError, match=r"should have shape \(8,\), found \(7,\)"):
        space.split(flat[0, :7])
    spread = Space.of({"w": weight, "b": bias.to("meta")})
    assert spread.devices == {"w": weight.device, "b": torch.device("meta")} and Space.restore(spread.state()) == spread
    assert spread.device == weight.device and spread.subspace(["b"]).device == torch.device("meta")
    assert spread.subspace(["w"]) == Space.of({"w": weight}) and Space.restore(spread.state(), device) == space
    with pytest.raises(ValueError, match=f"b should be on meta, found {bias.device}"):
        spread.flatten({"w": weight, "b": bias})
    with pytest.raises(ValueError, match="float32 or float64, not in torch.float16"):
        Space(("a",), ((1,),), torch.float16)
    for names in ((), ("a", "a"), ("a", "b", "c")):
        with pytest.raises(ValueError, match="different names"):
            Space(names, ((1,), (1,)))


def test_blocks_over_rows_of_parameters(device, tmp_path):
    """Against the dense matrix, with positions that are counted by hand."""
    source = Source(device)
    space = source.space(w=(4, 2), b=(4,), other=(3,))
    rows = {("w[1:4]", "b[1:4]"): [*range(2, 8), 9, 10, 11], ("other",): [12, 13, 14], ("b[0:1]", "w[0:1]"): [8, 0, 1]}
    expected, made = torch.zeros(15, 15, dtype=torch.float64, device=device), []
    for names, positions in rows.items():
        where = torch.tensor(positions, device=device)
        assert torch.equal(space.positions(names), where)
        made.append(Dense(space.subspace(names), source.definite(d=len(positions))))
        expected[where[:, None], where] = made[-1].matrix
    K, V = BlockDiagonal(space, made), source.normal(15, 2)
    K.save(tmp_path / "K.pt")
    for op in (K, load(tmp_path / "K.pt", device=device)):
        torch.testing.assert_close(op.to_dense(), expected)
        torch.testing.assert_close(op @ V, expected @ V)
        torch.testing.assert_close(op.diagonal(), expected.diagonal())
        torch.testing.assert_close((op + K).to_dense(), 2 * expected)
    assert [block.space.shapes for block in K.blocks.values()] == [((3, 2), (3,)), ((3,),), ((1,), (1, 2))]
    for name in ("w[0:5]", "w[2:2]", "v[0:1]"):
        with pytest.raises(KeyError, match="no parameters"):
            space.subspace([name])
    of_w, unit = space.subspace(["w"]), lambda part: Diagonal(part, torch.ones(part.size).to(V))
    for name in ("w[0:1]", "w[0:3]"):  # a row is in no block, or in two
        with pytest.raises(ValueError, match="blocks should cover each parameter once"):
            BlockDiagonal(of_w, [unit(of_w.subspace([rows])) for rows in (name, "w[2:4]")])


def test_parts_that_do_not_fit(device):
    space, matrix = first(device)
    with pytest.raises(ValueError, match="not symmetric"):
        Dense(space, matrix + matrix.triu(1))
    with pytest.raises(ValueError, match=r"the matrix should have shape \(8, 8\)"):
        Dense(space, matrix[:7, :7])
    with pytest.raises(ValueError, match="not finite"):
        Dense(space, matrix / 0)
    with pytest.raises(ValueError, match="not finite"):
        Diagonal(space, matrix.diagonal() * math.nan)
    rounded = matrix + 1e-13 * matrix.triu(1)
    assert torch.equal(Dense(space, rounded).matrix, Dense(space, rounded).matrix.T)
    one = Diagonal(space.subspace(["a"]), torch.ones(6).to(matrix))
    with pytest.raises(ValueError, match=r"missing \['b', 'c'\], not in the space \[\], more than once \['a'\]"):
        BlockDiagonal(space, [one, one])
    with pytest.raises(ValueError, match="a block is over"):
        BlockDiagonal(space, [Diagonal(Space(("a", "b", "c"), ((8,), (), ())), torch.ones(10))])
    with pytest.raises(ValueError, match="product with the matrix should have shape"):
        MatrixFree(space, lambda V: V[:3]) @ matrix
    with pytest.raises(ValueError, match="not symmetric"):
        MatrixFree(space, lambda V: matrix.tril() @ V).materialise()


@pytest.mark.parametrize("signs", list(itertools.product([1.0, -1.0], repeat=3)))
def test_asymmetry_that_random_signs_may_miss(signs):
    """The difference of a cyclic shift and its transpose sends a vector of equal entries to zero."""
    flip = torch.tensor(signs).diag()
    with pytest.raises(ValueError, match="not symmetric"):
        Dense(Space(("a",), ((3,),)), flip @ torch.eye(3).roll(1, 0) @ flip)


def test_blocks(device):
    op, _ = blocks(Source(device))
    assert list(op.blocks) == ["shift", "w", "rest"] and isinstance(op.blocks["w"], Kronecker)
    assert isinstance(2 * op, BlockDiagonal) and isinstance(op.inverse(D), BlockDiagonal)
    assert "3 blocks" in repr(op) and "Kronecker(15 x 15" in repr(op) and "w, b" in repr(op)


def test_large_matrices_are_not_built(monkeypatch):
    monkeypatch.setattr(space_module, "DENSE_LIMIT", 6)
    made = [matrix_free(Source())[0], diagonal(Source())[0], total(Source())[0], blocks(Source())[0]]
    made.append(kronecker(ARRANGEMENTS["bias"])(Source())[0])
    for op in made:
        with pytest.raises(ValueError, match=r"dense \d+ x \d+ matrix .* limit of 6.*conjugate_gradient"):
            op.to_dense()
    for call in (lambda: made[0].logdet(1.0), made[0].sample, made[0].eigenvalues, made[0].diagonal):
        with pytest.raises(ValueError, match="limit of 6"):
            call()


def test_matrix_free_above_the_direct_size(device):
    size = MAX_DIRECT_SIZE + 1
    source = Source(device)
    values = 1 + source.positive(size)
    op = MatrixFree(source.space(a=(size,)), lambda V: values[:, None] * V)
    v = source.normal(size, 2)
    torch.testing.assert_close(op.solve(v, D), v / (values + D)[:, None], rtol=1e-8, atol=1e-8)
    inverse = op.inverse(D)
    torch.testing.assert_close(inverse @ v, v / (values + D)[:, None], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(inverse.solve(v, 2.0), v / (1 / (values + D) + 2)[:, None], rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="singular or indefinite"):
        (op.damped(-1.5)).solve(v)


def test_matrix_free_prefers_exact_ways(device):
    space, matrix = first(device)

    def fail(_):
        raise AssertionError("a product was made")

    ways = {"diagonal": lambda: matrix.diagonal(), "dense": lambda: matrix, "trace": lambda: matrix.trace()}
    op = MatrixFree(space, fail, **ways)
    torch.testing.assert_close(op.trace(), matrix.trace())
    torch.testing.assert_close(op.diagonal(), matrix.diagonal())
    torch.testing.assert_close(MatrixFree(space, fail, trace=matrix.trace).trace(), matrix.trace())
    torch.testing.assert_close(op.solve(matrix), torch.eye(8).to(matrix))


def test_scipy_uses_them(device):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    op, matrix = kronecker(ARRANGEMENTS["grouped"])(Source(device))
    largest = linalg.eigsh(op.to_scipy(), k=3, return_eigenvectors=False)
    torch.testing.assert_close(torch.from_numpy(largest).sort().values, torch.linalg.eigvalsh(matrix)[-3:].cpu())
    v = Source(seed=1).normal(op.space.size)
    found, failed = linalg.cg(op.to_scipy(), v.numpy(), rtol=1e-12, maxiter=1000)
    assert not failed
    torch.testing.assert_close(torch.from_numpy(found), torch.linalg.solve(matrix.cpu(), v), rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="the matrix is real"):
        op.to_scipy() @ (1j * v.numpy())


def test_scipy_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        dense(Source())[0].to_scipy()
