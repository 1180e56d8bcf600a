"""Record every read of a parameter in a forward pass: what it met, and where to ask for its backprop.

Reads are seen at the level of the torch functions that receive a parameter (`TorchFunctionMode`), not of modules, so
tied weights, parameters read outside their module and raw parameters count wherever they are read. The mode is
entered and left by hooks on the root module: nothing is active outside ``with capture(model)``.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from curvature.functional import rewritten
from curvature.layers import RULES, RecordedCall, uses_running_statistics
from curvature.recording.loss_functions import LOSSES
from curvature.recording.tape import ParameterNode, Tape, Use, is_sharded, tensors_in


class Recorder(TorchFunctionMode):
    """The mode that is on during the forward pass of the root module."""

    def __init__(self, tape: Tape, model: nn.Module) -> None:
        super().__init__()
        self.tape = tape
        self.model = model
        self.nodes = {id(node.tensor): node for node in tape.parameters.values()}
        self.sharded = {name for name, node in tape.parameters.items() if is_sharded(node.tensor)}
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self.data = WeakIdKeyDictionary()  # tensors that depend on the model's input
        self.handled = sys.exc_info()[1]  # an exception from before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = list(tensors_in(args))
        if kwargs:
            found += tensors_in(kwargs.values())
        if func is F.batch_norm:
            self._note_mixing(args, kwargs)
        elif func in LOSSES and torch.is_grad_enabled() and any(x in self.data and x.requires_grad for x in found):
            self.tape.losses.append((func, args, kwargs))
        for x in found if self.sharded else ():
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self.nodes:
                self._find(x)
        if not torch.is_grad_enabled() or not any(id(x) in self.nodes for x in found):
            out = func(*args, **kwargs)
            if any(x in self.data for x in found):
                self.mark(out)
            return out
        other = rewritten(func, args) or (traceable_body(func) if func not in RULES else None)
        if other is not None:
            with self:
                return other(*args, **kwargs)
        return self._recorded(func, args, kwargs, found)

    def _find(self, parameter: nn.Parameter) -> None:
        """The whole parameter that stands in for one of FSDP's shards during the forward pass."""
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p is parameter and name in self.sharded:
                node = self.tape.parameters[name]
                node.tensor, self.nodes[id(p)] = p, node

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
        call = RecordedCall(saved, tuple(outs[0].shape)) if rule is not None else None
        edge = _edge_of(outs[0]) if rule is not None else None
        use = Use(len(self.tape.uses), func, rule, call, slots, edge, versions if rule is not None else [])
        self.tape.uses.append(use)
        for node in used.values():
            node.uses.append(use)
        overwritten = any(id(x) in self.nodes for x in outs)
        if any(x in self.data for x in found) or overwritten:
            self.mark(out)
        else:
            use.results = [ParameterNode(x, use.names, use) for x in outs]
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
def traceable_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
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
