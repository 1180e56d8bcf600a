"""Matrices of models with attention: those of attention written out, and no more scores at a time than they need."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.matrices import passes
from support.cases.case import Raw, seeded
from support.memory import Largest
from support.oracles.attention import attention as written_out

LOSS = nn.CrossEntropyLoss()


def attend(attention: Callable[..., Tensor], m: Any, x: Tensor) -> Tensor:
    """A causal block, and one whose last queries see no padding."""
    h = m.tokens(x)
    for layer, options in ((m.first, {"is_causal": True}), (m.second, {"attn_mask": (x != 0)[:, None, None]})):
        heads = layer(h).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        h = h + attention(*heads, **options).transpose(1, 2).flatten(2)
    return m.head(torch.tanh(h).mean(1))


def text(length: int, attention: Callable[..., Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        layers = {"tokens": nn.Embedding(7, 4), "first": nn.Linear(4, 12), "second": nn.Linear(4, 12)}
        model = Raw(partial(attend, attention), **layers, head=nn.Linear(4, 3)).double()
        x, y = torch.randint(1, 7, (2, length)), torch.randint(3, (2,))
    x[0, length // 2 :] = 0
    return model, x, y


def product(make: Callable[..., Any], columns: int, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    size = sum(p.numel() for p in model.parameters())
    directions = torch.randn(size, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return make(model, LOSS, (x, y)) @ directions


BUILDERS: dict[str, Callable[..., Tensor]] = {
    "fisher_diagonal": lambda m, x, y: torch.cat(
        [d.flatten() for d in curvature.fisher_diagonal(m, LOSS, x, y).values()]
    ),
    "kfac": lambda m, x, y: curvature.kfac(m, LOSS, (x, y)).to_dense(),
    "gauss_newton": partial(product, curvature.gauss_newton, 1),
    "gauss_newton, columns": partial(product, curvature.gauss_newton, 2),
    "hessian": partial(product, curvature.hessian, 1),
}


@pytest.mark.fast
@pytest.mark.parametrize("builder", BUILDERS)
def test_matrices_are_those_of_attention_written_out(builder: str) -> None:
    found, expected = (BUILDERS[builder](*text(9, one)) for one in (F.scaled_dot_product_attention, written_out))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_vectors_go_back_alone_where_scores_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four vectors no more scores are held than of one, though the layers' outputs are small."""
    model, x, y = text(60, F.scaled_dot_product_attention)
    scores = 2 * 2 * 60**2  # samples, heads, pairs of tokens
    monkeypatch.setattr(passes, "BATCHED_ELEMENTS", scores)
    with Largest() as largest:
        curvature.fisher_diagonal(model, LOSS, (x, y), curvature.sampled(4))
    assert largest.entries == scores
