"""Backprops handed on while the backward pass goes on, so that they need not all be in memory at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import cast

import torch
from torch import Tensor

from curvature.recording.tape import Tape, Use

Backprops = list[Tensor | None]  # by use
Take = Callable[[Backprops, frozenset[str]], None]


def stream_backprops(
    tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], take: Take, most_bytes: int
) -> None:
    """Send vectors back; hand the backprops on in portions of some `most_bytes`.

    Args:
        vectors: one for each output.
        take: is called with the backprops of some uses, None at all others, and the names of their parameters: every
            parameter comes once, with all of its uses. The last portion has the parameters whose uses got none. Calls
            come from autograd's threads, one at a time.
    """
    edges = [(use, use.edge) for use in tape.uses if use.edge is not None]
    if sum(math.prod(use.shape) for use, _ in edges) * torch.double.itemsize <= most_bytes:
        take(tape.gradients(outputs, vectors), frozenset(tape.parameters))
        return
    stream = _Stream(tape, take, most_bytes)
    ends = [use for use, _ in edges if not use.follows_graph]
    passed = [(use, edge) for use, edge in edges if use.follows_graph] if ends else []
    handles = [edge.node.register_prehook(partial(stream.arrive, use, edge.output_nr)) for use, edge in passed]
    try:
        stream.keep_all(ends, _gradients(outputs, vectors, ends))
    finally:
        for handle in handles:
            handle.remove()
    missed = [use for use, _ in edges if use not in stream.seen]  # nothing that the pass went to lies before them
    stream.keep_all(missed, _gradients(outputs, vectors, missed))
    stream.hand_on(list(stream.left))


def _gradients(outputs: Sequence[Tensor], vectors: Sequence[Tensor], uses: Sequence[Use]) -> Sequence[Tensor | None]:
    edges = cast("Sequence[Tensor]", [use.edge for use in uses])
    return torch.autograd.grad(outputs, edges, vectors, retain_graph=True, allow_unused=True) if uses else ()


@dataclass(eq=False)
class _Group:
    """Parameters that share uses, directly or through others, and the backprops at these."""

    names: frozenset[str]
    missing: int = 0  # uses that the backward pass has not come to
    backprops: dict[int, Tensor] = field(default_factory=dict)


class _Stream:
    """What has arrived and was not yet taken."""

    def __init__(self, tape: Tape, take: Take, most_bytes: int) -> None:
        self.take, self.most_bytes, self.length = take, most_bytes, len(tape.uses)
        self.seen: set[Use] = set()  # the uses that the backward pass has come to
        self.groups = _groups(tape)
        self.left = dict.fromkeys(self.groups.values())
        self.bytes = 0  # of complete groups
        self.lock = RLock()  # autograd has a thread for each device

    def arrive(self, use: Use, output: int, gradients: Sequence[Tensor | None]) -> None:
        """Hook of the node where a backprop arrives."""
        with self.lock:
            if use not in self.seen:
                self.keep(use, gradients[output])
                if self.bytes >= self.most_bytes:
                    self.hand_on([group for group in self.left if not group.missing])

    def keep_all(self, uses: Sequence[Use], gradients: Sequence[Tensor | None]) -> None:
        for use, g in zip(uses, gradients, strict=True):
            self.keep(use, g)

    def keep(self, use: Use, gradient: Tensor | None) -> None:
        group = self.groups[next(iter(use.names))]
        self.seen.add(use)
        group.missing -= 1
        if gradient is not None:
            group.backprops[use.index] = gradient.reshape(use.shape)
        if not group.missing:
            self.bytes += sum(g.nbytes for g in group.backprops.values())

    def hand_on(self, groups: Iterable[_Group]) -> None:
        portion: Backprops = [None] * self.length
        names = frozenset[str]()
        for group in groups:
            del self.left[group]
            names |= group.names
            for index, g in group.backprops.items():
                portion[index] = g
            group.backprops.clear()
        self.bytes = 0
        self.take(portion, names)


def _groups(tape: Tape) -> dict[str, _Group]:
    """The group of each parameter."""
    joined = {name: frozenset([name]) for name in tape.parameters}
    for use in tape.uses:
        names = frozenset[str]().union(*(joined[name] for name in use.names))
        joined.update(dict.fromkeys(names, names))
    groups = {names: _Group(names) for names in joined.values()}
    for use in tape.uses:
        groups[joined[next(iter(use.names))]].missing += use.edge is not None
    return {name: groups[names] for name, names in joined.items()}
