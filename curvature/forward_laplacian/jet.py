"""A tensor with its derivatives, the weights of its second derivatives, and a call of a function of such tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class NoRule(Exception):
    """A function has no rule; nested gradients take over."""


class Recorded(NoRule):
    """The model is being recorded (`curvature.capture`), which needs the graph of a plain forward pass."""


def _no_rule(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise NoRule(str(func))


class Jet(Tensor):
    """A tensor that depends on the inputs: `value` (*S), `first` (d, *S), `second` (*S) or None for zero."""

    value: Tensor
    first: Tensor
    second: Tensor | None

    # The mode `Taylor` finds the rules. What bypasses it must fail rather than take a jet for its value.
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    __torch_dispatch__: Any = classmethod(_no_rule)

    @staticmethod
    def __new__(cls, value: Tensor, first: Tensor, second: Tensor | None = None) -> Jet:
        jet = Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        jet.value, jet.first, jet.second = value, first, second
        return jet

    def aligned(self, ndim: int) -> Tensor:
        """`first` reshaped to broadcast with values of `ndim` axes."""
        missing = ndim - self.value.ndim
        return self.first if missing <= 0 else self.first.reshape(len(self.first), *[1] * missing, *self.value.shape)


class QuadraticForm:
    """``sum_ij C_ij a_i b_j`` with weights C: (d, d) symmetric, its diagonal (d,), or None for the identity."""

    def __init__(self, weights: Tensor | None) -> None:
        self.weights = weights

    def times(self, b: Tensor) -> Tensor:
        """``sum_j C_ij b_j`` for b (d, *S)."""
        if self.weights is None:
            return b
        if self.weights.ndim == 1:
            return self.weights.reshape(-1, *[1] * (b.ndim - 1)) * b
        return (self.weights @ b.reshape(len(b), -1)).reshape(b.shape)

    def of(self, a: Tensor, b: Tensor) -> Tensor:
        """(*S) for a, b (d, *S)."""
        if a is b and self.weights is None:
            return a.square().sum(0)
        return (a * self.times(b)).sum(0)


@dataclass(slots=True)
class Call:
    """A torch function of jets, which are in the order of its arguments."""

    form: QuadraticForm
    func: Function
    jets: list[Jet]
    args: Args
    kwargs: Kwargs

    @property
    def name(self) -> str:
        owner = getattr(self.func, "__self__", None)  # a property's getter
        name = getattr(self.func, "__name__", str(self.func))
        return getattr(owner, "__name__", name) if name == "__get__" else name

    def arguments(self, *names: str) -> Args:
        """Positional arguments, then keyword arguments in the order of `names`."""
        return (*self.args, *(self.kwargs[name] for name in names if name in self.kwargs))

    def of(self, parts: Iterable[Tensor | None]) -> Any:
        """The result with other tensors in place of the jets."""
        rest = iter(parts)
        take = lambda x: next(rest) if isinstance(x, Jet) else x
        args = map_arguments(self.args, take)
        return self.func(*args, **map_arguments(self.kwargs, take))

    def of_values(self) -> Any:
        return self.of([jet.value for jet in self.jets])


def jets_in(tree: Sequence[Any]) -> Iterator[Jet]:
    for x in tree:
        if isinstance(x, Jet):
            yield x
        elif isinstance(x, tuple | list):
            yield from jets_in(x)


def map_arguments(tree: Any, take: Callable[[Tensor], Any]) -> Any:
    """The tree with ``take(x)`` for every tensor x."""
    if isinstance(tree, Tensor):
        return take(tree)
    if isinstance(tree, dict):
        return {k: map_arguments(x, take) for k, x in tree.items()}
    return type(tree)([map_arguments(x, take) for x in tree]) if type(tree) in (tuple, list) else tree
