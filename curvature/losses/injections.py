"""What is sent back from the output of a model, and so what is estimated: vectors whose squares are a curvature.

All are in the unit of the *per-sample loss* l_n, the loss on a batch of sample n alone. With H the Hessian of l_n at
``output[n]`` (the expected one where l_n stands for a likelihood), v_k the k-th vector at sample n, and E over the
randomness, which is independent between samples:

=================  =======================================================================================
``exact()``        sum_k v_k v_k^T = H
``sampled(k)``     E sum_k v_k v_k^T = H; labels drawn from the model (arXiv:1503.05671, arXiv:1905.12558)
``propagated(k)``  E sum_k v_k v_k^T = H; random signs through a root of H (arXiv:1206.6464)
``isotropic(k)``   E sum_k v_k v_k^T = I; every term of the loss replaced by 1/2 ||f||^2
``empirical()``    v_1 is the gradient of l_n itself
=================  =======================================================================================

Sources: Martens, Sutskever & Swersky 2012, arXiv:1206.6464; Martens & Grosse 2015, arXiv:1503.05671; Kunstner,
Balles & Hennig 2019, arXiv:1905.12558 (why the empirical Fisher is none of the others).

The global random state is neither read nor changed. Without ``generator=`` every call starts anew from the seed `SEED`
and so draws the same numbers: whoever averages over calls keeps a generator and passes it to each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from curvature.losses.output_batch import OutputBatch
from curvature.losses.output_hessian import (
    LinearMap,
    OutputCurvature,
    fisher_information,
    hessian,
    hessian_root,
    label_gradient_sampler,
    term_masses,
)
from curvature.losses.per_sample import Loss, per_sample_losses

SEED = 0x5EED
VECTORS_PER_CHUNK = 64  # vectors at a time

Pair = tuple[Tensor, Tensor | None]  # left and right; None: right is left
MakeVectors = Callable[[int, int], Tensor]  # (start, stop) -> the vectors of these numbers, in float32 or float64
MakePairs = Callable[[int, int], Pair]


class Injection:
    """Base of what the functions of this module return: immutable, comparable, picklable; holds no state.

    Its matrix of sample n is ``M_n = sum_k left_k right_k^T``; left and right are the same vectors but in some cases of
    `exact`. A sub-class gives the number of vectors and a function that makes some of them in ``_vector_source``; where
    pairs differ from the vectors, also in ``_pair_source``.
    """

    is_random: ClassVar[bool] = False
    """Whether the vectors are drawn."""
    weighs_samples: ClassVar[bool] = True
    """Whether sample n counts with its mass m_n (`curvature.losses.sample_masses`) in a mean, or as one of N."""

    def vectors(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Make all vectors at once.

        Args:
            output: what the loss is taken of, shape (N, ...), a sample along dim 0; classes are dim 1.
            loss: a torch loss module, one of the functions of the same names in ``torch.nn.functional``, or any
                twice differentiable callable ``loss(output, target) -> scalar``.
            target: as ``loss`` takes it, N samples along dim 0. Where it is not needed, it still tells which places are
                ignored and how they are weighed; without it, all places count alike.
            generator: on the device of ``output``; None: a new one, seeded with `SEED`.

        Returns:
            Shape (k, *output.shape), dtype and device of the output, no graph.

        Raises:
            ValueError: the output is no floating point tensor with samples; a loss or target is needed and missing; the
                loss does not add or average, is not convex, or (``sampled``) has no likelihood. An output or a Hessian
                that is not finite is no error: the vectors of its sample are nan.
        """
        k, make = self._vector_source(OutputBatch.of(output, loss, target, None, generator))
        return make(0, k).to(output.dtype)

    def chunks(
        self,
        output: Tensor,
        loss: Loss | None = None,
        target: Any = None,
        *,
        size: int = VECTORS_PER_CHUNK,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield the vectors ``size`` at a time, so that memory stays bounded: (size or fewer, *output.shape) each.

        Arguments and errors are those of `vectors`, and so is the contract for all chunks together. The numbers drawn
        may depend on ``size``.

        Raises:
            ValueError: ``size`` is less than 1.
        """
        _require_size(size)
        k, make = self._vector_source(OutputBatch.of(output, loss, target, None, generator))
        return (make(start, min(start + size, k)).to(output.dtype) for start in range(0, k, size))

    def pairs(
        self,
        output: Tensor,
        loss: Loss | None = None,
        target: Any = None,
        *,
        count: int,
        size: int = VECTORS_PER_CHUNK,
        generator: torch.Generator | None = None,
    ) -> Iterator[Pair]:
        """Yield chunks (left, right) of vectors, of which the outer products add up to M_n for every sample n.

        Unlike `vectors`, works for losses that are not convex, and never decomposes a Hessian for ``exact()``.

        Args:
            output: shape (N, ...), or (N*m, ...) for samples of m consecutive rows each.
            loss: as for `vectors`; that of a sample is of its m rows.
            target: as for `vectors`.
            generator: as for `vectors`.
            count: N.
            size: at most so many vectors at a time.

        Returns:
            Of (size or fewer, *output.shape) each, dtype and device of the output, no graph; right None means left.
            There are `number` of them in all. Two samples may share a vector, two rows of a sample only where the
            matrix has entries between them.

        Raises:
            ValueError: as `vectors`, but for losses that are not convex in `exact`; ``count`` or ``size`` do not fit.
        """
        _require_size(size)
        k, make = self._pair_source(OutputBatch.of(output, loss, target, count, generator))
        return (_cast_pair(output.dtype, make(start, min(start + size, k))) for start in range(0, k, size))

    def number(self, output: Tensor, count: int) -> int:
        """How many vectors `pairs` yields in all."""
        raise NotImplementedError

    def product(
        self,
        output: Tensor,
        loss: Loss | None = None,
        target: Any = None,
        *,
        count: int,
        generator: torch.Generator | None = None,
    ) -> LinearMap:
        """Return z -> M_n z for every sample n, both of shape (k, *output.shape), for any k.

        Random vectors are drawn once, here: M_n is the same at every call. Arguments and errors as for `pairs`.
        """
        batch = OutputBatch.of(output, loss, target, count, generator)
        wide = batch.output.dtype
        apply = self._product(batch)
        return lambda z: apply(z.detach().to(wide)).to(z.dtype)

    def known_diagonal(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, count: int
    ) -> Tensor | None:
        """The diagonal of every M_n in the shape of the output, where a formula gives it and M_n is a constant."""
        return None

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        """Return k, and the function that makes the vectors start..stop of them."""
        raise NotImplementedError

    def _pair_source(self, batch: OutputBatch) -> tuple[int, MakePairs]:
        """Return k, and the function that makes the pairs start..stop of them."""
        k, make = self._vector_source(batch)
        return k, lambda start, stop: (make(start, stop), None)

    def _product(self, batch: OutputBatch) -> LinearMap:
        k, make = self._pair_source(batch)
        left, right = make(0, k)
        flat = batch.flat(left), batch.flat(left if right is None else right)

        def apply(z: Tensor) -> Tensor:
            along = torch.einsum("knd,jnd->jkn", flat[1], batch.flat(z))
            return torch.einsum("knd,jkn->jnd", flat[0], along).reshape(z.shape)

        return apply

    def __repr__(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__.lower()}({options})"

    def _require(self, loss: Loss | None) -> Loss:
        if loss is None:
            raise ValueError(f"{self!r} needs the loss: pass loss= (for an optimizer, KFAC(model, loss=...))")
        return loss


@dataclass(frozen=True, repr=False)
class Exact(Injection):
    """See `exact`."""

    def number(self, output: Tensor, count: int) -> int:
        return output.numel() // count

    def _curvature(self, batch: OutputBatch) -> OutputCurvature:
        return fisher_information(self._require(batch.loss), batch.output, batch.target, batch.count)

    def known_diagonal(
        self, output: Tensor, loss: Loss | None = None, target: Any = None, *, count: int
    ) -> Tensor | None:
        diagonal = self._curvature(OutputBatch.of(output, loss, target, count, None)).diagonal
        return None if diagonal is None else diagonal()

    def _root(self, batch: OutputBatch) -> LinearMap:
        return hessian_root(self._require(batch.loss), batch.output, batch.target, batch.count)

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        root = self._root(batch)
        return self.number(batch.output, batch.count), lambda start, stop: root(batch.basis(start, stop))

    def _pair_source(self, batch: OutputBatch) -> tuple[int, MakePairs]:
        curvature = self._curvature(batch)
        k, root = self.number(batch.output, batch.count), curvature.root
        if root is not None:
            return k, lambda start, stop: (root(batch.basis(start, stop)), None)
        product = curvature.product()

        def make(start: int, stop: int) -> Pair:
            left = batch.basis(start, stop)
            return left, product(left)

        return k, make

    def _product(self, batch: OutputBatch) -> LinearMap:
        return self._curvature(batch).product()


@dataclass(frozen=True, repr=False)
class LossHessian(Exact):
    """The Hessian of l_n itself, which `exact` is but for likelihoods where it depends on the label.

    It need not be positive semi-definite, so there are pairs and products, and vectors only where a root is known.
    """

    def _curvature(self, batch: OutputBatch) -> OutputCurvature:
        return hessian(self._require(batch.loss), batch.output, batch.target, batch.count)

    def _root(self, batch: OutputBatch) -> LinearMap:
        root = self._curvature(batch).root
        if root is None:
            raise ValueError("the Hessian of this loss has no root that is known: use pairs(), not vectors()")
        return root


@dataclass(frozen=True, repr=False)
class Random(Injection):
    """Base of those that draw ``k`` random vectors: ``_draws`` returns (count, generator) -> vectors for k = 1."""

    is_random: ClassVar[bool] = True
    k: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {self.k!r}")

    def number(self, output: Tensor, count: int) -> int:
        return self.k

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        draw, source = self._draws(batch), batch.generator
        if source is None:
            source = torch.Generator(batch.output.device).manual_seed(SEED)
        return self.k, lambda start, stop: draw(stop - start, source) / self.k**0.5

    def _draws(self, batch: OutputBatch) -> Callable[[int, torch.Generator], Tensor]:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Sampled(Random):
    """See `sampled`."""

    def _draws(self, batch: OutputBatch) -> Callable[[int, torch.Generator], Tensor]:
        return label_gradient_sampler(self._require(batch.loss), batch.output, batch.target, batch.count)


@dataclass(frozen=True, repr=False)
class Propagated(Random):
    """See `propagated`."""

    def _draws(self, batch: OutputBatch) -> Callable[[int, torch.Generator], Tensor]:
        root = hessian_root(self._require(batch.loss), batch.output, batch.target, batch.count)
        shape = batch.output.shape
        options: Any = {"dtype": batch.output.dtype, "device": batch.output.device}
        return lambda k, source: root(torch.randint(2, (k, *shape), generator=source, **options) * 2 - 1)


@dataclass(frozen=True, repr=False)
class Isotropic(Random):
    """See `isotropic`."""

    def _draws(self, batch: OutputBatch) -> Callable[[int, torch.Generator], Tensor]:
        output, loss = batch.output, batch.loss
        ones = torch.ones_like(output)
        masses = ones if loss is None else term_masses(loss, output, batch.target, strict=False, count=batch.count)
        scale = masses.sqrt()
        options: Any = {"dtype": output.dtype, "device": output.device}
        return lambda k, source: scale * torch.randn(k, *output.shape, generator=source, **options)


@dataclass(frozen=True, repr=False)
class Empirical(Injection):
    """See `empirical`."""

    weighs_samples: ClassVar[bool] = False

    def number(self, output: Tensor, count: int) -> int:
        return 1

    def _vector_source(self, batch: OutputBatch) -> tuple[int, MakeVectors]:
        loss = self._require(batch.loss)
        if batch.target is None:
            raise ValueError("empirical() is the gradient of the loss at the target, which is missing: pass target=")
        point = batch.output.requires_grad_()
        with torch.enable_grad():
            losses = per_sample_losses(loss, point, batch.target, batch.count)
            (gradient,) = torch.autograd.grad(losses.sum(), point, materialize_grads=True)
        return 1, lambda start, stop: gradient[None][start:stop]


def exact() -> Injection:
    """All columns of a root of the Hessian: sum_k v_k v_k^T = H, without randomness.

    There are as many vectors as entries in one sample's output (classes times places): two places share none, which
    would mix them. H is the Fisher information at the output where the loss is the negative logarithm of a likelihood
    (those of `sampled`), the expected Hessian over labels that the model draws: no target is needed then, unless for
    class weights, ``pos_weight`` and ignored places. ``NLLLoss`` takes log-probabilities that add up to one: behind a
    log-softmax it gives what ``CrossEntropyLoss`` gives of the logits.

    For every other loss H is the Hessian of l_n, and the target is needed. ``vectors()`` and ``chunks()`` then need a
    loss that is convex in the output; ``pairs()`` and ``product()`` do not. ``KLDivLoss`` has none: H is zero.
    """
    return Exact()


def sampled(k: int = 1) -> Injection:
    """Gradients at labels drawn from the model's own likelihood, k for each sample: E sum_k v_k v_k^T = H.

    The likelihoods: categorical (``CrossEntropyLoss``, ``NLLLoss``), Bernoulli (``BCEWithLogitsLoss``, ``BCELoss``),
    normal (``MSELoss``, of variance 1/2; ``GaussianNLLLoss``, of both heads) and Poisson (``PoissonNLLLoss``). In a
    mean over T terms per sample, the gradient of each term is divided by sqrt(T), not T: the terms' labels are
    independent and their second moments add up to H.

    Raises:
        ValueError: k is no integer of at least 1.
    """
    return Sampled(k)


def propagated(k: int = 1) -> Injection:
    """Send k vectors of independent random signs through a root of the Hessian: E sum_k v_k v_k^T = H.

    Curvature propagation. Losses and targets as for `exact`, but always convex ones: a callable has its Hessian
    decomposed, D x D for the D entries of each sample's output. With a diagonal Hessian the squares of the entries have
    no variance.

    Raises:
        ValueError: k is no integer of at least 1.
    """
    return Propagated(k)


def isotropic(k: int = 1) -> Injection:
    """k vectors of normal noise: the Gauss-Newton matrix of a loss whose terms are replaced by 1/2 ||f||^2.

    E sum_k v_k v_k^T = I where no loss is given, where it adds its terms or has one for each sample; I/T where it is a
    mean over T terms for each sample (places; entries of MSE and the like). Where a target is given, terms count as
    they do in the loss: not at all where ignored. A callable counts as one term per sample. Does not vanish as
    training converges.

    Raises:
        ValueError: k is no integer of at least 1.
    """
    return Isotropic(k)


def empirical() -> Injection:
    """One vector, the gradient of l_n at its own target: the empirical Fisher. Needs loss and target."""
    return Empirical()


def _require_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size!r}")


def _cast_pair(dtype: torch.dtype, pair: Pair) -> Pair:
    left, right = pair
    return left.to(dtype), None if right is None else right.to(dtype)
