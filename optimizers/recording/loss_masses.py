"""What a sample's own loss is in the training loop's: factors by which the gradient at an output becomes the sample's.

At the output of sample n arrives ``m_n g_n``, g_n being the gradient of its own loss and m_n its share in that of the
batch: 1/N in a mean, 1 in a sum, ``w_n / sum_k w_k`` with class weights, nothing for a sample that is ignored. The
graph of the loss says which, or the loss that the optimizer was given. The shares of a mean over classes follow from
the gradient ``m (p - onehot)`` at the logits. If nothing says it, a plain mean is assumed, and logged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from curvature.linalg import stack, to_host
from curvature.losses import reduction_of, resolve
from curvature.recording import warn_once
from optimizers.recording.loss_graph import MeanOverClasses, Reading, Unknown

NOT_KNOWN = (
    "empirical(): how much each sample counts in the loss cannot be told (%s): assumed that it is a mean in which all "
    "samples count alike; name another one by loss=, a loss of torch.nn with its weights and reduction"
)
NOT_DIVIDED = (
    "empirical(): several backward passes come before a step, and whether the loop divides its losses by their number "
    "cannot be told: assumed that it does not (else factors are too small by its square); inject=isotropic() does not "
    "depend on it"
)
MEETING = (
    "empirical(): samples meet in the loss (%s), so that none has a gradient of its own: it is taken for a mean over "
    "samples all the same; inject=isotropic() needs no loss"
)


class Division:
    """By how many backward passes a loop divides its losses before a step, where gradients at the logits tell."""

    def __init__(self) -> None:
        self.known: int | None = None  # the number that was found last: the last step of an epoch may have fewer passes
        self.forget()

    def forget(self) -> None:
        """Another step begins."""
        self.parts: list[tuple[object, Tensor | None]] = []  # and the sum of the masses of its rows, if it was found
        self.is_open = False  # whether something is no part
        self.rounding = 1e-4

    def note(self, part: object | None, reading: Reading, output: Tensor, gradient: Tensor) -> None:
        """A gradient is at the only output of the pass `part`; None for one of several outputs."""
        if part is None or any(part is own for own, _ in self.parts):
            self.is_open = True
            return
        share = None
        if self.parts or self.known:  # a step of one pass costs nothing
            rows = None
            if isinstance(reading, MeanOverClasses) and reading.of == "logits":
                weighted = MeanOverClasses(reading.classes, True, "logits")
                rows = _masses_of_rows(weighted, output.detach(), gradient.detach())
            self.is_open |= rows is None
            self.rounding = max(self.rounding, 4 * torch.finfo(gradient.dtype).eps)
            share = None if rows is None else rows.sum()
        self.parts.append((part, share))

    def unit(self, scale: float) -> float:
        """What the loss of each pass was multiplied by, as ``1/k`` times `scale`, which is a GradScaler's."""
        shares = [share for _, share in self.parts if share is not None]
        if shares and not self.is_open:
            (found,) = to_host([stack(shares) / scale])
            for k in (len(self.parts), self.known or 1):
                if bool(((found * k - 1).abs() <= self.rounding).all()):
                    self.known = k if k > 1 else None
                    return scale / k
        if len(self.parts) > 1:
            warn_once(NOT_DIVIDED, logger="optimizers")
        return scale


class SampleFactors:
    """Factors of the samples at an output, for a loss that the optimizer was given, or None."""

    def __init__(self, loss: Any) -> None:
        self.loss = None if loss is None else resolve(loss)

    def usual(self, count: int) -> float:
        """What to multiply with where nothing is known but the loss that was given."""
        return 1.0 if getattr(self.loss, "reduction", "mean") == "sum" else float(count)

    def of(self, reading: Reading, output: Tensor, gradient: Tensor, count: int) -> float | Tensor:
        """For all samples of (count * m, ...) a number, also as a tensor (), or (count,), by what the loss is of it."""
        found = _factors("mean" if count == 1 else reading, output, gradient, count)
        if found is not None:
            return found
        if isinstance(reading, Unknown) and reading.samples_meet:
            warn_once(MEETING, reading.why, logger="optimizers")
        elif (found := _factors(self._stated(), output, gradient, count)) is not None:
            return found
        elif bool(gradient.isfinite().all()):  # else the batch does not count
            warn_once(NOT_KNOWN, _why(reading), logger="optimizers")
        return self.usual(count)

    def _stated(self) -> Reading:
        """What the loss that was given says of itself."""
        loss = self.loss
        if loss is None or not hasattr(loss, "reduction"):
            return Unknown("no loss of torch.nn is named")
        if reduction_of(loss) == "sum":
            return "sum"
        if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            return "mean"
        if isinstance(loss, nn.NLLLoss):
            return MeanOverClasses(None, loss.weight is not None, "log-probabilities")
        if loss.weight is not None and loss.label_smoothing:
            return Unknown("class weights with label smoothing")
        return MeanOverClasses(None, loss.weight is not None, "logits")


def _why(reading: Reading) -> str:
    if isinstance(reading, Unknown):
        return reading.why
    if reading == "quotient":
        return "a sum that was divided or multiplied by something"
    return "a mean over classes with weights, of something else than the output"


def _factors(reading: Reading, output: Tensor, gradient: Tensor, count: int) -> float | Tensor | None:
    """None: the reading does not say."""
    if reading == "mean":
        return float(count)
    if reading == "sum":
        return 1.0
    if isinstance(reading, Unknown):
        return None
    output, gradient = output.detach(), gradient.detach()
    classes = MeanOverClasses(None, True, "logits") if reading == "quotient" else reading
    rows = _masses_of_rows(classes, output, gradient)
    # a quotient: one in all, if divided by the sum of the weights
    if rows is None or (reading == "quotient" and not bool((rows.sum() - 1).abs() <= _rounding(gradient))):
        return None
    masses = rows.reshape(count, -1).sum(1)
    total = masses.sum()
    if not classes.is_weighted and rows.numel() == count:  # all count alike, but for those that are ignored
        return torch.where(total > 0, total, count)
    if bool(((masses - masses[0]).abs() <= _rounding(gradient) * masses[0]).all()):
        return float(count)
    return torch.where(masses > 0, total / masses, 0)


def _masses_of_rows(reading: MeanOverClasses, output: Tensor, gradient: Tensor) -> Tensor | None:
    """The masses of all rows of classes, up to one factor; None if they cannot be told."""
    dim = _class_dim(reading, gradient)
    if dim is None or (reading.is_weighted and not reading.of):
        return None
    wide = torch.promote_types(gradient.dtype, torch.float32)
    f, b = (x.movedim(dim, -1).to(wide) for x in (output, gradient))
    if reading.of == "logits":
        return _masses_at_logits(f, b, reading.is_weighted, gradient.dtype)
    masses = -b.sum(-1) if reading.of else b.abs().amax(-1)
    return masses if reading.is_weighted else (masses != 0).to(wide)


def _masses_at_logits(f: Tensor, b: Tensor, is_weighted: bool, dtype: torch.dtype) -> Tensor | None:
    """From ``b = m (p - onehot)`` in a precision `dtype`: all entries but that of the label are ``m p``."""
    is_zero = (b == 0).all(-1)
    label = torch.where(is_zero, f.argmax(-1), b.argmin(-1))[..., None]
    of_others = lambda x: x.scatter(-1, label, 0.0).sum(-1)
    p = f.softmax(-1)
    masses = (of_others(b) / of_others(p) if is_weighted else torch.ones_like(b[..., 0])).masked_fill(is_zero, 0)
    if is_weighted:
        expected = masses[..., None] * p.scatter_add(-1, label, p.new_full(label.shape, -1.0))
        if not bool(((b - expected).abs() <= 32 * torch.finfo(dtype).eps * masses[..., None]).all()):
            return None  # something else than classes, or than the logits
    # a row at its minimum has no gradient either, and may count: as the mean of those that do
    known = masses.sum() / (~is_zero).sum().clamp(min=1)
    return torch.where(is_zero & (of_others(p) * b.abs().amax() <= torch.finfo(dtype).tiny), known, masses)


def _class_dim(reading: MeanOverClasses, gradient: Tensor) -> int | None:
    """The axis of the classes, along which the gradient at logits sums to zero."""
    dims = [d for d in range(1, gradient.ndim) if reading.classes in (None, gradient.shape[d])]
    if len(dims) < 2 or reading.of != "logits":
        return dims[0] if len(dims) == 1 else None
    g = gradient.double()
    return dims[int(torch.stack([g.sum(d).abs().sum() for d in dims]).argmin())]


def _rounding(gradient: Tensor) -> float:
    return 10 * float(torch.finfo(gradient.dtype).eps) ** 0.5
