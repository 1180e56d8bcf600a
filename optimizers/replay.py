"""A closure called again and again as if for the first time: same random numbers, buffers and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from curvature import output_changes


class WithoutBackward(TorchFunctionMode):
    """Makes ``loss.backward()`` do nothing, so that only the value of a closure is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func is Tensor.backward else func(*args, **(kwargs or {}))


class Replay:
    """One batch of a training loop, as its closure knows it.

    Args:
        model: what the closure calls.
        closure: returns the loss; it may also zero the gradients and call ``backward()``, as for `torch.optim.LBFGS`.
    """

    def __init__(self, model: nn.Module, closure: Callable[[], Any]) -> None:
        self.model, self.closure = model, closure
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        self.is_joint = True  # whether a sample's output may depend on the others, or on chance
        self.silent = False  # whether forward passes are replays, which are not to be recorded
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self.devices = sorted(devices, key=str)
        self.before = self._state()

    def first(self) -> Tensor:
        """The loss, after a backward pass; as the user's own loop would have it.

        Raises:
            TypeError: the closure returns no scalar tensor.
            RuntimeError: it calls the model never.
        """
        self.calls.clear()
        handle = self.model.register_forward_hook(self._note, with_kwargs=True)
        try:
            with torch.enable_grad():
                loss = self.closure()
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise TypeError(
                        f"closure: expected it to return the loss, a tensor of one entry, found {loss!r:.80}"
                    )
                if all(p.grad is None for p in self.model.parameters()) and loss.requires_grad:
                    loss.backward()
        finally:
            handle.remove()
        buffers, host, on_devices = self.before
        now = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self.devices)]
        drawn = any(not torch.equal(a, b) for a, b in zip([host, *on_devices], now, strict=True))
        mixing = any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())
        self.is_joint = drawn or mixing or any(not torch.equal(b, value) for b, value in buffers)
        if not self.calls:
            raise RuntimeError("closure: it did not call the model that the optimizer was given")
        return loss.detach()

    def again(self) -> Tensor:
        """As `first`, once more, after the parameters were changed."""
        self._restore(self.before)
        for p in self.model.parameters():
            p.grad = None
        return self.first()

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.calls.append((args, kwargs, output))

    def loss(self) -> Tensor:
        """The loss of the batch with the parameters as they are now."""
        with self._again(), torch.no_grad(), WithoutBackward():
            return self.closure().detach()

    @contextmanager
    def _again(self) -> Iterator[None]:
        """The state in which the closure was called first; after it, what that call had left."""
        after, gradients = self._state(), [(p, p.grad) for p in self.model.parameters()]
        self._restore(self.before)
        for p, _ in gradients:
            p.grad = None
        self.silent = True
        try:
            yield
        finally:
            self.silent = False
            self._restore(after)
            for p, g in gradients:
                p.grad = g

    def _state(self) -> tuple[Any, ...]:
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        return buffers, torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self.devices]

    def _restore(self, state: tuple[Any, ...]) -> None:
        buffers, host, devices = state
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        torch.set_rng_state(host)
        for device, own in zip(self.devices, devices, strict=True):
            torch.cuda.set_rng_state(own, device)

    # -- the model of the loss

    def curvatures(self, directions: Sequence[Mapping[str, Tensor]], share: float) -> Tensor:
        """``d_i^T G d_j`` for all pairs of directions (k, k) in float64, G the Gauss-Newton matrix of the loss.

        Args:
            directions: tensors of the shapes of parameters, by name.
            share: of the samples to compute it from; all, where they depend on each other or on random numbers.
        """
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        changes: list[list[Tensor]] = [[] for _ in directions]
        leaves: list[Tensor] = []
        shown: list[Any] = []
        factor = 1.0
        with self._again(), sdpa_kernel(SDPBackend.MATH):
            for call in self.calls:
                cut = self._cut(call, share)
                args, kwargs = call[:2] if cut is None else cut
                with torch.enable_grad():
                    outputs = _floats(self.model(*args, **kwargs))
                for moved, rows in zip(changes, output_changes(outputs, parameters, directions), strict=True):
                    moved += rows
                shown.append(pytree.tree_map(_leaf, call[2]))
                leaves += (now := _floats(shown[-1]))
                factor = len(now[0]) / len(outputs[0]) if now[0].ndim else 1.0
        direct = [[d.get(name) for name in parameters] for d in directions]
        return self._products([*leaves, *parameters.values()], self._outside(shown), changes, direct, factor)

    def _products(
        self, inputs: list[Tensor], loss: Tensor, changes: list[list[Tensor]], direct: list[Any], factor: float
    ) -> Tensor:
        """Second derivatives of the loss along changes of the outputs, and of the parameters where it reads them.

        The latter is a penalty on the parameters in the closure, say. Changes may be of the first rows alone.
        """
        found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
        live = [n for n, g in enumerate(found) if g is not None and g.requires_grad]
        total = torch.zeros(len(changes), len(changes), dtype=torch.float64)
        if not live:
            return total
        outputs = len(changes[0])
        moved = [[*change, *d] for change, d in zip(changes, direct, strict=True)]
        bent = []
        for own in moved:
            sent = [_padded(own[n], found[n]) for n in live]
            found_ = [found[n] for n in live]
            bent.append(torch.autograd.grad(found_, inputs, sent, retain_graph=True, allow_unused=True))
        for n in range(len(inputs)):
            rows = [b[n] for b in bent]
            columns = [m[n] for m in moved]
            total += (factor if n < outputs else 1.0) * _gram(rows, columns)
        return (total + total.T) / 2

    def _cut(self, call: tuple[Any, Any, Any], share: float) -> tuple[Any, Any] | None:
        """The arguments for the first samples; None where what they give may depend on the others or on chance."""
        args, kwargs, output = call
        tensors = [x for x in pytree.tree_leaves((args, kwargs, output)) if isinstance(x, Tensor)]
        counts = {len(x) if x.ndim else 0 for x in tensors}
        if share >= 1 or self.is_joint or len(counts) != 1 or counts == {0}:
            return None
        kept = math.ceil(share * counts.pop())
        first = lambda x: x[:kept] if isinstance(x, Tensor) else x
        return pytree.tree_map(first, args), pytree.tree_map(first, kwargs)

    def _outside(self, shown: Sequence[Any]) -> Tensor:
        """The loss as the closure makes it of given outputs, without the model's own work."""
        queue = iter(shown)
        own = self.model.__dict__.get("forward")
        self.model.forward = lambda *args, **kwargs: next(queue)
        try:
            with self._again(), torch.enable_grad(), WithoutBackward():
                return self.closure()
        finally:
            del self.model.forward
            if own is not None:
                self.model.forward = own


def _leaf(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_float else value


def _floats(output: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def _padded(change: Tensor | None, like: Tensor) -> Tensor:
    """A change of the first rows, or none, as one of the whole."""
    if change is not None and change.shape == like.shape:
        return change.to(like.dtype)
    whole = torch.zeros_like(like)
    if change is not None:
        whole[: len(change)] = change
    return whole


def _gram(rows: Sequence[Tensor | None], columns: Sequence[Tensor | None]) -> Tensor:
    """Inner products of one set of tensors with another, over the first entries that both have; None is zero."""
    total = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    left, right = ([k for k, x in enumerate(side) if x is not None] for side in (rows, columns))
    if left and right:
        other = torch.stack([x.flatten() for x in columns if x is not None])
        own = torch.stack([x.flatten()[: other.shape[1]] for x in rows if x is not None])
        total[torch.tensor(left)[:, None], torch.tensor(right)] = (own.to(other.dtype) @ other.T).double().cpu()
    return total
