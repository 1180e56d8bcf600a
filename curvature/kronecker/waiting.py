"""Activations whose second moment is computed later, because it would take more memory than they do until then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvature.kronecker.diagonal_blocks import cuts_of
from curvature.kronecker.factors import Affine, Scheme, at_least_float32
from curvature.kronecker.packing import entries_of
from curvature.terms import Convolution, OuterProduct

LEAST_SAVED = 1.2  # times that the moment has to be larger


@dataclass(frozen=True)
class Waiting:
    """Terms of one reading, without backprops.

    Attributes:
        versions: those of their inputs; None if these are copies.
    """

    terms: list[Affine]
    versions: list[int] | None

    def checked(self) -> list[Affine]:
        """The terms, for `Scheme.activations`.

        Raises:
            RuntimeError: an input was changed in place since.
        """
        if self.versions is not None and self.versions != [_inputs(term)._version for term in self.terms]:
            raise RuntimeError(
                f"the input of a layer with a weight of shape {tuple(self.terms[0].shape)} was changed in place before "
                "the backward pass of the model's outputs; change a copy"
            )
        return self.terms

    def copied(self) -> Waiting:
        """Copies of the inputs: once the backward pass is over, the loop may change the layer's own."""
        return self if self.versions is None else Waiting([_with(t, _inputs(t).clone()) for t in self.checked()], None)

    def bound(self) -> Tensor:
        """A number () no less than the trace of the moment, bias aside: not finite where the moment is not.

        An entry of a convolution's input is in as many patches as the kernel has entries, at most.
        """
        parts = [
            torch.linalg.vector_norm(x := _inputs(term), dtype=at_least_float32(x.dtype)).square()
            * math.prod(term.shape[2:])
            for term in self.terms
        ]
        return torch.stack(parts).sum()


def kept_activations(scheme: Scheme, terms: Sequence[Affine]) -> Waiting | None:
    """The layer's own inputs, which autograd keeps until the backward pass, too; None if moments are smaller.

    Args:
        terms: of one reading.
    """
    reading = scheme.reading(terms[0])
    side = 0 if reading.flipped else 1
    if scheme.diagonal[side] or scheme.sketched[side]:
        return None
    some = [term for term in terms if isinstance(term, OuterProduct | Convolution)]
    number = scheme.arrangement.groups * entries_of(cuts_of(scheme)[side])
    size = sum(_inputs(term).numel() for term in some)
    if len(some) < len(terms) or number < LEAST_SAVED * size:
        return None
    return Waiting([_with(term, _inputs(term)) for term in some], [_inputs(term)._version for term in some])


def _inputs(term: Affine) -> Tensor:
    assert isinstance(term, OuterProduct | Convolution)
    return term.a if isinstance(term, OuterProduct) else term.source


def _with(term: Affine, inputs: Tensor) -> Affine:
    """A term with these inputs, and zeros that take no memory in place of its backprops."""
    assert isinstance(term, OuterProduct | Convolution)
    b = term.b.new_zeros(()).expand(term.b.shape)
    return replace(term, a=inputs, b=b) if isinstance(term, OuterProduct) else replace(term, source=inputs, b=b)
