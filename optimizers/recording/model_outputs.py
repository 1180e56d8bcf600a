"""Where vectors are sent back from: what a model returned, or what losses in it are made of; how large outputs are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributions import Distribution

from curvature.functional import graph_nodes
from curvature.linalg import stack
from curvature.recording import Tape
from optimizers.recording.loss_graph import Reading, Source, Unknown, read_loss
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
    # where the model returned no more than its losses: their gradients at `tensors`, how they are made of these, and
    # their absolute value
    gradients: Sequence[Tensor] = ()
    readings: Sequence[Reading] = ()
    scale: Tensor | None = None


@torch.enable_grad()
def find_outputs(tape: Tape, output: Any) -> ModelOutputs:
    """The tensors that a model returned; of one that returns only its losses, what these are made of.

    That is what loss functions of torch have received, or else what sums and means were taken of. A model that returned
    None and called no loss function has no tensors. A count of zero means that nothing goes back.
    """
    # of an object of the user's what it holds, if that is all there is
    returned = list(differentiable(output)) or list(differentiable(getattr(output, "__dict__", None)))
    if any(x.is_nested for x in returned):
        raise RuntimeError("the model returned a nested tensor, whose samples are not known; return x.unbind() instead")
    own = [x for x in returned if x.ndim]
    if own:
        return ModelOutputs([*map(regular, own)], own, [None] * len(own), len(own[0]))
    pairs: list[tuple[Tensor, Any]] = []  # what loss functions were given that may be differentiated, and the target
    for _, args, kwargs in tape.losses:
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim]
        pairs += [(x, target) for x in given if x.requires_grad]
    if not pairs and returned:
        return _of_losses(tape, returned)
    if not pairs:
        return ModelOutputs([], [], [], (tape.samples or 1) if output is None else 0)
    counts = {len(x) for x, _ in pairs}
    count = tape.samples or 0
    if not count or any(rows % count for rows in counts):
        count = len(pairs[0][0])
    tensors = [samples_first(x, count) for x, _ in pairs]
    targets = [samples_first(y, count) for _, y in pairs]
    return ModelOutputs(tensors, [x for x, _ in pairs], targets, count)


def _of_losses(tape: Tape, losses: Sequence[Tensor]) -> ModelOutputs:
    """What losses () that no loss function has made are the means of; the losses themselves, if that is not known."""
    count = tape.samples or 1
    terms = loss_terms(tape, losses)
    if not terms and tape.samples == 1:  # outputs of one sample that the model has squeezed
        return ModelOutputs([*map(regular, losses)], losses, [None] * len(losses), 1)
    gradients: Sequence[Tensor] = [torch.ones_like(x) for x in losses]
    if terms:
        gradients = torch.autograd.grad(losses, terms, retain_graph=True)
    rows = lambda x: samples_first(x, count) if x.ndim else regular(x)
    scale = torch.stack([x.detach().float().abs() for x in losses]).sum()
    known = [None] * len(gradients)
    roots = [x.grad_fn for x in losses]
    readings = [read_loss(Source.of(x), roots) for x in terms] or [Unknown("it is no sum or mean")] * len(losses)
    tensors, gradients = [*map(rows, terms or losses)], [*map(rows, gradients)]
    return ModelOutputs(tensors, losses, known, count, gradients, readings, scale)


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


def loss_terms(tape: Tape, losses: Sequence[Tensor]) -> list[Tensor]:
    """What sums and means over data made the losses, but for penalties and scalar functions; empty if not known."""
    terms = {x.grad_fn: terms for terms, x in tape.reductions}
    without_data = {node.tensor.grad_fn for use in tape.uses for node in use.results}
    found: dict[Any, Tensor] = {}
    todo: list[Any] = [(x.grad_fn, 0) for x in losses]
    seen = set()
    while todo:
        node, number = todo.pop()
        if node in terms:
            found[node] = terms[node]
        elif node is not None and node not in seen and node not in without_data and not hasattr(node, "variable"):
            if node._input_metadata[number].shape:
                return []
            seen.add(node)
            todo += node.next_functions
    return list(found.values())


# -- how large outputs are, in the metric of the curvature: sums of each forward pass in, a norm out


class OutputScale:
    """The size of the outputs of the last batch, in the same units as the energies ``v^T M v`` of the curvature.

    Isotropic curvature measures changes of the outputs, so their size is the root mean square of an entry. Fisher
    matrices measure changes in nats, which near zero loss are far smaller: their size is the root of the mean over
    samples of ``f^T H f``, with H the matrix at the output and f the output.
    """

    def __init__(self) -> None:
        self.rms = 0.0  # zero while no outputs are known
        self.entries_per_sample = 1.0  # that an energy is a sum over; 1 but for isotropic curvature
        self.along: Mapping[str, float] = {}  # `CurvatureStatistics.along` of the last renewal, means over samples

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

    def update(self, sums: Sums, along: Sums) -> None:
        """Replace all by those of a step's passes, if it had any. The host reads them at once."""
        self.along = {}
        if not sums:
            return
        first = sums["squares"]
        numbers = [x.reshape(-1).to(first.device) for x in (first, sums["numbers"], *along.values())]
        squares, count, entries, *found = torch.cat(numbers).tolist()
        if entries > 0 and math.isfinite(squares):
            self.rms = math.sqrt(squares / entries)
        if entries > 0:
            self.entries_per_sample = entries / count
        self.along = {name: square / count for name, square in zip(along, found, strict=True)}


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
