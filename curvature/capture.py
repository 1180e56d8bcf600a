"""Record every read of a parameter in a forward pass: what it met, and where to ask for its backprop.

Reads are seen at the level of the torch functions that receive a parameter (`TorchFunctionMode`), not of modules, so
tied weights, parameters read outside their module and raw parameters count wherever they are read. The mode is
entered and left by hooks on the root module: nothing is active outside ``with capture(model)``.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from curvature.contractions import Term
from curvature.layers import RULES, Call, Layout, Rule, Unsupported, rewritten
from curvature.layers.normalisation import uses_running_statistics

TRANSPOSES = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.transpose, torch.transpose}  # type: ignore[attr-defined]


@dataclass(eq=False)
class Node:
    """A parameter, or a tensor computed from parameters alone; `names` are the parameters that it depends on.

    Where only its `edge` is known, `tensor` has its shape.
    """

    tensor: Tensor
    names: frozenset[str]
    origin: Use | None = None
    uses: list[Use] = field(default_factory=list)
    edge: GradientEdge | None = None


@dataclass(eq=False)
class Use:
    """One read: the function, its arguments by name, which of them are parameters, and the output's gradient edge.

    `call` is None where the function has no rule; `results` are the outputs, where they depend on parameters alone.
    """

    index: int
    function: Callable[..., Any]
    rule: Rule | None
    call: Call | None
    slots: dict[str, Node]
    edge: GradientEdge | None
    versions: list[tuple[Tensor, int]]
    results: list[Node] = field(default_factory=list)

    @property
    def names(self) -> frozenset[str]:
        return frozenset[str]().union(*(node.names for node in self.slots.values()))

    @property
    def is_transpose(self) -> bool:
        """Whether the function transposes a matrix."""
        return self.function in TRANSPOSES and next(iter(self.slots.values())).tensor.ndim == 2

    @property
    def shape(self) -> tuple[int, ...]:
        return self.call.shape if self.call is not None else ()

    @property
    def activation(self) -> Tensor | None:
        """The data that met the parameter: the input as the layer received it, detached but not copied."""
        if self.call is None:
            return None
        data = [(k, x) for k, x in self.call.args.items() if isinstance(x, Tensor) and k not in self.slots]
        biases = set(self.rule.bias_of.values()) if self.rule is not None else set()
        parameters = set(self.rule.parameters) if self.rule is not None else set()
        data.sort(key=lambda entry: (entry[0] in biases, entry[0] in parameters))
        return data[0][1] if data else None

    def term(self, slot: str, b: Tensor, layout: Layout) -> Term:
        """Per-sample gradients of one argument, given the backprop of the output.

        Raises:
            Unsupported: the function has no rule, or this call no per-sample view.
        """
        if self.rule is None or self.call is None:
            raise Unsupported(f"{self.function} has no rule")
        if any(x._version != version for x, version in self.versions):
            raise Unsupported("the activation was changed in place after it was read")
        return self.rule.term(self.call, slot, b, layout)


class Tape:
    """What a capture recorded. `uses` are in the order of the forward pass.

    `mixing` names the modules whose output for one sample depends on the others (BatchNorm in training mode).
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        named = model.named_parameters() if parameters is None else parameters.items()
        self.uses: list[Use] = []
        self.parameters = {name: Node(p, frozenset([name])) for name, p in named if p.requires_grad}
        self.mixing: list[str] = []

    def backprops(self, output: Tensor | Sequence[Tensor], vectors: Tensor | Sequence[Tensor]) -> list[Tensor | None]:
        """Send vectors back from the output.

        Args:
            output: what the model returned, or anything computed from it; one tensor or several.
            vectors: (k, *output.shape), or a sequence of such for several outputs.

        Returns:
            For each of `uses` the backprops (k, *use.shape); None where the output does not depend on the use.
        """
        outputs = [output] if isinstance(output, Tensor) else list(output)
        sent = [vectors] if isinstance(vectors, Tensor) else list(vectors)
        for out, v in zip(outputs, sent, strict=True):
            if v.shape[1:] != out.shape:
                raise ValueError(
                    f"vectors: expected shape (k, {', '.join(map(str, out.shape))}), found {tuple(v.shape)}"
                )
        if sent[0].shape[0] == 1:
            single = self.gradients(outputs, [v[0] for v in sent])
            return [None if g is None else g[None] for g in single]
        return self.gradients(outputs, sent, batched=True)

    def gradients(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        vectors: Sequence[Tensor] | None,
        batched: bool = False,
        also: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """One backward pass to the output of every use, then to the tensors `also`; the graph is kept."""
        edges = [use.edge for use in self.uses if use.edge is not None]
        found: Iterable[Tensor | None] = ()
        if edges or also:
            found = torch.autograd.grad(
                cast("Sequence[Tensor]", outputs),
                cast("Sequence[Tensor]", [*edges, *also]),
                vectors,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
        queue = iter(found)
        rows = [None if use.edge is None else next(queue) for use in self.uses]
        lead = vectors[0].shape[:1] if batched and vectors is not None else ()
        shaped = (None if g is None else g.reshape((*lead, *use.shape)) for use, g in zip(self.uses, rows, strict=True))
        return [*shaped, *queue]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors in arguments or results, through sequences and mappings."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())


class Recorder(TorchFunctionMode):
    """The mode that is on during the forward pass of the root module."""

    def __init__(self, tape: Tape, model: nn.Module) -> None:
        super().__init__()
        self.tape = tape
        self.nodes = {id(node.tensor): node for node in tape.parameters.values()}
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self.data = WeakIdKeyDictionary()  # tensors that depend on the model's input

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = list(tensors_in(args))
        if kwargs:
            found += tensors_in(kwargs.values())
        if func is F.batch_norm:
            self._note_mixing(args, kwargs)
        if not torch.is_grad_enabled() or not any(id(x) in self.nodes for x in found):
            out = func(*args, **kwargs)
            if any(x in self.data for x in found):
                self.mark(out)
            return out
        other = rewritten(func, args) or (opened(func) if func not in RULES else None)
        if other is not None:
            with self:
                return other(*args, **kwargs)
        return self._recorded(func, args, kwargs, found)

    def _recorded(self, func: Any, args: Any, kwargs: Any, found: list[Tensor]) -> Any:
        rule = RULES.get(func)
        bound = rule.bind(func, args, kwargs) if rule is not None else {}
        saved = {k: x.detach() if isinstance(x, Tensor) else x for k, x in bound.items()}
        data = [saved[k] for k, x in bound.items() if isinstance(x, Tensor) and id(x) not in self.nodes]
        versions = [(x, x._version) for x in data]
        before = [(x, x._version) for x in found if id(x) in self.nodes]
        out = func(*args, **kwargs)
        outs = [x for x in tensors_in([out]) if x.requires_grad]
        if not outs or any(out is x and x._version == version for x, version in before):
            return out  # nothing to differentiate, or the very tensor that was given (`to` the device it is on)
        slots = {k: self.nodes[id(x)] for k, x in bound.items() if isinstance(x, Tensor) and id(x) in self.nodes}
        used = {id(x): self.nodes[id(x)] for x in found if id(x) in self.nodes}
        if (
            rule is None
            or len(outs) != 1
            or set(slots) - set(rule.parameters)
            or len(used) > len({*map(id, slots.values())})
        ):
            rule, slots = None, {f"argument{k}": node for k, node in enumerate(used.values())}
        call = Call(saved, tuple(outs[0].shape)) if rule is not None else None
        edge = _edge_of(outs[0]) if rule is not None else None
        use = Use(len(self.tape.uses), func, rule, call, slots, edge, versions if rule is not None else [])
        self.tape.uses.append(use)
        for node in used.values():
            node.uses.append(use)
        overwritten = any(id(x) in self.nodes for x in outs)
        if any(x in self.data for x in found) or overwritten:
            self.mark(out)
        else:
            use.results = [Node(x, use.names, use) for x in outs]
            self.nodes.update({id(node.tensor): node for node in use.results})
        return out

    def mark(self, out: Any) -> None:
        for x in tensors_in([out]):
            self.data[x] = True

    def _note_mixing(self, args: Any, kwargs: Any) -> None:
        bound = RULES[F.batch_norm].bind(F.batch_norm, args, kwargs)
        if not uses_running_statistics(bound, "training"):
            node = self.nodes.get(id(bound.get("weight")))
            name = next(iter(node.names)) if node else self.buffers.get(id(bound.get("running_mean")), "")
            self.tape.mixing.append(name.rpartition(".")[0] or name or "a batch norm without parameters")


def _edge_of(out: Tensor) -> GradientEdge:
    """Where the backprop arrives. An in-place change of a view goes past the view to its base: then at the base.

    A linear layer with several leading axes returns the view of a matrix product, in the order of its entries.
    """
    base = out._base if out._is_view() else None
    whole = base is not None and base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous()
    return get_gradient_edge(base if base is not None and whole and base.requires_grad else out)


@cache
def opened(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of torch.nn.functional that is written in torch functions, so that its inner calls are seen.

    Such a function hands itself over as a whole as long as ``has_torch_function`` says yes; the same code with that
    answer turned to no runs its body instead (multi-head attention above all).
    """
    if not isinstance(func, types.FunctionType) or func.__module__ != "torch.nn.functional":
        return None
    silent = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    return types.FunctionType(
        func.__code__, {**func.__globals__, **silent}, func.__name__, func.__defaults__, func.__closure__
    )


class Listener:
    """Hooks on a root module that record its forward passes.

    `start` is asked before every forward pass for the tape to record on (None: do not record); `done` gets the tape and
    the output after it, not after an exception. A copy or a pickle of the module gets inert hooks.
    """

    def __init__(self, model: nn.Module, start: Callable[[], Tape | None], done: Callable[[Tape, Any], None]) -> None:
        self.model = weakref.ref(model)
        self.start, self.done = start, done
        self.running: list[Recorder | None] = []
        self.frames: list[Any] = []  # of the calls of the root that these belong to
        self.handles = [
            model.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Listener,)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not hasattr(self, "model") or module is not self.model():
            return
        if self.frames and self.frames[-1] not in _callers():
            self.reset()  # an interrupt ended that call
        tape = None if any(self.running) else self.start()  # a root that calls itself records once
        recorder = None if tape is None else Recorder(tape, module)
        self.running.append(recorder)
        self.frames.append(sys._getframe(1))
        if recorder is not None:
            recorder.mark([args, kwargs])
            recorder.__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not hasattr(self, "model") or module is not self.model() or not self.running:
            return
        recorder, _ = self.running.pop(), self.frames.pop()
        if recorder is not None:
            recorder.__exit__(None, None, None)
            if output is not None:  # what always_call passes after an exception
                self.done(recorder.tape, output)

    def reset(self) -> None:
        """Leave what an interrupt of the forward pass left entered: torch calls no hook after one."""
        self.frames.clear()
        while self.running:
            recorder = self.running.pop()
            if recorder is not None:
                recorder.__exit__(None, None, None)

    def remove(self) -> None:
        self.reset()
        for handle in self.handles:
            handle.remove()


def _callers() -> list[Any]:
    """The frames of all calls that are running."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


@contextmanager
def capture(model: nn.Module) -> Iterator[Tape]:
    """Record the uses of `model`'s parameters in every forward pass inside the context.

    Usage:
        with capture(model) as tape:
            output = model(x)
        backprops = tape.backprops(output, vectors)

    Parameters that do not require a gradient are not recorded. The hooks are gone when the context ends, also after
    an exception; the activations are views of the tensors that the layers received.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    tape = Tape(model)
    listener = Listener(model, lambda: tape, lambda tape, output: None)
    try:
        yield tape
    finally:
        listener.remove()
