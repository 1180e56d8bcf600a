"""Which recorded forward passes count at a step: those that the loop's backward pass differentiated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_batchedtensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
)
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from curvature.functional import graph_nodes
from curvature.preconditioners import CurvatureStatistics, SquaredChange
from optimizers.distributed.team import Team
from optimizers.recording.model_outputs import Sums as OutputSums

ALONG = "along"  # name of what `CurvatureStatistics.along` has


@dataclass
class Measured:
    """Measurements of passes: statistics of the curvature and of the size of the outputs."""

    curvature: CurvatureStatistics = field(default_factory=CurvatureStatistics)
    outputs: OutputSums = field(default_factory=dict)

    def add_(self, other: Measured) -> None:
        """Add in place; may reuse the memory of `other`."""
        self.curvature.add_(other.curvature)
        known = self.outputs
        self.outputs = {**known, **{k: known[k] + x if k in known else x for k, x in other.outputs.items()}}

    def scale_vectors_(self, times: float) -> None:
        """Rescale as if the vectors had been `times` as long."""
        self.curvature.scale_vectors_(times)
        if self.outputs:
            self.outputs = {**self.outputs, "squares": times**2 * self.outputs["squares"]}

    def add_up(self, team: Team) -> None:
        """Replace all by what all processes have measured; sums by name of block ("" for the outputs) and of sum."""
        curvature, processes = self.curvature, team.processes
        team.store.gather(curvature, processes.all_gather_objects)
        each = {name: block.sums(processes.rank, processes.size) for name, block in curvature.blocks.items()}
        sums = {(name, k): x for name, block in each.items() for k, x in block.items()}
        sums |= {("", k): x for k, x in self.outputs.items()}
        if (along := curvature.along).blocks:  # of which there is only that they were reached
            sums |= {("", ALONG): along.value} | {(name, ALONG): along.value.new_zeros(0) for name in along.blocks}
        sums = team.summed(sums)
        of_blocks = {pair: x for pair, x in sums.items() if pair[0] and pair[1] != ALONG}
        curvature.blocks = team.store.statistics_from(of_blocks)
        self.outputs = {k: x for (name, k), x in sums.items() if not name and k != ALONG}
        if ("", ALONG) in sums:
            reached = frozenset(name for name, k in sums if name and k == ALONG)
            curvature.along = SquaredChange(sums["", ALONG], reached)


class Passes:
    """Recorded passes until a step takes them: those at whose outputs gradients arrive, or else the last."""

    def __init__(self, has_gradients: Callable[[], Any] = lambda: True) -> None:
        self.has_gradients = has_gradients  # whether a parameter has a gradient now
        self.step = object()  # which one is to come
        self.total = Measured()  # of the passes that count
        self.last: Measured | None = None  # of the last pass, kept alive by the hooks on its outputs, too
        self.arrived = False  # whether a pass has counted since the last step
        self.is_old = False  # whether what has counted belongs to gradients that were zeroed
        self.backward = -1  # number of the last backward pass
        self.adds = False  # whether it adds to the gradients of parameters
        self.leaf_hooks: list[RemovableHandle] = []  # of the passes since the last step

    def wait(
        self, measured: Measured, outputs: Sequence[Tensor], parameters: Sequence[Tensor],
        check: Callable[[Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """Count a pass once a gradient arrives that trains or has a graph; `check` may raise at it."""
        self.last = measured
        me, step = weakref.ref(self), self.step

        def arrive(gradient: Tensor) -> None:
            nonlocal step
            # 1. a gradient of the loss, for the step that is to come
            passes = me()
            if passes is None or step is not passes.step or is_batched(gradient):
                return
            if not torch.is_grad_enabled() and not is_training(parameters):
                return
            if check is not None:
                check(gradient)
            # 2. drop what belongs to gradients that were zeroed
            passes.begin(parameters)
            # 3. count the pass, once
            passes.total.add_(measured)
            step = None

        for x in outputs:
            handle = x.register_hook(arrive)
            if x.is_leaf:  # a parameter that the model returns as it is
                self.leaf_hooks.append(handle)

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """A gradient of the loss arrives: forget what belongs to gradients that were zeroed."""
        number = torch._C._current_graph_task_id()
        if number != self.backward:
            # where the gradients of the backward pass before are gone, the model has zeroed them
            self.is_old |= self.adds and not self.has_gradients()
            self.backward, self.adds = number, is_training(parameters, adds=True)
        if self.is_old:
            self.total = Measured()
        self.is_old, self.arrived = False, True

    def zero(self) -> None:
        """Gradients are zeroed: what counted until now belongs to none, unless nothing follows before the step."""
        self.is_old = True

    def settle(self) -> None:
        """A step begins. Later gradients are dropped: they were measured in the previous eigenbasis."""
        if not self.arrived and self.last is not None:
            self.total.add_(self.last)
        self._end()

    def forget(self) -> None:
        self.total = Measured()
        self._end()

    def _end(self) -> None:
        for handle in self.leaf_hooks:
            handle.remove()
        self.leaf_hooks.clear()
        self.step, self.last, self.arrived, self.is_old, self.adds = object(), None, False, False, False


def is_transformed(model: nn.Module) -> bool:
    """Whether torch.func (but ``grad`` by the parameters, once), forward mode or a trace runs the model now."""
    modes = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE
    if (
        torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)
    ):
        return True
    transforms = get_interpreter_stack() or []
    if not transforms:
        return False
    is_gradient = len(transforms) == 1 and transforms[0].key() == TransformType.Grad
    return not is_gradient or not any(map(is_gradtrackingtensor, model.parameters()))


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is one of many vectors that ``vmap`` sends back at once: a Jacobian, and no training pass."""
    return is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)


def is_training(parameters: Iterable[Tensor], adds: bool = False) -> bool:
    """Whether the running backward pass goes on to a parameter, not only to inputs as in a Jacobian by these.

    With `adds`, whether it adds to the ``.grad`` of one, and is not ``torch.autograd.grad``.
    """
    try:
        nodes = (get_gradient_edge(p).node for p in parameters if not adds or isinstance(p, nn.Parameter))
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # of a leaf that torch.autograd.grad was asked for
        return not adds


def is_checkpointed(outputs: Sequence[Tensor]) -> bool:
    """Whether parts of a graph come about only in ``.backward()``: those of ``checkpoint(..., use_reentrant=True)``."""
    nodes = graph_nodes(*(x.grad_fn for x in outputs))
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)
