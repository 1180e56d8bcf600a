"""Inputs without one axis of samples: bags given by offsets, packed sequences, a dict as an argument. Against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import curvature
from support.cases.case import Raw, seeded
from support.comparisons import matches

LOSS = nn.CrossEntropyLoss()
WORDS = torch.tensor([1, 2, 2, 4, 3, 3, 1, 5, 2])


def plain_gradients(model: nn.Module, *pairs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Rows of the gradients of (output, target) of one sample each."""
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(LOSS(o, y), list(named.values()), materialize_grads=True) for o, y in pairs]
    return {name: torch.stack(column) for name, column in zip(named, zip(*rows, strict=True), strict=True)}


def agrees(model: nn.Module, x: Any, y: Tensor, expected: dict[str, Tensor]) -> None:
    found = curvature.per_sample_gradients(model, LOSS, x, y)
    assert list(found) == list(expected)
    for name, rows in expected.items():
        matches(found[name], rows)
    flat = torch.cat([rows.flatten(1) for rows in expected.values()], 1)
    matches(curvature.per_sample_norms(model, LOSS, x, y), flat.norm(dim=1))
    fisher = curvature.empirical_fisher(model, LOSS, (x, y))
    matches(fisher.to_dense(), flat.T @ flat / len(y))
    matches(fisher @ flat[0], flat.T @ (flat @ flat[0]) / len(y))


# Uneven, empty first and last, as many words as bags, fewer words than bags, one word each
@pytest.mark.parametrize("ends", [(3, 3, 5, 9), (0, 4, 9, 9), (0, 1, 1, 3, 3, 5, 9, 9, 9), (0, 2, 2, 2), (1, 2, 3)])
@pytest.mark.parametrize("options", [{"mode": "mean"}, {"mode": "sum", "include_last_offset": True}, {"mode": "max"}])
def test_bags(ends: tuple[int, ...], options: dict[str, Any]):
    with seeded(0):
        bag, head = nn.EmbeddingBag(6, 3, **options), nn.Linear(3, 4)
        model = Raw(lambda m, *x: m.head(m.bag(*x).tanh()), bag=bag, head=head).double()
    y, words = torch.arange(len(ends)) % 4, WORDS[: ends[-1]]
    starts = [0, *ends[:-1]]
    last = "include_last_offset" in options
    x = (words, torch.tensor([*starts, ends[-1]] if last else starts))
    one = lambda s, e: (words[s:e], torch.tensor([0, e - s] if last else [0]))
    pairs = [(model(*one(s, e)), y[n : n + 1]) for n, (s, e) in enumerate(zip(starts, ends, strict=True))]
    agrees(model, x, y, plain_gradients(model, *pairs))
    curvature.check_gradients(model, LOSS, x, y)


def test_weights_of_words():
    with seeded(0):
        model = nn.EmbeddingBag(6, 4, mode="sum").double()
        weights = torch.rand(9).double()
    y = torch.tensor([0, 1, 3])
    parts = [(0, 2), (2, 2), (2, 9)]
    one = lambda s, e: model(WORDS[s:e], torch.tensor([0]), weights[s:e])
    pairs = [(one(*part), y[n : n + 1]) for n, part in enumerate(parts)]
    agrees(model, (WORDS, torch.tensor([0, 2, 2]), weights), y, plain_gradients(model, *pairs))


@pytest.mark.parametrize(
    "names", [("words", "starts", "dense"), ("starts", "words", "dense"), ("dense", "starts", "words")]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_bags_do_not_depend_on_the_order_of_the_inputs(names: tuple[str, ...], by_name: bool):
    def run(m: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        given = kwargs or dict(zip(names, args, strict=True))
        return m.head(m.bag(given["words"], given["starts"]).tanh() + given["dense"])

    with seeded(0):
        model = Raw(run, bag=nn.EmbeddingBag(6, 3), head=nn.Linear(3, 4)).double()
        dense = torch.randn(4, 3).double()
    starts, ends, y = [0, 2, 2, 5], [2, 2, 5, 9], torch.tensor([0, 1, 3, 2])
    whole = {"words": WORDS, "starts": torch.tensor(starts), "dense": dense}

    def one(n: int) -> dict[str, Tensor]:
        return {"words": WORDS[starts[n] : ends[n]], "starts": torch.tensor([0]), "dense": dense[n : n + 1]}

    form = lambda given: {k: given[k] for k in names} if by_name else tuple(given[k] for k in names)
    pairs = [(model(**one(n)), y[n : n + 1]) for n in range(4)]
    agrees(model, form(whole), y, plain_gradients(model, *pairs))


def test_keywords_of_an_embedding_bag_in_either_order():
    with seeded(0):
        model = nn.EmbeddingBag(6, 4).double()
    offsets, y = torch.tensor([0, 2, 5]), torch.tensor([0, 1, 3])
    expected = curvature.per_sample_gradients(model, LOSS, (WORDS, offsets), y)
    for x in ({"input": WORDS, "offsets": offsets}, {"offsets": offsets, "input": WORDS}):
        agrees(model, x, y, expected)


@pytest.mark.parametrize("sizes", [(9, 7), (9, 9)])
def test_several_fields_with_offsets_of_their_own(sizes: tuple[int, int]):
    def run(m: Any, a: Tensor, a_starts: Tensor, b: Tensor, b_starts: Tensor) -> Tensor:
        return m.head(m.first(a, a_starts) * m.second(b, b_starts))

    with seeded(0):
        tables = {"first": nn.EmbeddingBag(6, 3), "second": nn.EmbeddingBag(6, 3)}
        model = Raw(run, **tables, head=nn.Linear(3, 4)).double()
    a, b, y = WORDS[: sizes[0]], WORDS.flip(0)[: sizes[1]], torch.tensor([0, 1, 3])
    ends = [[0, 2, 5, sizes[0]], [0, 4, 6, sizes[1]]]
    starts = [torch.tensor(own[:-1]) for own in ends]

    def one(n: int) -> Tensor:
        (s, e), (t, f) = (own[n : n + 2] for own in ends)
        return model(a[s:e], torch.tensor([0]), b[t:f], torch.tensor([0]))

    pairs = [(one(n), y[n : n + 1]) for n in range(3)]
    agrees(model, (a, starts[0], b, starts[1]), y, plain_gradients(model, *pairs))


# As many items as users, and a table shared by all samples
@pytest.mark.parametrize("items", [6, 3])
def test_identifiers_that_look_like_offsets(items: int):
    """A bag reads them in rows of one, or makes the same offsets itself: they are inputs like any others."""

    def run(m: Any, users: Tensor, items: Tensor) -> Tensor:
        own = m.own(users, torch.arange(len(users), device=users.device))
        read = m.items(items[:, None])
        return m.head((m.users(users) + own).tanh() * (read if len(read) == len(users) else read.sum(0)))

    with seeded(0):
        layers = {"users": nn.Embedding(6, 3), "own": nn.EmbeddingBag(6, 3), "items": nn.EmbeddingBag(6, 3)}
        model = Raw(run, **layers, head=nn.Linear(3, 4)).double()
    users, table, y = WORDS[:6], torch.arange(items), torch.arange(6) % 4
    some = lambda n: table[n : n + 1] if items == 6 else table
    pairs = [(model(users[n : n + 1], some(n)), y[n : n + 1]) for n in range(6)]
    agrees(model, (users, table), y, plain_gradients(model, *pairs))


def test_packed_sequences():
    """As one argument, in the order of the batch, which packing sorts."""

    def run(m: Any, x: PackedSequence) -> Tensor:
        out, lengths = pad_packed_sequence(m.lstm(x)[0], batch_first=True)
        return m.head(out.sum(1) / lengths[:, None])

    with seeded(0):
        model = Raw(run, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 4)).double()
        rows = [torch.randn(t, 3).double() for t in (2, 5, 1, 5)]
    y = torch.tensor([0, 3, 1, 2])
    expected = plain_gradients(model, *((model(pack_sequence([row])), y[n : n + 1]) for n, row in enumerate(rows)))
    agrees(model, pack_sequence(rows, enforce_sorted=False), y, expected)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    packed = pack_padded_sequence(padded, torch.tensor([2, 5, 1, 5]), batch_first=True, enforce_sorted=False)
    agrees(model, (packed,), y, expected)


def test_a_dict_as_the_one_argument_is_a_tuple_of_it():
    with seeded(0):
        model = Raw(lambda m, batch: m.head(batch["a"] + batch["b"]), head=nn.Linear(3, 4)).double()
        a, b = torch.randn(2, 5, 3).double()
    y = torch.arange(5) % 4
    pairs = [(model({"a": a[n : n + 1], "b": b[n : n + 1]}), y[n : n + 1]) for n in range(5)]
    agrees(model, ({"a": a, "b": b},), y, plain_gradients(model, *pairs))


def test_sizes_that_disagree_are_refused_all_the_same():
    model = Raw(lambda m, a, b: m.head(a), head=nn.Linear(3, 4))
    with pytest.raises(ValueError, match="9 samples in x"):
        curvature.per_sample_gradients(model, LOSS, (torch.randn(9, 3), torch.tensor([0, 3, 4, 5])), torch.arange(4))
    with pytest.raises(ValueError, match="9 samples in x"):
        curvature.per_sample_gradients(model, LOSS, (WORDS, torch.tensor([0, 5, 4, 6])), torch.arange(4))
