"""How matrices and diagonals depend on batches, arguments and random injections, in memory that stays bounded; the
catalogue is in test_catalogue.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature
from support.builders import BUILDERS, evaluated
from support.cases.case import Case, Raw, floats, indices, seeded
from support.cases.matrices import batches
from support.cases.refused import batch_statistics
from support.combinations import member
from support.comparisons import matches
from support.memory import Largest
from support.moments import source, within_five_errors
from support.oracles import brute_force as oracle
from support.oracles.kronecker import affine_layers, kronecker
from support.snapshots import unchanged


def dense(builder: str, model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    """(P, P) of what `curvature` returns, nothing of the user's being changed."""
    with unchanged(model, data if isinstance(data, tuple) else ()):
        return getattr(curvature, builder)(model, loss, data, **options).to_dense()


def diagonal(model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    with unchanged(model, data if isinstance(data, tuple) else ()):
        return flat(model, curvature.fisher_diagonal(model, loss, data, **options))


def flat(model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    assert {k: v.shape for k, v in tensors.items()} == {k: p.shape for k, p in oracle.trainable(model).items()}
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


class HalfProduct(torch.autograd.Function):
    """v g, whose second derivative is there only once, whatever it says."""

    twice_differentiable = True

    @staticmethod
    def forward(context: Any, v: Tensor, g: Tensor) -> Tensor:
        context.save_for_backward(v, g)
        return v * g

    @staticmethod
    def backward(context: Any, sent: Tensor) -> tuple[Tensor, Tensor]:
        v, g = context.saved_tensors
        return sent * g.detach(), sent * v


def test_a_hessian_needs_the_loss():
    with pytest.raises(TypeError, match="loss: expected a loss module or a callable.*NoneType"):
        curvature.hessian(nn.Linear(3, 2), None, (torch.randn(5, 3), None))


def test_wrong_second_derivatives_are_no_hessian():
    model = Raw(lambda m, x: x * HalfProduct.apply(m.v, m.g), v=(3,), g=(3,)).double()
    with pytest.raises(RuntimeError, match="not symmetric or not finite"):
        dense("hessian", model, nn.MSELoss(), (floats(3)(4).double(), floats(3)(4).double()))


@pytest.mark.parametrize("builder", BUILDERS)
def test_loader(builder: str):
    """A DataLoader that shuffles, its last batch small; only its own random state is used."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = floats(3)(10).double(), indices(3)(10)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))
    source = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=source)
    whole = dense(builder, model, loss, (x, y))
    matches(dense(builder, model, loss, loader, progress=True), whole, 1e-12)


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_tuple_of_batches(builder: str):
    """Of three, since two are a pair (x, y)."""
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), nn.CrossEntropyLoss()
    data = floats(3)(6).double(), indices(3)(6)
    parts = tuple(batches(data, 3, 1, 2))
    made = getattr(curvature, builder)(model, loss, parts)
    columns = torch.eye(made.space.size, dtype=torch.float64)
    matches(made @ columns, dense(builder, model, loss, data))
    matches(made.to_dense(), made @ columns)


def test_batches_of_different_length():
    """Sentences of another length in each batch: a mean over all tokens, so a sample weighs by its length."""
    model = Raw(lambda m, x: m.head(m.words(x)).mT, words=nn.Embedding(5, 3), head=nn.Linear(3, 5)).double()
    with seeded(0):
        data = [(torch.randint(5, (n, t)), torch.randint(5, (n, t))) for n, t in ((2, 3), (1, 5), (3, 1))]
    data[0][1][0, :2] = -100
    weights = torch.tensor([1, 3, 5, 1, 1, 1], dtype=torch.float64) / 12
    expected = oracle.Matrices(model, nn.CrossEntropyLoss(), data, weights)
    for builder in ("gauss_newton", "fisher", "empirical_fisher"):
        matches(dense(builder, model, nn.CrossEntropyLoss(), data), getattr(expected, builder))
    matches(diagonal(model, nn.CrossEntropyLoss(), data), expected.fisher.diagonal())


@pytest.mark.parametrize("builder", BUILDERS)
def test_sparse_gradients(builder: str):
    with seeded(0):
        parts = {"words": nn.Embedding(5, 3, sparse=True), "head": nn.Linear(3, 5)}
        model, x, y = (
            Raw(lambda m, x: m.head(m.words(x).tanh()).mT, **parts).double(),
            indices(5, 4)(3),
            indices(5, 4)(3),
        )
    found = getattr(curvature, builder)(model, nn.CrossEntropyLoss(), (x, y))
    model.words.sparse = False
    expected = getattr(oracle.Matrices(model, nn.CrossEntropyLoss(), (x, y)), builder)
    model.words.sparse = True
    matches(found.to_dense(), expected)
    matches(found @ torch.ones(len(expected), dtype=torch.float64), expected.sum(1))


@pytest.mark.parametrize("case, norm", list(batch_statistics()), ids=lambda value: getattr(value, "id", ""))
def test_batch_statistics_are_refused_by_name(case: Case, norm: str):
    model, loss = case.build()
    data = case.batch(model)
    for builder in (*BUILDERS, "fisher_diagonal", "fisher_blocks", "kfac", "ekfac"):
        with member(builder), pytest.raises(ValueError, match=norm), unchanged(model, data):
            evaluated(builder, model, loss, data)


X, Y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one tensor": ({"data": X}, TypeError, "pair"),
    "tensors": ({"data": [X, X, X]}, TypeError, "pairs"),
    "triples": ({"data": [(X, X, Y)]}, TypeError, "pairs"),
    "no batch": ({"data": []}, ValueError, "no batch"),
    "an empty batch": ({"data": (X[:0], Y[:0])}, ValueError, "empty"),
    "text as input": ({"data": ("words", Y)}, TypeError, "x: expected a tensor"),
    "one label too few": ({"data": (X, Y[1:])}, ValueError, "4 samples"),
    "nothing to train": ({"model": nn.Linear(3, 3).requires_grad_(False)}, ValueError, "no parameter requires"),
    "no data": ({"data": None}, TypeError, "data: expected a pair"),
    "a function as model": ({"model": lambda x: x}, TypeError, "Module"),
    "a class as model": (
        {"model": nn.Linear},
        TypeError,
        "Module, found the class Linear, no instance of it",
    ),
    "parameters as model": ({"model": nn.Linear(3, 3).parameters()}, TypeError, "Module, found generator"),
    "the name of a loss": ({"loss": "cross_entropy"}, TypeError, "loss: expected a loss module or a callable"),
    "a class as loss": (
        {"loss": nn.CrossEntropyLoss},
        TypeError,
        r"loss: .* the class CrossEntropyLoss: pass CrossEntropyLoss\(\)",
    ),
    "a loss without reduction": ({"loss": nn.CrossEntropyLoss(reduction="none")}, ValueError, "none"),
    "the name of an injection": ({"inject": "exact"}, TypeError, "inject"),
    "an injection's function": ({"inject": curvature.exact}, TypeError, "inject"),
    "no likelihood": (
        {"loss": lambda o, t: o.square().mean(), "inject": curvature.sampled()},
        ValueError,
        "likelihood",
    ),
}


AT_ONCE = {"one tensor", "nothing to train", "the name of a loss", "the name of an injection"}
AT_ONCE |= {f"{what} as model" for what in ("a function", "a class", "parameters")}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str):
    """Before the first product, where that can be."""
    wrong, error, text = REFUSALS[name]
    arguments = {"model": nn.Linear(3, 3), "loss": nn.CrossEntropyLoss(), "data": (X, Y), **wrong}
    without_injection = [] if "inject" in wrong else ["gauss_newton", "empirical_fisher", "hessian"]
    for builder in ("fisher", "fisher_diagonal", "fisher_blocks", "kfac", "ekfac", *without_injection):
        with member(builder), pytest.raises(error, match=text):
            made = getattr(curvature, builder)(**arguments)
            assert name not in AT_ONCE, "too late"
            made.to_dense()


def test_an_exception_changes_nothing():
    """In the middle of the data, as the second batch is too long."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    for builder in (*BUILDERS, "fisher_diagonal", "kfac"):
        with unchanged(model), pytest.raises((ValueError, RuntimeError)):
            evaluated(builder, model, nn.CrossEntropyLoss(), [(X, Y), (torch.zeros(4, 7), Y)])


DRAWS = 120
RANDOM = [curvature.sampled(), curvature.sampled(3), curvature.propagated(2), curvature.isotropic(2)]


def two_places() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A layer used at three places, and targets of which some are ignored."""
    model = Raw(lambda m, x: m.layer(x).mT, layer=nn.Linear(1, 3)).double()
    y = indices(3, 3)(4)
    y[0, :2] = -100
    return model, (floats(3, 1)(4).double(), y)


@pytest.mark.parametrize("inject", RANDOM, ids=repr)
def test_random_injections_have_the_right_mean(inject: curvature.Injection):
    with seeded(0):
        model, data = two_places()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    of = oracle.Matrices(model, loss, data)
    masses = {"curvature": lambda *sample: oracle.output_masses(*sample).diag()} if "isotropic" in repr(inject) else {}
    expected = of.isotropic if masses else of.fisher
    draws = source(5)
    options: dict[str, Any] = {"inject": inject, "generator": draws}
    whole = torch.stack([curvature.fisher(model, loss, data, **options).to_dense() for _ in range(DRAWS)])
    within_five_errors(whole, expected)
    blocks = torch.stack([curvature.fisher_blocks(model, loss, data, **options).to_dense() for _ in range(DRAWS)])
    within_five_errors(blocks, expected)
    diagonal = [flat(model, curvature.fisher_diagonal(model, loss, data, **options)) for _ in range(DRAWS)]
    within_five_errors(torch.stack(diagonal), expected.diagonal())
    factors = torch.stack([curvature.kfac(model, loss, data, **options).to_dense() for _ in range(DRAWS)])
    within_five_errors(factors, kronecker(affine_layers(of, **masses)))


def test_isotropic_needs_no_loss():
    """Then a mean over samples is assumed, each of one term: J^T J / N."""
    with seeded(0):
        model, data = two_places()
    plain = lambda output, target: output.square().sum() / 2
    of = oracle.Matrices(model, plain, data, torch.full((4,), 0.25, dtype=torch.float64))
    inject, draws = curvature.isotropic(), source(1)
    options: dict[str, Any] = {"inject": inject, "generator": draws}
    found = [curvature.fisher(model, None, data, **options).to_dense() for _ in range(DRAWS)]
    within_five_errors(torch.stack(found), of.gauss_newton)


@pytest.mark.parametrize("inject", RANDOM, ids=repr)
@pytest.mark.parametrize("builder", ["fisher", "fisher_diagonal", "fisher_blocks", "kfac", "ekfac"])
def test_a_seed_gives_the_same_numbers(builder: str, inject: curvature.Injection):
    with seeded(0):
        model, data = two_places()

    def drawn(generator: torch.Generator | None) -> Tensor:
        made = getattr(curvature, builder)(model, nn.CrossEntropyLoss(), data, inject=inject, generator=generator)
        return flat(model, made) if isinstance(made, dict) else made.to_dense()

    with unchanged(model, data):
        one, same, other = (drawn(source(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.allclose(one, other)
        assert torch.equal(drawn(None), drawn(None)), "without a generator, a seed of its own"
        draws = source(1)
        assert not torch.allclose(drawn(draws), drawn(draws)), "a generator moves on"


def words_to_words(words: int) -> nn.Module:
    """(N, T) to (N, words, T)"""
    with seeded(0):
        return Raw(lambda m, x: m.head(m.words(x)).mT, words=nn.Embedding(words, 2), head=nn.Linear(2, words))


@pytest.mark.parametrize("count, places, words, budget", [(10, 1, 1_000, 2**21), (2, 2, 300, 2**16)])
def test_memory_with_many_classes(count: int, places: int, words: int, budget: int, monkeypatch: pytest.MonkeyPatch):
    """The roots of the Hessian alone have more entries than any tensor; the diagonal has a closed form."""
    monkeypatch.setattr("curvature.matrices.passes.BACKWARD_ELEMENTS", budget)
    model = words_to_words(words)
    with seeded(0):
        x, y = indices(words, places)(count), indices(words, places)(count)
    root = count * (places * words) ** 2
    with Largest() as largest:
        found = curvature.fisher_diagonal(model, nn.CrossEntropyLoss(), (x, y))
    assert largest.entries < min(2 * budget, root), f"{largest.entries:.3g} of {root:.3g}"

    a, W = model.words(x).detach(), model.head.weight.detach()
    p = model.head(a).detach().softmax(-1)
    hessian = (p - p.square()) / (count * places)
    torch.testing.assert_close(found["head.bias"], hessian.sum((0, 1)))
    torch.testing.assert_close(found["head.weight"], torch.einsum("nto,nti->oi", hessian, a.square()))
    inner = (p @ W.square() - (p @ W).square()) / (count * places)
    expected = torch.zeros_like(W).index_add(0, x.flatten(), inner.flatten(0, 1))
    torch.testing.assert_close(found["words.weight"], expected)


def test_memory_with_a_large_vocabulary():
    """Nothing of the square of 50,000 words, where the matrix asked for has none."""
    words, loss = 50_000, nn.CrossEntropyLoss()
    model, x = words_to_words(words), indices(words, 3)(4)
    with Largest() as largest:
        found = curvature.fisher_diagonal(model, loss, (x, x), inject=curvature.sampled(2))
        assert all(value.isfinite().all() and value.any() for value in found.values())
        structure = {"head": "diagonal"}
        blocks = curvature.kfac(model, loss, (x, x), inject=curvature.empirical(), structure=structure)
        vector = {name: torch.ones_like(p) for name, p in oracle.trainable(model).items()}
        solved = blocks.solve(vector, damping=0.1)
        assert all(value.isfinite().all() for value in solved.values())
    assert largest.entries < 40 * x.numel() * words, f"{largest.entries:.3g}"
