"""That nothing of the user's is changed."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from support.oracles.brute_force import map_tensors


@contextlib.contextmanager
def unchanged(model: nn.Module, *inputs: Any) -> Iterator[None]:
    """Gradients, modes, hooks, values, inputs and the random state are afterwards what they were; also when it raises.

    Every second parameter is given a `.grad` first, so that one that is overwritten, added to or cleared is seen.
    """
    for parameter in [p for p in model.parameters() if p.requires_grad][::2]:
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model, inputs)
    try:
        yield
    finally:
        after = snapshot(model, inputs)
        changed = [key for key in before.keys() | after.keys() if not same(before.get(key), after.get(key))]
        assert not changed, f"changed: {sorted(changed)}"


def snapshot(model: nn.Module, inputs: Any = ()) -> dict[str, Any]:
    state: dict[str, Any] = {
        "random state": torch.random.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "torch function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }
    if torch.cuda.is_available():
        state["random state of CUDA"] = torch.cuda.get_rng_state()
    tensors: list[Tensor] = []
    map_tensors(tensors.append, inputs)
    for i, tensor in enumerate(tensors):
        state |= {f"input {i}": tensor.detach().clone(), f"input {i} .grad": tensor.grad}
    for name, module in model.named_modules():
        state[f"mode of {name!r}"] = module.training
        state[f"attributes of {name!r}"] = sorted(vars(module))
        for attribute, hooks in vars(module).items():
            if attribute.endswith("hooks"):
                state[f"{attribute} of {name!r}"] = list(hooks)
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = buffer.clone()
    for name, parameter in model.named_parameters():
        state |= {
            f"{name}": parameter.detach().clone(),
            f"{name}.grad": None if parameter.grad is None else parameter.grad.clone(),
            f"{name}.requires_grad": parameter.requires_grad,
            f"hooks of {name}": list(parameter._backward_hooks or ()),
            f"accumulation hooks of {name}": list(parameter._post_accumulate_grad_hooks or ()),
            f"attributes of {name}": sorted(vars(parameter)),
        }
    return state


def same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)
    return type(before) is type(after) and before == after
