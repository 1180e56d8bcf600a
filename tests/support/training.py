"""Small models with their losses, to be trained on digits, and what compares the results.

The environment variable DATA_ORDER, a whole number, gives every run other batches: `make test-processors` sets it.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import Raw, seeded, token_loss
from support.cases.models import GPT, ViT, autoencoder

Loss = Callable[[Tensor, Tensor], Tensor]

DATA_ORDER = int(os.environ.get("DATA_ORDER", "0"))
ORDERS = range(3)  # seeds of the data order over which a claim about training is made


def order_seed(seed: int) -> int:
    """Where a run makes its data with torch's own random numbers, or a framework does."""
    return 1000 * DATA_ORDER + seed


def data_order(seed: int = 0) -> torch.Generator:
    """What every other run draws its data from, on the CPU."""
    return torch.Generator().manual_seed(order_seed(seed))


def epochs(count: int, size: int, seed: int = 0) -> Iterator[Tensor]:
    """Indices of batches without replacement, the last of an epoch smaller, as a DataLoader makes them; without end."""
    generator = data_order(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def draws(count: int, size: int, seed: int = 0) -> Iterator[Tensor]:
    """Indices of batches, each drawn from all samples; without end."""
    generator = data_order(seed)
    while True:
        yield torch.randperm(count, generator=generator)[:size]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """The 1797 real images of scikit-learn, (N, 1, 8, 8) in 0 to 1, their order that of the file unless DATA_ORDER."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=data_order()) if DATA_ORDER else slice(None)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)[order], torch.tensor(classes)[order]


def cnn() -> nn.Module:
    block = lambda i, o: [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*block(1, 6), *block(6, 8), nn.Flatten(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    """Rows of an image as tokens."""
    run = lambda m, x: m.head(m.layers(m.enter(x[:, 0]) + m.places).mean(1))
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True), 2)
    return Raw(run, enter=nn.Linear(8, 16), places=(8, 16), layers=layers, head=nn.Linear(16, 10))


def lstm() -> nn.Module:
    run = lambda m, x: m.head(m.lstm(x[:, 0])[0][:, -1])
    return Raw(run, lstm=nn.LSTM(8, 12, batch_first=True), head=nn.Linear(12, 10))


mlp = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
regression = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
entropy = lambda output, target: F.cross_entropy(output, target % output.shape[1])
own_pixels = lambda output, target: F.mse_loss(output, digits()[0][: len(output)].to(output.device))
# A model with its loss, to be trained on digits: the ViT on their middle, the GPT on a column as words.
TASKS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    **{"mlp": (mlp, entropy), "cnn": (cnn, entropy), "transformer": (transformer, entropy), "lstm": (lstm, entropy)},
    **{"vit": (ViT, entropy), "gpt": (GPT, token_loss), "autoencoder": (autoencoder, own_pixels)},
    "regression": (regression, lambda output, target: F.mse_loss(output[:, 0], target / 3)),
}


def task(name: str, device: str = "cpu", n: int = 64) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    make, loss = TASKS[name]
    x, y = (t[:n].to(device) for t in digits())
    if name == "gpt":
        words = (x[:, 0, :7, 3] * 6).long()
        x, y = words[:, :-1], words[:, 1:]
    if name == "vit":
        x = x[:, :, 2:6, 2:6].expand(-1, 3, -1, -1)
    with seeded(0):
        return make().to(device), loss, x, y


def backward(model: nn.Module, opt: torch.optim.Optimizer, loss: Loss, x: Any, y: Tensor) -> Tensor:
    opt.zero_grad()
    value = loss(model(x), y)
    value.backward()
    return value


def train(model: nn.Module, opt: torch.optim.Optimizer, loss: Loss, x: Any, y: Tensor, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(backward(model, opt, loss, x, y).item())
        opt.step()
    return values


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert not [name for name in one if not torch.equal(one[name], two[name])]


def curvature_of(opt: Any) -> dict[str, Tensor]:
    blocks = opt.store.state_dict().items()
    return {f"{name} {k}": v for name, block in blocks for k, v in block.items() if isinstance(v, Tensor)}


def natural_matrix(opt: Any) -> Tensor:
    """The curvature of the last batch of a `NaturalGradient`, from its rows (M, P)."""
    (block,) = opt.store.blocks
    rows = block.problem.jacobian.to_dense()
    return rows.mT @ rows / block.divisor


def closure_of(model: nn.Module, opt: torch.optim.Optimizer, loss: Loss, x: Any, y: Tensor) -> Callable[[], Tensor]:
    return functools.partial(backward, model, opt, loss, x, y)


def train_by_closure(model: nn.Module, opt: Any, loss: Loss, x: Any, y: Tensor, steps: int) -> list[float]:
    return [opt.step(closure_of(model, opt, loss, x, y)).item() for _ in range(steps)]
