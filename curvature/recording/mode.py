"""Record every read of a parameter in a forward pass: the data that it met, and where its backprop will arrive.

A `TorchFunctionMode` sees the torch functions that receive a parameter. It does not look at modules, so tied weights,
raw parameters and parameters read outside their module all count, wherever they are read. Hooks on the root module
enter and leave the mode: outside ``with capture(model)`` nothing is active.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from curvature.functional import RECURRENT, plain_form, traceable_body
from curvature.layers import RULES, RecordedCall, uses_running_statistics
from curvature.recording.loss_functions import LOSSES
from curvature.recording.tape import ParameterNode, Tape, Use, is_sharded, tensors_in

PLAIN = Tensor, nn.Parameter
REDUCTIONS = {torch.sum, torch.mean, Tensor.sum, Tensor.mean}


def _quietly(*values: Any) -> Any:
    """A context in which a look at plain tensors passes no mode, which would make it several times as slow."""
    is_plain = all(type(x) in PLAIN for x in values if isinstance(x, Tensor))
    return torch._C.DisableTorchFunction() if is_plain else nullcontext()


class RecordingMode(TorchFunctionMode):
    """The mode that is active during the forward pass of the root module."""

    def __init__(self, tape: Tape, model: nn.Module) -> None:
        super().__init__()
        self.tape = tape
        self.model = model
        self.nodes = {id(node.tensor): node for node in tape.parameters.values()}
        self.sharded = {name for name, node in tape.parameters.items() if is_sharded(node.tensor)}
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self.data: dict[int, weakref.ref[Tensor]] = {}  # tensors that depend on the model's input, by id
        self.exception_before = sys.exc_info()[1]  # one that is being handled while the pass begins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = tensors_in(*args, *kwargs.values())
        if func is F.batch_norm:
            self._note_mixing(args, kwargs)
        elif func in LOSSES and torch.is_grad_enabled() and any(self._is_data(x) and x.requires_grad for x in found):
            self.tape.losses.append((func, args, kwargs))
        for x in found if self.sharded else ():
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self.nodes:
                self._adopt_unsharded(x)
        if not torch.is_grad_enabled() or not any(id(x) in self.nodes for x in found):
            out = func(*args, **kwargs)
            if any(map(self._is_data, found)):
                self.mark_as_data(out)
                if func in REDUCTIONS and out.requires_grad and not out.ndim:
                    self.tape.reductions.append((found[0], out))
            return out
        plain = plain_form(func, args)
        inputs = tensors_in(*args[:2])  # and states, of a recurrent layer
        is_loop = plain is not None and func in RECURRENT and not any(id(x) in self.nodes for x in inputs)
        if is_loop and any(map(self._is_data, inputs)):
            return self._run_recurrent(func, args, kwargs)
        plain = plain or (traceable_body(func) if func not in RULES else None)
        if plain is not None:
            with self:
                return plain(*args, **kwargs)
        return self._record(func, args, kwargs, found)

    def _adopt_unsharded(self, parameter: nn.Parameter) -> None:
        """Record the full parameter that FSDP puts in place of a shard during the forward pass."""
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if p is parameter and name in self.sharded:
                node = self.tape.parameters[name]
                node.tensor, self.nodes[id(p)] = p, node

    def _record(self, func: Any, args: Any, kwargs: Any, found: list[Tensor], run: Any = None) -> Any:
        """Run a function that receives a parameter, or `run` that stands for it, and enter it on the tape."""
        rule = RULES.get(func)
        with _quietly(*args, *kwargs.values()):
            bound = rule.bind(func, args, kwargs) if rule is not None else {}
            saved = {k: x.detach() if isinstance(x, Tensor) else x for k, x in bound.items()}
            data = [saved[k] for k, x in bound.items() if isinstance(x, Tensor) and id(x) not in self.nodes]
            versions = [(x, x._version) for x in data]
            before = [(x, x._version) for x in found if id(x) in self.nodes]
            follows_graph = any(x.requires_grad for x in found if id(x) not in self.nodes)
        out = (run or func)(*args, **kwargs)
        with _quietly(*args, *kwargs.values(), out):
            outs = [x for x in tensors_in(out) if x.requires_grad]
            if not outs or any(out is x and x._version == version for x, version in before):
                return out  # nothing to differentiate, or the very tensor that came in (`to` the device that it is on)
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
            use = Use(
                len(self.tape.uses), func, rule, call, slots, edge, versions if rule is not None else [], follows_graph
            )
            self.tape.uses.append(use)
            for node in used.values():
                node.readers.append(weakref.ref(use))
            overwritten = any(id(x) in self.nodes for x in outs)
            if any(map(self._is_data, found)) or overwritten:
                self.mark_as_data(out)
            else:
                use.results = [ParameterNode(x, use.names, weakref.ref(use)) for x in outs]
                self.nodes.update({id(node.tensor): node for node in use.results})
            return out

    def _run_recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a recurrent layer as its loop, of which only the products are looked at: all inputs of these are data."""

        def linear(x: Tensor, *weights: Any) -> Tensor:
            self.mark_as_data(x)
            return self.__torch_function__(F.linear, (), (x, *weights))

        def together(run: Any, x: Tensor, *weights: Any) -> Tensor:
            self.mark_as_data(x)
            found = tensors_in(x, *weights)
            is_read = any(id(x) in self.nodes for x in found)
            return self._record(F.linear, (x, *weights), {}, found, run) if is_read else run(x, *weights)

        out = RECURRENT[func](*args, **kwargs, linear=linear, together=together)
        self.mark_as_data(out)
        return out

    def mark_as_data(self, out: Any) -> None:
        for x in tensors_in(out):
            self.data[id(x)] = weakref.ref(x)

    def _is_data(self, x: Tensor) -> bool:
        known = self.data.get(id(x))
        return known is not None and known() is x

    def _note_mixing(self, args: Any, kwargs: Any) -> None:
        bound = RULES[F.batch_norm].bind(F.batch_norm, args, kwargs)
        if not uses_running_statistics(bound, "training"):
            node = self.nodes.get(id(bound.get("weight")))
            name = next(iter(node.names)) if node else self.buffers.get(id(bound.get("running_mean")), "")
            self.tape.mixing.append(name.rpartition(".")[0] or name or "a batch norm without parameters")


def _edge_of(out: Tensor) -> GradientEdge:
    """Where the backprop of an output arrives: at its base if the output is a view of all of it.

    An in-place change of a view bypasses the view's node. A linear layer with several leading axes returns such a
    view, of its matrix product.
    """
    base = out._base if out._is_view() else None
    whole = base is not None and base.numel() == out.numel() and base.is_contiguous() and out.is_contiguous()
    return get_gradient_edge(base if base is not None and whole and base.requires_grad else out)
