"""What a loss says at an output, of which the samples come first."""

from typing import Any

from torch import Tensor

from curvature.losses.output_hessian import OutputBatch

at = lambda loss, output, target=None: OutputBatch.of(output, loss, target, None, None)
root_of = lambda loss, output, target=None: at(loss, output, target).root()
masses_of = lambda loss, output, target=None, strict=True: at(loss, output, target).masses(strict)


def sampler_of(loss: Any, output: Tensor, target: Any = None) -> Any:
    likelihood, scale = at(loss, output, target).drawn_from()
    return lambda k, generator: scale * likelihood.draw(k, generator)
