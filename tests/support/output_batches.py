"""What a loss says at an output, of which the samples come first."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from curvature.losses.output_hessian import OutputBatch


def at(loss: Any, output: Tensor, target: Any = None) -> OutputBatch:
    return OutputBatch.of(output, loss, target, None, None)


def root_of(loss: Any, output: Tensor, target: Any = None) -> Any:
    return at(loss, output, target).root()


def sampler_of(loss: Any, output: Tensor, target: Any = None) -> Any:
    likelihood, scale = at(loss, output, target).drawn_from()
    return lambda k, generator: scale * likelihood.draw(k, generator)


def masses_of(loss: Any, output: Tensor, target: Any = None, strict: bool = True) -> Tensor:
    return at(loss, output, target).masses(strict)
