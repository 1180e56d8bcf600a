"""How the loss of a batch is made of the losses of its samples, for other losses than torch's: measured, not assumed.

``L = sum_n m_n l_n``, up to a constant, with l_n the loss of sample n alone. Then ``dL/doutput[n] = m_n
dl_n/doutput[n]`` at every output. That gives the *share* m_n of each sample, and what is left over tells a loss in
which samples meet (contrastive losses, the root of a mean). Torch's losses have closed forms (`table.sample_masses`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from curvature.attempts import attempt
from curvature.losses.table import (
    TORCH_LOSSES,
    Loss,
    dim_of_terms,
    map_target,
    name_of,
    per_sample_losses,
    reduction_of,
    require_scalar,
    resolve,
    sample_masses,
)

log = logging.getLogger("curvature")
NEAR_POINTS, FAR_POINTS = 3, 8
FEW, FEWEST, FEW_ELEMENTS = 8, 3, 1 << 16  # samples of one batch that are asked again; entries of their outputs
Point = Sequence[Tensor]  # the outputs of a model
Losses = Callable[[Point], Tensor]
Row = tuple[Tensor, Tensor]  # the gradient of the batch's loss at one point, and those of the samples' own: (N, D)


class NoWeightedSum(ValueError):
    """The loss of a batch is no weighted sum of the losses of its samples: nothing is defined by samples."""

    def __init__(self, loss: Loss, why: str) -> None:
        super().__init__(
            f"{name_of(loss)}: the loss of the batch is no weighted sum of the losses of its samples ({why}), so no "
            "sample has a loss or a gradient of its own. curvature.hessian() and curvature.gauss_newton() give its "
            "matrices, with all data as one batch"
        )


class LossVaries(ValueError):
    """Two calls of the loss with the same arguments differ."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(
            f"{name_of(loss)}: two calls with the same arguments differ: it draws random numbers, or keeps something "
            "from call to call (a moving average, a count), so that its derivatives would be those of one call. Pass a "
            "loss that reads what is kept and does not change it"
        )


def require_repeats(loss: Loss, output: Tensor, target: Any) -> None:
    """Raise `LossVaries` where a second call of the loss gives another value."""
    whole, _ = _of_batch_and_samples(resolve(loss), target, 1, 0, 0)
    point = [output.detach().nan_to_num(0.0, 0.0, 0.0)]
    _require_same(loss, _slope(whole, point), whole, point)


def require_weighted_sum(
    loss: Any, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor | None:
    """Raise `NoWeightedSum` where samples meet. The samples' `shares`, where these had to be found, else None."""
    where = output, target, count, output_dim, target_dim
    if dim_of_terms(loss, output, target, output_dim, target_dim) is None:
        return shares(loss, *where)
    # no sample has what is left of a term of mass zero by its smoothing
    may_be_left = getattr(loss, "label_smoothing", 0) and loss.weight is not None and bool((loss.weight == 0).any())
    if may_be_left and bool(per_sample_losses(loss, *where).isinf().any()):
        raise NoWeightedSum(loss, "its smoothing counts for a sample whose class has weight zero")
    return None


def count_alike(
    loss: Loss, shares: Tensor | None, output: Tensor, target: Any, count: int, output_dim: int, target_dim: int
) -> bool:
    """Whether all samples have one share (from `require_weighted_sum`) in the batch's loss, but for those with none."""
    if shares is None:
        weighs = getattr(loss, "weight", None) is not None or isinstance(target, Tensor) and target.numel() > count
        if not weighs or TORCH_LOSSES[type(loss)].masses is None:
            return True
        shares = sample_masses(loss, output, target, count, output_dim, target_dim)
    counted = shares[shares > 0]
    return not len(counted) or _near(counted, counted[0], counted[0])


def shares(loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0) -> Tensor:
    """The shares m_n of the samples' own losses, (N,); zero where the loss depends on the sample at no output tried.

    All are nan where the loss of the batch is not finite, though a sample's is.
    """
    dtype = torch.promote_types(output.dtype, torch.float32)
    output = output.detach().to(dtype)
    whole, alone = _of_batch_and_samples(loss, target, count, output_dim, target_dim)
    if count == 1:
        require_repeats(loss, output, target)
        return whole([output]).detach().isnan().logical_and(output.isfinite().all()).logical_not().to(output.real)[None]
    return shares_of_parts(loss, [output], count, output_dim, whole, alone)


def _of_batch_and_samples(
    loss: Loss, target: Any, count: int, output_dim: int, target_dim: int
) -> tuple[Losses, Losses]:
    """From an output to the loss of the batch, and to the samples' own losses (N,)."""

    def whole(point: Point) -> Tensor:
        value = loss(point[0].clone(), map_target(torch.clone, target))  # it may work in place
        return require_scalar(loss, value, "a batch")

    def alone(point: Point) -> Tensor:
        try:
            return per_sample_losses(loss, point[0], target, count, output_dim, target_dim)
        except Exception as error:  # whatever a loss of the user's raises
            if type(loss) in TORCH_LOSSES:
                raise
            raise NoWeightedSum(loss, f"it does not run on one sample alone: {error}") from error

    return whole, alone


def _explain(loss: Loss, masses: Tensor, output: Tensor, target: Any, output_dim: int, target_dim: int) -> bool | None:
    """Whether the samples' own losses with these masses, up to a factor, are the batch's; None if it is not finite."""
    count, output = len(masses), output.to(torch.promote_types(output.dtype, torch.float32))
    points = [[point[0]] for point in islice(_points([output], count, output_dim), NEAR_POINTS)]
    by_sample = lambda parts: parts[0].movedim(output_dim, 0).reshape(count, -1)
    losses = _of_batch_and_samples(loss, target, count, output_dim, target_dim)
    rows = [(by_sample(_slope(losses[0], p)[1]), by_sample(_slope(losses[1], p)[1])) for p in points]
    if not rows[0][0].isfinite().all():
        return None
    return _is_sum(masses, rows) or _is_sum(masses, _changes_of_slopes(rows, points, *losses, by_sample))


def _is_sum(masses: Tensor, rows: Sequence[Row]) -> bool:
    """Whether the gradients of the batch are those of its samples with these masses, up to a factor."""
    if not rows:
        return False
    whole, alone = (torch.stack(column) for column in zip(*rows, strict=True))
    parts = masses.to(whole)[:, None] * alone.nan_to_num(0.0, 0.0, 0.0)
    factor = (whole * parts).sum() / parts.square().sum()
    left = whole - factor.nan_to_num(0.0) * parts
    return not bool(whole.isfinite().all() and _exceeds_rounding(left.norm(dim=2), whole.norm(dim=2)).any())


def shares_of_parts(loss: Loss, outputs: Point, count: int, dim: int, whole: Losses, alone: Losses) -> Tensor:
    """`shares` of a loss of several outputs, at least float32: a sample has one share in all that it has of them."""
    by_sample = lambda parts: torch.cat([t.movedim(dim, 0).reshape(count, -1).to(outputs[0].real) for t in parts], 1)
    rows: list[Row] = []
    points: list[Point] = []
    empty = torch.zeros(count, dtype=torch.bool, device=outputs[0].device)  # 0/0: no term of the sample counts
    for point in _points(outputs, count, dim):
        if len(rows) >= NEAR_POINTS and bool((_is_known(rows) | empty).all()):
            break
        try:
            value, batch = _slope(whole, point)
            if not points:  # before vmap, whose tensors a loss that keeps them could not use any more
                _require_same(loss, (value, batch), whole, point)
            values, slope = _slope(alone, point)
        except Exception as error:  # of a matrix that is no longer positive definite, say, or a negative variance
            if not rows or isinstance(error, NoWeightedSum):
                raise
            log.info("%s: not tried further away: %s", name_of(loss), error)
            break
        empty |= values.isnan().to(empty.device)
        if all(g.isfinite().all() for g in batch):
            rows.append((by_sample(batch), by_sample(slope).nan_to_num(0.0, 0.0, 0.0)))
            points.append(point)
    if not rows:
        return outputs[0].real.new_full((count,), 0.0 if empty.all() else math.nan)
    return _shares(loss, rows, lambda: _changes_of_slopes(rows, points, whole, alone, by_sample), empty)


def _shares(loss: Loss, rows: list[Row], changes: Callable[[], list[Row]], empty: Tensor) -> Tensor:
    """The shares by gradients, or by their changes where gradients tell nothing but rounding."""
    try:
        result = _quotients(loss, rows, empty)
        if result.any():
            return result
        others = changes()
    except NoWeightedSum:
        others = changes()
        if not others:
            raise
    return _quotients(loss, others, empty) if others else result


def _require_same(loss: Loss, first: tuple[Tensor, Point], whole: Losses, point: Point) -> None:
    """Raise `LossVaries` where the loss of a batch is another than at the first call, beyond rounding."""
    value, slope = first
    with torch.enable_grad():  # which a loss that differentiates its argument needs
        again = whole([part.detach().requires_grad_() for part in point]).detach()
    size = float(sum((g * _as_real(x)).abs().nan_to_num().sum() for g, x in zip(slope, point, strict=True)))
    close = 100 * torch.finfo(value.dtype).eps
    if value.isfinite() and not torch.allclose(again, value, rtol=close, atol=close * size):
        raise LossVaries(loss)


def _points(outputs: Point, count: int, dim: int) -> Iterator[Point]:
    """The outputs, two others made of several samples' outputs, and some further away, as beyond a hinge's margin."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda f, like: f(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)
    outputs = [output.nan_to_num(0.0, 0.0, 0.0) for output in outputs]
    yield outputs

    def between(output: Tensor, k: int) -> Tensor:
        """Between outputs, and a little nearer to zero: probabilities and variances stay what they are."""
        if bool((output == 0).all()):
            return 0.3 * draw(torch.randn, output)
        others = output.unflatten(dim, (count, -1)).roll(k, dim).flatten(dim, dim + 1)
        return output.lerp(others, 0.2 + 0.1 * k) * (1 - 0.2 * draw(torch.rand, output))

    for k in (1, 2):
        yield [between(output, k) for output in outputs]
    sizes = [1 + output.square().mean().sqrt() for output in outputs]
    for _ in range(FAR_POINTS):
        yield [output + 3 * size * draw(torch.randn, output) for output, size in zip(outputs, sizes, strict=True)]


def _slope(losses: Losses, point: Point) -> tuple[Tensor, Point]:
    """The losses at a point, and the gradient of their sum."""
    point = [part.detach().requires_grad_() for part in point]
    with torch.enable_grad():
        values = losses(point)
        if not values.requires_grad:
            return values, [torch.zeros_like(_as_real(part)) for part in point]
        slope = torch.autograd.grad(values.sum(), point, materialize_grads=True, allow_unused=True)
    return values.detach(), [_as_real(part) for part in slope]


def _changes_of_slopes(
    rows: Sequence[Row], points: Sequence[Point], whole: Losses, alone: Losses, by_sample: Callable[[Point], Tensor]
) -> list[Row]:
    """The same of second derivatives along a random direction, if slopes are nothing but rounding; none otherwise."""
    generator = torch.Generator().manual_seed(0)
    changes: list[Row] = []
    for (slope, slope_alone), point in zip(rows, points, strict=True):
        drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x) for x in point]
        along = [v * (1 + x.abs().square().mean().sqrt()) for v, x in zip(drawn, point, strict=True)]
        try:
            of_batch, of_samples = (by_sample(_change_of_slope(f, point, along)) for f in (whole, alone))
        except RuntimeError as error:  # of a function without second derivative
            log.info("second derivatives do not tell what samples count: %s", str(error).split("\n")[0])
            return []
        rounding = 1e3 * torch.finfo(slope.dtype).eps * of_batch.norm()
        if not of_batch.isfinite().all() or max(slope.norm(), slope_alone.norm()) > rounding:
            return []
        changes.append((of_batch, of_samples.nan_to_num(0.0, 0.0, 0.0)))
    return changes


def _change_of_slope(losses: Losses, point: Point, along: Point) -> Point:
    """How the gradient of the sum of the losses changes along a direction."""
    point = [part.detach().requires_grad_() for part in point]
    options: Any = {"materialize_grads": True, "allow_unused": True}
    with torch.enable_grad():
        value = losses(point).sum()
        slopes = torch.autograd.grad(value, point, create_graph=True, **options) if value.requires_grad else []
        inner = sum((_as_real(g) * _as_real(v)).sum() for g, v in zip(slopes, along, strict=False))
        if not isinstance(inner, Tensor) or not inner.requires_grad:
            return [torch.zeros_like(_as_real(part)) for part in point]
        return [_as_real(part) for part in torch.autograd.grad(inner, point, **options)]


def _as_real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _is_known(rows: list[Row]) -> Tensor:
    """(N,): whether the sample's own loss has a gradient that is more than rounding at one of the points."""
    sizes = torch.stack([slope.norm(dim=1) for _, slope in rows]).amax(0)
    return sizes > 1e3 * torch.finfo(sizes.dtype).eps * sizes.amax()


def _quotients(loss: Loss, rows: list[Row], empty: Tensor) -> Tensor:
    batch, alone = (torch.stack(column) for column in zip(*rows, strict=True))  # (points, N, D)
    is_known = _is_known(rows)
    measured = torch.where(is_known, (batch * alone).sum((0, 2)) / alone.square().sum((0, 2)), 0)
    sizes = batch.norm(dim=2)
    left = (batch - measured[:, None] * alone).norm(dim=2)
    if bool(_exceeds_rounding(left, sizes).any()):
        worst = float((left / sizes.clamp(min=torch.finfo(batch.dtype).eps * float(sizes.amax()))).amax())
        raise NoWeightedSum(loss, f"{min(1.0, worst):.0%} of its gradient at the output of a sample is not of that")
    return _round_off(measured, is_known | empty)


def _exceeds_rounding(left: Tensor, sizes: Tensor) -> Tensor:
    eps = torch.finfo(sizes.dtype).eps
    return left > 10 * eps**0.5 * sizes + 100 * eps * sizes.amax()


def _round_off(measured: Tensor, is_known: Tensor) -> Tensor:
    """Shares of a plain mean or sum without their rounding, and for samples of which nothing is known, too."""
    for plain in (1 / len(measured), 1.0):
        near = (measured - plain).abs() <= 100 * torch.finfo(measured.dtype).eps * plain
        if bool((near | ~is_known).all()) and bool(is_known.any()):
            # the share of one sample alone says nothing of others: all of a mean over what counts, or one in a sum
            is_all = plain < 1 or len(near) == 1 or bool(near.sum() > 1)
            return torch.full_like(measured, plain) if is_all else near.to(measured)
    return measured


def _near(values: Tensor, expected: Tensor, scale: Tensor) -> bool:
    return bool(((values - expected).abs() <= 10 * torch.finfo(values.dtype).eps ** 0.5 * scale).all())


def require_terms(mass: float) -> None:
    """Refuse a mean loss in which nothing counts."""
    if not mass:
        raise ValueError("loss: no term of it counts (all targets ignored or of weight zero), so its mean is 0/0")


class SampleMasses:
    """The masses of the samples of all data, batch by batch, in one unit: the loss of all data as one batch is
    ``sum_n m_n l_n``, divided by ``sum_n m_n`` unless `is_sum`.

    Torch's losses say their masses. Of every other callable the shares are found; with several batches, those of each
    together with one sample of the first, which tells how the batches count beside each other. A few samples of it and
    of batches before show whether masses are a matter of the sample alone, as those of a quantile or a rank are not.
    """

    def __init__(self, loss: Loss | None) -> None:
        self.loss: Any = None if loss is None else resolve(loss)
        self.is_sum = loss is not None and reduction_of(loss) == "sum"
        self.first: int | None = None  # number of the batch that has the reference
        self.reference: tuple[Tensor, Any, Tensor] | None = None  # output, target and mass of a sample that counts
        self.known: list[tuple[Tensor, Any, Tensor]] = []  # the same of a few samples of all batches
        self.compared: set[int] = set()  # numbers of batches
        self.is_plain = True  # whether every sample counts as much as any other
        self.kind = ""  # of a callable: "mean", "sum", "other"; "" where nothing has told, which counts as a mean
        self.is_untold = False  # whether nothing counts in a batch, unless its loss is not finite for another reason
        self.seen: set[int] = set()  # numbers of all batches
        self.apart: set[int] = set()  # of those whose samples were asked whether they meet in the model, and do not
        self.only: ValueError | None = None  # why there may be no other batch than those seen

    def of(
        self, number: int, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
    ) -> Tensor:
        """(N,), of the batch of this number; ValueError where it is not known how it counts beside others."""
        self._see(number)
        if self.loss is None:
            return output.new_ones(count, dtype=torch.promote_types(output.dtype, torch.float32))
        if dim_of_terms(self.loss, output, target, output_dim, target_dim) is not None:
            require_weighted_sum(self.loss, output, target, count, output_dim, target_dim)
            return sample_masses(self.loss, output, target, count, output_dim, target_dim)
        dims = output_dim, target_dim
        if self.first is None or number == self.first:
            masses = self._of_first(number, output, target, count, dims)
        else:
            masses = self._beside_first(output, target, count, dims)
        self.is_plain &= bool((masses == 1).all())
        if number not in self.compared:
            self._compare(output.detach(), target, masses, dims)
            self.compared.add(number)
        return masses

    def _compare(self, output: Tensor, target: Any, masses: Tensor, dims: tuple[int, int]) -> None:
        """Raise ValueError where a few samples of this batch and of others count otherwise than in their batches."""
        count = len(masses)
        few = max(FEWEST, min(FEW, FEW_ELEMENTS // max(1, output.numel() // count)))
        some = list(range(0, count, max(1, count // few)))[:few]
        if not self.known and masses.any():  # one that counts
            some = list(dict.fromkeys([int(masses.argmax()), *some]))
        samples = [(*_sample(n, output, target, count, dims), masses[n]) for n in some]
        outputs, targets, known = zip(*samples, *self.known, strict=True)
        if self.known and any(known) and (len(self.compared) < FEW or not self.is_plain):
            try:
                both = torch.cat(outputs, dims[0]), _join(targets, dims[1])
            except RuntimeError:  # of other shapes: a sum
                return
            same = attempt(lambda: (_explain(self.loss, torch.stack(known), *both, *dims),), "several batches")
            if same is None:
                raise self._only_one_batch("it does not run on some of their samples")
            if same == (None,):
                raise self._not_finite()
            if not all(same):
                raise self._only_one_batch("how much a sample counts in it depends on the others")
        self.known = (self.known + samples)[: 2 * few]

    def whole(self, number: int, output: Tensor) -> Tensor:
        """(1,): the mass of a batch whose samples meet in the loss; ValueError unless it is the only one."""
        self.require_only(number, self._only_one_batch("its samples meet in it"))
        self.first, self.is_sum, self.kind = number, True, "other"
        return output.new_ones(1, dtype=torch.promote_types(output.dtype, torch.float32))

    def require_only(self, number: int, error: ValueError) -> None:
        """Raise the error if there is another batch than this one, now or later."""
        self._see(number)
        self.only = error
        if len(self.seen) > 1:
            raise error

    def _see(self, number: int) -> None:
        self.seen.add(number)
        if self.only is not None and len(self.seen) > 1:
            raise self.only

    def require_told(self) -> None:
        """Raise ValueError where no sample of any batch has told that those which count nothing are right so."""
        if self.is_untold and self.first is None:
            require_terms(0)

    def _of_first(self, number: int, output: Tensor, target: Any, count: int, dims: tuple[int, int]) -> Tensor:
        measured = self._shares(output, target, count, dims)
        n = int(measured.argmax())
        if measured[n] <= 0:
            self.is_untold = True
            return measured
        one = _sample(n, output.detach(), target, count, dims)
        if self.first is None:
            kind, counts = _kind(measured), True
            if not kind:  # a single sample counts, or there is one
                kind, counts = self._beside_itself(*one, dims)
            if not counts:
                return torch.zeros_like(measured)
            self.first, self.kind, self.is_sum = number, kind, kind in ("sum", "other")
        masses = measured * count if self.kind == "mean" else measured
        self.reference = *one, masses[n]
        return masses

    def _shares(self, output: Tensor, target: Any, count: int, dims: tuple[int, int]) -> Tensor:
        measured = shares(self.loss, output, target, count, *dims)
        if measured.isnan().any():
            raise self._not_finite()
        return measured

    def _not_finite(self) -> ValueError:
        return ValueError(
            f"{name_of(self.loss)}: the loss of a batch, or its gradient, is nan or infinite where the model's output "
            "is finite: leave out the samples for which it is (a target that is nan?), or give them no part in it"
        )

    def _beside_itself(self, output: Tensor, target: Any, dims: tuple[int, int]) -> tuple[str, bool]:
        """What a batch of a sample and its copy tells: the kind of the loss, and whether the sample counts."""

        def measure() -> Tensor:
            both = torch.cat([output, output], dims[0])
            return shares(self.loss, both, _join([target, target], dims[1]), 2, *dims).nan_to_num(0.0)

        otherwise = f"{name_of(self.loss)}: taken for a mean, since it does not run on a sample twice"
        measured = attempt(measure, otherwise)
        return ("", True) if measured is None else (_kind(measured), bool(measured.any()))

    def _beside_first(self, output: Tensor, target: Any, count: int, dims: tuple[int, int]) -> Tensor:
        if self.reference is None:
            raise self._only_one_batch("its samples meet in it")
        if self.kind == "other":
            raise self._only_one_batch("the shares of samples in it sum to neither one nor their number")
        output_of_one, target_of_one, mass = self.reference
        try:
            both = torch.cat([output_of_one, output.detach()], dims[0])
            targets = _join([target_of_one, target], dims[1])
        except RuntimeError as error:
            if self.kind == "sum" and _kind(measured := self._shares(output, target, count, dims)) != "mean":
                return measured
            raise self._only_one_batch(f"their outputs or targets do not fit together: {error}") from error
        measured = self._shares(both, targets, count + 1, dims)
        if not measured[1:].any() and _near(measured[0], measured.new_ones(()), measured[0]):
            return measured[1:]  # no term of this batch counts
        kind = _kind(measured)
        if self.kind and kind != self.kind or kind in ("", "other"):
            raise self._only_one_batch(f"it is a {self.kind or 'sum'} over one batch, but not over another")
        self.kind, self.is_sum = kind, kind != "mean"
        if self.is_sum:
            return measured[1:]
        return _round_off(measured[1:] / measured[0] * mass, torch.ones_like(measured[1:], dtype=torch.bool))

    def _only_one_batch(self, why: str) -> ValueError:
        return ValueError(
            f"{name_of(self.loss)}: how several batches make up the loss of all data cannot be told, since {why}. "
            "Give all data as one batch, or a loss of torch.nn"
        )


def _kind(measured: Tensor) -> str:
    """What shares tell of a loss: "mean", "sum" or "other", "" if it may be either of the first two."""
    one = measured.new_ones(())
    is_mean, is_sum = _near(measured.sum(), one, one), _near(measured[measured > 0], one, one)
    if is_mean and is_sum:
        return ""
    return "mean" if is_mean else "sum" if is_sum else "other"


def _sample(n: int, output: Tensor, target: Any, count: int, dims: tuple[int, int]) -> tuple[Tensor, Any]:
    """Output and target of one sample, as copies: views would keep the whole batch."""

    def rows(t: Tensor, dim: int) -> Tensor:
        each = t.shape[dim] // count
        return t.narrow(dim, n * each, each).clone()

    return rows(output, dims[0]), map_target(lambda t: rows(t, dims[1]), target)


def _join(targets: Sequence[Any], dim: int) -> Any:
    """Several targets as one."""
    leaves: list[list[Tensor]] = [[] for _ in targets]
    for of_target, target in zip(leaves, targets, strict=True):
        map_target(of_target.append, target)
    parts = zip(*leaves, strict=False)
    return map_target(lambda _: torch.cat(next(parts), dim), targets[0])
