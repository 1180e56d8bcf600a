"""Closures: what they may return, and calling them again with the same random numbers, buffers and gradients.

A closure returns the loss, after a backward pass, or residuals. Everything else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from curvature.attempts import attempt
from curvature.functional import TwiceDifferentiable, graph_nodes, own_functions
from curvature.gradients import changes_by_backward_passes
from curvature.linalg import look, product_rounding, widen
from curvature.recording import ModelState, map_tensors, warn_once
from optimizers.recording.backward_passes import is_transformed

BACKWARD = {Tensor.backward, torch.autograd.backward}
EXPECTED = "closure: expected it to return the loss, a tensor of one entry, or residuals (M,)"
DIFFERENTIATES = (
    "closure: its loss differentiates the model (torch.autograd.grad with create_graph=True), and the curvature of the "
    "outputs is not that of their derivatives; return the residuals r (M,), whose loss is 1/2 ||r||^2, and call no "
    "backward(). Penalties on gradients go in a loop without a closure"
)
CALLED_BEFORE = (
    "closure: it returned {} of outputs that the model computed before the closure was called. This step calls the "
    "closure again for other parameters, so the closure itself has to call the model"
)
WITHOUT_THE_MODEL = (
    "closure: it returned {} that depends on no parameter of the optimizer's model; call the very model that the "
    "optimizer was given in it, not a copy"
)
LOST = "nothing says that torch can differentiate the backward pass of"
# What is said of functions that cannot be differentiated twice
WITHOUT_SECOND_DERIVATIVE = "is not implemented", "Could not run", LOST


def check_computed(values: Sequence[Tensor], model: nn.Module, start: int, what: str) -> bool:
    """Whether values of a closure depend on parameters; raises if these were read before node `start`, its first."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if not trained or not values or any(id(x) in trained for x in values):  # a loss that is a parameter
        return True
    reads = [
        node._sequence_nr()
        for node in graph_nodes(*(x.grad_fn for x in values))
        if any(id(getattr(child, "variable", None)) in trained for child, _ in node.next_functions)
    ]
    if reads and max(reads) < start:
        raise RuntimeError(CALLED_BEFORE.format(what))
    return bool(reads)


def checked_value(value: Any) -> Tensor:
    """The value of a closure; refuses what is neither a loss nor residuals."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{EXPECTED}; found {_describe(value)}")
    if value.ndim > 1:
        raise TypeError(f"{EXPECTED}; found shape {tuple(value.shape)}")
    return value


def _describe(value: Any) -> str:
    if value is None:
        return "None: return the loss at its end"
    if isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(x, Tensor) for x in value):
        return f"a {type(value).__name__} of {len(value)}: return the loss alone, or the residuals by torch.cat"
    return f"{value!r:.80} ({type(value).__name__}): return the loss itself"


class ClosureWatch(TorchFunctionMode):
    """Notes what a closure does while it is evaluated: backward passes, derivatives and calls of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.before: list[tuple[Tensor, Tensor | None, int]] = []  # gradients and their versions
        self.calls_backward = self.calls_model = self.differentiates = False
        self.sent_back: list[Tensor] = []  # what backward passes began at

    def __enter__(self) -> ClosureWatch:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.before = [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in trained]
        self.start = torch.autograd._get_sequence_nr()
        self.hook = self.model.register_forward_pre_hook(self._note_call)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.hook.remove()
        super().__exit__(*exception)

    def _note_call(self, module: nn.Module, args: Any) -> None:
        self.calls_model = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARD:
            self.calls_backward = True
            self.sent_back += [x for x in pytree.tree_leaves((args[:1], kwargs)) if isinstance(x, Tensor)]
        self.differentiates |= func is torch.autograd.grad and bool(kwargs.get("create_graph"))
        return func(*args, **kwargs)

    @property
    def has_sent_back(self) -> bool:
        """Whether there was a backward pass, or gradients are new, which zeroed ones are not."""
        return self.calls_backward or any(_is_new(p.grad, g, version) for p, g, version in self.before)

    def loss_or_residuals(self, value: Any) -> Tensor:
        """The value of a closure, a loss () or residuals (M,); a loss of shape (1,) is told by its backward pass."""
        value = checked_value(value)
        return value[0] if value.shape == (1,) and self.has_sent_back else value

    def check_repeatable(self, value: Tensor) -> None:
        """Refuse a value of outputs from before the closure: other parameters do not change it; log one of none."""
        values = [x for x in (value, *self.sent_back) if x.requires_grad]
        what = "residuals" if value.ndim else "a loss"
        if not check_computed(values, self.model, self.start, what):
            warn_once(f"{WITHOUT_THE_MODEL.format(what)}. No step is made", logger="optimizers")

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that differentiates the model, or has a graph through which no backward pass has gone."""
        if self.differentiates:
            raise TypeError(DIFFERENTIATES)
        has_gradients = any(p.grad is not None for p, _, _ in self.before)
        # not if the loss comes from a backward pass before the step
        is_expected = self.calls_model or not has_gradients
        if self.before and loss.requires_grad and not self.has_sent_back and is_expected:
            what = f"a loss ({float(loss.detach()):.3g})"
            raise RuntimeError(f"closure: it returned {what} and has sent no gradient back; call loss.backward() in it")


def _is_new(gradient: Tensor | None, before: Tensor | None, version: int) -> bool:
    if gradient is None:
        return False
    return gradient is not before or (gradient._version != version and bool(gradient.to_dense().any()))


class WithoutBackward(TorchFunctionMode):
    """Makes ``loss.backward()`` do nothing, to compute only the value of a closure."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func in BACKWARD else func(*args, **(kwargs or {}))


@dataclass
class Call:
    """A forward pass of the model within the closure."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: ModelState
    precision: tuple[str, bool, torch.dtype]  # of autocast
    output: Any = None
    versions: Sequence[int] = ()  # of the output's tensors, when the model returned them
    has_drawn: bool = False  # random numbers
    apart: Sequence[Tensor] | None = None  # flags () on whose truth no output depends on other samples or on chance

    def as_then(self) -> torch.autocast:
        """Restore the random state and buffers of the call's start; returns its autocast context."""
        self.before.restore()
        device, enabled, dtype = self.precision
        return torch.autocast(device, dtype, enabled)

    @property
    def is_changed(self) -> bool:
        """Whether the closure has changed the output in place."""
        return [x._version for x in _floats(self.output)] != self.versions

    def cut(self, stride: int) -> tuple[Any, Any] | None:
        """The arguments for every stride-th sample; None if their outputs may depend on other samples or on chance."""
        tensors = _tensors((self.args, self.kwargs, self.output))
        counts = {len(x) if x.ndim and x.layout is torch.strided else 0 for x in tensors}  # no sparse tensor is cut
        if stride == 1 or self.apart is None or self.is_changed or len(counts) != 1 or counts == {0}:
            return None
        if self.apart and not all(look(self.apart)):
            return None
        some = lambda x: x[::stride].contiguous() if isinstance(x, Tensor) else x
        return pytree.tree_map(some, self.args), pytree.tree_map(some, self.kwargs)

    def agrees(self, outputs: Sequence[Tensor], stride: int) -> bool:
        """Whether outputs equal every stride-th row of the call's own outputs, up to rounding."""
        outputs_then = _floats(self.output)
        if self.is_changed or len(outputs_then) != len(outputs):
            return self.is_changed
        rows = [x[::stride] if x.ndim else x for x in outputs_then]
        rough = self.rounding**0.5
        return all(a.shape == b.shape and _close(a, b, rough) for a, b in zip(rows, outputs, strict=True))

    @property
    def rounding(self) -> float:
        """The coarsest rounding of the output, of autocast, and of products of single precision."""
        _, reduced, dtype = self.precision
        outputs = _floats(self.output)
        kinds = [torch.finfo(d).eps for d in [x.dtype for x in outputs] + [dtype] * reduced]
        return max(kinds + [product_rounding(x.device) for x in outputs if x.dtype == torch.float32])


class Replay:
    """Evaluates the batch of a closure repeatedly.

    `mean` averages over processes, each with its part of the batch; inside `unrecorded` no forward pass is recorded.
    """

    def __init__(
        self, model: nn.Module, closure: Callable[[], Any], mean: Callable[[Tensor], Tensor] = lambda x: x,
        unrecorded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self.model, self.closure, self.mean, self.unrecorded = model, closure, mean, unrecorded
        self.calls: list[Call] = []
        self.has_transformed = False  # whether a call within torch.func shows no output that the loss is made of
        self.value = torch.zeros((), device="cpu")  # the loss at the first call
        self.before = ModelState(model)

    def first(self) -> Tensor:
        """The loss, after a backward pass as in the user's own loop; if the closure returns residuals, just these."""
        self.calls.clear()
        self.has_transformed = False
        with (
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end),
            torch.enable_grad(),
            ClosureWatch(self.model) as watch,
        ):
            # 1. call it, and note calls of the model and backward passes
            loss = watch.loss_or_residuals(self.closure())
        if loss.ndim:
            return loss
        # 2. refuse what cannot be called again at other parameters
        if watch.differentiates:
            raise TypeError(DIFFERENTIATES)
        watch.check_repeatable(loss)
        # 3. send the loss back, if the closure has not
        self.value = loss.detach()
        if loss.requires_grad and not watch.has_sent_back:
            nn.Module.zero_grad(self.model)
            loss.backward()
        return self.mean(self.value)

    def again(self) -> Tensor:
        """Call `first` again, after the parameters changed."""
        self.before.restore()
        nn.Module.zero_grad(self.model)
        return self.first()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if is_transformed(module):
            self.has_transformed = True
        elif torch.is_grad_enabled():
            device = next(module.parameters()).device.type
            precision = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            self.calls.append(Call(args, kwargs, ModelState(module), precision))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not is_transformed(module):
            call = self.calls[-1]
            call.output, call.versions = output, [x._version for x in _floats(output)]
            call.has_drawn = call.before.random.differs()
            norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.training]
            is_mixing = any(isinstance(m, _BatchNorm) or m.track_running_stats for m in norms)  # or buffers change
            call.apart = None if is_mixing else call.before.unchanged()

    def loss(self) -> Tensor:
        """The loss of the batch at the current parameters."""
        with self._as_first(), torch.no_grad(), WithoutBackward():
            return self.mean(self.closure().detach())

    @contextmanager
    def _as_first(self) -> Iterator[None]:
        """Restore the state before the first call of the closure; at the end, the state after it."""
        after, gradients = ModelState(self.model), [(p, p.grad) for p in self.model.parameters()]
        self.before.restore()
        nn.Module.zero_grad(self.model)
        try:
            with self.unrecorded():
                yield
        finally:
            after.restore()
            for p, g in gradients:
                p.grad = g

    # -- the model of the loss

    def curvatures(self, directions: Sequence[Mapping[str, Tensor]], stride: int) -> Tensor:
        """``d_i^T G d_j`` for pairs of directions (k, k), G the Gauss-Newton matrix on every stride-th sample.

        On all samples, where they depend on each other or on chance. G is the Hessian where the loss is linear in the
        model's outputs (these are losses, or log-probabilities) or depends on more, or where these are unknown or no
        floating point tensors; zero where some function has no second derivative.
        """
        try:
            are_real = all(_floats(c.output) and not any(map(torch.is_complex, _tensors(c.output))) for c in self.calls)
            if are_real and not self.has_transformed:
                products = self._gauss_newton(directions, stride)
                if products is not None and bool(products.any()):
                    return products
            return self._hessian(directions)
        except RuntimeError as error:
            if not any(phrase in str(error) for phrase in WITHOUT_SECOND_DERIVATIVE):
                raise
            warn_once("adaptive steps go by slopes alone: %s", str(error).split("\n")[0], logger="optimizers")
            return self.value.new_zeros(len(directions), len(directions))

    @torch.enable_grad()
    def _hessian(self, directions: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """``d_i^T H d_j``, with H the Hessian of the loss."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with self._as_first(), sdpa_kernel(SDPBackend.MATH), TwiceDifferentiable(), WithoutBackward():
            loss = self.closure()
            _require_second_derivatives([loss])
            products = _products(loss, [], [[] for _ in directions], [], parameters, directions)
        return self.mean(products)

    def _gauss_newton(self, directions: Sequence[Mapping[str, Tensor]], stride: int) -> Tensor | None:
        """None where the closure computes its loss from more than the model's outputs, hidden features for example."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        changes: list[list[Tensor]] = [[] for _ in directions]
        leaves: list[Tensor] = []
        strides: list[int] = []
        shown: list[Any] = []
        others: list[Call] = []  # of which these forms give another output
        # 1. the outputs of each call, of every stride-th sample where it can run alone, and their changes
        with self._as_first(), sdpa_kernel(SDPBackend.MATH), TwiceDifferentiable():  # forms with second derivatives
            for call in self.calls:
                output, step, is_same = self._some(call, stride)
                others += [] if is_same else [call]
                outputs = _floats(output)
                _require_second_derivatives(outputs)
                of_call = changes_by_backward_passes(outputs, parameters, directions)
                for moved, rows in zip(changes, of_call, strict=True):
                    moved += rows
                leaf = lambda x: x.detach().requires_grad_() if x.is_floating_point() else x
                shown.append(map_tensors(leaf, output if call.is_changed else call.output))
                leaves += _floats(shown[-1])
                strides += [step] * len(outputs)
        self._require_repeatable(others)
        # 2. the loss that the closure computes from these outputs alone, if that is the same
        loss = self._outside(shown)
        rough = max([torch.finfo(self.value.dtype).eps, *(call.rounding for call in self.calls)]) ** 0.5
        if loss is None or not _close(self.value, loss, rough):
            return None
        # 3. its second derivatives along the changes
        _require_second_derivatives([loss])
        return self.mean(_products(loss, leaves, changes, strides, parameters, directions))

    @torch.enable_grad()
    def _some(self, call: Call, stride: int) -> tuple[Any, int, bool]:
        """The output for every stride-th sample, the stride (1 if inseparable), and whether the call gave the same."""
        cut = call.cut(stride)
        if cut is not None:
            with call.as_then():
                output = attempt(lambda: self.model(*cut[0], **cut[1]), "the model does not run on some samples alone")
            if output is not None and call.agrees(_floats(output), stride):
                return output, stride, True
        with call.as_then():
            output = self.model(*call.args, **call.kwargs)
        return output, 1, call.agrees(_floats(output), 1)

    def _require_repeatable(self, calls: Sequence[Call]) -> None:
        """Refuse a model of which another call gives another output; fused attention drops other weights out."""
        for call in calls:
            with self._as_first(), torch.no_grad(), call.as_then():
                is_same = call.has_drawn and call.agrees(_floats(self.model(*call.args, **call.kwargs)), 1)
            if not is_same:
                raise RuntimeError(
                    "closure: called again with the same input, parameters, buffers and random numbers, the "
                    "model gave another output; keep its state in buffers, and draw from torch's own random numbers"
                )

    def _outside(self, shown: Sequence[Any]) -> Tensor | None:
        """The loss that the closure computes from given outputs, without running the model; None where it cannot."""
        forward = self.model.__dict__.get("forward")
        try:
            with self._as_first(), torch.enable_grad(), WithoutBackward():
                queue = iter([map_tensors(Tensor.clone, output) for output in shown])  # the closure may change them
                self.model.forward = lambda *args, **kwargs: next(queue)
                return self.closure()
        except RuntimeError:
            return None
        finally:
            self.model.__dict__.pop("forward", None)
            if forward is not None:
                self.model.forward = forward


def _require_second_derivatives(results: Sequence[Tensor]) -> None:
    if names := own_functions(results):
        raise RuntimeError(f"{LOST} {', '.join(names)}; if it can, say so: twice_differentiable = True in its class")


def _products(
    loss: Tensor, outputs: Sequence[Tensor], changes: list[list[Tensor]], strides: Sequence[int],
    parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]],
) -> Tensor:  # fmt: skip
    """Second derivatives of the loss along changes of outputs, of every stride-th row, and of parameters it reads."""
    if not loss.requires_grad:
        raise TypeError(
            "closure: it returned a loss without a graph; return the loss itself, not loss.detach() (Lightning's own "
            "closure detaches it: use manual optimization)"
        )
    inputs, strides = [*outputs, *parameters.values()], [*strides, *[1] * len(parameters)]
    gradients = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    live = [n for n, g in enumerate(gradients) if g is not None and g.requires_grad]
    total = widen(loss.new_zeros(len(changes), len(changes)))
    if not live:
        return total
    moved: list[list[Any]] = [[*some, *map(d.get, parameters)] for some, d in zip(changes, directions, strict=True)]
    bent = []
    for along in moved:
        sent = [_fill_rows(along[n], inputs[n], strides[n]) for n in live]
        through = [gradients[n] for n in live]
        bent.append(torch.autograd.grad(through, inputs, sent, retain_graph=True, allow_unused=True))
    for n, stride in enumerate(strides):
        rows = [b[n] if b[n] is None or stride == 1 else b[n][::stride] for b in bent]
        factor = len(inputs[n]) / math.ceil(len(inputs[n]) / stride) if stride > 1 else 1.0
        columns = [m[n] for m in moved]
        if any(x is not None for x in rows) and any(x is not None for x in columns):
            total += factor * _gram(rows, columns).to(total.device)
    return (total + total.T) / 2


def _close(one: Tensor, other: Tensor, relative: float) -> bool:
    one, other = one.detach().to(torch.promote_types(one.dtype, torch.float32)), other.detach()
    largest = one.abs().amax() if one.numel() else 0.0
    other = other.to(one.dtype)
    is_near = (other - one).abs() <= relative * (one.abs() + largest)
    return bool((is_near | (other == one) | (other.isnan() & one.isnan())).all())


def _floats(output: Any) -> list[Tensor]:
    return [x for x in _tensors(output) if x.is_floating_point()]


def _tensors(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_tensors(tensors.append, tree)
    return tensors


def _fill_rows(change: Tensor | None, like: Tensor, stride: int) -> Tensor:
    """A change of every stride-th row, or none, as a change of all rows."""
    if change is not None and stride == 1:
        return change.to(like.dtype)
    whole = torch.zeros_like(like)
    if change is not None:
        whole[::stride] = change
    return whole


def _gram(rows: Sequence[Tensor | None], columns: Sequence[Tensor | None]) -> Tensor:
    """Inner products of one set of tensors with another, all of one shape; None is zero."""
    (like, *_) = (x for x in columns if x is not None)
    wide = torch.promote_types(like.dtype, torch.float32)
    zeros = torch.zeros_like(like).flatten()
    flat = lambda side: torch.stack([zeros if x is None else x.flatten() for x in side]).to(wide)
    return widen(flat(rows) @ flat(columns).T)
