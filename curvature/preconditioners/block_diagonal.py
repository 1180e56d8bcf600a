"""Which curvature every parameter of a model gets, and its running average over recorded forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.gradients import candidate_axes, joint_bias, terms_by_parameter
from curvature.kronecker import Scheme
from curvature.layers import Layout
from curvature.linalg import full_precision
from curvature.preconditioners.block import Block
from curvature.preconditioners.diagonal import DiagonalBlock
from curvature.preconditioners.eigen import EigenBlock
from curvature.preconditioners.kronecker import KroneckerBlock
from curvature.recording import Tape
from curvature.terms import DenseGradients, ElementwiseProduct, Term

MAX_SIZE = 2048  # a side larger than this is kept by few directions

LAYERS: dict[str, type[KroneckerBlock]] = {block.structure: block for block in (KroneckerBlock, EigenBlock)}


def layer_blocks(
    tape: Tape, terms: dict[str, list[Term]], taken: set[str], sharing: str, kind: str = "kronecker"
) -> list[Block]:
    """Blocks for the parameters that have terms and are not `taken`, and which structure each has."""
    blocks: list[Block] = []
    taken = set(taken)
    todo = {name: node for name, node in tape.parameters.items() if terms.get(name) and name not in taken}
    for name, node in todo.items():
        bias = joint_bias(tape, name)
        names = [name] if bias is None or bias in taken else [name, bias]
        shapes = [tuple(tape.parameters[n].tensor.shape) for n in names]
        scheme = Scheme.of(terms[name], shapes, node.tensor.dtype, sharing, MAX_SIZE)
        if scheme is not None and not any(isinstance(t, ElementwiseProduct) for t in terms[name]):  # else 1 x 1
            large = any(scheme.few)
            blocks.append(LAYERS["kronecker" if large else kind](names, scheme))
            blocks[-1].reason = "too large for an eigenbasis" if large and kind == "eigen" else ""
            taken |= set(names)
    for name, node in todo.items():
        if name not in taken:
            readers = sorted({getattr(use.function, "__name__", "a function") for use in node.uses})
            reason = "read by " + ", ".join(readers) if readers else "read by nothing that was recorded"
            blocks.append(DiagonalBlock(name, tuple(node.tensor.shape), node.tensor.dtype, reason))
    return blocks


class Blocks:
    """Base: curvature of a model in blocks of parameters, fed by recorded forward passes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.place = 0, 1  # which process this is, of how many that share a batch

    def record(self, tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], count: int) -> None:
        """Take a recorded pass over `count` samples, vectors (k, *shape) being sent back from its outputs."""
        raise NotImplementedError

    def gather(self, objects: Callable[[Any], Sequence[Any]]) -> None:
        """Have what all processes have recorded, where that is not sums alone; `objects` exchanges what each gives."""

    def holders(self) -> dict[str, Block]:
        """What has sums to be added up over processes, by name."""
        return {block.names[0]: block for block in self.blocks}

    def complete(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Have a block for each of the states, in their order: those that other processes have."""
        own = self.holders()
        make = lambda state: own.get(state["names"][0]) or Block.restore(dict(state), device)
        self.blocks = [make(state) for state in states]

    def discard(self) -> None:
        """Forget what was added since the last `fold`."""
        for block in self.blocks:
            block.discard()

    def cut(self) -> list[tuple[Block, dict[str, Any]]]:
        """Take out what was added since the last `fold`."""
        return [(block, block.cut()) for block in self.blocks]

    def join(self, parts: Iterable[tuple[Block, dict[str, Any]]]) -> None:
        """Add what was `cut` out."""
        for block, found in parts:
            block.join(found)

    @full_precision()
    def fold(self, decay: float) -> None:
        """Take what was added since the last time into the averages."""
        for block in self.blocks:
            block.fold(decay)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Plain tensors, numbers and names, by the first parameter of each block."""
        return {block.names[0]: block.state() for block in self.blocks}

    def load_state_dict(self, state: dict[str, dict[str, Any]], device: torch.device) -> None:
        self.blocks = [Block.restore(entry, device) for entry in state.values()]


class RunningFactors(Blocks):
    """Curvature of a model's layers as running averages over recorded forward passes.

    Args:
        sharing: "expand" counts every place of a shared weight as a sample of its own, "reduce" averages activations
            and adds backprops over the places of a sample first (arXiv:2311.00636, equations 17 and 21).
        kind: of the layers' blocks, "kronecker" or "eigen" (rescaled in the eigenbasis).
    """

    def __init__(self, sharing: str = "expand", kind: str = "kronecker") -> None:
        if sharing not in ("expand", "reduce"):
            raise ValueError(f'sharing: expected "expand" or "reduce", found {sharing!r}')
        if kind not in ("kronecker", "eigen"):
            raise ValueError(f'kind: expected "kronecker" or "eigen", found {kind!r}')
        super().__init__()
        self.sharing, self.kind = sharing, kind

    def record(self, tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], count: int) -> None:
        """Send vectors (k, *shape) back from the outputs of a recorded pass over `count` samples and add the result."""
        for k in range(len(vectors[0])):
            sent = [v[k] for v in vectors]
            backprops = tape.gradients(outputs, sent)
            terms, failed = terms_by_parameter(tape, backprops, _layouts(tape, count), set())
            hidden = {name for name, node in tape.parameters.items() if not node.uses}  # in a scripted module, say
            left = sorted(failed | hidden)
            self.add(tape, terms | self._plain(tape, outputs, sent, left), count if k == 0 else 0)

    def _plain(self, tape: Tape, outputs: Any, sent: Any, names: list[str]) -> dict[str, list[Term]]:
        """The gradient of the whole batch, for parameters that no rule explains."""
        roots = [tape.parameters[name].tensor for name in names]
        found = torch.autograd.grad(outputs, roots, sent, retain_graph=True, allow_unused=True) if roots else ()
        return {name: [DenseGradients(g[None])] for name, g in zip(names, found, strict=True) if g is not None}

    def record_backprops(self, tape: Tape, backprops: list[Tensor | None], count: int) -> None:
        """Add a pass whose backprops came from elsewhere (the loss's own backward pass)."""
        self.add(tape, terms_by_parameter(tape, backprops, _layouts(tape, count), set())[0], count)

    def add(self, tape: Tape, terms: dict[str, list[Term]], count: int) -> None:
        """Add the terms of one pass; a parameter gets its block when it has terms for the first time."""
        taken = {name for block in self.blocks for name in block.names}
        self.blocks += layer_blocks(tape, terms, taken, self.sharing, self.kind)
        for block in self.blocks:
            block.place = self.place
        with full_precision():
            measured = [(b, b.measured(terms[b.names[0]])) for b in self.blocks if terms.get(b.names[0])]
        found = [(block, batch) for block, batch in measured if batch is not None]
        for (block, batch), is_fine in zip(found, _are_finite([batch for _, batch in found]), strict=True):
            if is_fine:
                block.take(batch, count)


def _are_finite(batches: Sequence[Any]) -> list[bool]:
    """Of trees of tensors; the host asks once for all."""
    sums = [[t.sum().double() for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)] for batch in batches]
    return torch.stack([torch.stack(own).sum().isfinite() for own in sums]).tolist() if sums else []


def _layouts(tape: Tape, count: int) -> list[Iterable[Layout]]:
    """Sample axes guessed from the sizes, not proved, all as one sample at the last.

    Kronecker factors ("expand") do not depend on the guess; a diagonal from vectors that are independent over samples
    stays close.
    """
    return [chain(candidate_axes(u.shape, count), [Layout(0, 1, 1, u.shape[0])]) if u.shape else () for u in tape.uses]
