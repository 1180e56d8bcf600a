"""Record every read of a parameter in a forward pass: the data that it met, and where its backprop will arrive.

A `TorchFunctionMode` does not look at modules, so tied weights, raw parameters and parameters read outside their module
all count. Per-sample gradients enter it for one call of the model, `capture` and the optimizers by hooks on the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from curvature.functional import PLAIN_FORMS, RECURRENT, plain_form, traceable_body
from curvature.layers import RULES, RecordedCall, uses_running_statistics
from curvature.losses import LOSS_FUNCTIONS
from curvature.recording.tape import Tape, add_result, add_use, is_sharded, tensors_in

PLAIN = {Tensor, nn.Parameter}
CONVERSIONS = {Tensor.to, Tensor.type_as}  # what else they receive is an example of a type, and no data
CUMULATIVE = {torch.cumsum, Tensor.cumsum}
NOTED = {*LOSS_FUNCTIONS, *CUMULATIVE, F.batch_norm, torch.autograd.grad}  # what the tape knows of beside reads


class RecordingMode(TorchFunctionMode):
    """The mode that is active during the forward pass of the root module on these inputs, which runs uncompiled."""

    def __init__(self, tape: Tape, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.tape = tape
        self.model = model
        # a parameter without entries changes nothing, so that its reads need no rule; a lazy one has no shape yet
        counts = lambda p: is_lazy(p) or p.numel()
        self.nodes = {id(node.tensor): node for node in tape.parameters.values() if counts(node.tensor)}
        self.sharded = {name for name, node in tape.parameters.items() if is_sharded(node.tensor)}
        self.data: dict[int, weakref.ref[Tensor]] = {}  # tensors that depend on the model's input, by id
        self.mark_as_data(inputs)
        # views of all of an input may be made where no mode looks, as `nn.DataParallel` does; it stays while they may
        self.memory = {_memory(x): x for x in tensors_in(inputs)}
        self.memory.pop(None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        numbers: list[Any] = [func]
        tensors = tensors_in(*args, *kwargs.values(), numbers=numbers)
        self.tape.functions.append(tuple(numbers))
        if func in CONVERSIONS:
            tensors = tensors[:1]
        if func in NOTED:
            self._note(func, args, kwargs, tensors)
        for x in tensors if self.sharded else ():
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self.nodes:
                self._adopt_unsharded(x)
        if self.nodes.keys().isdisjoint(map(id, tensors)) or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if self._are_data(tensors):
                self.mark_as_data(out)
            return out
        plain = plain_form(func, args, kwargs) if func in PLAIN_FORMS else None
        if plain is not None and func in RECURRENT:
            inputs = tensors_in(*args[:2])  # and states
            if self._are_data(inputs) and not any(id(x) in self.nodes for x in inputs):
                return self._run_recurrent(func, args, kwargs)
        plain = plain or (traceable_body(func) if func not in RULES else None)
        if plain is not None:
            with self:
                return plain(*args, **kwargs)
        return self._record(func, args, kwargs, tensors)

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Enter what is no read of a parameter on the tape: losses, derivatives, layers that mix or count samples."""
        if func is F.batch_norm:
            self._note_mixing(args, kwargs)
        elif func in CUMULATIVE:
            self.tape.counts |= _counts(tensors[0], args[1] if len(args) > 1 else kwargs.get("dim"))
        elif func is torch.autograd.grad:
            self.tape.differentiates |= bool(kwargs.get("create_graph"))  # torch hands it over by name
        elif torch.is_grad_enabled() and any(x.requires_grad and self._are_data([x]) for x in tensors):
            self.tape.losses.append((func, args, kwargs))

    def _adopt_unsharded(self, parameter: nn.Parameter) -> None:
        """Record the full parameter that FSDP puts in place of a shard during the forward pass."""
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p is parameter and name in self.sharded:
                node = self.tape.parameters[name]
                node.tensor, self.nodes[id(p)] = p, node

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], run: Any = None) -> Any:
        """Run a function that receives a parameter, or `run` that stands for it, and enter it on the tape."""
        rule, nodes = RULES.get(func), self.nodes
        used = {id(x): nodes[id(x)] for x in tensors if id(x) in nodes}
        if any(x.is_nested for x in tensors):
            name = next(iter(next(iter(used.values())).names))
            raise TypeError(
                f"{name}: read beside a nested tensor, of which no sample can be cut out; pass a padded tensor with "
                "a mask (torch.nested.to_padded_tensor), or a PackedSequence"
            )
        # a look at plain tensors that passed this mode would take several times as long
        with torch._C.DisableTorchFunction() if PLAIN.issuperset(map(type, tensors)) else nullcontext():
            before = [(x, x._version) for x in tensors if id(x) in used]
            follows_graph = any(x.requires_grad for x in tensors if id(x) not in used)
            bound = rule.bind(func, args, kwargs) if rule is not None else {}
            slots = {k: nodes[id(x)] for k, x in bound.items() if id(x) in nodes}
            saved = {k: x.detach() if isinstance(x, Tensor) else x for k, x in bound.items()}
            versions = [(x, x._version) for k, x in saved.items() if isinstance(x, Tensor) and k not in slots]
        out = (run or func)(*args, **kwargs)
        outs = tensors_in(out)
        with torch._C.DisableTorchFunction() if PLAIN.issuperset(map(type, [*tensors, *outs])) else nullcontext():
            outs = [x for x in outs if x.requires_grad]
            if not outs or any(out is x and x._version == version for x, version in before):
                return out  # nothing to differentiate, or the very tensor that came in (`to` the device that it is on)
            is_whole = len(outs) == 1 and len(used) <= len({*map(id, slots.values())})
            if rule is not None and is_whole and all(k in rule.parameters for k in slots):
                call = RecordedCall(saved, tuple(outs[0].shape), rule.statistics(outs[0]))
                known = {"edge": _edge_of(outs[0], tensors), "versions": versions, "follows_graph": follows_graph}
                use = add_use(self.tape, func, slots, rule, call, **known)
            else:
                use = add_use(self.tape, func, {f"argument{k}": node for k, node in enumerate(used.values())})
            if self._are_data(tensors) or any(id(x) in nodes for x in outs):  # the latter are overwritten parameters
                self.mark_as_data(out)
            else:
                nodes.update({id(x): add_result(use, x) for x in outs})
            return out

    def _run_recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a recurrent layer as its loop, of which only the products are looked at: all inputs of these are data."""

        def linear(x: Tensor, *weights: Any) -> Tensor:
            self.mark_as_data(x)
            return self.__torch_function__(F.linear, (), (x, *weights))

        def together(run: Any, x: Tensor, *weights: Any) -> Tensor:
            self.mark_as_data(x)
            tensors = tensors_in(x, *weights)
            is_read = any(id(x) in self.nodes for x in tensors)
            return self._record(F.linear, (x, *weights), {}, tensors, run) if is_read else run(x, *weights)

        out = RECURRENT[func](*args, **kwargs, linear=linear, together=together)
        self.mark_as_data(out)
        return out

    def mark_as_data(self, out: Any) -> None:
        for x in tensors_in(out):
            self.data[id(x)] = weakref.ref(x)

    def _are_data(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of the tensors depends on the model's input."""
        for x in tensors:
            data = self.data.get(id(x))
            if data is not None and data() is x:
                return True
        return any(_memory(x) in self.memory for x in tensors)

    def _note_mixing(self, args: Any, kwargs: Any) -> None:
        bound = RULES[F.batch_norm].bind(F.batch_norm, args, kwargs)
        is_of_data = isinstance(bound["input"], Tensor) and self._are_data([bound["input"]])  # else of a weight
        if is_of_data and not uses_running_statistics(bound, "training"):
            node = self.nodes.get(id(bound.get("weight")))
            mean = bound.get("running_mean")
            of_mean = next((name for name, x in self.model.named_buffers() if x is mean), "")
            name = next(iter(node.names)) if node else of_mean
            self.tape.mixing.append(name.rpartition(".")[0] or name or "a batch norm without parameters")


def _counts(x: Tensor, dim: Any) -> bool:
    """Whether a cumulative sum is of marks, which have no gradient, and not along the last axis: that of experts."""
    return not x.requires_grad and isinstance(dim, int) and x.ndim > 1 and dim % x.ndim < x.ndim - 1


def _memory(x: Tensor) -> tuple[int, torch.Size] | None:
    """Where a plain tensor's numbers are, and its shape; None of others."""
    is_plain = type(x) in PLAIN and x.layout is torch.strided and not is_functorch_wrapped_tensor(x)
    return (x.data_ptr(), x.shape) if is_plain and x.numel() else None


def _edge_of(out: Tensor, inputs: Iterable[Tensor]) -> GradientEdge:
    """Where the backprop arrives: at the base of a view of all of it, whose node in-place changes would bypass.

    The base of a view of an input (``p.expand(1, 4)``) gets what comes back from all other reads, too.
    """
    base = out._base if out._is_view() else None
    whole = base is not None and base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous()
    is_input = base is not None and any(x is base or x._base is base for x in inputs)
    return get_gradient_edge(base if base is not None and whole and base.requires_grad and not is_input else out)
