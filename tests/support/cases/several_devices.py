"""Models whose layers are on two devices; both may be the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from support.cases.case import seeded

Devices = tuple[str, str]


class OverTwo(nn.Module):
    def __init__(self, devices: Devices, **layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.devices = devices
        with seeded(0):
            made = {name: layer().double() for name, layer in layers.items()}
        for (name, layer), device in zip(made.items(), devices, strict=True):
            self.add_module(name, layer.to(device))


class Split(OverTwo):
    """Its layers are on two devices."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices, first=lambda: nn.Linear(5, 7), second=lambda: nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).to(self.devices[1]))


class Tied(OverTwo):
    """The embedding on the first device is the decoder on the second."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices, tokens=lambda: nn.Embedding(5, 4), second=lambda: nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x.argsort(1)[:, :3]).mean(1).to(self.devices[1])
        return (torch.tanh(self.second(hidden)) @ self.tokens.weight.to(self.devices[1]).T)[:, :3]


class ThereAndBack(OverTwo):
    """A convolution on the first device, a wide head on the second, and the output on the first again."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices, first=lambda: nn.Conv1d(1, 2, 2, stride=3), second=lambda: nn.Linear(4, 12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x[:, None])).flatten(1).to(self.devices[1])
        return self.second(hidden).to(self.devices[0])


MODELS = {kind.__name__: kind for kind in (Split, Tied, ThereAndBack)}


def data(devices: Devices) -> tuple[Tensor, Tensor]:
    """Inputs on the first device, targets on the second."""
    with seeded(1):
        x, y = torch.randn(8, 5).double(), torch.randint(3, (8,))
    return x.to(devices[0]), y.to(devices[1])


def loss_at_output(output: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy, where the output is."""
    return nn.functional.cross_entropy(output, y.to(output.device))


def loss_at_target(output: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy, where the target is."""
    return nn.functional.cross_entropy(output.to(y.device), y)
