"""Second derivatives of bags of embeddings, of which torch's kernel has none, against sums of rows written out."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import KFAC
from support.cases.case import Raw, seeded
from support.combinations import in_turn
from support.comparisons import matches
from support.training import closure_of

LOSS = nn.CrossEntropyLoss()
LENGTHS = [3, 0, 2, 4, 1]
WORDS = torch.tensor([1, 2, 2, 4, 3, 3, 1, 5, 2, 0])
OFFSETS = torch.tensor([0, 3, 3, 5, 9])
BAGS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("sum", "mean", "max")},
    **{f"{mode} padding": {"mode": mode, "padding_idx": 2} for mode in ("sum", "mean", "max")},
    "last padding": {"mode": "mean", "padding_idx": -5},
    **{f"{mode} offsets": {"mode": mode, "include_last_offset": False} for mode in ("sum", "mean", "max")},
    "last offset": {"mode": "mean", "include_last_offset": True},
    "weights": {"mode": "sum", "weights": torch.linspace(0.3, 1.2, 10)},
    "weights offsets": {"mode": "sum", "weights": torch.linspace(0.3, 1.2, 10), "include_last_offset": True},
    "long rows": {"mode": "sum", "max_norm": 0.5},
}


def by_hand(
    weight: Tensor, rows: list[list[int]], mode: str, weights: Any = None, padding_idx: int | None = None
) -> Tensor:
    """Bag by bag, by indexing alone."""
    frozen = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + len(weight)
    found, scale = [], iter(torch.ones(10) if weights is None else weights)
    for words in rows:
        some = [next(scale) * weight[word] for word in words if word != frozen]
        whole = torch.stack([*some, 0 * weight[0]][: max(len(some), 1)])
        found.append({"sum": whole.sum(0), "mean": whole.mean(0), "max": whole.amax(0)}[mode])
    return torch.stack(found)


def models(name: str) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """With torch's bags, and with bags written out; one embedding and one head for both."""
    options = dict(BAGS[name])
    weights, last = options.pop("weights", None), options.pop("include_last_offset", None)
    given = {} if weights is None else {"per_sample_weights": weights.double()}
    with seeded(0):
        words, head, x = nn.Embedding(7, 3), nn.Linear(3, 4), torch.randn(5, 3).double()
        if "max_norm" in options:
            words.weight.data *= 0.5 / words.weight.norm(dim=1, keepdim=True)
    if last is None:
        rows = [WORDS[2 * k : 2 * k + 2].tolist() for k in range(5)]
        call = functools.partial(F.embedding_bag, WORDS.view(5, 2), **options)
        given = {k: w.view(5, 2) for k, w in given.items()}
    else:
        rows = [part.tolist() for part in WORDS.split(LENGTHS)]
        offsets = torch.cat([OFFSETS, torch.tensor([10])]) if last else OFFSETS
        call = functools.partial(F.embedding_bag, WORDS, offsets=offsets, include_last_offset=last, **options)
    plain = {k: options[k] for k in ("mode", "padding_idx") if k in options}
    bags = Raw(lambda m, x: m.head((x * call(m.words.weight, **given)).tanh()), words=words, head=head)
    each = given["per_sample_weights"].flatten() if given else None
    rows_of = lambda m: by_hand(m.words.weight, rows, weights=each, **plain)
    written = Raw(lambda m, x: m.head((x * rows_of(m)).tanh()), words=words, head=head)
    return bags.double(), written, (x, torch.tensor([0, 3, 1, 2, 0]))


@in_turn(name=BAGS, matrix=["gauss_newton", "hessian"])
def test_products(name: str, matrix: str) -> None:
    bags, written, data = models(name)
    build = getattr(curvature, matrix)
    matches(build(bags, LOSS, data).to_dense(), build(written, LOSS, data).to_dense())
    with seeded(1):
        v = torch.randn(build(bags, LOSS, data).shape[0], 2).double()
    matches(build(bags, LOSS, data) @ v, build(written, LOSS, data) @ v)


def test_scaled_gradients_are_refused() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
    H = curvature.hessian(model, LOSS, (torch.arange(24).reshape(8, 3) % 5, torch.arange(8) % 3))
    with pytest.raises(RuntimeError, match="no Hessian of the loss.*embedding_bag"):
        H @ torch.ones(H.shape[0])


@pytest.mark.parametrize("name", ["mean", "weights offsets"])
def test_adaptive_steps_know_the_curvature(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, _, (x, y) = models(name)
    opt = KFAC(model, adaptive=True)
    closure = closure_of(model, opt, LOSS, x, y)
    losses = [float(opt.step(closure)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and "slopes alone" not in caplog.text
