"""Convolutions and transposed convolutions, unfolded only on demand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.terms.basic import Activations, OuterProduct, Samples, WithDirectForm

CACHED_ELEMENTS = 1 << 18  # of patches that are made at a time
ADDITION_COST = 17  # multiplications of a matrix product that adding an entry takes the time of (measured, one thread)


@dataclass(frozen=True)
class Convolution:
    """The `OuterProduct` of a convolution before unfolding; its places are the output's pixels."""

    source: Tensor  # (N, m, C, *size), the input
    b: Tensor  # (N, m, O, *out)
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding: tuple[int, ...] = ()  # of the input, as `F.pad` takes it
    has_bias: bool = True  # as of `OuterProduct`
    independent: bool = False  # as of `OuterProduct`

    sizes: ClassVar[tuple[int, ...] | None] = None
    order: ClassVar[tuple[int, ...] | None] = None

    @property
    def x(self) -> Tensor:
        """The padded input, made at each use: that of all layers at once would be as large as their activations."""
        return F.pad(self.source, self.padding) if any(self.padding) else self.source

    def _pad_input(self) -> tuple[Tensor, Sequence[int]]:
        """The input, and by how much torch's own convolution is to pad it; already padded where the ends differ."""
        before, after, zeros = self.padding[-2::-2], self.padding[::-2], [0] * len(self.stride)
        return (self.source, before or zeros) if before == after else (self.x, zeros)

    @property
    def device(self) -> torch.device:
        return self.b.device

    @property
    def places(self) -> int:
        return self.b.shape[1] * math.prod(self.b.shape[3:])

    @property
    def overlap(self) -> float:
        """As of `OuterProduct`: the number of windows that an input is in, away from the edges."""
        return _overlap(self, self.b.shape[3:])

    @property
    def inputs(self) -> int:
        """Number of entries of the layer's input."""
        return self.source.numel()

    @property
    def outputs(self) -> int:
        return self.shape[0] // self.groups

    def __len__(self) -> int:
        return self.b.shape[0]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        b = self.b * weights.to(self.b.dtype).reshape(-1, *[1] * (self.b.ndim - 1))
        return replace(self, source=self.source.flatten(0, 1)[None], b=b.flatten(0, 1)[None]).gradients()[0]

    def inner_products(self, vector: Tensor) -> Tensor:
        return self._outputs(vector.view(self.shape)).reshape(self.b.shape).mul_(self.b).flatten(1).sum(1)

    def _outputs(self, weight: Tensor) -> Tensor:
        """What the layer would give with another weight, (N * m, outputs, *out)."""
        (x, padding), zeros = self._pad_input(), [0] * len(self.stride)
        weight, x = weight.to(x.dtype), x.flatten(0, 1)
        outputs = torch.convolution(x, weight, None, self.stride, padding, self.dilation, False, zeros, self.groups)
        return _crop(outputs, self.b.shape[3:])  # the stride may leave some of the input

    def place_products(self, vector: Tensor) -> Tensor:
        return self.unfold().place_products(vector)

    @property
    def has_rows(self) -> bool:
        """As of `OuterProduct`."""
        return self.groups == 1

    def rows(self, start: int, stop: int) -> Convolution:
        """The same for some output channels, without groups."""
        return replace(self, b=self.b[:, :, start:stop], shape=(stop - start, *self.shape[1:]))

    def projected(self, left: Tensor, right: Tensor) -> Tensor:
        """``left g[n] right^T`` (N, k, l) of the gradients as matrices, without groups: nothing is unfolded."""
        inputs = self._outputs(right.view(len(right), *self.shape[1:]))
        products = (left.to(self.b.dtype) @ self.b.flatten(0, 1).flatten(2)) @ inputs.flatten(2).mT
        return products.unflatten(0, self.b.shape[:2]).sum(1)

    def gradients(self) -> Tensor:
        """Products of the input's patches where these are no larger, some samples at a time; else one convolution."""
        if self.outputs == self.shape[1] == 1 and _has_onednn(self.b):
            return self._correlate()
        if self.places > self.outputs:
            return self._convolve()
        n, patches = len(self.b), self.places * math.prod(self.shape[1:]) * self.groups
        blocks = self.b.new_empty(n, self.groups, self.outputs, math.prod(self.shape[1:]))
        step = max(1, CACHED_ELEMENTS // max(1, patches))
        for part in (slice(start, start + step) for start in range(0, n, step)):
            self.samples(part)._products(blocks[part])
        return blocks.view(n, *self.shape)

    def _products(self, out: Tensor) -> None:
        """The gradients (N, g, o, i) by a matrix product for each sample and group."""
        patches = _patches(self.x, self.shape[2:], self.dilation, self.stride, self.b.shape[3:])
        patches = patches.movedim(1, -len(self.stride) - 1).reshape(len(out) * self.groups, -1, self.places)
        b = self.b.movedim(1, 2).reshape(len(patches), -1, self.places)
        torch.bmm(b, patches.mT, out=out.flatten(0, 1))

    def _correlate(self) -> Tensor:
        """Of a depthwise convolution: by another one, for which oneDNN is fast. Stride and dilation exchange roles."""
        n, copies = self.b.shape[:2]
        (x, padding), zeros = self._pad_input(), [0] * len(self.stride)
        x, kernels = x.flatten(0, 2)[None], self.b.flatten(0, 2)[:, None]
        gradients = torch.convolution(x, kernels, None, self.dilation, padding, self.stride, False, zeros, len(kernels))
        return _crop(gradients, self.shape[2:]).reshape(n, copies, *self.shape).sum(1)  # as in `_outputs`

    def _convolve(self) -> Tensor:
        """The gradients by one weight gradient of a convolution with a group per sample."""
        n, dims = len(self.b), len(self.stride)
        whole, padding = self._pad_input()
        x, b = (t.transpose(0, 1).reshape(t.shape[1], n * t.shape[2], *t.shape[3:]) for t in (whole, self.b))
        weight = b.new_empty(n * self.shape[0], *self.shape[1:])
        _, gradients, _ = torch.ops.aten.convolution_backward(
            b, x, weight, None, self.stride, padding, self.dilation, False, [0] * dims, n * self.groups,
            [False, True, False],
        )  # fmt: skip
        return gradients.reshape(n, *self.shape)

    def samples(self, part: Samples) -> Convolution:
        return replace(self, source=self.source[part], b=self.b[part])

    def activations(self) -> Iterator[Activations]:
        yield None, self._input_patches()

    def backprops(self) -> Tensor:
        """(N, t, g, o)."""
        return _by_place(self.b, self.groups, len(self.stride))

    def backprop_moment(self, other: Convolution, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``sum_n weights[n] sum_t b b'^T`` (g, o, o), b' that of `other`. Adds up samples last: nothing is moved."""
        b, c = (t.b.to(dtype).flatten(3).unflatten(2, (self.groups, self.outputs)) for t in (self, other))
        moments = (b @ c.mT).sum(1)
        return moments.sum(0) if weights is None else torch.tensordot(weights.to(dtype), moments, 1)

    def _input_patches(self) -> Tensor:
        patches = _patches(self.x, self.shape[2:], self.dilation, self.stride, self.b.shape[3:])
        return _by_place(patches, self.groups, len(self.stride))

    @property
    def gram_cost(self) -> float:
        """Multiplications that each pair of places costs in `grams`."""
        return self.shape[0] + self.groups * min(math.prod(self.shape[1:]), self._pixel_cost)

    @property
    def _pixel_cost(self) -> float:
        """The same of the inner products of pixels, and of adding them up, in one group."""
        pixels = self.source.shape[1] * math.prod(self.source.shape[3:])
        return (pixels / self.places) ** 2 * (self.shape[1] + ADDITION_COST * self.shape[2])

    def grams(self) -> tuple[Tensor, Tensor]:
        """Inner products of the input's patches, and of the backprops, at pairs of places, (N, g, t, t)."""
        if self._pixel_cost < math.prod(self.shape[1:]):
            return self._patch_gram(), _pixel_gram(self.b, self.groups)
        a = self._input_patches().transpose(1, 2)
        return a @ a.mT, _pixel_gram(self.b, self.groups)

    def _patch_gram(self) -> Tensor:
        """Sums over the kernel's entries of inner products of pixels, along one axis after the other."""
        x, axes = self.x, len(self.stride)
        size = (x.shape[1], *x.shape[3:])
        gram = _pixel_gram(x, self.groups).unflatten(3, size).unflatten(2, size)
        for axis in range(axes):
            entries, step, pixels = self.shape[2 + axis], self.stride[axis], self.b.shape[3 + axis]
            starts = (k * self.dilation[axis] for k in range(entries))
            steps = (slice(start, start + step * (pixels - 1) + 1, step) for start in starts)
            last = [slice(None)] * (axes - axis - 1)
            first, *others = (gram[(..., one, *last, *[slice(None)] * (axis + 1), one, *last)] for one in steps)
            gram = first.clone() if others else first
            for other in others:
                gram += other
        return gram.reshape(len(x), self.groups, self.places, self.places)

    def unfold(self) -> OuterProduct:
        """The `OuterProduct` of the input's patches."""
        return OuterProduct(self._input_patches(), self.backprops(), self.shape, has_bias=self.has_bias)


def _overlap(term: Convolution, windows: Sequence[int]) -> float:
    """The number of windows that share an input, away from the edges: along each axis, of so many."""
    axes = zip(term.shape[2:], term.stride, term.dilation, windows, strict=True)
    # windows start at multiples of the stride, and see every dilation-th input
    return math.prod(min(max(k * math.gcd(by, step) / by, 1.0), n) for k, by, step, n in axes)


class Phase(NamedTuple):
    """Output pixels a stride apart, of which the u-th sees pixel ``first + u - step * m`` through entry ``taps[m]``."""

    taps: list[int]
    first: int
    step: int
    pixels: int


@dataclass(frozen=True)
class TransposedConvolution(WithDirectForm):
    """A transposed convolution. Its gradients are those of its adjoint, whose places are the input's pixels.

    As a layer, its places are the output's pixels, each of which sees one in `stride` kernel entries per axis.
    """

    direct: Convolution  # its source is the backprop, its b the input

    @property
    def groups(self) -> int:
        return self.direct.groups

    @property
    def has_bias(self) -> bool:
        return self.direct.has_bias

    @property
    def inputs(self) -> int:
        """Number of entries of the layer's input."""
        return self.direct.b.numel()

    @property
    def outputs(self) -> int:
        return self.shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        inputs, outputs, *kernel = self.shape
        return (self.groups, outputs, inputs // self.groups, *kernel)

    @property
    def order(self) -> tuple[int, ...]:
        return (0, 2, 1, *range(3, len(self.sizes)))

    @property
    def places(self) -> int:
        return self.direct.source.shape[1] * math.prod(self.direct.source.shape[3:])

    @property
    def overlap(self) -> float:
        """Of windows of outputs a stride apart, which see the same entries of the kernel."""
        direct = self.direct
        return _overlap(direct, [-(-n // by) for n, by in zip(direct.source.shape[3:], direct.stride, strict=True)])

    def activations(self) -> Iterator[Activations]:
        inputs, _, *kernel = self.shape
        number = torch.arange(inputs // self.groups * math.prod(kernel), device=self.device)
        number = number.reshape(-1, *kernel)
        before = self.direct.padding[::-2] or [0] * len(kernel)
        out = self.direct.source.shape[3:]
        geometry = zip(kernel, self.direct.stride, self.direct.dilation, before, out, strict=True)
        for phases in product(*(_phases(*axis) for axis in geometry)):
            seen = _window(self.direct.b, phases).flip(*range(3, number.ndim + 2))  # the kernel slides backwards
            taps, _, steps, pixels = zip(*phases, strict=True)
            patches = _patches(seen, [len(k) for k in taps], steps, [1] * len(phases), pixels)
            chosen = number[(slice(None), *(slice(k[0], k[-1] + 1, k[1] - k[0] if len(k) > 1 else 1) for k in taps))]
            some = None if chosen.shape == number.shape else chosen.flatten()
            yield some, _by_place(patches, self.groups, len(phases))

    def backprops(self) -> Tensor:
        """(N, t, g, o)."""
        return _by_place(self.direct.source, self.groups, len(self.direct.stride))

    def samples(self, part: Samples) -> TransposedConvolution:
        return replace(self, direct=self.direct.samples(part))


def _phases(kernel: int, stride: int, dilation: int, padding: int, out: int) -> list[Phase]:
    """The phases of one axis, where pixel y sees ``(y + padding - dilation * k) / stride``; none without taps."""
    phases = []
    for y in range(min(stride, out)):
        taps = [k for k in range(kernel) if (y + padding - dilation * k) % stride == 0]
        if taps:
            step = dilation * (taps[1] - taps[0]) // stride if len(taps) > 1 else 1
            phases.append(Phase(taps, (y + padding - dilation * taps[0]) // stride, step, len(range(y, out, stride))))
    return phases


def _window(x: Tensor, phases: Sequence[Phase]) -> Tensor:
    """The input pixels that the phases see, with zeros outside the input."""
    padding: list[int] = []
    inside: list[Any] = []
    for phase, size in zip(phases, x.shape[3:], strict=True):
        start, stop = phase.first - phase.step * (len(phase.taps) - 1), phase.first + phase.pixels
        before, after = max(0, -start), max(0, stop - size)
        padding = [before, after, *padding]
        inside.append(slice(start + before, stop + before))
    return F.pad(x, padding)[(..., *inside)]


def _patches(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int], out: Sequence[int]
) -> Tensor:
    """A view (N, m, C, *kernel, *out) of x (N, m, C, *size)."""
    steps = x.stride()[3:]
    return x.as_strided(
        (*x.shape[:3], *kernel, *out), (*x.stride()[:3], *map(mul, steps, dilation), *map(mul, steps, stride))
    )


def _crop(x: Tensor, size: Sequence[int]) -> Tensor:
    inside: list[Any] = [slice(pixels) for pixels in size]
    return x[(..., *inside)]


def _has_onednn(x: Tensor) -> bool:
    """Whether torch convolves such tensors by oneDNN."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _pixel_gram(x: Tensor, groups: int) -> Tensor:
    """Inner products (N, g, m * pixels, m * pixels) over the channels of x (N, m, channels, *size), by groups."""
    channels = x.transpose(1, 2).reshape(len(x), groups, x.shape[2] // groups, -1)
    return channels.mT @ channels


def _by_place(x: Tensor, groups: int, axes: int) -> Tensor:
    """(N, m, channels, ..., *places) with `axes` axes of places to (N, t, g, ...)."""
    samples, copies = x.shape[:2]  # last in memory, with the places, as in images: patches are copied row by row
    by_channel = x.permute(*range(2, x.ndim - axes), 0, 1, *range(x.ndim - axes, x.ndim))
    return by_channel.reshape(groups, -1, samples, copies * math.prod(x.shape[-axes:])).permute(2, 3, 0, 1)
