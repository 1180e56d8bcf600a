"""Second moments of activations and of backprops: the Kronecker factors of a layer, before scaling.

A layer is seen as ``z[n,t,g,o] = sum_i W[g,o,i] a[n,t,g,i]``, its bias as the last input. `Scheme` says how the moments
of one weight are summed up (arXiv:1503.05671, equation 1; arXiv:2311.00636, equations 17 and 21), and nothing of how
they are scaled, averaged over batches or solved with. Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.kronecker.sides import STORAGES, Side, storage_of
from curvature.linalg import ByDevice
from curvature.terms import (
    AffineLayout,
    Convolution,
    ElementwiseProduct,
    IndexedRows,
    OuterProduct,
    Term,
    TransposedConvolution,
    chunks,
    joined,
    sum_in_place,
)

CHUNK_ELEMENTS = 1 << 24  # elements of activations at a time
PIECE_ELEMENTS = 1 << 19  # of unfolded ones, if the input, and the moment, are no larger
SQUARED_ELEMENTS = 1 << 19  # of rows; more are squared in parts, which take less memory
SQUARED_PARTS = 4
# Size from which a symmetric product is computed in parts; never on an accelerator
SYMMETRIC_MIN_COLUMNS, SYMMETRIC_MIN_ROWS, SYMMETRIC_MIN_ELEMENTS = 256, 128, ByDevice(1 << 16, sys.maxsize)
SYMMETRIC_PARTS = 4
# of a moment that are computed at a time where its rows are not next to each other
BLOCK_ELEMENTS = ByDevice(1 << 19, sys.maxsize)
COPIED_ELEMENTS = ByDevice(1 << 15, 1 << 20)  # of rows, up to which a copy of them costs less than some calls
ROWS_PER_INPUT = 8  # rows of activations, per column of their moment, that a running mean needs
MIN_SUBSAMPLE = 16  # samples that these rows come from, at least
ALIGNED_ENTRIES = 16  # of a row, that BLAS wants to begin at multiples of so many

Whole = OuterProduct | Convolution | TransposedConvolution | ElementwiseProduct
Affine = Whole | IndexedRows  # terms that have a view as a grouped affine map
Read = TypeVar("Read", bound=Sized)


class Reading(NamedTuple):
    """How a weight is read. Equal readings count as places of one use; a weight with several readings is tied.

    Attributes:
        one_hot: the inputs are rows looked up, so that the second moment of activations is a diagonal.
        flipped: inputs and outputs are exchanged (a decoder beside its embedding, W^T beside W): activations belong to
            the side of the outputs, k = `not flipped` of a product, and backprops to the other, k = `flipped`.
    """

    one_hot: bool
    flipped: bool


@dataclass(frozen=True)
class Scheme:
    """How the second moments of one weight, with or without a bias, are summed over samples and places.

    A moment is (g, d, d), or (g, d) where its diagonal suffices; d is the number of outputs (k = 0), or that of inputs
    with the bias as the last (k = 1). "expand" counts each place as a sample; with "reduce", activations are averaged
    and backprops added first.
    """

    arrangement: AffineLayout  # of weight and bias as (g, o, i)
    dtype: torch.dtype  # of the moments
    sharing: str  # "expand" or "reduce"
    storage: tuple[str, str] = ("dense", "dense")  # names of the forms of both sides, see `Side`
    block_size: int | None = None  # a dense side with more rows, a bias aside, is zero outside of blocks of that size

    @staticmethod
    def of(
        terms: Sequence[Term],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        sharing: str,
        largest: float = math.inf,
        block_size: int | None = None,
    ) -> Scheme | None:
        """The scheme for a weight with these terms; None if they have no Kronecker factors.

        Args:
            shapes: of the weight, and of the bias if that is one more input wherever the weight is read.
            dtype: of the parameter; moments are in single precision at least.
            largest: a larger side is kept as a sketch, or as its diagonal if the layer has groups or the weight is
                tied. The side of an embedding's rows always is a diagonal, and so is that of noise. See `storage_of`.
            block_size: see `Scheme`.

        Raises:
            ValueError: `sharing` is neither "expand" nor "reduce".
        """
        if sharing not in ("expand", "reduce"):
            raise ValueError(f'sharing: expected "expand" or "reduce", found {sharing!r}')
        affine = [term for term in terms if isinstance(term, Affine)]
        if not affine:
            return None
        first = next((term for term in affine if not isinstance(term, IndexedRows)), affine[0])
        arrangement = AffineLayout(tuple(shapes), first.groups, first.outputs, first.sizes, first.order)
        if any(math.prod(shape) != first.groups * first.outputs for shape in shapes[1:]):
            return None  # the bias is broadcast
        scheme = Scheme(arrangement, torch.promote_types(dtype, torch.float32), sharing, block_size=block_size)
        readings = {scheme.reading(term) for term in terms}
        if None in readings:
            return None
        one_hot = [not reading.flipped for reading in readings if reading and reading.one_hot]
        is_plain = readings == {Reading(one_hot=False, flipped=False)} and arrangement.groups == 1
        is_noise = len(readings) == 1 and all(getattr(term, "independent", False) for term in terms)
        rows, columns = (
            storage_of(scheme.block_sizes(k), largest, k in one_hot, is_plain, is_noise and k == 0) for k in (0, 1)
        )
        return replace(scheme, storage=(rows, columns))

    @functools.cached_property
    def kinds(self) -> tuple[type[Side], type[Side]]:
        """The types of the side of the outputs, and of that of the inputs."""
        return STORAGES[self.storage[0]], STORAGES[self.storage[1]]

    def block_sizes(self, k: int) -> tuple[int, ...]:
        """Numbers of rows of the diagonal blocks of a side, if dense; a bias is one more row of the last."""
        width, size = self.arrangement.sides[1 + k], self.block_size
        bias = k * (len(self.arrangement.shapes) - 1)
        if size is None or width - bias <= size:
            return (width,)
        count, rest = divmod(width - bias, size)
        *others, last = [size] * count + [rest] * (rest > 0)
        return *others, last + bias

    def side(self, k: int, moment: Tensor) -> Side:
        """A measured moment, the side of the outputs (k = 0) or that of the inputs (1), as it is stored."""
        return self.kinds[k].of(moment, self.block_sizes(k))

    def side_of_entries(self, k: int, entries: Tensor) -> Side:
        """The side with these `Side.entries`."""
        return self.kinds[k].of_entries(entries, self.block_sizes(k))

    def side_of_sum(self, k: int, total: Tensor) -> Side:
        """The side that is a sum over processes of `Side.to_sum`."""
        return self.kinds[k].of_sum(total, self.block_sizes(k))

    def reading(self, term: Term) -> Reading | None:
        """How a term reads the weight; None if it reads neither it nor its transpose in this arrangement."""
        here = self.arrangement
        if not isinstance(term, Affine) or tuple(term.shape) != tuple(here.shapes[0]):
            return None
        order = (term.order is not None and term.sizes, term.order)
        same = order == (here.order is not None and here.sizes, here.order)
        if any(kind.takes_rows for kind in self.kinds) and (isinstance(term, IndexedRows) or not same):
            return None
        is_matrix = len(term.shape) == 2
        may_be_flipped = len(here.shapes) == 1 and is_matrix and term.groups == here.groups == 1
        if not may_be_flipped and not (same and term.groups == here.groups):
            return None
        is_flipped = is_matrix and (term.order == (1, 0)) != (here.order == (1, 0))
        if term.outputs != here.sides[2 if is_flipped else 1]:
            return None  # both axes may be inputs, as those of a bilinear form
        return Reading(isinstance(term, IndexedRows), is_flipped)

    def readings(self, terms: Sequence[Term]) -> dict[Reading, list[Affine]]:
        """The terms by their reading of the weight; ValueError for one that does not read it in this arrangement."""
        by_reading: dict[Reading, list[Affine]] = {}
        for term in terms:
            reading = self.reading(term)
            if reading is None or not isinstance(term, Affine):
                raise ValueError(f"a weight of shape {self.arrangement.shapes[0]} is read in another form than before")
            by_reading.setdefault(reading, []).append(term)
        return by_reading

    def activations(self, terms: Sequence[Affine]) -> tuple[Tensor, int | Tensor]:
        """``sum_nt a a^T`` ("expand") or ``sum_n (mean_t a)(mean_t a)^T`` ("reduce") over the terms of one reading.

        Also the number of summands, by which to divide it for the mean.
        """
        reading = self.reading(terms[0])
        assert reading is not None
        k = not reading.flipped
        diagonal = self.kinds[k].is_diagonal
        if reading.one_hot:
            moment, number = self._moment_of_indices([term for term in terms if isinstance(term, IndexedRows)])
            return moment if diagonal else torch.diag_embed(moment), number
        whole = [term for term in terms if not isinstance(term, IndexedRows)]
        if self.kinds[1].takes_rows:
            return self._of_rows(whole)
        if self.sharing == "reduce":
            a = torch.cat([self._rows(part) for same in by_length(whole) for part in self._chunks(same)])
            bias = _mean_bias(whole)
            moment = self._empty(whole[0], k, len(a) * bias**2)
            self._add_second(moment, a, None, bias)
            return moment, sum(self._count_routed(same) for same in by_length(whole))
        count: int | Tensor = 0
        for term in whole:
            arrived = self._routes(term)
            count += len(term) * term.places if arrived is None else arrived.sum((0, 1)).to(self.dtype)
        ones = sum(len(term) * term.places for term in whole if term.has_bias)
        total: Tensor | None = None
        waiting: dict[float, list[Tensor]] = {}
        parts = [part[0] for term in whole for part in self._chunks([term])]
        for part in parts:
            bias = float(part.has_bias)
            for inputs, a in part.activations():
                rows = a.flatten(0, 1).to(self.dtype)
                if inputs is None and (len(parts) == 1 or has_few_rows(rows)):
                    waiting.setdefault(bias, []).append(rows)
                    continue
                total = self._empty(whole[0], k, ones) if total is None else total
                self._add_second(total, rows, inputs, bias)
        together = {bias: rows[0] if len(rows) == 1 else torch.cat(rows) for bias, rows in waiting.items()}
        if len(together) == 1 and total is None and not diagonal:  # written once, together with the bias's input
            ((bias, rows),) = together.items()
            has_bias = len(self.arrangement.shapes) > 1
            return (second_moment_with_constant(rows, bias) if has_bias else second_moment(rows, rows, False)), count
        total = self._empty(whole[0], k, ones) if total is None else total
        for bias, rows in together.items():
            self._add_second(total, rows, None, bias)
        return total, count

    @staticmethod
    def look_ups(terms: Sequence[Any], moment: Tensor, number: int | Tensor) -> Tensor:
        """How often one look-up goes into the moment of a table from `activations`: with "expand", their number."""
        total = sum(term.index.numel() if term.valid is None else term.valid.sum() for term in terms)
        # with "reduce", one place of T in a sample counts 1 / T^2; where all is padding there are no look-ups
        return (moment.sum() * (total / number) ** 2).nan_to_num(0.0)

    def backprops(
        self,
        left: Sequence[Sequence[Affine]],
        right: Sequence[Sequence[Affine]] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """``sum_n weights[n] sum_t b b^T`` ("expand") or the same of ``sum_t b`` ("reduce"), over one reading's terms.

        Args:
            left: for each vector sent back from the output the terms.
            right: those of as many other vectors (then ``b_left b_right^T``).
            weights: (N,); None: all one.
        """
        kinds = self.kinds
        if kinds[0].takes_rows:
            assert right is None and weights is None  # these take one vector and no weights
            sides = (kinds[0].of_rows(b[:, 0]) for terms in left for b in self._backprops(terms, None))
            return functools.reduce(kinds[0].add_, sides).entries
        reading = self.reading(left[0][0])
        assert reading is not None
        diagonal = kinds[reading.flipped].is_diagonal
        # the square root of the weights on both sides, so that equal factors share one copy
        root = None if weights is None else weights.to(self.dtype).sqrt()
        if not diagonal and right is None and all(getattr(t, "independent", False) for terms in left for t in terms):
            entries = (second_moment(b, b, True) for terms in left for b in self._backprops(terms, root))
            return torch.diag_embed(sum_in_place(entries))
        if self.sharing == "expand" and not diagonal:
            images = [term for terms in left for term in terms if isinstance(term, Convolution) and _is_wide(term)]
            if len(images) == sum(map(len, left)):
                others = images if right is None else [term for terms in right for term in terms]
                pairs = [(b, c) for b, c in zip(images, others, strict=True) if isinstance(c, Convolution)]
                return sum_in_place(b.backprop_moment(c, weights, self.dtype) for b, c in pairs)
        lefts = [b for terms in left for b in self._backprops(terms, root)]
        rights = lefts if right is None else [b for terms in right for b in self._backprops(terms, root)]
        if len(lefts) > 1 and all(map(has_few_rows, lefts)):  # several vectors; a recurrent layer's times
            whole = [joined(lefts)]
            lefts, rights = whole, whole if right is None else [joined(rights)]
        return sum_in_place(second_moment(b, c, diagonal) for b, c in zip(lefts, rights, strict=True))

    def _routes(self, term: Affine) -> Tensor | None:
        """The places (N, t, g) sent to each group, which counts no others; None: all, as if zeros leave a bias on."""
        is_routed = isinstance(term, OuterProduct) and term.is_routed
        return cast("OuterProduct", term).arrived if is_routed and len(self.arrangement.shapes) == 1 else None

    def _counts(self, terms: Sequence[Affine]) -> Tensor | None:
        """How many places of each sample are sent to each group, (N, g), by terms of one length; None: all of them."""
        arrived = [self._routes(term) for term in terms]
        if all(places is None for places in arrived):
            return None
        counts: Any = (
            term.places if places is None else places.sum(1) for term, places in zip(terms, arrived, strict=True)
        )
        return sum(counts)

    def _count_routed(self, terms: Sequence[Affine]) -> int | Tensor:
        """The number of samples that have such places, for each group if they differ."""
        counts = self._counts(terms)
        return len(terms[0]) if counts is None else (counts > 0).sum(0).to(self.dtype)

    def _backprops(self, terms: Sequence[Affine], scale: Tensor | None) -> list[Tensor]:
        """Backprops (N * t, g, o) of each term, scaled by sample; for "reduce" summed over all places."""
        backprops = []
        for term in terms:
            b, arrived = term.backprops().to(self.dtype), self._routes(term)
            backprops.append(b if arrived is None else b * arrived[..., None])
        if self.sharing == "reduce":
            backprops = [sum_in_place(b.sum(1, keepdim=True) for b in same) for same in by_length(backprops)]
        flat = [b.flatten(0, 1) for b in backprops]
        if scale is None:
            return flat
        scales = [scale.repeat_interleave(b.shape[1])[:, None, None] for b in backprops]
        return [b * s for b, s in zip(flat, scales, strict=True)]

    def _of_rows(self, terms: Sequence[Whole]) -> tuple[Tensor, int]:
        """Entries of a side of activations that takes rows, and the number of summands."""
        together = by_length(terms) if self.sharing == "reduce" else [[term] for term in terms]
        total, number = None, 0
        for part in (part for same in together for part in self._chunks(same)):  # one chunk in memory
            a = self._rows(part)[:, 0]
            moment = self.kinds[1].of_rows(F.pad(a, (0, len(self.arrangement.shapes) - 1), value=_mean_bias(part)))
            total, number = moment if total is None else total.add_(moment), number + len(a)
        assert total is not None
        return total.entries, number

    def _rows(self, terms: Sequence[Whole]) -> Tensor:
        """Activations (n, g, i) of all places of one term, or for "reduce" means over the places of all."""
        is_mean, first, places = self.sharing == "reduce", terms[0], sum(term.places for term in terms)
        d, count = math.prod(first.shape) // (first.groups * first.outputs), len(first) * (1 if is_mean else places)
        total = torch.zeros(count, first.groups, d, dtype=self.dtype, device=first.device)
        for inputs, a in (x for term in terms for x in term.activations()):
            rows = a.sum(1) if is_mean else a.flatten(0, 1)
            total[..., slice(None) if inputs is None else inputs] += rows.to(self.dtype)
        counts = self._counts(terms) if is_mean else None
        if counts is not None:
            return total / counts.clamp(min=1)[..., None]
        return total / places if is_mean else total

    def _chunks(self, terms: Sequence[Whole]) -> Iterator[list[Whole]]:
        """Chunks of samples, since unfolding the inputs takes memory: no more than the inputs themselves."""
        width = self.arrangement.dimension // self.arrangement.outputs
        each, samples = width * sum(term.places for term in terms), len(terms[0])
        folded = sum(t.inputs for t in terms if isinstance(t, Convolution | TransposedConvolution))
        most = min(CHUNK_ELEMENTS, max(PIECE_ELEMENTS, folded, width**2)) if folded else CHUNK_ELEMENTS
        parts = chunks(samples, most, each)
        return (list(terms) if len(parts) == 1 else [t.samples(part) for t in terms] for part in parts)

    def _empty(self, term: Whole, k: int, number: float) -> Tensor:
        """A moment of the inputs, zero but for the entry of the bias's input; k is that of `side`."""
        size, diagonal = self.arrangement.sides[1 + k], self.kinds[k].is_diagonal
        dims = [size] if diagonal else [size, size]
        moment = torch.zeros(term.groups, *dims, dtype=self.dtype, device=term.device)
        if len(self.arrangement.shapes) > 1:
            corner = moment[:, -1] if diagonal else moment[:, -1, -1]
            corner.fill_(number)
        return moment

    def _add_second(self, moment: Tensor, a: Tensor, inputs: Tensor | None, bias: float) -> None:
        """Add ``sum_n a a^T`` of activations (n, g, i) of some inputs (None: all), and the products with the bias's."""
        diagonal = moment.ndim == 2
        part, some = second_moment(a, a, diagonal), cast("Any", slice(a.shape[2]) if inputs is None else inputs)
        if diagonal:
            moment[:, some] += part
        elif inputs is None:
            moment[:, some, some] += part
        else:
            moment[:, inputs[:, None], inputs] += part
        if len(self.arrangement.shapes) > 1 and not diagonal:
            total = bias * a.sum(0)
            moment[:, -1, some] += total
            moment[:, some, -1] += total

    def _moment_of_indices(self, terms: Sequence[IndexedRows]) -> tuple[Tensor, int | Tensor]:
        """The diagonal (1, rows) of the moment of one-hot inputs, and the number of summands."""
        rows = terms[0].shape[0]
        moment = torch.zeros(rows, dtype=self.dtype, device=terms[0].device)
        number: int | Tensor = 0
        for same in by_length(terms):
            index = torch.cat([term.index for term in same], 1)
            every = [torch.ones_like(t.index, dtype=torch.bool) if t.valid is None else t.valid for t in same]
            valid = torch.cat(every, 1)
            weights = valid.to(self.dtype)
            if self.sharing == "reduce":
                # row v counts (look-ups of v in the sample / places)^2, shared equally by these look-ups
                order = index.masked_fill(~valid, rows).sort(1).values
                equal = torch.searchsorted(order, index, right=True) - torch.searchsorted(order, index)
                number = number + len(index)
                weights = weights * equal / weights.sum(1, keepdim=True).clamp(min=1).square()
            else:
                number = number + weights.sum()
            moment.index_add_(0, index.flatten(), weights.flatten())
        return moment[None], number


def _is_wide(term: Convolution) -> bool:
    """Whether a sample's backprops are more than their second moment."""
    return math.prod(term.b.shape[3:]) >= term.outputs


def by_length(terms: Sequence[Read]) -> list[list[Read]]:
    """Grouped by number of samples, which is one group unless sample axes are guessed."""
    return [[term for term in terms if len(term) == n] for n in dict.fromkeys(map(len, terms))]


def _mean_bias(terms: Sequence[Whole]) -> float:
    """The mean over places of the bias's input, which is 0 where the weight is read without the bias."""
    return sum(term.places for term in terms if term.has_bias) / max(1, sum(term.places for term in terms))


def second_moment(left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
    """``sum_n left right^T``: (n, g, d) twice to (g, d, d), or to its diagonal (g, d)."""
    if diagonal or left.shape[2] == 1:
        count = left.shape[0]
        size = -(-count // SQUARED_PARTS) if left.numel() > SQUARED_ELEMENTS else count
        pairs = zip(left.split(size), right.split(size), strict=True) if size < count else [(left, right)]
        entries = sum_in_place((b * c).sum(0) for b, c in pairs)
        return entries if diagonal else entries[..., None]
    rows, columns = left.permute(1, 2, 0), right.transpose(0, 1)
    if left is not right or not _is_large(left):
        return torch.bmm(rows, columns)
    return _fill_symmetric(left.new_empty(len(rows), rows.shape[1], rows.shape[1]), rows, columns)


def second_moment_with_constant(rows: Tensor, value: float) -> Tensor:
    """`second_moment` of rows (n, g, d), as if each had one more entry of this value, the last: (g, d + 1, d + 1).

    That entry takes no part in the product of many rows, and the result has space after each of its rows: where these
    begin at odd places in memory, the product takes up to three times as long.
    """
    groups, d = rows.shape[1:]
    if rows.numel() <= COPIED_ELEMENTS.at(rows.device):
        whole = F.pad(rows, (0, 1), value=value)
        return torch.bmm(whole.permute(1, 2, 0), whole.transpose(0, 1))
    stride = -(-(d + 1) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
    moment = rows.new_empty(groups, d + 1, stride)[:, :, : d + 1]
    left, right, without_last = rows.permute(1, 2, 0), rows.transpose(0, 1), moment[:, :-1, :-1]
    if _is_large(rows):
        _fill_symmetric(without_last, left, right)
    else:
        size = max(1, BLOCK_ELEMENTS.at(rows.device) // d)
        for start in range(0, d, size):
            torch.bmm(left[:, start : start + size], right, out=without_last[:, start : start + size])
    moment[:, -1, :-1] = moment[:, :-1, -1] = value * rows.sum(0)
    moment[:, -1, -1].fill_(value**2 * rows.shape[0])
    return moment


def _is_large(rows: Tensor) -> bool:
    count, _, columns = rows.shape
    is_large = count * columns >= SYMMETRIC_MIN_ELEMENTS.at(rows.device)
    return is_large and count >= SYMMETRIC_MIN_ROWS and columns >= SYMMETRIC_MIN_COLUMNS


def _fill_symmetric(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Fill with the symmetric product ``left @ right`` of (g, d, n) and (g, n, d), three eighths of it by mirroring."""
    ends = [round(k * left.shape[1] / SYMMETRIC_PARTS) for k in range(SYMMETRIC_PARTS + 1)]
    for start, end in zip(ends, ends[1:], strict=False):
        torch.bmm(left[:, start:end], right[:, :, :end], out=product[:, start:end, :end])
        product[:, :start, start:end] = product[:, start:end, :start].mT
    return product


def count_rows(terms: Sequence[Affine], sharing: str) -> float:
    """Number of rows that a moment of these terms rests on: places ("expand") or samples ("reduce").

    Windows of a convolution that share inputs count as many as there would be without sharing, at least one an image.
    """
    if sharing == "reduce":
        return sum(len(same[0]) for same in by_length(terms))
    return sum(len(term) * term.places / term.overlap for term in terms)


def has_few_rows(rows: Tensor) -> bool:
    """Whether the second moment of rows (n, g, d) is larger than they are."""
    return rows.shape[0] < rows.shape[2]


def subsample_samples(terms: Sequence[Any], sharing: str, rank: int = 0, world_size: int = 1) -> Sequence[Any]:
    """Every k-th sample if there are many places for each input: the mean of `a a^T` needs no more.

    The mean over a batch is an estimate anyway, and enters a running mean. With several processes, whose parts of the
    batch are equal, the chosen samples together are those that one process would choose from the whole batch.
    """
    whole = [term for term in terms if not isinstance(term, IndexedRows)]
    if not whole:
        return terms
    inputs = math.prod(whole[0].shape) // (whole[0].groups * whole[0].outputs)
    rows = world_size * sum(len(term) * (term.places if sharing == "expand" else 1) for term in whole)
    stride = rows // (ROWS_PER_INPUT * inputs)
    stride = min([stride, *(world_size * len(term) // MIN_SUBSAMPLE for term in whole)])
    if stride < 2:
        return terms
    some = lambda term: term.samples(slice(-rank * len(term) % stride, None, stride))
    return [term if isinstance(term, IndexedRows) else some(term) for term in terms]
