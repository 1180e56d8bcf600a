"""Whose data keep one order: the type of a sampler tells, and none is run to find out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import curvature
from curvature.gradients import require_order
from support.cases.case import seeded

N = 7
with seeded(0):
    DATA = TensorDataset(torch.randn(N, 3), torch.randn(N, 2))


class Counting(Sampler[Any]):
    """Counts how often it, or a copy of it, was run; what it gives is in order."""

    def __init__(self, entries: Any) -> None:
        self.entries, self.runs = entries, list[int]()

    def __iter__(self) -> Iterator[Any]:
        self.runs.append(len(self.runs))
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Declared(Counting):
    shuffle = False


class Drawing(SequentialSampler):
    """A subclass with an order of its own, which may be any."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(N), N))


class Sized(SequentialSampler):
    """A subclass without one."""

    def __len__(self) -> int:
        return N


class Buckets(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


class Wrapper(Declared):
    """Says that it does not shuffle, and holds a sampler that does."""

    def __init__(self) -> None:
        super().__init__(range(N))
        self.within = RandomSampler(range(N))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


BATCHES = [[0, 1, 2], [3, 4], [5, 6]]
Make = Callable[[], Any]
ordered: dict[str, Make] = {
    "as it comes": lambda: DataLoader(DATA, batch_size=3),
    "the last batch dropped": lambda: DataLoader(DATA, batch_size=3, drop_last=True),
    "one by one": lambda: DataLoader(DATA, batch_size=None),
    "a subclass that is run as it was": lambda: DataLoader(DATA, batch_size=3, sampler=Sized(DATA)),
    "batches of a sequential sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, False)
    ),
    "batches of a range": lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(N), 3, False)),
    "a list of batches": lambda: DataLoader(DATA, batch_sampler=BATCHES),
    "a list of indices": lambda: DataLoader(DATA, sampler=[3, 1, 2], batch_size=2),
    "a tensor of indices": lambda: DataLoader(DATA, sampler=torch.tensor([3, 1, 2]), batch_size=2),
    "shares of processes": lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0, shuffle=False)),
    "one's own that says so": lambda: DataLoader(DATA, batch_sampler=Declared(BATCHES)),
    "a stream": lambda: DataLoader(Stream(), batch_size=3),
    "a stream, one by one": lambda: DataLoader(Stream(), batch_size=None),
    "batches without a loader": lambda: [(DATA[:3]), (DATA[3:])],
}  # fmt: skip
shuffling: dict[str, tuple[Make, str]] = {
    "shuffle": (lambda: DataLoader(DATA, shuffle=True), "RandomSampler"),
    "a generator": (lambda: DataLoader(DATA, shuffle=True, generator=torch.Generator()), "RandomSampler"),
    "one by one": (lambda: DataLoader(DATA, shuffle=True, batch_size=None), "RandomSampler"),
    "a subset": (lambda: DataLoader(DATA, sampler=SubsetRandomSampler([1, 3])), "SubsetRandomSampler"),
    "weights": (lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * N, N)), "WeightedRandomSampler"),
    "batches": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)), "RandomSampler"),
    "shares of processes": (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), "DistributedSampler"),
    "within": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(Wrapper(), 3, False)), "RandomSampler"),
}  # fmt: skip
unknown: dict[str, tuple[Make, str]] = {
    "indices": (lambda: DataLoader(DATA, sampler=Counting(range(N)), batch_size=3), "Counting"),
    "batches": (lambda: DataLoader(DATA, batch_sampler=Counting(BATCHES)), "Counting"),
    "an order that a subclass changes": (lambda: DataLoader(DATA, sampler=Drawing(DATA)), "Drawing"),
    "batches that a subclass changes": (
        lambda: DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 3, False)), "Buckets",
    ),
    "batches that come once": (lambda: DataLoader(DATA, batch_sampler=iter(BATCHES)), "list_iterator"),
    "a set": (lambda: DataLoader(DATA, sampler={1, 2, 3}), "set"),
}  # fmt: skip


@pytest.mark.parametrize("case", ordered)
def test_data_in_order(case: str) -> None:
    require_order(ordered[case]())


@pytest.mark.parametrize("case", shuffling)
def test_data_that_shuffle(case: str) -> None:
    make, kind = shuffling[case]
    with pytest.raises(ValueError, match=rf"query: the DataLoader shuffles \(its sampler is a {kind}\).*shuffle=False"):
        require_order(make(), "query")


@pytest.mark.parametrize("case", unknown)
def test_samplers_that_do_not_tell_are_refused_and_not_run(case: str) -> None:
    make, kind = unknown[case]
    loader, before = make(), random.getstate()
    with pytest.raises(ValueError, match=rf"shuffles or may shuffle \(its sampler is a {kind}\).*shuffle = False"):
        require_order(loader)
    sampler = loader.batch_sampler if isinstance(loader.batch_sampler, Counting) else loader.sampler
    assert not getattr(sampler, "runs", [])
    assert random.getstate() == before
    if case == "batches that come once":
        assert len(list(loader)) == len(BATCHES)


@pytest.mark.parametrize("case", [case for case in unknown if case != "batches that come once"])
def test_what_the_message_says_keeps_the_order(case: str) -> None:
    """One pass of the sampler is the order of all later ones."""
    loader = unknown[case][0]()
    with pytest.raises(ValueError, match=r"batch_sampler=list\(loader\.batch_sampler\)"):
        require_order(loader)
    fixed = DataLoader(loader.dataset, batch_sampler=list(loader.batch_sampler))
    require_order(fixed)
    for (x, _), (again, _) in zip(fixed, fixed, strict=True):
        assert torch.equal(x, again)
    single = DataLoader(DATA, sampler=Counting(range(N)), batch_size=None)
    with pytest.raises(ValueError, match=r"sampler=list\(loader\.sampler\), batch_size=None"):
        require_order(single)


def test_samplers_are_run_once_for_each_pass() -> None:
    with seeded(1):
        model = torch.nn.Linear(3, 2)
    loss, sampler = torch.nn.MSELoss(), Declared(BATCHES)
    loader = DataLoader(DATA, batch_sampler=sampler)
    whole = DATA[:]
    K = curvature.kfac(model, loss, loader, inject=curvature.empirical())
    assert len(sampler.runs) == 1
    scores = curvature.influence(model, loss, loader, loader, K)
    assert len(sampler.runs) == 3  # the training samples once, the queries once
    torch.testing.assert_close(scores, curvature.influence(model, loss, whole, whole, K))
