"""curvlinops' tests of products with Gauss-Newton matrices and Hessians, with those of this package.

A plugin of pytest. Its operators keep their forms of vectors, orders of parameters and blocks; the references are those
of its tests, by torch.func.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import curvlinops
import torch
from curvlinops.utils import split_list
from torch import Tensor

import curvature

torch.set_num_threads(1)


def products(builder: Callable[..., curvature.Operator]) -> Callable[[Any, list[Tensor]], list[Tensor]]:
    """A method that multiplies with a list of tensors (*shape, columns), one for each parameter."""

    def matmat(self: Any, M: list[Tensor]) -> list[Tensor]:
        names = {id(p): name for name, p in self._model_func.named_parameters()}
        found: list[Tensor] = []
        blocks = zip(split_list(self._params, self._block_sizes), split_list(M, self._block_sizes), strict=True)
        for parameters, columns in blocks:
            own = [names[id(p)] for p in parameters]
            matrix = builder(self._model_func, self._loss_func, self._data, parameters=own)
            sides = range(columns[0].shape[-1])
            done = [matrix @ {k: x[..., c] for k, x in zip(own, columns, strict=True)} for c in sides]
            found += [torch.stack([one[name] for one in done], -1) for name in own]
        return found

    return matmat


curvlinops.GGNLinearOperator._matmat = products(curvature.gauss_newton)
curvlinops.HessianLinearOperator._matmat = products(curvature.hessian)
