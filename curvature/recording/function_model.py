"""A function of named parameters as a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn


class FunctionModel(nn.Module):
    """A function of parameters by name, ``function(parameters, *inputs)``, as a module with these parameters.

    For models that are written as such functions (as those of ``torch.func``), with everything that takes a module.

    Args:
        function: takes a dict of tensors by name, then the model's inputs.
        parameters: floating point tensors are trained; `nn.Parameter`s are taken as they are, other tensors share their
            memory. Tensors of integers become buffers. Names may have dots; ``named_parameters()`` has those with one
            after those without.

    Raises:
        TypeError: something else than a tensor among the parameters.
        KeyError: a name is taken by something else in a module ("forward"), or is a prefix of another.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a tensor, found {type(value).__name__}")
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            if isinstance(value, nn.Parameter):
                owner.register_parameter(last, value)
            elif value.is_floating_point() or value.is_complex():
                owner.register_parameter(last, nn.Parameter(value.detach()))
            else:
                owner.register_buffer(last, value)
        self.names = list(parameters)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function({name: attrgetter(name)(self) for name in self.names}, *inputs, **options)
