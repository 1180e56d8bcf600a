"""What a case of the catalogue is: a model, its input, a loss and a target, all drawn from a seed."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.oracles.brute_force import forked, forward, map_tensors

Loss = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from a seed inside, on the CPU and on all accelerators; those outside go on as before."""
    kind = torch.accelerator.current_accelerator()
    with forked():
        # torch.manual_seed takes 2 ms: it notes where it was called from for every kind of device that is not there
        seed_all = torch.manual_seed if kind is not None else torch.default_generator.manual_seed
        seed_all(seed)
        yield


@contextlib.contextmanager
def placed(device: str, *tensors: Tensor) -> Iterator[None]:
    """Tensors that are made once for all tests are on a device inside; they stay who they are."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.data = tensor.data.cpu()


@dataclass(frozen=True, eq=False)
class Case:
    """`inputs(n)` draws x for n samples and `target(output)` draws y to go with the model's output.

    `combine` says how the rows make up the gradient of the batch: "mean", "sum", or "neither" where terms are weighted
    across samples (class weights, ignored terms, a frequency over the batch); left out, the loss's reduction says it.
    """

    id: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    loss: Loss = field(default_factory=nn.MSELoss)
    target: Callable[[Tensor], Tensor] = torch.randn_like
    n: int = 4
    sample_dim: int | tuple[int, int, int] = 0
    combine: str = ""

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Loss]:
        with seeded(0):
            model = self.model()
            randomise(model)
        loss = copy.deepcopy(self.loss).to(device, dtype) if isinstance(self.loss, nn.Module) else self.loss
        return model.to(device, dtype), loss

    def batch(self, model: nn.Module, n: int | None = None, seed: int = 1) -> tuple[Any, Tensor]:
        """(x, y) on the model's device, in its dtype."""
        like = next(model.parameters())

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)

        with seeded(seed):
            x = map_tensors(moved, self.inputs(self.n if n is None else n))
            output = map_tensors(lambda tensor: tensor.detach().cpu(), forward(model, x))
            y = map_tensors(moved, self.target(output))
        return x, y

    @property
    def combination(self) -> str:
        return self.combine or ("sum" if getattr(self.loss, "reduction", "mean") == "sum" else "mean")


def randomise(model: nn.Module) -> None:
    """Moves what is initialised to zeros and ones, so that no term of a gradient vanishes by accident."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


class Raw(nn.Module):
    """Its forward pass is `function(self, *inputs)`.

    Keywords name its parts: a shape is a parameter, a tensor a buffer, and there are modules.
    """

    def __init__(self, function: Callable[..., Tensor], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, nn.Parameter(torch.randn(part)) if isinstance(part, tuple) else part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def positive(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.rand(n, *shape) + 0.5


def indices(high: int, *shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(high, (n, *shape))


def masks(*shape: int) -> Callable[[int], Tensor]:
    """True where a place is to be left out; never the first one."""

    def draw(n: int) -> Tensor:
        mask = torch.rand(n, *shape) < 0.4
        mask[..., 0] = False
        return mask

    return draw


def lengths(longest: int, shortest: int = 0) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(shortest, longest + 1, (n,))


def second(draw: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """The same draw with samples along dim 1."""
    return lambda n: draw(n).transpose(0, 1).contiguous()


def both(*draws: Callable[[int], Tensor]) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: tuple(draw(n) for draw in draws)


def named(**draws: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {name: draw(n) for name, draw in draws.items()}


def classes(output: Tensor) -> Tensor:
    """Indices of classes, which lie along dim 1 of the output."""
    return torch.randint(output.shape[1], output.select(1, 0).shape)


def tokens(output: Tensor) -> Tensor:
    """Indices of classes, which lie along the last dim of the output."""
    return torch.randint(output.shape[-1], output.shape[:-1])


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def mixture(*layers: nn.Module) -> nn.Module:
    """The layers, then what makes the backprop differ from place to place."""
    return nn.Sequential(*layers, nn.Tanh())
