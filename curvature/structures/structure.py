"""The base class of structures, what they are measured of, and how far few samples make them too small."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from curvature.operators import Operator, Space, rows_of_name
from curvature.recording import Tape
from curvature.terms import Term, TermsByVector, gradients, promote, row_ranges

# Small eigenvalues of a moment of few rows are too small (Ledoit and Wolf, 2004, J. Multivariate Anal. 88): this many
# times its size over the number of rows is added, in its mean eigenvalues
SHRINKAGE = 3.0
COUNTS = "counts"  # the name of a sum over processes, beside those of the numbers

Vectors = Mapping[str, TermsByVector]  # by parameter what vectors give that were sent back
Kind = TypeVar("Kind", bound="Structure")


@dataclass(frozen=True)
class Chunk:
    """Some of the vectors of one batch, sent back; the matrix is ``sum_n weights[n] sum_k u_kn w_kn^T``."""

    tape: Tape | None
    vectors: int  # how many there are
    left: Vectors  # for every vector the terms of ``u_k = J^T left_k``
    right: Vectors  # and of ``w_k = J^T right_k``; the same object where these are the same
    weights: Tensor  # (N,), what each sample counts for, not yet divided by their sum
    first: bool  # whether this is the first chunk of its batch
    patches: dict[str, list[Tensor]]  # unfolded activations by parameter, kept from one chunk of a batch to the next
    whole: ValueError | None  # why the batch counts as one sample, if it does: its samples meet

    def of(self, name: str) -> tuple[TermsByVector, TermsByVector] | None:
        """Terms of one parameter, or of rows of one, by vector, left and right; None if no output depends on it."""
        left = terms_of(self.left, name)
        right = left if self.right is self.left else terms_of(self.right, name)
        return None if left is None or right is None else (left, right)

    def by_sample(self, name: str) -> tuple[TermsByVector, TermsByVector] | None:
        """As `of`, for what is defined by samples; raises where they meet, and the batch counts as one."""
        if self.whole is not None:
            raise self.whole
        return self.of(name)

    def rows(self, space: Space) -> Iterator[tuple[Tensor, Tensor]]:
        """For each vector the rows u and w (N, P) of all samples; the same tensor where these are the same."""
        known = {name: both for name in space.names if (both := self.of(name)) is not None}
        for k in range(self.vectors):
            of = lambda side, k=k: {name: both[side][k] for name, both in known.items()}
            u = rows_of(space, of(0), len(self.weights))
            yield u, u if self.right is self.left else rows_of(space, of(1), len(self.weights))

    def on(self, device: torch.device) -> Chunk:
        """The chunk with its weights on a device: there are the terms of the parameters there."""
        return self if device == self.weights.device else replace(self, weights=self.weights.to(device))

    @cached_property
    def scales(self) -> Tensor | None:
        """The weights, or None if all are one."""
        return None if bool((self.weights == 1).all()) else self.weights


def terms_of(vectors: Vectors, name: str) -> TermsByVector | None:
    """The terms of a parameter, or of rows of one, ``"weight[0:4]"``, by vector; None if no output depends on them.

    Raises:
        ValueError: some of these rows are read together with others.
    """
    whole, start, stop = rows_of_name(name)
    if name in vectors or whole not in vectors:
        return vectors.get(name)
    apart = [row_ranges(terms) for terms in vectors[whole]]
    for part in apart[0]:
        if part.start < stop and start < part.stop and (part.start, part.stop) != (start, stop):
            raise ValueError(
                f"{whole}: rows {part.start} to {part.stop} are read together, which was not so in the first batch; "
                f'choose structure={{"{whole}": "dense"}} or "diagonal"'
            )
    return [part.terms for ranges in apart for part in ranges if part.start == start] or None


def rows_of(space: Space, terms: Mapping[str, Sequence[Term]], count: int) -> Tensor:
    """Gradients (N, P) of samples from their terms, zero for parameters that have none."""
    zeros = lambda size: torch.zeros(count, size, dtype=space.dtype, device=space.device)
    parts = zip(space.names, space.sizes, strict=True)
    flat = lambda parts_of: gradients(parts_of).reshape(count, -1).to(space.device, space.dtype)
    return torch.cat([flat(terms[name]) if name in terms else zeros(size) for name, size in parts], 1)


class Accumulator(ABC):
    """A sum over data, over a space of parameters, from which a matrix is made."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Add what vectors have brought that were sent back."""

    @abstractmethod
    def result(self, scale: float) -> Any:
        """The matrix, times a number; the sum is used up."""


class Structure(Accumulator):
    """What stands for the curvature of one block of parameters, ``sum_n weights[n] sum_k u_kn w_kn^T``.

    It works in builders, as ``kfac(..., structure={"head": Mine})``, which sum it over data, and in optimizers, as
    ``KFAC(model, structure={"head": Mine})``, which average it over steps. A class of your own has a `name`, and says
    how the numbers in `tensors` are measured (`add`), which matrix they are (`operator`), and its `trace`. All numbers
    are linear in the matrix, so that sums, scales and averages follow.

    Attributes:
        name: of the class, in reports and checkpoints.
        space: names, shapes, dtype and device of the parameters.
        tensors: the numbers; none before the first `add`.
        counts: how many samples an optimizer has added, and how many of their gradients; builders count none.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            other = FORMS.setdefault(cls.name, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"name: {other.__qualname__} is called {cls.name!r}, too; checkpoints tell them by it")
            FORMS[cls.name] = cls  # the newer, if a notebook defines it again

    def __init__(self, space: Space, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(space)
        self.tensors: dict[str, Tensor] = dict(tensors or {})
        self.counts = [0.0, 0.0]

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Add what vectors have brought that were sent back, by `add_to`: `Chunk.rows` times `Chunk.weights`."""

    def estimate(self, terms: Mapping[str, Sequence[Term]], samples: float, rank: int, world_size: int) -> None:
        """Add what one vector has brought to an optimizer, perhaps of fewer of many samples.

        Args:
            terms: by parameter; those with the same number of samples belong together.
            samples: number of samples in the batch; zero if this is not its first vector.
            rank: this process.
            world_size: the number of processes that share the batch.
        """
        dtype = self.space.dtype
        self.counts[0] += samples
        for count in dict.fromkeys(len(term) for parts in terms.values() for term in parts):
            alike = {name: [promote(t, dtype) for t in parts if len(t) == count] for name, parts in terms.items()}
            vectors = {name: [parts] for name, parts in alike.items() if parts}
            weights = torch.ones(count, dtype=dtype, device=self.space.device)
            self.add(Chunk(None, 1, vectors, vectors, weights, True, {}, None))
            self.counts[1] += count

    @abstractmethod
    def operator(self) -> Operator:
        """The matrix, over `space`."""

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace of the matrix, a scalar tensor; not finite if the numbers are not."""

    def inverse(self, damping: float) -> Operator:
        """``(M + damping I)^-1``."""
        return self.operator().inverse(damping)

    @classmethod
    def most_entries(cls, space: Space) -> int:
        """How many numbers there are, at most."""
        return space.size

    @classmethod
    def rank(cls, space: Space) -> int:
        """Rows of the matrix that a sample adds a matrix of rank one to, which takes many of them (`shrinkage`).

        Zero where samples make up each entry alone, as of a diagonal.
        """
        return 0

    @classmethod
    def describe(cls, space: Space) -> str:
        """Its shape, for reports."""
        return f"{space.size} parameters"

    def add_to(self, name: str, value: Tensor) -> None:
        """Add a value, which is used up, to one of the numbers."""
        self.tensors[name] = self.tensors[name].add_(value) if name in self.tensors else value

    def add_(self, other: Structure) -> None:
        """Add another sum, which must not be used any more."""
        for name, value in other.tensors.items():
            self.add_to(name, value)
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]

    def scaled(self: Kind, factor: float) -> Kind:
        """Times a number."""
        new = copy.copy(self)
        new.tensors = {name: x * factor for name, x in self.tensors.items()}
        return new

    def result(self, scale: float) -> Operator:
        return self.scaled(scale).operator()

    def flat(self) -> Tensor:
        """All numbers, one after the other: to compare two."""
        every = [x.flatten() for x in self.tensors.values()]
        return every[0] if len(every) == 1 else torch.cat(every)

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        """Tensors that add up over `size` processes, this one being `rank`."""
        return {**self.tensors, COUNTS: next(iter(self.tensors.values())).new_tensor(self.counts)}

    def load_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Fill an empty one with the all-reduced `sums`."""
        self.tensors = {name: x for name, x in sums.items() if name != COUNTS}
        self.counts = sums[COUNTS].tolist()


FORMS: dict[str, type[Structure]] = {}  # by name


def scale_structures(structures: Sequence[Kind], factors: Sequence[float]) -> list[Kind]:
    """Each times a number, all in one call."""
    each = [(x, by) for structure, by in zip(structures, factors, strict=True) for x in structure.tensors.values()]
    scaled = iter(torch._foreach_mul([x for x, _ in each], [by for _, by in each]) if each else ())
    made = [copy.copy(structure) for structure in structures]
    for structure in made:
        structure.tensors = {name: next(scaled) for name in structure.tensors}
    return made


def average_structures(
    structures: Sequence[Kind], before: Sequence[Kind | None], weights: Sequence[float]
) -> list[Kind]:
    """``(1 - weight) old + weight new`` of each, all in one call; without an old one the new one."""
    each = list(zip(structures, before, weights, strict=True))
    pairs = [(old.tensors[k], x, by) for new, old, by in each if old is not None for k, x in new.tensors.items()]
    olds, news, shares = [x for x, _, _ in pairs], [x for _, x, _ in pairs], [by for *_, by in pairs]
    averages = iter(torch._foreach_lerp(olds, news, shares) if pairs else ())
    return [
        new if old is None else type(new)(new.space, {name: next(averages) for name in new.tensors})
        for new, old, _ in each
    ]


def shrinkage(size: int, sparsity: float) -> float:
    """What is added to a moment of this size, in its mean eigenvalues; `sparsity` is one over its number of rows."""
    return SHRINKAGE * size * sparsity


def averaged_sparsity(before: float, weight: float, rows: float) -> float:
    """One over the number of rows that a running mean rests on, after so many more with this weight."""
    return (1 - weight) ** 2 * before + weight**2 / max(rows, 1.0)
