"""Attention in blocks of queries: values and derivatives of attention written out, and no tensor of all scores."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import curvature
from curvature.functional import AttentionInBlocks
from curvature.functional import attention as attention
from support.cases.case import Raw, seeded
from support.memory import Largest
from support.oracles.attention import attention as written_out

LOSS = nn.CrossEntropyLoss()
QUERIES, KEYS = 11, 14


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 queries, with blocks of queries, heads and samples left over."""
    monkeypatch.setattr(attention, "CACHED_SCORES", 130)
    monkeypatch.setattr(attention, "LEAST_QUERIES", 3)


def blind() -> Tensor:
    """Query 2 sees no key."""
    mask = torch.rand(QUERIES, KEYS) > 0.3
    mask[2] = False
    return mask


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True, "scale": 0.3},
    "mask": lambda: {"attn_mask": blind()},
    "padding": lambda: {"attn_mask": torch.rand(2, 1, 1, KEYS) > 0.3},
    "each its own mask": lambda: {"attn_mask": torch.rand(2, 4, QUERIES, KEYS) > 0.3},
    "bias": lambda: {"attn_mask": torch.randn(4, QUERIES, KEYS).double().masked_fill(~blind(), -math.inf)},
    "fewer keys than queries": lambda: {"is_causal": False},
    "groups of queries": lambda: {"enable_gqa": True},
}


def inputs(call: str, width: int) -> list[Tensor]:
    keys = 5 if call == "fewer keys than queries" else KEYS
    heads = 2 if call == "groups of queries" else 4
    shapes = (2, 4, QUERIES, 6), (2, heads, keys, 6), (2, heads, keys, width)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def derivatives(run: Callable[..., Tensor], given: list[Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """All that builders and products take, along fixed directions."""
    out = run(*given, **options)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    sent, along = draw(2, *out.shape), [draw(2, *x.shape) for x in given]
    probe = sent[0].clone().requires_grad_()
    slopes = torch.autograd.grad(out, given, probe, create_graph=True)
    second = lambda *directions: torch.autograd.grad(slopes, [*given, probe], directions, retain_graph=True)
    values = tuple(x.detach() for x in given)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, d[0]) for x, d in zip(given, along, strict=True)]
        change = forward_ad.unpack_dual(run(*duals, **options)).tangent
    return {
        "value": out,
        "gradients": torch.autograd.grad(out, given, sent[0], retain_graph=True),
        "gradients of a batch": torch.vmap(lambda v: torch.autograd.grad(out, given, v, retain_graph=True))(sent),
        "second": second(*(d[0] for d in along)),
        "second of a batch": torch.vmap(second)(*along),
        "change": change,
        "changes of a batch": torch.vmap(lambda *d: torch.func.jvp(lambda *x: run(*x, **options), values, d)[1])(
            *along
        ),
    }


@pytest.mark.fast
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("call", "width"), [*((call, 6) for call in CALLS), ("causal", 7), ("bias", 7)]
)  # torch's kernels take one width for all
def test_every_derivative_is_that_of_attention_written_out(call: str, width: int) -> None:
    with seeded(0):
        given, options = inputs(call, width), CALLS[call]()
    found = derivatives(attention.attention, given, options)
    assert type(found["value"].grad_fn.next_functions[0][0]).__name__ != "SafeSoftmaxBackward0"
    expected = derivatives(written_out, given, options)
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def attend(m: Any, x: Tensor) -> Tensor:
    """A causal block, and one of `nn.MultiheadAttention` that sees no padding."""
    h = m.tokens(x)
    heads = m.qkv(h).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    h = h + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
    h = h + m.other(h, h, h, key_padding_mask=x == 0, need_weights=False)[0]
    return m.head(torch.tanh(h).mean(1))


def text(length: int) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        layers = {"tokens": nn.Embedding(7, 4), "qkv": nn.Linear(4, 12), "head": nn.Linear(4, 3)}
        model = Raw(attend, **layers, other=nn.MultiheadAttention(4, 2, batch_first=True))
        return model.double(), torch.randint(1, 7, (2, length)), torch.randint(3, (2,))


BUILDERS: dict[str, Callable[..., Tensor]] = {
    "fisher_diagonal": lambda *data: torch.cat([d.flatten() for d in curvature.fisher_diagonal(*data).values()]),
    "kfac": lambda *data: curvature.kfac(*data).to_dense(),
    "fisher_blocks": lambda *data: curvature.fisher_blocks(*data).to_dense(),
    "gauss_newton": lambda model, *data: curvature.gauss_newton(model, *data) @ directions(model, 1),
    "gauss_newton, columns": lambda model, *data: curvature.gauss_newton(model, *data) @ directions(model, 2),
    "hessian": lambda model, *data: curvature.hessian(model, *data) @ directions(model, 1),
}


def directions(model: nn.Module, columns: int) -> Tensor:
    size = sum(p.numel() for p in model.parameters())
    return torch.randn(size, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("builder", BUILDERS)
def test_matrices_are_those_of_attention_written_out(builder: str, request: pytest.FixtureRequest) -> None:
    model, x, y = text(9)
    x[0, 6:] = 0
    expected = BUILDERS[builder](model, LOSS, (x, y))
    request.getfixturevalue("small_blocks")
    torch.testing.assert_close(BUILDERS[builder](model, LOSS, (x, y)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("builder", ["fisher_diagonal", "kfac", "gauss_newton", "hessian"])
def test_scores_are_never_held(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first call, which learns the structure, and later."""
    monkeypatch.setattr(attention, "CACHED_SCORES", 1 << 13)
    model, x, y = text(200)
    for _ in range(2):
        with Largest() as largest:
            BUILDERS[builder](model, LOSS, (x, y))
        assert largest.entries < 200**2


@pytest.mark.usefixtures("small_blocks")
def test_what_blocks_cannot_do_is_left_to_torch() -> None:
    """Dropout keeps its random numbers, a learnt bias its gradient, checkpointing what it saves."""
    with seeded(0):
        given = inputs("plain", 6)
        bias = torch.randn(QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
    for options in ({"dropout_p": 0.5}, {"attn_mask": bias}):
        with sdpa_kernel(SDPBackend.MATH), seeded(2):
            expected = F.scaled_dot_product_attention(*given, **options)
        with sdpa_kernel(SDPBackend.MATH), AttentionInBlocks(), seeded(2):
            found = F.scaled_dot_product_attention(*given, **options)
        assert torch.equal(found, expected)
    (slope,) = torch.autograd.grad(found.sum(), bias)
    assert slope.norm() > 0
    with AttentionInBlocks():
        again = checkpoint(F.scaled_dot_product_attention, *given, use_reentrant=False)
    torch.autograd.grad(again.sum(), given)  # outside


@pytest.mark.usefixtures("small_blocks")
def test_low_precision_is_raised() -> None:
    with seeded(0):
        given = [x.detach().to(torch.bfloat16) for x in inputs("plain", 6)]
    found = attention.attention(*given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, written_out(*(x.float() for x in given)).to(torch.bfloat16), rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.attention(*(x.float() for x in given))
        assert found.dtype == F.scaled_dot_product_attention(*(x.float() for x in given)).dtype
    torch.testing.assert_close(found, written_out(*(x.float() for x in given)).to(torch.bfloat16), rtol=0, atol=0)
