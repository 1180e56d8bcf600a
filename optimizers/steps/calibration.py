"""How far the curvature of each layer is off along the steps that are taken, and that of all layers together.

A block knows its layer alone, and as a product of two factors. The energy ``u^T M u`` that it predicts for a step u may
be a hundredth of what the step does to the outputs, where the places of a sample, or several layers, pull in one
direction. Renewals measure that: ``(v^T J u)^2`` for the random vectors v that they send back anyway. From then on the
layers whose curvature is underestimated more than that of others take shorter steps, and the predicted change of
the outputs is that of all layers together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvature.preconditioners import Block

Named = Mapping[str, Tensor]

DECAY = 0.3  # of sums of energies, per renewal: where steps go changes fast
LARGEST_SCALE = 4.0  # by how much the direction of a layer is made longer or shorter


def noted(known: Tensor, measured: Tensor, predicted: Tensor) -> Tensor:
    """Decayed sums (n, 2) of energies measured and predicted (n,), of those that are finite and not zero."""
    new = torch.stack([measured, predicted.to(measured)], 1)
    return torch.where((new.isfinite() & (new > 0)).all(1, keepdim=True), DECAY * known + new, known)


def calibrate(blocks: Sequence[Block], along: Named, predicted: Named, joint: Tensor) -> Tensor:
    """Note the energies of the last step in the blocks.

    Args:
        along: measured, by the first parameter of a block; that of all together by "".
        predicted: by parameter.
        joint: decayed sums (2,) of all blocks together.

    Returns:
        `joint`, with those of the last step.
    """
    found = [block for block in blocks if block.names[0] in along]
    of = lambda block: [predicted[name] for name in block.names if name in predicted]
    found = [block for block in found if of(block)]
    if not found:
        return joint
    measured = torch.stack([along[block.names[0]] for block in found])
    own = torch.stack([torch.stack(of(block)).sum() for block in found]).to(measured)
    known = [measured.new_zeros(2) if block.energies is None else block.energies.to(measured) for block in found]
    for block, energies in zip(found, noted(torch.stack(known), measured, own).unbind(), strict=True):
        block.energies = energies
    return noted(joint[None], along[""][None], own.sum()[None])[0]


def scales(blocks: Sequence[Block | None]) -> Tensor | None:
    """What to multiply the directions of layers (n,) by, given their blocks; None if nothing was measured yet."""
    known = [block.energies for block in blocks if block is not None and block.energies is not None]
    if not known:
        return None
    unknown = known[0].new_zeros(2)
    own = [unknown if block is None or block.energies is None else block.energies.to(unknown) for block in blocks]
    measured, predicted = torch.stack(own).unbind(1)
    mean = measured.sum() / predicted.sum()
    return (mean * predicted / measured).nan_to_num(1.0).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)


def underestimate(measured: Tensor, predicted: Tensor) -> Tensor:
    """How many times larger changes of the outputs are than predicted, given sums of energies; 1 if not known."""
    return (measured / predicted).sqrt().nan_to_num(1.0)
