"""Random injections within their errors, and memory that stays bounded; the catalogue is in test_catalogue.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, floats, indices, seeded
from support.memory import Largest
from support.moments import source, within_five_errors
from support.oracles import brute_force as oracle
from support.snapshots import unchanged


def flat(model: nn.Module, tensors: dict[str, Tensor]) -> Tensor:
    assert {k: v.shape for k, v in tensors.items()} == {k: p.shape for k, p in oracle.trainable(model).items()}
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


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
    expected = of.isotropic if "isotropic" in repr(inject) else of.fisher
    draws = source(5)
    options: dict[str, Any] = {"inject": inject, "generator": draws}
    whole = torch.stack([curvature.fisher(model, loss, data, **options).to_dense() for _ in range(DRAWS)])
    within_five_errors(whole, expected)
    blocks = torch.stack([curvature.fisher_blocks(model, loss, data, **options).to_dense() for _ in range(DRAWS)])
    within_five_errors(blocks, expected)
    diagonal = [flat(model, curvature.fisher_diagonal(model, loss, data, **options)) for _ in range(DRAWS)]
    within_five_errors(torch.stack(diagonal), expected.diagonal())


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
