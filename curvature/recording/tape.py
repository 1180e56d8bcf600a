"""The reads of parameters in a forward pass, with the data that they met, and where their backprops arrive.

`RecordingMode` fills a `Tape`. A `TorchFunctionMode` does not look at modules, so tied weights, raw parameters and
parameters read outside their module all count. Per-sample gradients enter it for one call of the model, `capture` and
the optimizers by hooks on the root.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from curvature.functional import PLAIN_FORMS, RECURRENT, batched_vjp, plain_form, traceable_body
from curvature.layers import RULES, Layout, RecordedCall, Rule, Unsupported, uses_running_statistics
from curvature.losses import LOSS_FUNCTIONS
from curvature.terms import Term, without_bias

if TYPE_CHECKING:
    from curvature.recording.model_call import ModelState

TRANSPOSES = {Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.transpose, torch.transpose}  # type: ignore[attr-defined]
MOVES = {Tensor.to, Tensor.cuda}
LEAVES = {type(None), bool, int, float, str}  # of most arguments that are no tensors
Backprops = list[Tensor | None]  # by use
Take = Callable[[Backprops, frozenset[str]], None]
ENDS = {0.0, 1.0}  # numbers at which a term vanishes; others may be new in every pass, and move nothing


@dataclass(eq=False)
class ParameterNode:
    """A parameter, or a tensor computed from parameters alone.

    It knows uses by weak references, for they know it: activations go with the tape, without Python's collector.
    """

    tensor: Tensor  # itself; where only its `edge` in the graph is known, a tensor of its shape
    names: frozenset[str]  # of the parameters that it depends on
    computed_by: weakref.ref[Use] | None = None
    edge: GradientEdge | None = None
    readers: list[weakref.ref[Use]] = field(default_factory=list)

    @property
    def origin(self) -> Use | None:
        """The use that computed it; None for a parameter."""
        return None if self.computed_by is None else self.computed_by()

    @property
    def uses(self) -> list[Use]:
        """Where it is read."""
        return [use for reader in self.readers if (use := reader()) is not None]


@dataclass(eq=False)
class Use:
    """One read of a parameter by a torch function.

    Attributes:
        index: its place in `Tape.uses`.
        function, rule, call: what was called, with which arguments; rule and call are None for a function without rule.
        slots: the arguments that are parameters, or computed from parameters alone, by name.
        names: of the parameters.
        shape: of the output.
        edge: where the backprop of the output arrives.
        versions: the data among the arguments, with the versions that they had.
        follows_graph: whether autograd's graph goes on behind the data.
        results: the outputs, if they depend on parameters alone.
    """

    index: int
    function: Any
    slots: dict[str, ParameterNode]
    names: frozenset[str]
    shape: tuple[int, ...]
    rule: Rule | None = None
    call: RecordedCall | None = None
    edge: GradientEdge | None = None
    versions: Sequence[tuple[Tensor, int]] = ()
    follows_graph: bool = False
    results: list[ParameterNode] = field(default_factory=list)

    @property
    def is_transpose(self) -> bool:
        """Whether the function transposes a matrix."""
        return self.function in TRANSPOSES and next(iter(self.slots.values())).tensor.ndim == 2

    @property
    def is_move(self) -> bool:
        """Whether the function takes a tensor to another device, and does nothing else."""
        old = next(iter(self.slots.values())).tensor
        return self.function in MOVES and all(
            (new.tensor.dtype, new.tensor.shape) == (old.dtype, old.shape) for new in self.results
        )

    @property
    def activation(self) -> Tensor | None:
        """The data that met the parameter: the layer's input as it received it, detached but not copied."""
        if self.rule is None or self.call is None:
            return None
        biases, parameters = self.rule.bias_of.values(), self.rule.parameters
        data = {k: x for k, x in self.call.args.items() if isinstance(x, Tensor) and k not in self.slots}
        return data[min(data, key=lambda k: (k in biases, k in parameters))] if data else None

    def term(self, slot: str, b: Tensor, layout: Layout) -> Term:
        """Per-sample gradients of one argument, given the backprop of the output.

        Raises:
            Unsupported: the function has no rule, or the rule has no per-sample view of this call.
        """
        if self.rule is None or self.call is None:
            raise Unsupported(f"{self.function} has no rule")
        if any(x._version != version for x, version in self.versions):
            raise Unsupported("the activation was changed in place after it was read")
        term = self.rule.term(self.call, slot, b, layout)
        return term if self.rule.bias_slot(self.call, slot) in self.slots else without_bias(term)


class Tape:
    """The reads of parameters that a capture recorded.

    Attributes:
        uses: in the order of the forward pass.
        parameters: the parameters that require a gradient, by name.
        mixing: names of modules whose output for one sample depends on the others (BatchNorm in training mode).
        differentiates: whether the model differentiates something in its forward pass, with ``create_graph=True``.
        samples: the length of the model's inputs.
        losses: calls of loss functions inside the model: function, positional and keyword arguments.
        functions: all torch functions that the pass calls, in order, each with the numbers among its arguments.
        start: buffers and random state that the forward pass began with.
        graph: `graph_signature` of the output: None if the data may say where samples go, by an index for example.
        counts: whether it counts along the samples, as experts do that take a number of them.
        meeting: the module where samples meet, "" where they do not; None if that was not tried for this pass.
    """

    graph: tuple[Any, ...] | None = ()
    start: ModelState | None = None
    counts: bool = False
    meeting: str | None = None

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        named = model.named_parameters() if parameters is None else parameters.items()
        self.uses: list[Use] = []
        self.parameters = {name: ParameterNode(p, frozenset([name])) for name, p in named if p.requires_grad}
        self.mixing: list[str] = []
        self.differentiates = False
        self.samples: int | None = None
        self.losses: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.functions: list[tuple[Any, ...]] = []

    def backprops(self, output: Tensor | Sequence[Tensor], vectors: Tensor | Sequence[Tensor]) -> list[Tensor | None]:
        """Backpropagate vectors from the output.

        Args:
            output: what the model returned, or anything computed from it; one tensor or several.
            vectors: (k, *output.shape), k at least 1, or a sequence of such for several outputs.

        Returns:
            For each of `uses` the backprops (k, *use.shape); None where the output does not depend on the use.
        """
        outputs = [output] if isinstance(output, Tensor) else list(output)
        sent = [vectors] if isinstance(vectors, Tensor) else list(vectors)
        for out, v in zip(outputs, sent, strict=True):
            if v.shape[1:] != out.shape or not len(v):
                shape = ", ".join(map(str, out.shape))
                raise ValueError(f"vectors: expected shape (k, {shape}), k at least 1, found {tuple(v.shape)}")
        edges = [use.edge for use in self.uses if use.edge is not None]
        backprops = iter(batched_vjp(outputs, edges, sent))
        rows = [(use, None if use.edge is None else next(backprops)) for use in self.uses]
        return [None if g is None else g.reshape(len(g), *use.shape) for use, g in rows]

    def gradients(
        self, outputs: Sequence[Tensor | GradientEdge], vectors: Sequence[Tensor], also: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Send one vector for each output back to the outputs of all uses and the tensors `also`; keeps the graph."""
        places: Any = [*(use.edge for use in self.uses if use.edge is not None), *also]
        options: Any = {"retain_graph": True, "allow_unused": True}
        backprops = iter(torch.autograd.grad(outputs, places, vectors, **options) if places else ())  # type: ignore[arg-type]
        rows = [(use, None if use.edge is None else next(backprops)) for use in self.uses]
        return [*(None if g is None else g.reshape(use.shape) for use, g in rows), *backprops]


def add_use(
    tape: Tape, function: Any, slots: Mapping[str, ParameterNode], rule: Rule | None = None,
    call: RecordedCall | None = None, **known: Any,
) -> Use:  # fmt: skip
    """Enter a read on the tape; `known` are the other attributes of the `Use`."""
    names = frozenset(name for node in slots.values() for name in node.names)
    use = Use(len(tape.uses), function, dict(slots), names, call.shape if call is not None else (), rule, call, **known)
    tape.uses.append(use)
    for node in {id(node): node for node in slots.values()}.values():
        node.readers.append(weakref.ref(use))
    return use


def add_result(use: Use, tensor: Tensor, edge: GradientEdge | None = None) -> ParameterNode:
    """Note an output that depends on parameters alone."""
    node = ParameterNode(tensor, use.names, weakref.ref(use), edge)
    use.results.append(node)
    return node


def stream_backprops(
    tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], take: Take, most_bytes: int
) -> None:
    """Send a vector back from each output; hand the backprops on in portions of some `most_bytes`.

    `take` gets the backprops of some uses, None at all others, and the names of their parameters: each comes once, with
    all of its uses, last those whose uses got none. Calls come from autograd's threads, one at a time.
    """
    edges = [(use, use.edge) for use in tape.uses if use.edge is not None]
    if sum(math.prod(use.shape) for use, _ in edges) * torch.double.itemsize <= most_bytes:
        take(tape.gradients(outputs, vectors), frozenset(tape.parameters))
        return
    stream = _Stream(tape, take, most_bytes)
    ends = [use for use, _ in edges if not use.follows_graph]
    passed = [(use, edge) for use, edge in edges if use.follows_graph] if ends else []
    handles = [edge.node.register_prehook(partial(stream.arrive, use, edge.output_nr)) for use, edge in passed]
    try:
        stream.send_back(outputs, vectors, ends)
    finally:
        for handle in handles:
            handle.remove()
    missed = [use for use, _ in edges if use not in stream.seen]  # nothing that the pass went to lies before them
    stream.send_back(outputs, vectors, missed)
    stream.hand_on(list(stream.left))


@dataclass(eq=False)
class _Group:
    """Parameters that share uses, directly or through others, and the backprops at these."""

    names: frozenset[str]
    missing: int = 0  # uses that the backward pass has not come to
    backprops: dict[int, Tensor] = field(default_factory=dict)


class _Stream:
    """What has arrived and was not yet taken."""

    def __init__(self, tape: Tape, take: Take, most_bytes: int) -> None:
        self.take, self.most_bytes, self.length = take, most_bytes, len(tape.uses)
        self.seen: set[Use] = set()  # the uses that the backward pass has come to
        self.groups = _groups(tape)
        self.left = dict.fromkeys(self.groups.values())
        self.bytes = 0  # of complete groups
        self.lock = RLock()  # autograd has a thread for each device

    def arrive(self, use: Use, output: int, gradients: Sequence[Tensor | None]) -> None:
        """Hook of the node where a backprop arrives."""
        with self.lock:
            if use not in self.seen:
                self.keep(use, gradients[output])
                if self.bytes >= self.most_bytes:
                    self.hand_on([group for group in self.left if not group.missing])

    def send_back(self, outputs: Sequence[Tensor], vectors: Sequence[Tensor], uses: Sequence[Use]) -> None:
        """One backward pass to these uses."""
        edges: Any = [use.edge for use in uses]
        options: Any = {"retain_graph": True, "allow_unused": True}
        backprops = torch.autograd.grad(outputs, edges, vectors, **options) if edges else ()
        for use, g in zip(uses, backprops, strict=True):
            self.keep(use, g)

    def keep(self, use: Use, gradient: Tensor | None) -> None:
        group = self.groups[next(iter(use.names))]
        self.seen.add(use)
        group.missing -= 1
        if gradient is not None:
            group.backprops[use.index] = gradient.reshape(use.shape)
        if not group.missing:
            self.bytes += sum(g.nbytes for g in group.backprops.values())

    def hand_on(self, groups: Iterable[_Group]) -> None:
        portion: Backprops = [None] * self.length
        names = frozenset[str]()
        for group in groups:
            del self.left[group]
            names |= group.names
            for index, g in group.backprops.items():
                portion[index] = g
            group.backprops.clear()
        self.bytes = 0
        self.take(portion, names)


def _groups(tape: Tape) -> dict[str, _Group]:
    """The group of each parameter."""
    joined = {name: frozenset([name]) for name in tape.parameters}
    for use in tape.uses:
        names = frozenset[str]().union(*(joined[name] for name in use.names))
        joined.update(dict.fromkeys(names, names))
    groups = {names: _Group(names) for names in joined.values()}
    for use in tape.uses:
        groups[joined[next(iter(use.names))]].missing += use.edge is not None
    return {name: groups[names] for name, names in joined.items()}


def is_sharded(x: Any) -> bool:
    """Whether a tensor is spread over processes, as the parameters of FSDP2 are."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # takes a second to import; without it there are no shards
    return module is not None and isinstance(x, module.DTensor)


def tensors_in(*trees: Any, numbers: list[Any] | None = None) -> list[Tensor]:
    """The tensors in arguments or results, through sequences and mappings; appends what else is there to `numbers`."""
    tensors: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            tensors.append(tree)
        elif type(tree) in LEAVES:
            if numbers is not None:
                numbers.append(None if type(tree) is float and tree not in ENDS else tree)
        elif isinstance(tree, list | tuple):
            tensors += tensors_in(*tree, numbers=numbers)
        elif isinstance(tree, Mapping):
            tensors += tensors_in(*tree.values(), numbers=numbers)
        elif isinstance(tree, slice):
            tensors += tensors_in(tree.start, tree.stop, tree.step, numbers=numbers)
        elif numbers is not None and hasattr(tree, "tobytes"):  # of NumPy
            numbers.append(tree.tobytes())
    return tensors


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
            raise RuntimeError(  # operators take a TypeError for their own
                f"{name}: read beside a nested tensor, of which no sample can be cut out; pass a padded tensor with "
                "a mask (torch.nested.to_padded_tensor), or a PackedSequence"
            )
        # a look at plain tensors that passed this mode would take several times as long
        with torch._C.DisableTorchFunction() if PLAIN.issuperset(map(type, tensors)) else nullcontext():
            before = [(x, x._version) for x in tensors if id(x) in used]
            follows_graph = any(x.requires_grad for x in tensors if id(x) not in used)
            bound = rule.bind(func, args, kwargs) if rule is not None else {}
            slots = {k: nodes[id(x)] for k, x in bound.items() if id(x) in nodes}
            saved = {k: _values(x) if isinstance(x, Tensor) else x for k, x in bound.items()}
            versions = [(x, x._version) for k, x in saved.items() if isinstance(x, Tensor) and k not in slots]
        out = (run or func)(*args, **kwargs)
        outs = tensors_in(out)
        with torch._C.DisableTorchFunction() if PLAIN.issuperset(map(type, [*tensors, *outs])) else nullcontext():
            outs = [x for x in outs if x.requires_grad]
            if not outs or any(out is x and x._version == version for x, version in before):
                return out  # nothing to differentiate, or the very tensor that came in (`to` the device that it is on)
            is_whole = len(outs) == 1 and len(used) <= len({*map(id, slots.values())})
            if rule is not None and is_whole and all(k in rule.parameters for k in slots):
                call = RecordedCall(saved, tuple(outs[0].shape))
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


def _values(x: Tensor) -> Tensor:
    """Without its graph, and of a sparse tensor with its zeros, as the rules take it."""
    return x.detach() if x.layout is torch.strided else x.detach().to_dense()


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
