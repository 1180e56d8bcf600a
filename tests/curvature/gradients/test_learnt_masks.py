"""Attention with learnt biases on its scores, shared by all samples: rules give their rows, not the general path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles import brute_force as oracle
from support.plans import plans_of
from support.rows import all_of_rows

pytestmark = pytest.mark.fast
N, TOKENS, WIDTH, HEADS, LOSS = 4, 6, 4, 2, nn.MSELoss()
DISTANCES = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
Parts = dict[str, Any]


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attended(m: Any, x: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Tokens (batch, tokens, WIDTH), projected, attended to and joined."""
    q, k, v = map(heads, m.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2).flatten(2)


def windows(m: Any, x: Tensor, shifted: bool = False) -> Tensor:
    """Swin: two windows of three tokens for each sample, a bias from a table, where shifted a mask of each window."""
    w = x.reshape(-1, 3, WIDTH)
    bias = m.table[m.where.view(-1)].view(3, 3, -1).permute(2, 0, 1)[None]
    if shifted:
        bias = bias + m.mask.repeat(len(x), 1, 1, 1)
    return attended(m, w, bias).view_as(x)


def multi_head(m: Any, x: Tensor, weights: bool) -> Tensor:
    out: Tensor = m.layer(x, x, x, attn_mask=m.mask, need_weights=weights)[0]
    return out


def grouped(m: Any, x: Tensor) -> Tensor:
    q, k = heads(m.qkv(x)[..., :WIDTH]), x[:, None, :, :2]
    return F.scaled_dot_product_attention(q, k, k, m.mask, enable_gqa=True).flatten(1)


TABLE: Parts = {"table": (2 * TOKENS - 1, HEADS), "where": DISTANCES + TOKENS - 1}
WINDOW: Parts = {"table": (5, HEADS), "where": DISTANCES[:3, :3] + 2, "mask": torch.randn(2, 1, 3, 3).double()}
BY_RULES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Parts]] = {
    "windows": (windows, WINDOW),
    "shifted windows": (lambda m, x: windows(m, x, shifted=True), WINDOW),
    "one more axis of a table": (lambda m, x: attended(m, x, m.table[m.where].permute(2, 0, 1)), TABLE),
    "embedding of buckets": (
        lambda m, x: attended(m, x, m.table(m.where).permute(2, 0, 1)[None]),
        {"table": lambda: nn.Embedding(2 * TOKENS - 1, HEADS), "where": DISTANCES + TOKENS - 1},
    ),
    "slopes": (lambda m, x: attended(m, x, -m.slopes[:, None, None] * DISTANCES.abs()), {"slopes": (HEADS,)}),
    "gathered": (
        lambda m, x: attended(m, x, m.table.gather(1, m.where.view(1, -1).expand(2, -1)).view(2, TOKENS, TOKENS)),
        {"table": (HEADS, 2 * TOKENS - 1), "where": DISTANCES + TOKENS - 1},
    ),
    "taken": (
        lambda m, x: attended(m, x, torch.take(m.table, m.where)),
        {"table": (2 * TOKENS - 1,), "where": DISTANCES + TOKENS - 1},
    ),
    "by a network": (
        lambda m, x: attended(m, x, m.net(DISTANCES[..., None].to(x)).permute(2, 0, 1)),
        {"net": lambda: nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, HEADS))},
    ),
    "one for all scores": (lambda m, x: attended(m, x, m.mask), {"mask": (TOKENS, TOKENS)}),
    "causal as well": (
        lambda m, x: attended(m, x, m.mask.masked_fill(DISTANCES < 0, -torch.inf)),
        {"mask": (TOKENS, TOKENS)},
    ),
    "grouped queries": (grouped, {"mask": (HEADS, TOKENS, TOKENS)}),
    "converted by type": (
        lambda m, x: attended(m, x.type_as(m.qkv.weight), m.mask.type_as(x)),
        {"mask": (TOKENS, TOKENS)},
    ),
    "added by hand": (
        lambda m, x: ((m.qkv(x)[..., :WIDTH] @ x.mT + m.table[m.where][..., 0].to(x)).softmax(-1) @ x),
        TABLE,
    ),
    "multi-head": (lambda m, x: multi_head(m, x, False), {"mask": (TOKENS, TOKENS)}),
    "multi-head with weights": (lambda m, x: multi_head(m, x, True), {"mask": (TOKENS, TOKENS)}),
}  # fmt: skip


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    forward, parts = BY_RULES[name]
    own = {key: part() if callable(part) else part for key, part in parts.items()}
    with seeded(0):
        layers = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "layer": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)}
        read = "layer" if name.startswith("multi") else "qkv"
        model = Raw(forward, **{read: layers[read]}, **own).double()
        x = torch.randn(N, TOKENS, WIDTH).double()
        return model, x, torch.randn_like(model(x))


@pytest.mark.parametrize("name", BY_RULES)
def test_rows_and_matrices_by_rules(name: str) -> None:
    model, x, y = problem(name)
    all_of_rows(model, LOSS, x, y, oracle.per_sample_gradients(model, LOSS, x, y))
    assert not any(plan.general for plan in plans_of(model))
    matrix = oracle.Matrices(model, LOSS, [(x, y)]).gauss_newton
    found = curvature.gauss_newton(model, LOSS, [(x[:1], y[:1]), (x[1:], y[1:])])
    matches(found.diagonal(), matrix.diagonal())
    matches(found @ torch.ones(len(matrix)).double(), matrix.sum(1))


def test_dropout_of_the_weights_is_that_of_the_pass() -> None:
    with seeded(0):
        forward = lambda m, x: attended(m, x, m.mask, dropout_p=0.3)
        model = Raw(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), mask=(TOKENS, TOKENS)).double()
        x = torch.randn(N, TOKENS, WIDTH).double()
    for _ in range(2):
        with seeded(3):
            rows = curvature.per_sample_gradients(model, LOSS, x, x.tanh())
        with seeded(3):
            LOSS(model(x), x.tanh()).backward()
        torch.testing.assert_close(
            {k: g.mean(0) for k, g in rows.items()}, {k: p.grad for k, p in model.named_parameters()}
        )
        model.zero_grad()
    assert not any(plan.general for plan in plans_of(model))
