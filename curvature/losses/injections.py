"""Injections: the vectors to backpropagate from the model's output. They decide which curvature is estimated.

All are in the unit of the *per-sample loss* l_n, the loss on a batch of sample n alone. With H the Hessian of l_n at
``output[n]`` (the expected Hessian if l_n is a negative log-likelihood), v_k the k-th vector at sample n, and E the
mean over the randomness, which is independent between samples, the functions below say what sum_k v_k v_k^T is.
Sources: Martens, Sutskever & Swersky 2012, arXiv:1206.6464 (`propagated`); Martens & Grosse 2015, arXiv:1503.05671
(`sampled`); Kunstner, Balles & Hennig 2019, arXiv:1905.12558 (why the empirical Fisher differs from the others).

The global random state is neither read nor changed. Without ``generator=``, every call starts from `SEED` and draws the
same numbers: to average over calls, keep a generator and pass it to each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.losses.output_hessian import LinearMap, OutputBatch, OutputCurvature
from curvature.losses.table import Loss, per_sample_losses

SEED = 0x5EED
VECTORS_PER_CHUNK = 64

VectorPair = tuple[Tensor, Tensor | None]  # left and right; None: right is left
MakeVectors = Callable[[int, int], Tensor]  # (start, stop) -> vectors start..stop, in float32 or float64
Draw = Callable[[int, torch.Generator], Tensor]  # (number of vectors, generator) -> vectors for k = 1
MakePairs = Callable[[int, int], VectorPair]


class Injection:
    """Base class of injections: immutable, comparable, picklable, without state.

    The matrix of sample n is ``M_n = sum_k left_k right_k^T``, where left and right differ only in some cases of
    `exact`. Subclasses implement ``_vector_source`` (the number of vectors, and a function that makes some of them);
    if pairs differ from the vectors, also ``_pair_source``. They say by class attributes what they are; the guide on
    the choice of curvature has an example.
    """

    is_random: ClassVar[bool] = False
    """Whether the vectors are drawn, from ``batch.source(seed)``."""
    needs_loss: ClassVar[bool] = False
    """Whether there are no vectors without the loss."""
    is_isotropic: ClassVar[bool] = False
    """Whether E M_n is a multiple of the identity: curvature measures changes of the output then, not of the loss."""
    weighs_samples: ClassVar[bool] = True
    """Whether sample n counts with its mass m_n (`losses.table.sample_masses`) in a mean, or with 1/N."""

    def vectors(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Make all vectors at once.

        Args:
            output: input of the loss, shape (N, ...): dim 0 holds the samples, dim 1 the classes.
            loss: a torch loss module, one of the functions of the same names in ``torch.nn.functional``, or any
                twice differentiable callable ``loss(output, target) -> scalar``.
            target: as ``loss`` takes it, N samples along dim 0. If it is not needed, it still says which places are
                ignored and how they are weighted; without it, all places count alike.
            generator: on the device of ``output``; None: a new one, seeded with `SEED`.

        Returns:
            Shape (k, *output.shape), dtype and device of the output, no graph.

        Raises:
            ValueError: the output is not a floating point tensor with samples; a loss or target is needed but missing;
                the loss is neither a sum nor a mean, is not convex, or (``sampled``) has no likelihood. A non-finite
                output or Hessian is not an error: the vectors of its sample are nan.
        """
        k, make = self._vector_source(OutputBatch.of(output, loss, target, None, generator))
        return make(0, k).to(output.dtype)

    def chunks(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, size: int = VECTORS_PER_CHUNK,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Yield the vectors ``size`` at a time, which bounds memory: (size or fewer, *output.shape) each.

        Arguments, errors and the vectors of all chunks together are as for `vectors`. Random numbers may depend on
        ``size``.

        Raises:
            ValueError: ``size`` is less than 1.
        """
        check_whole("size", size, 1)
        k, make = self._vector_source(OutputBatch.of(output, loss, target, None, generator))
        return (make(start, min(start + size, k)).to(output.dtype) for start in range(0, k, size))

    def pairs(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, count: int,
        size: int = VECTORS_PER_CHUNK, generator: torch.Generator | None = None,
    ) -> Iterator[VectorPair]:  # fmt: skip
        """Yield chunks (left, right) of vectors whose outer products add up to M_n for every sample n.

        Unlike `vectors`, works for losses that are not convex, and never decomposes a Hessian for ``exact()``.

        Args:
            output: shape (N, ...), or (N*m, ...) for samples of m consecutive rows each.
            loss: as for `vectors`; that of a sample is of its m rows.
            target: as for `vectors`.
            generator: as for `vectors`.
            count: N.
            size: maximum number of vectors at a time.

        Returns:
            Of (size or fewer, *output.shape) each, dtype and device of the output, no graph; right None means left.
            There are `number` in all, or fewer. Samples may share a vector; rows of one sample do only if the matrix
            has entries between them.

        Raises:
            ValueError: as for `vectors`, except that `exact` allows non-convex losses; ``count`` or ``size`` is
                invalid.
        """
        check_whole("size", size, 1)
        k, make = self._pair_source(OutputBatch.of(output, loss, target, count, generator))
        cast = lambda left, right: (left.to(output.dtype), None if right is None else right.to(output.dtype))
        return (cast(*make(start, min(start + size, k))) for start in range(0, k, size))

    def number(self, output: Tensor, count: int) -> int:
        """How many vectors `pairs` yields in all, at most."""
        return self._vector_source(OutputBatch.of(output, None, None, count, None))[0]

    def product(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, count: int,
        generator: torch.Generator | None = None,
    ) -> LinearMap:  # fmt: skip
        """Return z -> M_n z for every sample n, both of shape (k, *output.shape), for any k.

        Random vectors are drawn once, here: M_n is the same at every call. Arguments and errors as for `pairs`.
        """
        batch = OutputBatch.of(output, loss, target, count, generator)
        dtype = batch.output.dtype
        apply = self._product(batch)
        return lambda z: apply(z.detach().to(dtype)).to(z.dtype)

    def known_diagonal(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, count: int
    ) -> Tensor | None:
        """The diagonal of every M_n in the shape of the output, if a formula gives it and M_n is not random."""
        return None

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        """Return k and the function that makes vectors start..stop."""
        raise NotImplementedError

    def _pair_source(self, batch: OutputBatch) -> tuple[int, MakePairs]:
        """Return k and the function that makes pairs start..stop."""
        k, make = self._vector_source(batch)
        return k, lambda start, stop: (make(start, stop), None)

    def _product(self, batch: OutputBatch) -> LinearMap:
        k, make = self._pair_source(batch)
        vectors = batch.flat(make(0, k)[0])  # left and right; `exact`, where they differ, has products of its own

        def apply(z: Tensor) -> Tensor:
            along = torch.einsum("knd,jnd->jkn", vectors, batch.flat(z))
            return torch.einsum("knd,jkn->jnd", vectors, along).reshape(z.shape)

        return apply

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__.lower()}({options})"

    def _with_loss(self, batch: OutputBatch) -> OutputBatch:
        if batch.loss is None:
            raise ValueError(f"{self!r} needs the loss: pass loss= (for an optimizer, KFAC(model, loss=...))")
        return batch


@dataclass(frozen=True, repr=False)
class Exact(Injection):
    """See `exact`."""

    needs_loss: ClassVar[bool] = True
    is_expected: ClassVar[bool] = True  # whether the Hessian of a negative log-likelihood is the mean over labels

    def number(self, output: Tensor, count: int) -> int:
        return output.numel() // count

    def _curvature(self, batch: OutputBatch) -> OutputCurvature:
        return self._with_loss(batch).curvature(self.is_expected)

    def known_diagonal(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, count: int
    ) -> Tensor | None:
        diagonal = self._curvature(OutputBatch.of(output, loss, target, count, None)).diagonal
        return None if diagonal is None else diagonal()

    def _root(self, batch: OutputBatch) -> LinearMap:
        return self._with_loss(batch).root()

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        root = self._root(batch)
        return batch.size, lambda start, stop: root(batch.basis(start, stop))

    def _pair_source(self, batch: OutputBatch) -> tuple[int, MakePairs]:
        curvature = self._curvature(batch)
        if curvature.columns is not None:
            k, columns = curvature.columns
            return k, lambda start, stop: (columns(start, stop), None)
        product = curvature.product()

        def make(start: int, stop: int) -> VectorPair:
            left = batch.basis(start, stop)
            return left, product(left)

        return batch.size, make

    def _product(self, batch: OutputBatch) -> LinearMap:
        return self._curvature(batch).product()


@dataclass(frozen=True, repr=False)
class Curved(Exact):
    """The Hessian of l_n itself. It equals that of `exact`, except for likelihoods where it depends on the label.

    It need not be positive semi-definite: there are pairs and products, and vectors only if a root is known.
    """

    is_expected: ClassVar[bool] = False

    def _root(self, batch: OutputBatch) -> LinearMap:
        root = self._curvature(batch).root
        if root is None:
            raise ValueError("the Hessian of this loss has no root that is known: use pairs(), not vectors()")
        return root


@dataclass(frozen=True, repr=False)
class Random(Injection):
    """Base of injections of ``k`` random vectors; ``_draws`` makes them for k = 1."""

    is_random: ClassVar[bool] = True
    k: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {self.k!r}")

    def number(self, output: Tensor, count: int) -> int:
        return self.k

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        draw, source = self._draws(batch), batch.source(SEED)
        return self.k, lambda start, stop: draw(stop - start, source) / self.k**0.5 if self.k > 1 else draw(1, source)

    def _draws(self, batch: OutputBatch) -> Draw:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Sampled(Random):
    """See `sampled`."""

    needs_loss: ClassVar[bool] = True

    def _draws(self, batch: OutputBatch) -> Draw:
        unit, scale = self._with_loss(batch).drawn_from()
        return lambda k, source: scale * unit.draw(k, source)

    def number(self, output: Tensor, count: int) -> int:
        return min(self.k, output.numel() // count)

    def _pair_source(self, batch: OutputBatch) -> tuple[int, MakePairs]:
        number = self.number(batch.output, batch.count)
        if number == self.k:
            return super()._pair_source(batch)
        unit, scale = self._with_loss(batch).drawn_from()
        root = unit.drawn_root(self.k, batch.source(SEED))
        return number, lambda start, stop: (scale * root(batch.basis(start, stop)) / self.k**0.5, None)


@dataclass(frozen=True, repr=False)
class Propagated(Random):
    """See `propagated`."""

    needs_loss: ClassVar[bool] = True

    def _draws(self, batch: OutputBatch) -> Draw:
        root = self._with_loss(batch).root()
        return lambda k, source: root(batch.signs(k, source))


@dataclass(frozen=True, repr=False)
class Isotropic(Random):
    """See `isotropic`."""

    is_isotropic: ClassVar[bool] = True

    def number(self, output: Tensor, count: int) -> int:
        return min(self.k, output.numel() // count)

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        if self.k < batch.size:
            return super()._vector_source(batch)
        source, scale = batch.source(SEED), self._scale(batch)
        # the signs tell samples that meet, as in a batch norm, from each other
        return batch.size, lambda start, stop: scale * batch.signs(stop - start, source) * batch.basis(start, stop)

    def _draws(self, batch: OutputBatch) -> Draw:
        scale, new = self._scale(batch), batch.output.new_empty
        return lambda k, source: scale * new(k, *batch.output.shape).normal_(generator=source)

    def _scale(self, batch: OutputBatch) -> Tensor | float:
        return 1.0 if batch.loss is None else batch.masses(strict=False).sqrt()


@dataclass(frozen=True, repr=False)
class Empirical(Injection):
    """See `empirical`."""

    needs_loss: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = False

    def number(self, output: Tensor, count: int) -> int:
        return 1

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        loss = self._with_loss(batch).loss
        point = batch.output.requires_grad_()
        try:
            with torch.enable_grad():
                losses = per_sample_losses(loss, point, batch.target, batch.count)
                (gradient,) = torch.autograd.grad(losses.sum(), point, materialize_grads=True)
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:  # of None for a target
            if batch.target is not None:
                raise
            why = "empirical() is the gradient of the loss at the target, which is missing: pass target="
            raise ValueError(why) from error
        return 1, lambda start, stop: gradient[None][start:stop]


def exact() -> Injection:
    """All columns of a root of the Hessian: sum_k v_k v_k^T = H, without randomness.

    There are as many vectors as entries in one sample's output (classes times places); matrices of a cross-entropy over
    C classes need C - 1 for each place. If the loss is a negative log-likelihood (those of `sampled`), H is the Fisher
    information at the output, that is the expected Hessian over labels drawn from the model. It needs no target, except
    for class weights, ``pos_weight`` and ignored places. ``NLLLoss`` takes log-probabilities whose exponentials sum to
    one: after a log-softmax it gives what ``CrossEntropyLoss`` gives for the logits.

    For every other loss, H is the Hessian of l_n and needs the target. ``vectors()`` and ``chunks()`` then require a
    loss that is convex in the output; ``pairs()`` and ``product()`` do not. For ``KLDivLoss``, H is zero.
    """
    return Exact()


def sampled(k: int = 1) -> Injection:
    """Gradients at k labels per sample, drawn from the model's own likelihood: E sum_k v_k v_k^T = H.

    The likelihoods: categorical (``CrossEntropyLoss``, ``NLLLoss``), Bernoulli (``BCEWithLogitsLoss``, ``BCELoss``),
    normal (``MSELoss`` with variance 1/2; ``GaussianNLLLoss``, both heads) and Poisson (``PoissonNLLLoss``). In a mean
    over T terms per sample, the gradient of each term is divided by sqrt(T), not T: the labels of the terms are
    independent, so their second moments add up to H.

    Matrices cost D vectors, not k, where a sample's output has D < k entries: each class once, weighed by how often it
    was drawn, each term alone. Without ``generator=``, repeated calls draw the same labels (the other random injections
    likewise): for independent estimates pass the same ``torch.Generator`` to each.

    Raises:
        ValueError: k is not an integer of at least 1.
    """
    return Sampled(k)


def propagated(k: int = 1) -> Injection:
    """Curvature propagation: a root of the Hessian times k vectors of random signs, E sum_k v_k v_k^T = H.

    Losses and targets are as for `exact`, but the loss must be convex. The Hessian of a callable is decomposed, D x D
    for the D entries of each sample's output. If the Hessian is diagonal, the squared entries have no variance.

    Raises:
        ValueError: k is not an integer of at least 1.
    """
    return Propagated(k)


def isotropic(k: int = 1) -> Injection:
    """The Gauss-Newton matrix of a loss whose terms are replaced by 1/2 ||f||^2, from k vectors of normal noise.

    If k is at least the number of entries in one sample's output, there is one vector for each entry, with random
    signs, and the matrix of every sample is exact.

    E sum_k v_k v_k^T = I without a loss, and if the loss sums its terms or has one per sample; I/T if it is a mean over
    T terms per sample (places; entries of MSE and the like). Given a target, terms count as they do in the loss, those
    that it ignores not at all. A callable counts as one term per sample. The matrix does not vanish as training
    converges.

    Raises:
        ValueError: k is not an integer of at least 1.
    """
    return Isotropic(k)


def empirical() -> Injection:
    """One vector, the gradient of l_n at its target: the empirical Fisher. Needs the loss and its target."""
    return Empirical()
