"""What was learnt of a model, remembered by the shapes of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from curvature.gradients.batch import Batch
from curvature.layers import Layout
from curvature.recording import Tape, tensors


@dataclass
class Plan:
    """What was learnt of a model at one shape of its inputs."""

    signature: list[tuple[Any, ...]]
    layouts: list[list[Layout]]  # one for each use, or none
    general: set[str]  # parameters that go through the general path
    loop: bool = False  # whether that path is the loop of batch size one


PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_key(batch: Batch) -> tuple[Any, ...]:
    """What the structure may depend on."""
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors(batch.x))
    training = tuple(module.training for module in batch.model.modules())
    return (shapes, batch.dims, training, tuple(batch.parameters))


def tape_signature(tape: Tape) -> list[tuple[Any, ...]]:
    """Functions, shapes and parameters of the uses in order: equal where the layouts can be used again."""
    return [(use.function, use.shape, use.names) for use in tape.uses]
