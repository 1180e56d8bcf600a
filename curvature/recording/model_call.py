"""Calling a model with whatever form its input has, leaving it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvature.recording.eager import force_eager_nonreentrant


def logits(output: Any) -> Any:
    """The tensor that the loss is taken of: an output with `.logits` stands for them."""
    return getattr(output, "logits", output)


def call(model: Callable[..., Any], x: Any) -> Any:
    """Run the model: x is a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple | list) else model(x)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to the tensors of a tensor, sequence or mapping; leave everything else."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {k: map_tensors(function, v) for k, v in tree.items()}
    return tuple(map_tensors(function, v) for v in tree) if isinstance(tree, tuple | list) else tree


def tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Leave buffers, random state and gradient mode as they were, also after an exception; nothing runs compiled.

    Yields a function that says whether random numbers were drawn since, on the CPU or on the model's devices.
    """
    buffers = [(m, key, b, None if b is None else b.clone()) for m in model.modules() for key, b in m._buffers.items()]
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]

    start = states()
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), force_eager_nonreentrant():
            yield lambda: any(not torch.equal(a, b) for a, b in zip(start, states(), strict=True))
    finally:
        with torch.no_grad():
            for module, key, buffer, before in buffers:
                module._buffers[key] = buffer  # the model may have put another in its place
                # batch norm's kernel changes them without a new version
                if buffer is not None and before is not None and not torch.equal(buffer, before):
                    buffer.copy_(before)
