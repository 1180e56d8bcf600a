"""What is sent back from the output of a model, and so what is estimated: vectors whose squares are a curvature.

All are in the unit of the *per-sample loss* l_n, the loss on a batch of sample n alone. With H the Hessian of l_n at
``output[n]``, v_k the k-th vector at sample n, and E over the randomness, which is independent between samples:

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
from typing import Any

import torch
from torch import Tensor

from curvature.losses import Loss, per_sample_losses
from curvature.roots import hessian_root, likelihood, term_masses

SEED = 0x5EED
CHUNK = 64  # vectors at a time

Part = Callable[[int, int], Tensor]  # (start, stop) -> the vectors of these numbers, in float32 or float64


class Injection:
    """Base of what the functions of this module return: immutable, comparable, picklable; holds no state.

    A sub-class says in ``_plan`` how many vectors there are, and how some of them are made.
    """

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
        k, part = self._plan(_checked(output), loss, target, generator)
        return part(0, k).to(output.dtype)

    def chunks(
        self,
        output: Tensor,
        loss: Loss | None = None,
        target: Any = None,
        *,
        size: int = CHUNK,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield the vectors ``size`` at a time, so that memory stays bounded: (size or fewer, *output.shape) each.

        Arguments and errors are those of `vectors`, and so is the contract for all chunks together. The numbers drawn
        may depend on ``size``.

        Raises:
            ValueError: ``size`` is less than 1.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size!r}")
        k, part = self._plan(_checked(output), loss, target, generator)
        return (part(start, min(start + size, k)).to(output.dtype) for start in range(0, k, size))

    def _plan(
        self, output: Tensor, loss: Loss | None, target: Any, generator: torch.Generator | None
    ) -> tuple[int, Part]:
        """Return k, and the function that makes the vectors start..stop of them."""
        raise NotImplementedError

    def __repr__(self) -> str:
        options = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__.lower()}({options})"

    def _needed(self, loss: Loss | None) -> Loss:
        if loss is None:
            raise ValueError(f"{self!r} needs the loss: pass loss= (for an optimizer, KFAC(model, loss=...))")
        return loss


@dataclass(frozen=True, repr=False)
class Exact(Injection):
    """See `exact`."""

    def _plan(
        self, output: Tensor, loss: Loss | None, target: Any, generator: torch.Generator | None
    ) -> tuple[int, Part]:
        root = hessian_root(self._needed(loss), output, target)

        def part(start: int, stop: int) -> Tensor:
            numbers = torch.arange(start, stop, device=output.device)
            columns = output.new_zeros(stop - start, output[0].numel())
            columns[numbers - start, numbers] = 1
            return root(columns.reshape(-1, 1, *output.shape[1:]).expand(-1, *output.shape))

        return output[0].numel(), part


@dataclass(frozen=True, repr=False)
class Random(Injection):
    """Base of those that draw ``k`` random vectors: ``_draws`` returns (count, generator) -> vectors for k = 1."""

    k: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {self.k!r}")

    def _plan(
        self, output: Tensor, loss: Loss | None, target: Any, generator: torch.Generator | None
    ) -> tuple[int, Part]:
        draw = self._draws(output, loss, target)
        source = torch.Generator(output.device).manual_seed(SEED) if generator is None else generator
        return self.k, lambda start, stop: draw(stop - start, source) / self.k**0.5

    def _draws(self, output: Tensor, loss: Loss | None, target: Any) -> Callable[[int, torch.Generator], Tensor]:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Sampled(Random):
    """See `sampled`."""

    def _draws(self, output: Tensor, loss: Loss | None, target: Any) -> Callable[[int, torch.Generator], Tensor]:
        return likelihood(self._needed(loss), output, target)


@dataclass(frozen=True, repr=False)
class Propagated(Random):
    """See `propagated`."""

    def _draws(self, output: Tensor, loss: Loss | None, target: Any) -> Callable[[int, torch.Generator], Tensor]:
        root = hessian_root(self._needed(loss), output, target)
        options: Any = {"dtype": output.dtype, "device": output.device}
        return lambda k, source: root(torch.randint(2, (k, *output.shape), generator=source, **options) * 2 - 1)


@dataclass(frozen=True, repr=False)
class Isotropic(Random):
    """See `isotropic`."""

    def _draws(self, output: Tensor, loss: Loss | None, target: Any) -> Callable[[int, torch.Generator], Tensor]:
        masses = torch.ones_like(output) if loss is None else term_masses(loss, output, target, strict=False)
        scale = masses.sqrt()
        options: Any = {"dtype": output.dtype, "device": output.device}
        return lambda k, source: scale * torch.randn(k, *output.shape, generator=source, **options)


@dataclass(frozen=True, repr=False)
class Empirical(Injection):
    """See `empirical`."""

    def _plan(
        self, output: Tensor, loss: Loss | None, target: Any, generator: torch.Generator | None
    ) -> tuple[int, Part]:
        loss = self._needed(loss)
        if target is None:
            raise ValueError("empirical() is the gradient of the loss at the target, which is missing: pass target=")
        point = output.requires_grad_()
        with torch.enable_grad():
            losses = per_sample_losses(loss, point, target, len(point))
            (gradient,) = torch.autograd.grad(losses.sum(), point, materialize_grads=True)
        return 1, lambda start, stop: gradient[None][start:stop]


def exact() -> Injection:
    """All columns of a root of the Hessian: sum_k v_k v_k^T = H, without randomness.

    There are as many vectors as entries in one sample's output (classes times places): two places share none, which
    would mix them. Needs a loss that is convex in the output; its target, unless it is cross-entropy, binary
    cross-entropy with logits, MSE or Poisson of the log rate, without class weights or ``pos_weight``. The Hessian of a
    loss on log-probabilities (``NLLLoss``, ``KLDivLoss``) at its output is zero, and so are these vectors: use
    ``CrossEntropyLoss`` on the logits.
    """
    return Exact()


def sampled(k: int = 1) -> Injection:
    """Gradients at labels drawn from the model's own likelihood, k for each sample: E sum_k v_k v_k^T = H.

    The likelihoods: categorical (``CrossEntropyLoss``), Bernoulli (``BCEWithLogitsLoss``), normal (``MSELoss``, of
    variance 1/2) and Poisson (``PoissonNLLLoss`` of the log rate). In a mean over T terms per sample, the gradient of
    each term is divided by sqrt(T), not T: the terms' labels are independent and their second moments add up to H.

    Raises:
        ValueError: k is no integer of at least 1.
    """
    return Sampled(k)


def propagated(k: int = 1) -> Injection:
    """Send k vectors of independent random signs through a root of the Hessian: E sum_k v_k v_k^T = H.

    Curvature propagation. Losses and targets as for `exact`. With a diagonal Hessian the squares of the entries have
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


def _checked(output: Tensor) -> Tensor:
    """The output without graph, in float32 at least."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        found = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"output must be a floating point tensor of shape (N, ...), got {found}")
    if output.ndim == 0 or output.numel() == 0:
        raise ValueError(f"output must have at least one sample along dim 0, got shape {tuple(output.shape)}")
    return output.detach().to(torch.promote_types(output.dtype, torch.float32))
