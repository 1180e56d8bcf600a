"""Where vectors are sent back from: what a model returned, or what losses in it received; how large outputs are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributions import Distribution

from curvature.functional import graph_nodes
from curvature.linalg import read, stack
from curvature.preconditioners import SquaredChange
from curvature.recording import Tape
from optimizers.steps.layer_vector import at_least_single

SUBSTITUTE = (
    "the model returned no tensor but its loss, made by no loss function of torch: curvature by empirical(), for a "
    "loss that is a mean over the batch"
)
Sums = Mapping[str, Tensor]


@dataclass(frozen=True)
class ModelOutputs:
    """Tensors (count, ...), samples first, and the target of each, where it is known."""

    tensors: Sequence[Tensor]
    sources: Sequence[Tensor]  # to which the loop's backward pass comes: what `tensors` are views of, or the losses
    targets: Sequence[Any]
    count: int


@torch.enable_grad()
def find_outputs(tape: Tape, output: Any) -> ModelOutputs:
    """The tensors that a model returned; of one that returns only its losses, what loss functions of torch received.

    A model that calls none, and returns nothing else than its losses or None, has no tensors; `sources` are then the
    losses. A count of zero means that nothing goes back.
    """
    # of an object of the user's what it holds, if that is all there is
    returned = list(differentiable(output)) or list(differentiable(getattr(output, "__dict__", None)))
    if any(x.is_nested for x in returned):
        raise RuntimeError("the model returned a nested tensor, whose samples are not known; return x.unbind() instead")
    tensors = [x for x in returned if x.ndim]
    if tensors:
        return ModelOutputs([*map(regular, tensors)], tensors, [None] * len(tensors), len(tensors[0]))
    pairs: list[tuple[Tensor, Any]] = []  # what loss functions were given that may be differentiated, and the target
    for _, args, kwargs in tape.losses:
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim]
        pairs += [(x, target) for x in given if x.requires_grad]
    if not pairs and returned and tape.samples == 1:  # outputs of one sample that the model has squeezed
        return ModelOutputs([*map(regular, returned)], returned, [None] * len(returned), 1)
    if not pairs:
        return ModelOutputs([], returned, [], (tape.samples or 1) if returned or output is None else 0)
    counts = {len(x) for x, _ in pairs}
    count = tape.samples or 0
    if not count or any(rows % count for rows in counts):
        count = len(pairs[0][0])
    tensors = [samples_first(x, count) for x, _ in pairs]
    targets = [samples_first(y, count) for _, y in pairs]
    return ModelOutputs(tensors, [x for x, _ in pairs], targets, count)


def regular(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, a sparse one with its zeros, a number with an axis for its sample."""
    x = torch.atleast_1d(x.to_dense() if x.is_sparse else x)
    return torch.view_as_real(x) if x.is_complex() else x


def differentiable(output: Any) -> Iterator[Tensor]:
    """Every tensor of a sequence, mapping, dataclass or distribution, that may be differentiated.

    Of an object with logits these, and what reads parameters that they do not, as a value or boxes beside them.
    """
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
        return
    logits = list(differentiable(output.logits)) if hasattr(output, "logits") else []
    yield from logits
    seen = set(graph_nodes(*(get_gradient_edge(x).node for x in logits)))
    for x in itertools.chain.from_iterable(map(differentiable, _parts(output, bool(logits)))):
        if not logits:
            yield x
        elif x.ndim:
            new = set(graph_nodes(get_gradient_edge(x).node)) - seen
            seen |= new
            if any(hasattr(node, "variable") for node in new):
                yield x


def _parts(output: Any, is_known: bool) -> Iterable[Any]:
    """What an object holds; of one of no kind that is known, if it has logits."""
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, tuple | list):
        return output
    if is_dataclass(output):
        return [getattr(output, field.name) for field in fields(output)]
    return vars(output).values() if isinstance(output, Distribution) or is_known and hasattr(output, "__dict__") else ()


def samples_first(x: Any, count: int) -> Any:
    """(count * m, ...) as (count, ..., m): tokens, say, that were put along the axis of the samples for the loss."""
    if not isinstance(x, Tensor) or not x.ndim or len(x) == count or len(x) % count:
        return x
    return x.unflatten(0, (count, -1)).movedim(1, -1)


# -- how large outputs are, in the metric of the curvature: sums of each forward pass in, a norm out


class OutputFacts(NamedTuple):
    """What the host reads of the outputs of a step's passes: tensors, then numbers."""

    squares: Any
    numbers: Any  # of samples, and of entries
    change: Any  # along the last step, squared


class OutputScale:
    """The size of the outputs of the last batch, in the same units as the energies ``v^T M v`` of the curvature.

    Isotropic curvature measures changes of the outputs, so their size is the root mean square of an entry. Fisher
    matrices measure changes in nats, which near zero loss are far smaller: their size is the root of the mean over
    samples of ``f^T H f``, with H the matrix at the output and f the output.
    """

    def __init__(self) -> None:
        self.rms = 0.0  # zero while no outputs are known
        self.entries_per_sample = 1.0  # that an energy is a sum over; 1 but for isotropic curvature
        self.squared_change = 0.0  # that the last renewal saw along the last step, a mean over samples ...
        self.reached: frozenset[str] = frozenset()  # ... in blocks with these first parameters

    @staticmethod
    @torch.no_grad()
    def of(outputs: Sequence[Tensor]) -> Sums:
        """The sums of one pass for isotropic curvature, given its outputs (N, ...). Only finite entries count."""
        each = [_sums(x.detach()) for x in outputs]
        squares, entries = each[0] if len(each) == 1 else (stack(column).sum() for column in zip(*each, strict=True))
        # to fill a tensor needs no wait, as a copy to the device does
        count = torch.full_like(squares, len(outputs[0]))
        return {"squares": squares, "numbers": torch.stack([count, entries])}

    @staticmethod
    def in_metric(squares: Tensor, count: int) -> Sums:
        """The sums of one pass over `count` samples for other curvature, given the sum of ``f^T H f`` over them."""
        return {"squares": squares, "numbers": torch.full_like(squares, count).expand(2)}

    def update(self, sums: Sums, along: SquaredChange) -> None:
        """Replace all by those of a step's passes, if it had any. The host reads them at once."""
        self.squared_change, self.reached = 0.0, frozenset(along.blocks)
        if not sums:
            return
        facts = read(OutputFacts(sums["squares"], sums["numbers"], along.value if along.blocks else ()))
        count, entries = facts.numbers
        if entries > 0 and math.isfinite(facts.squares):
            self.rms = math.sqrt(facts.squares / entries)
        if entries > 0:
            self.entries_per_sample = entries / count
        if along.blocks:
            self.squared_change = facts.change / count


def squares_along(output: Tensor, vectors: Tensor) -> Tensor:
    """Sum () over samples of ``f^T H f`` of an output f (N, ...); H is the sum of ``v v^T`` of vectors (k, N, ...)."""
    wide = at_least_single([output])
    flat = [x.detach().reshape(*x.shape[: -output.ndim], len(output), -1).to(wide) for x in (vectors, output)]
    return torch.linalg.vecdot(*flat).nan_to_num(0.0, 0.0, 0.0).square().sum()


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares, and the number of finite entries."""
    squares = x.to(at_least_single([x])).square()  # a copy, and the only one of the size of x
    entries = (squares < torch.inf).count_nonzero()  # isfinite, and a sum of its truths, would make copies
    return squares.nan_to_num_(0.0, 0.0, 0.0).sum(), entries
