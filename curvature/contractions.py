"""Per-sample gradients of one parameter, kept in the form in which a layer hands them over.

A layer that reads a weight at t places gives ``sum_t b[n,t,g,o] a[n,t,g,i]`` (`Outer`), an embedding gives rows to
add at indices (`Rows`), everything small is given outright (`Dense`). Gradients, norms and Gram matrices of a sum of
such terms are written here once; norms and Gram matrices never build the gradients where the inner products of
activations and of backprops are cheaper (arXiv:1510.01799 for t = 1, arXiv:2009.03106 for t > 1).

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul

import torch
from torch import Tensor

CHUNK = 1 << 24  # elements of a temporary result above which the work is split


@dataclass(frozen=True)
class Outer:
    """``sum_t b[n,t,g,o] a[n,t,g,i]``, its axes split into `sizes` (g, o, i) and permuted by `order` into `shape`."""

    a: Tensor  # (N, t, g, i)
    b: Tensor  # (N, t, g, o)
    shape: tuple[int, ...]
    sizes: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def assemble(self, blocks: Tensor) -> Tensor:
        """(N, g, o, i) to (N, *shape)."""
        if self.sizes is not None and self.order is not None:
            blocks = blocks.reshape(len(blocks), *self.sizes).permute(0, *(k + 1 for k in self.order))
        return blocks.reshape(len(blocks), *self.shape)

    def gradients(self) -> Tensor:
        a, b = self.a, self.b
        if a.shape[1] == 1:
            return self.assemble(b[:, 0, :, :, None] * a[:, 0, :, None, :])
        return self.assemble(b.permute(0, 2, 3, 1) @ a.permute(0, 2, 1, 3))

    def transposed(self) -> Outer:
        """The same term for the transpose of a matrix parameter."""
        if self.is_transposed:
            return replace(self, shape=self.shape[::-1], sizes=None, order=None)
        if len(self.shape) != 2 or self.order is not None:
            raise ValueError("only a matrix can be transposed")
        return replace(self, shape=self.shape[::-1], sizes=self.shape, order=(1, 0))

    @property
    def is_transposed(self) -> bool:
        """Whether a matrix is held as (i, o)."""
        return len(self.shape) == 2 and self.order == (1, 0)

    def samples(self, part: slice) -> Outer:
        return replace(self, a=self.a[part], b=self.b[part])

    def merges_with(self, other: object) -> bool:
        return (
            isinstance(other, Outer)
            and (self.shape, self.sizes, self.order) == (other.shape, other.sizes, other.order)
            and self.a.shape[2:] == other.a.shape[2:]
        )


@dataclass(frozen=True)
class Convolved:
    """The `Outer` of a convolution, its places the output's pixels; unfolded only where that is asked for.

    Built as one convolution's weight gradient with a group per sample, which reads the input in place.
    """

    x: Tensor  # (N, m, C, *size), padded
    b: Tensor  # (N, m, O, *out)
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def places(self) -> int:
        return self.b.shape[1] * math.prod(self.b.shape[3:])

    def gradients(self) -> Tensor:
        n, dims = len(self.x), len(self.stride)
        x, b = (t.transpose(0, 1).reshape(t.shape[1], n * t.shape[2], *t.shape[3:]) for t in (self.x, self.b))
        weight = b.new_empty(n * self.shape[0], *self.shape[1:])
        _, found, _ = torch.ops.aten.convolution_backward(
            b, x, weight, None, self.stride, [0] * dims, self.dilation, False, [0] * dims, n * self.groups,
            [False, True, False],
        )  # fmt: skip
        return found.reshape(n, *self.shape)

    def samples(self, part: slice) -> Convolved:
        return replace(self, x=self.x[part], b=self.b[part])

    def unfolded(self) -> Outer:
        """The same with the patches written out: a (N, t, g, i * kernel)."""
        kernel, out = self.shape[2:], self.b.shape[3:]
        x = self.x.flatten(0, 1)
        steps = x.stride()[2:]
        patches = x.as_strided(
            (*x.shape[:2], *kernel, *out),
            (*x.stride()[:2], *map(mul, steps, self.dilation), *map(mul, steps, self.stride)),
        )
        a = patches.reshape(len(x), self.groups, -1, math.prod(out)).permute(0, 3, 1, 2)
        b = self.b.flatten(0, 1).reshape(len(x), self.groups, -1, math.prod(out)).permute(0, 3, 1, 2)
        n, m = self.x.shape[:2]
        a, b = (t.unflatten(0, (n, m)).flatten(1, 2) for t in (a, b))
        return Outer(a, b, self.shape)


@dataclass(frozen=True)
class Rows:
    """``sum_t`` of `values[n,t]` added to row `index[n,t]` of a table of `shape` (rows, width)."""

    index: Tensor  # (N, t)
    values: Tensor  # (N, t, width)
    shape: tuple[int, ...]

    def gradients(self) -> Tensor:
        n = len(self.index)
        rows, width = self.shape
        start = torch.arange(0, n * rows, rows, device=self.index.device)[:, None]
        out = self.values.new_zeros(n * rows, width)
        return out.index_add_(0, (self.index + start).flatten(), self.values.flatten(0, 1)).view(n, rows, width)

    def samples(self, part: slice) -> Rows:
        return replace(self, index=self.index[part], values=self.values[part])


@dataclass(frozen=True)
class Dense:
    """The per-sample gradients themselves, (N, *shape)."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def gradients(self) -> Tensor:
        return self.values

    def samples(self, part: slice) -> Dense:
        return Dense(self.values[part])


Term = Outer | Convolved | Rows | Dense


def unfolded(term: Term) -> Term:
    return term.unfolded() if isinstance(term, Convolved) else term


def merged(terms: Sequence[Term]) -> list[Term]:
    """One term where several differ in their places only (a recurrent weight is read once per step)."""
    out: list[Term] = []
    groups: list[list[Outer]] = []
    for term in terms:
        if not isinstance(term, Outer):
            out.append(term)
            continue
        for group in groups:
            if group[0].merges_with(term):
                group.append(term)
                break
        else:
            groups.append([term])
    for group in groups:
        one = group[0]
        if len(group) > 1:
            one = replace(one, a=torch.cat([u.a for u in group], 1), b=torch.cat([u.b for u in group], 1))
        out.append(one)
    return out


def gradients(terms: Sequence[Term]) -> Tensor:
    """Per-sample gradients (N, *shape): the sum of the terms."""
    first, *others = merged(terms)
    out = first.gradients()
    for term in others:
        out = out + term.gradients()
    return out


def weighted_sum(terms: Sequence[Term], weights: Tensor) -> Tensor:
    """``sum_n weights[n] g[n]``, of the parameter's shape, without the per-sample gradients."""
    total: Tensor | None = None
    weights = weights.to(_values(terms[0]).dtype)
    for term in merged(terms):
        if isinstance(term, Convolved):
            b = term.b * weights.reshape(-1, *[1] * (term.b.ndim - 1))
            part = replace(term, x=term.x.flatten(0, 1)[None], b=b.flatten(0, 1)[None]).gradients()[0]
        elif isinstance(term, Outer):
            b = (term.b * weights[:, None, None, None]).flatten(0, 1)
            part = term.assemble((b.permute(1, 2, 0) @ term.a.flatten(0, 1).transpose(0, 1))[None])[0]
        elif isinstance(term, Rows):
            values = (term.values * weights[:, None, None]).flatten(0, 1)
            part = values.new_zeros(term.shape).index_add_(0, term.index.flatten(), values)
        else:
            part = torch.tensordot(weights, term.values, 1)
        total = part if total is None else total + part
    assert total is not None
    return total


def norms_squared(terms: Sequence[Term]) -> Tensor:
    """Squared norms (N,) of the per-sample gradients, each built only where that is cheaper."""
    terms = merged(terms)
    if _pairs_cheaper(terms, samples=1):
        total = None
        terms = merged([unfolded(t) for t in terms])
        for k, u in enumerate(terms):
            for v in terms[k:]:
                term = _pair_norms(u, v) * (1 if u is v else 2)
                total = term if total is None else total + term
        assert total is not None
        return total.clamp(min=0)
    return torch.cat([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1).square() for g in _built(terms)])


def gram(terms: Sequence[Term]) -> Tensor:
    """Inner products (N, N) of the per-sample gradients."""
    terms = merged(terms)
    n = _samples(terms[0])
    if _pairs_cheaper(terms, samples=n):
        terms = merged([unfolded(t) for t in terms])
        total = torch.zeros((), device=_values(terms[0]).device, dtype=_values(terms[0]).dtype)
        for u in terms:
            for v in terms:
                total = total + _pair_gram(u, v)
        return total
    flat = gradients(terms).reshape(n, -1)
    return flat @ flat.T


def _samples(term: Term) -> int:
    return len(_values(term))


def _values(term: Term) -> Tensor:
    return term.b if isinstance(term, Outer | Convolved) else term.values


def _places(term: Term) -> int:
    return term.places if isinstance(term, Convolved) else _values(term).shape[1]


def _form(term: Term) -> tuple[int, int, bool]:
    """Groups, sum of both widths over the groups, and whether the axes are permuted."""
    if isinstance(term, Outer):
        groups = term.b.shape[2]
        return groups, groups * (term.a.shape[3] + term.b.shape[3]), term.order is not None
    if isinstance(term, Convolved):
        return term.groups, term.shape[0] + term.groups * math.prod(term.shape[1:]), False
    return 1, term.shape[-1] + 1, False


def _pairs_cheaper(terms: Sequence[Term], samples: int) -> bool:
    """Whether inner products over pairs of places take fewer operations than building the gradients.

    Building costs t * numel multiplications a sample; the pairs cost (sum of t)^2 * (i + o), for each pair of
    samples. With one place and one term the pairs always win.
    """
    if any(isinstance(u, Dense) for u in terms):
        return False
    forms = [_form(u) for u in terms]
    if len(terms) > 1 and any(groups > 1 or permuted for groups, _, permuted in forms):
        return False  # terms of different layout meet entry by entry only
    places = sum(_places(u) for u in terms)
    width = max(width for _, width, _ in forms)
    numel = math.prod(terms[0].shape)
    return places * places * width * samples <= 2 * (places + samples) * numel


def _built(terms: Sequence[Term]) -> Iterator[Tensor]:
    """The gradients, a bounded number of samples at a time."""
    step = max(1, CHUNK // max(1, math.prod(terms[0].shape)))
    for start in range(0, _samples(terms[0]), step):
        yield gradients([u.samples(slice(start, start + step)) for u in terms])


def _kernel(u: Term, v: Term) -> Tensor:
    """Inner products of single places: u with p, v with q places a batch entry, to (..., p, q) summed over groups.

    Outer: (..., p, g, i) and (..., p, g, o); Rows: (..., p) and (..., p, width).
    """
    if isinstance(u, Outer) and isinstance(v, Outer):
        ua, ub, va, vb = (x.movedim(-2, 0) for x in (u.a, u.b, v.a, v.b))
        return ((ua @ va.mT) * (ub @ vb.mT)).sum(0)
    if isinstance(u, Rows) and isinstance(v, Rows):
        return (u.values @ v.values.mT) * (u.index[..., :, None] == v.index[..., None, :])
    if isinstance(u, Outer):
        return _kernel(v, u).mT
    assert isinstance(u, Rows) and isinstance(v, Outer)
    places = v.b.shape[-3]
    index = u.index[..., None, :].expand(*u.index.shape[:-1], places, u.index.shape[-1])
    return (u.values @ v.a[..., 0, :].mT) * torch.gather(v.b[..., 0, :], -1, index).mT


def _pair_norms(u: Term, v: Term) -> Tensor:
    if u is v and isinstance(u, Outer) and _places(u) == 1:
        return (u.a.square().sum(3) * u.b.square().sum(3)).sum((1, 2))
    step = max(1, CHUNK // max(1, _places(u) * _places(v)))
    parts = [slice(k, k + step) for k in range(0, _samples(u), step)]
    return torch.cat([_kernel(u.samples(s), v.samples(s)).sum((1, 2)) for s in parts])


def _flat(term: Term) -> Term:
    """Samples and places as one axis."""
    if isinstance(term, Outer):
        return replace(term, a=term.a.flatten(0, 1), b=term.b.flatten(0, 1))
    assert isinstance(term, Rows)
    return replace(term, index=term.index.flatten(), values=term.values.flatten(0, 1))


def _pair_gram(u: Term, v: Term) -> Tensor:
    n, m = _samples(u), _samples(v)
    flat = _flat(v)
    step = max(1, CHUNK // max(1, _places(u) * _places(v) * m))
    rows = []
    for start in range(0, n, step):
        part = u.samples(slice(start, start + step))
        kernel = _kernel(_flat(part), flat)
        rows.append(kernel.unflatten(0, (_samples(part), -1)).unflatten(2, (m, -1)).sum((1, 3)))
    return torch.cat(rows)
