"""A family of problems: a model, its data, and the loop in which its users train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from _generality_data import Pair, Parts
from _race_problems import epochs
from torch import Tensor, nn

Models = Sequence[nn.Module]
Update = Callable[[int, Callable[[], Tensor]], Tensor]  # train the model of that index on this loss; returns the loss
Loss = Callable[[Tensor, Tensor], Tensor]
CHUNK = 500  # samples of one forward pass of an evaluation


@dataclass(frozen=True)
class Family:
    """What is trained, how, and what is measured.

    Attributes:
        name: on the command line.
        title: in the table.
        objective: what is to become small: the training loss, on a fixed part of the training set in evaluation mode.
        metric: what is measured on the test part.
        make: builds the models, each of which gets an optimizer of its own; they follow the global random state.
        batches: endless batches, fixed by a seed.
        train: one round of the user's loop, with the models, a batch and `update`.
        evaluate: objective and metric of the models, which are in evaluation mode.
        budget: CPU seconds of training that the rivals have.
        growth: of the steps from one evaluation to the next; small where single evaluations are noisy.
        momenta: of the rivals, to be tuned beside their learning rate; none: their usual one.
    """

    name: str
    title: str
    objective: str
    metric: str
    make: Callable[[], Models]
    batches: Callable[[int], Iterator[Any]]
    train: Callable[[Models, Any, Update], Tensor]
    evaluate: Callable[[Models], tuple[float, float]]
    budget: float
    growth: float = 1.12
    momenta: tuple[float, ...] = ()


def mean_of(model: nn.Module, part: Pair, measure: Loss) -> float:
    chunks = zip(part[0].split(CHUNK), part[1].split(CHUNK), strict=True)
    return sum(measure(model(x), y).item() * len(x) for x, y in chunks) / len(part[0])


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def supervised(
    name: str, title: str, make: Callable[[], nn.Module], loss: Loss, parts: Parts, batch: int, budget: float = 4.0,
    objective: str = "cross-entropy, nats", metric: str = "accuracy", measure: Loss = accuracy, seen: int = 1000,
    tested: int = 1000,
) -> Family:  # fmt: skip
    """One model, one loss of outputs and targets; the loop of every tutorial."""
    train, test = parts
    probe, rest = (train[0][:seen], train[1][:seen]), (test[0][:tested], test[1][:tested])

    def step(models: Models, pair: Pair, update: Update) -> Tensor:
        return update(0, lambda: loss(models[0](pair[0]), pair[1]))

    def evaluate(models: Models) -> tuple[float, float]:
        return mean_of(models[0], probe, loss), mean_of(models[0], rest, measure)

    title = f"{title}, batch {batch}"
    return Family(
        name, title, objective, metric, lambda: [make()], epochs(train, batch), step, evaluate, budget
    )  # fmt: skip
