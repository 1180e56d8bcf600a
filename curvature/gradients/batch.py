"""A batch as it was handed in, with its model and loss; the one place that knows what "sample n alone" means.

Also of inputs that are no tensors with an axis of samples: bags of words with offsets, and packed sequences.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from curvature.arguments import check_whole
from curvature.attempts import attempt
from curvature.gradients.data import kind_of
from curvature.losses import (
    Injection,
    Loss,
    join_heads,
    naming_labels,
    per_sample_losses,
    reduction_of,
    require_labels,
    resolve,
)
from curvature.recording import (
    as_arguments,
    call_model,
    logits,
    map_tensors,
    preserve_state,
    tensors_in,
    trained_parameters,
    unwrap_compiled,
)

SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
Function = TypeVar("Function", bound=Callable[..., Any])
BEFORE_Y = 3  # arguments: model, loss, and x or data
SampleDim = int | tuple[int, int, int]  # the axis of the samples: of all, or of inputs, output and target
Bags = tuple[tuple[int, int], ...]  # places of values and their offsets among the tensors of the input


def either_form(function: Function) -> Function:
    """Make a function of (model, loss, x, y, ...) accept ``(x, y)`` as its third argument, or as data, without y; and
    one of (model, loss, data, ...) x and y in place of data, y by position (no option holds a tensor) or by name."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def joining_pair(*args: Any, **kwargs: Any) -> Any:
        _require_loss_second(args)
        if "y" in kwargs:
            y, others = kwargs.pop("y"), args[BEFORE_Y:]
        elif len(args) > BEFORE_Y and tensors_in(args[BEFORE_Y]):
            y, others = args[BEFORE_Y], args[BEFORE_Y + 1 :]
        else:
            return function(*args, **kwargs)
        x = args[BEFORE_Y - 1] if len(args) >= BEFORE_Y else kwargs.pop("x", kwargs.pop("data", None))
        if isinstance(x, DataLoader):
            raise TypeError("y: the data are a DataLoader, which gives x and y: leave y out")
        if len(args) >= BEFORE_Y:
            return function(*args[: BEFORE_Y - 1], (x, y), *others, **kwargs)
        return function(*args, data=(x, y), **kwargs)

    @functools.wraps(function)
    def splitting_pair(*args: Any, **kwargs: Any) -> Any:
        _require_loss_second(args)
        if "data" in kwargs and "x" not in kwargs:
            kwargs["x"] = kwargs.pop("data")
        if "y" in kwargs or (len(args) > BEFORE_Y and tensors_in(args[BEFORE_Y])):
            return function(*args, **kwargs)
        try:
            is_missing = isinstance(signature.bind(*args, **kwargs).arguments["y"], Injection)
        except TypeError:  # y is left out
            is_missing = len(args) >= BEFORE_Y or "x" in kwargs  # else the call says what is missing
        if not is_missing:
            return function(*args, **kwargs)
        pair = args[BEFORE_Y - 1] if len(args) >= BEFORE_Y else kwargs.pop("x")
        if not isinstance(pair, tuple | list) or len(pair) != 2 or isinstance(pair[1], tuple | list):
            raise TypeError(
                f"y: it is missing, and x is no pair (x, y) but {kind_of(pair)}; pass x and y, of one batch"
            )
        if len(args) >= BEFORE_Y:
            return function(*args[: BEFORE_Y - 1], *pair, *args[BEFORE_Y:], **kwargs)
        return function(*args, x=pair[0], y=pair[1], **kwargs)

    return cast("Function", joining_pair if "data" in signature.parameters else splitting_pair)


def _require_loss_second(args: tuple[Any, ...]) -> None:
    """Refuse the data in the place of the loss, of which Python would say that the data are missing."""
    if len(args) > 1 and isinstance(args[1], Tensor | tuple | list | Mapping | DataLoader):
        raise TypeError(
            f"loss: expected a loss module or a callable(output, target), found {kind_of(args[1])} (the order is "
            "model, loss, data)"
        )


def described(x: Any) -> str:
    """What was found in place of an input, for messages."""
    if isinstance(x, Tensor):
        return f"one of shape {tuple(x.shape)}; a single sample needs x[None] and y[None]"
    if isinstance(x, tuple | list | Mapping):
        inner = x.values() if isinstance(x, Mapping) else x
        return f"{kind_of(x)}: {', '.join(dict.fromkeys(map(kind_of, inner)))}"
    return kind_of(x)


@dataclass(frozen=True)
class Batch:
    """`count` samples along axis `dims[0]` of the inputs, `dims[1]` of the output, `dims[2]` of the target."""

    model: nn.Module
    loss: Loss
    x: Any
    y: Any
    count: int
    dims: tuple[int, int, int]
    parameters: dict[str, nn.Parameter]  # that require a gradient, or those of them that are asked for
    bags: Bags = ()  # of x, if its samples are bags: values with offsets
    takes_logits: bool = True  # whether the loss takes ``output.logits`` where the output has them
    are_clipped: bool = False  # whether the samples' gradients are summed, each clipped, so that none may count more

    @staticmethod
    def of(
        model: nn.Module, loss: Loss, x: Any, y: Any, sample_dim: SampleDim = 0, parameters: Iterable[str] | None = None
    ) -> Batch:
        """Check the arguments of the public functions, and count the samples."""
        model, chosen = unwrap_compiled(model), trained_parameters(model, parameters)
        loss = resolve(loss)
        reduction_of(loss)  # refuses "none"
        x = as_arguments(model, x) if isinstance(x, Mapping) else x
        dims = tuple(sample_dim) if isinstance(sample_dim, tuple | list) else (sample_dim,) * 3
        for dim in dims:
            check_whole("sample_dim", dim)
        if len(dims) != 3:
            raise ValueError(f"sample_dim: expected one axis or (input, output, target), found {sample_dim!r}")
        if any(t.is_nested for t in tensors_in(x, y)):
            raise TypeError(
                "x: found a nested tensor, of which no sample can be cut out; pass a padded tensor with a mask "
                "(torch.nested.to_padded_tensor), or a PackedSequence"
            )
        for name, tree in (("x", x), ("y", y)):
            if sparse := next((t.layout for t in tensors_in(tree) if t.layout in SPARSE), None):
                raise TypeError(
                    f"{name}: found a sparse tensor ({sparse}), of which no sample can be cut out; pass "
                    f"{name}.to_dense()"
                )
        dims = _from_front(dims, model, x, y) if min(dims) < 0 else dims
        inputs = [t for t in tensors_in(x) if t.ndim > dims[0]]
        if not inputs:
            raise TypeError(
                f"x: expected a tensor with an axis {dims[0]} of samples (or a tuple or dict), found {described(x)}"
            )
        bags, packed = ((), []) if isinstance(x, Tensor) else (_bags_in(model, x), _packed_in(x))
        count = inputs[0].shape[dims[0]]
        if bags or packed:
            count = _number_of_bags(tensors_in(x)[bags[0][1]], y) if bags else int(packed[0].batch_sizes[0])
        for t in tensors_in(y):
            if t.ndim <= dims[2] or t.shape[dims[2]] % max(1, count) or bool(t.shape[dims[2]]) > bool(count):
                hint = "; a single sample needs x[None] and y[None]" if t.ndim <= dims[2] else ""
                if isinstance(x, tuple) and isinstance(y, tuple) and len(x) == len(y) == 2:
                    hint += "; several batches are a list [(x, y), (x, y)], and no tuple"
                if isinstance(x, list):
                    hint += (
                        f"; x is a list of {len(x)}: a batch is one tensor with an axis of samples: pad what differs "
                        "in size and stack it, or pass batches of one: [(a[None], b[None]) for a, b in zip(x, y)]"
                    )
                raise ValueError(f"y: {count} samples in x, but the shape of y is {tuple(t.shape)}{hint}")
        if isinstance(y, np.ndarray):
            raise TypeError(f"y: expected a tensor, found {kind_of(y)}")
        if any(t.is_inference() for t in tensors_in(x, y)):  # autograd may not keep these
            with torch.inference_mode(False):
                x, y = map_tensors(lambda t: t.clone() if t.is_inference() else t, (x, y))
        return Batch(model, loss, x, y, count, dims, chosen, bags)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What decides, beside the functions that the model calls, how its parameters are explained."""
        shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors_in(self.x))
        training = tuple(module.training for module in self.model.modules())
        hooked = tuple(name for name, p in self.parameters.items() if p._backward_hooks)  # of gradients
        return (shapes, self.count, self.takes_logits, self.dims, training, tuple(self.parameters), hooked)

    @property
    def is_uneven(self) -> bool:
        """Whether the input has no axis of samples: bags with offsets, packed sequences."""
        return bool(self.bags) or bool(_packed_in(self.x))

    def sample(self, n: int) -> Batch:
        """Sample n as a batch of one."""
        return self.part(slice(n, n + 1))

    def part(self, some: slice) -> Batch:
        """The samples from `some.start` to `some.stop`; of a target with N * m rows, m each."""
        dim, _, target_dim = self.dims
        count = some.stop - some.start

        def rows(t: Tensor) -> Tensor:
            each = t.shape[target_dim] // self.count
            return t.narrow(target_dim, some.start * each, count * each)

        if self.bags:
            x = _some_bags(self.x, self.bags, some, self.count)
        elif self.is_uneven:
            x = _some_sequences(self.x, some)
        else:
            x = map_tensors(lambda t: t.narrow(dim, some.start, count) if self.has_samples(t) else t, self.x)
        y = map_tensors(lambda t: rows(t) if t.ndim > target_dim else t, self.y)
        return replace(self, x=x, y=y, count=count)

    def parts(self, size: int | None, name: str) -> Iterator[tuple[int, slice]]:
        """Parts of one size: the first sample whose turn it is, and the part; the last one begins before its turn."""
        if size is not None:
            check_whole(name, size, 1)
        size = self.count if size is None else min(size, self.count)
        for turn in range(0, self.count, max(1, size)):
            start = min(turn, self.count - size)
            yield turn, slice(start, start + size)

    def output(self) -> Any:
        return self.for_loss(call_model(self.model, self.x))

    def is_by_entry(self, output: Any) -> bool:
        """Whether the output is a list with an entry for each sample; one of tensors with their axis may be as long."""
        if not isinstance(output, list | tuple) or len(output) != self.count:
            return False
        with preserve_state(self.model), torch.no_grad():
            call = self.sample(self.count - 1).output
            alone = attempt(call, "not tried whether a sample alone has a list of one entry")
        return isinstance(alone, list | tuple) and len(alone) == 1

    def for_loss(self, output: Any) -> Any:
        """What the loss takes of the model's output."""
        if type(output) is not Tensor and self.takes_logits:
            output = join_heads(self.loss, logits(output))
        require_classes_first(self.loss, output, self.y)
        require_labels(self.loss, output, self.y)
        return output

    def loss_of(self, output: Any) -> Tensor:
        """The loss of the batch; ValueError where it reads more than the logits of the output."""
        try:
            with naming_labels(self.loss, output):
                return self.loss(output, self.y)
        except AttributeError as error:
            raise ValueError(
                f"loss: {error}. It is called with the output of the model, or with its .logits where it has them. A "
                "matrix needs the loss as a function of these: pass the labels as y, and "
                "loss=torch.nn.functional.cross_entropy, or the function that the model applies to its logits"
            ) from error

    def has_samples(self, t: Tensor) -> bool:
        """Whether a tensor of the input has the axis of samples."""
        return t.ndim > self.dims[0] and t.shape[self.dims[0]] == self.count

    def losses(self, output: Tensor) -> Tensor:
        """The loss of every sample alone, (N,)."""
        return per_sample_losses(self.loss, output, self.y, self.count, self.dims[1], self.dims[2])

    def without_terms(self, some: Iterable[int]) -> list[int]:
        """Those of these samples of which no term counts: their own loss is 0/0, where that of the batch is finite."""

        def value(batch: Batch) -> Tensor:
            with preserve_state(self.model), torch.no_grad():
                return self.loss(batch.output(), batch.y).detach()

        nothing = [n for n in some if value(self.sample(n)).isnan()]
        return nothing if nothing and value(self).isfinite() else []

    def along(self, vector: Tensor) -> Batch:
        """The batch with the loss ``<output, vector>``."""
        return replace(self, loss=_inner_product, y=vector, dims=(self.dims[0], self.dims[1], self.dims[1]))

    def probe(self, output: Tensor) -> Batch:
        """The same, along a random vector of the shape of the output."""
        draw: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": "cpu"}
        return self.along(torch.randn(output.shape, **draw).to(output))

    def gradients(self, output: Any = None) -> dict[str, Tensor]:
        """Gradient of the loss as the user would call it, by one plain backward pass."""
        value = self.loss(self.output() if output is None else output, self.y)
        gradients = torch.autograd.grad(value, list(self.parameters.values()), materialize_grads=True)
        return {name: g.to_dense() for name, g in zip(self.parameters, gradients, strict=True)}


class OtherShapeAlone(ValueError):
    """The output of a sample alone has another shape than its part of the batch's."""


def require_classes_first(loss: Loss, output: Any, y: Any) -> None:
    """Refuse what torch takes no class of: logits (N, T, C), as language models return them, with labels (N, T)."""
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or not isinstance(output, Tensor):
        return
    if not isinstance(y, Tensor) or y.is_floating_point() or output.ndim < 3 or output.shape[:-1] != y.shape:
        return
    if (len(output), *output.shape[2:]) != y.shape:
        raise ValueError(
            f"loss: classes are on the last axis of the output {tuple(output.shape)}, beside labels {tuple(y.shape)}, "
            f"and {type(loss).__name__} takes them from axis 1: pass {_over_places(loss, y.ndim)} or, for sampled(), "
            "which takes torch's own losses only, a module that returns model(x).movedim(-1, 1)"
        )


def _over_places(loss: nn.CrossEntropyLoss | nn.NLLLoss, axes: int) -> str:
    """The code of the same loss for classes on the last axis, behind that many axes of samples and places."""
    function = "cross_entropy" if isinstance(loss, nn.CrossEntropyLoss) else "nll_loss"
    options = "" if loss.weight is None else ", weight=weight"
    usual = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    given = {name: getattr(loss, name, value) for name, value in usual.items()}
    options += "".join(f", {name}={value!r}" for name, value in given.items() if value != usual[name])
    return f"lambda o, t: F.{function}(o.flatten(0, {axes - 1}), t.flatten(){options})"


def _from_front(dims: tuple[int, int, int], model: nn.Module, x: Any, y: Any) -> tuple[int, int, int]:
    """Axes that are counted from the back, as they are from the front; that of the output takes a forward pass."""

    def output() -> Any:
        with preserve_state(model), torch.no_grad():
            return logits(call_model(model, x))

    def found(dim: int, what: str, tree: Callable[[], Any]) -> int:
        ranks = {t.ndim for t in tensors_in(tree())} if dim < 0 else set()
        if len(ranks) > 1 or any(dim < -rank for rank in ranks):
            many = " and ".join(map(str, sorted(ranks)))
            raise ValueError(f"sample_dim: {dim}, but {what} has tensors of {many} axes; count from the front")
        return dim + max(ranks) if ranks else max(0, dim)

    return found(dims[0], "x", lambda: x), found(dims[1], "the output", output), found(dims[2], "y", lambda: y)


def _inner_product(output: Tensor, vector: Tensor) -> Tensor:
    if output.shape != vector.shape:
        raise OtherShapeAlone(f"its output has the shape {tuple(output.shape)}, and {tuple(vector.shape)} in the batch")
    return (output * vector).sum()


def _bags_in(model: nn.Module, x: Any) -> Bags:
    """Where x holds values with offsets, as `nn.EmbeddingBag` takes them, in whatever order."""
    # Values (L,) and offsets are integers, the offsets from 0 upwards to L at most. Identifiers may look the same, so a
    # forward pass shows which reach an embedding bag as its offsets.
    leaves = tensors_in(x)
    whole = [k for k, t in enumerate(leaves) if t.ndim == 1 and not t.is_floating_point()]
    if len(whole) < 2 or _packed_in(x):
        return ()
    sizes = {k: max(len(leaves[j]) for j in whole if j != k) for k in whole}
    likely = [k for k in whole if _are_ends(leaves[k].tolist(), sizes[k])]
    if not likely:
        return ()
    with preserve_state(model), torch.no_grad(), _BagsSought(leaves, whole, likely) as sought:
        call_model(model, x)
    return tuple(sought.found)


def _are_ends(ends: list[int], size: int) -> bool:
    return bool(ends) and ends[0] == 0 and sorted(ends) == ends and ends[-1] <= size


class _BagsSought(TorchFunctionMode):
    """Follows tensors through torch functions: which arrive, unchanged, at an embedding bag as its offsets?"""

    def __init__(self, leaves: list[Tensor], whole: list[int], likely: list[int]) -> None:
        super().__init__()
        self.leaves, self.likely, self.found = leaves, likely, list[tuple[int, int]]()
        self.derived = {k: [leaves[k]] for k in whole}  # kept alive, so that no other tensor takes their identity

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding_bag:
            offsets = kwargs.get("offsets", args[2] if len(args) > 2 else None)
            self._note(kwargs.get("input", args[0] if args else None), offsets)
        result = function(*args, **kwargs)
        given = pytree.tree_leaves((args, kwargs))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        for k in self.derived:
            if any(self._is_of(k, t) for t in given):
                self.derived[k] += made
        return result

    def _note(self, values: Any, offsets: Any) -> None:
        if offsets is None:
            return
        for k in self.likely:
            leaf = self.leaves[k]
            if self._is_of(k, offsets) and torch.equal(offsets[: len(leaf)], leaf.to(offsets)):
                read = [j for j in self.derived if j != k and len(self.leaves[j]) == len(values)]
                read.sort(key=lambda j: not self._is_of(j, values))
                self.found += [(j, k) for j in read[:1] if (j, k) not in self.found]

    def _is_of(self, k: int, value: Any) -> bool:
        return any(value is t for t in self.derived[k])


def _number_of_bags(offsets: Tensor, y: Any) -> int:
    """One for each offset, but for the last if there is no target for it (`include_last_offset`)."""
    return len(offsets) - any(len(t) == len(offsets) - 1 for t in tensors_in(y) if t.ndim)


def _some_bags(x: Any, bags: Bags, some: slice, count: int) -> Any:
    """The bags of these samples."""
    leaves = tensors_in(x)
    parts: dict[int, Tensor] = {}  # by identity of the whole
    spans: dict[int, slice] = {}  # of tensors beside the values, which have their length
    for values, k in bags:
        offsets, size = leaves[k], len(leaves[values])
        ends = [*offsets.tolist(), size]
        span = slice(ends[some.start], ends[some.stop])
        parts[id(offsets)] = offsets[some.start : some.stop + len(offsets) - count] - span.start
        parts[id(leaves[values])] = leaves[values][span]
        spans.setdefault(size, span)

    def part(t: Tensor) -> Tensor:
        if id(t) in parts:
            return parts[id(t)]
        if t.ndim == 1 and len(t) in spans:
            return t[spans[len(t)]]
        return t[some] if t.ndim and len(t) == count else t

    return map_tensors(part, x)


def _packed_in(x: Any) -> list[PackedSequence]:
    """The packed sequences among the arguments."""
    return [leaf for leaf in pytree.tree_leaves(x, is_leaf=_is_packed) if _is_packed(leaf)]


def _some_sequences(x: Any, some: slice) -> Any:
    """The arguments with these sequences of every packed sequence, in the order before packing."""

    def part(leaf: Any) -> Any:
        if not _is_packed(leaf):
            return leaf
        rows, lengths = pad_packed_sequence(leaf, batch_first=True)
        lengths = lengths[some]
        return pack_padded_sequence(rows[some, : int(lengths.max())], lengths, batch_first=True, enforce_sorted=False)

    return pytree.tree_map(part, x, is_leaf=_is_packed)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)
