"""Log loss of classifiers on data held out: the network itself, and Laplace posteriors with several priors.

    python tests/benchmarks/posteriors.py

Five sets of data, halved into training data and, a quarter each, validation and test data; a network of 50 and 50
hidden units with ReLU, trained by KFAC with its defaults, Adam (1e-3) or SGD (0.05, momentum 0.9). Medians over seeds
of the log loss on the test data in nats. laplace-torch: Kronecker factors of all layers, prior by its `gridsearch` (one
value each decade from 1e-4 to 1e4; its default of 100 takes minutes) on the same validation data. Seconds: of the
search on validation data alone, processor time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from _report import medians, options_of, printed
from _rows import timed
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification, make_moons
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature
from optimizers import KFAC

LOSS, SEEDS = nn.CrossEntropyLoss(), 2
Data = tuple[Tensor, Tensor]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "KFAC": lambda model: KFAC(model),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}
SETS: dict[str, tuple[Callable[[], tuple], int]] = {  # and epochs
    "digits": (lambda: load_digits(return_X_y=True), 30),
    "wrong labels": (lambda: make_classification(800, 20, n_informative=8, flip_y=0.2, random_state=0), 30),
    "breast cancer": (lambda: load_breast_cancer(return_X_y=True), 30),
    "wine": (lambda: load_wine(return_X_y=True), 30),
    "two moons": (lambda: make_moons(600, noise=0.3, random_state=0), 30),
}


def parts_of(name: str, seed: int) -> list[Data]:
    x, y = map(torch.as_tensor, SETS[name][0]())
    x, y = x.float(), y.long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y, n = x[order], y[order], len(x)
    # pixels share one scale, measurements have one each
    scale = x[: n // 2].std(0) if x.shape[1] < 50 else x[: n // 2].std()
    x = (x - x[: n // 2].mean(0)) / scale
    return [(x[part], y[part]) for part in (slice(0, n // 2), slice(n // 2, 3 * n // 4), slice(3 * n // 4, n))]


def trained(name: str, by: str, seed: int, data: Data) -> nn.Module:
    torch.manual_seed(seed)
    x, y = data
    sizes = [x.shape[1], 50, 50, int(y.max()) + 1]
    layers = [layer for pair in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    opt = OPTIMIZERS[by](model)
    for _ in range(SETS[name][1]):
        for batch in torch.randperm(len(x)).split(64):
            opt.zero_grad()
            LOSS(model(x[batch]), y[batch]).backward()
            opt.step()
    return model


def peer(model: nn.Module, train: Data, validation: Data) -> Callable[[Tensor], Tensor]:
    loaders = [DataLoader(TensorDataset(*data), batch_size=512) for data in (train, validation)]
    posterior = Laplace(model, "classification", "all", "kron", backend=CurvlinopsGGN)
    posterior.fit(loaders[0])
    posterior.optimize_prior_precision(
        method="gridsearch", pred_type="glm", link_approx="probit", val_loader=loaders[1], grid_size=9
    )
    return lambda x: posterior(x, pred_type="glm", link_approx="probit")


def measured(name: str, by: str, seed: int) -> list[float]:
    print(f"{name}, {by}, seed {seed}", file=sys.stderr)
    train, validation, (x, y) = parts_of(name, seed)
    model = trained(name, by, seed, train)
    log_loss = lambda p: F.nll_loss(p.detach().clamp(min=1e-30).log(), y).item()
    default = curvature.laplace(model, LOSS, train)
    validated, seconds = timed(lambda: default.optimize_prior(validation=validation))
    theirs, their_seconds = timed(lambda: peer(model, train, validation))
    losses = [
        log_loss(model(x).softmax(1)),
        log_loss(default.predict(x).mean),
        log_loss(default.optimize_prior().predict(x).mean),
        log_loss(validated.predict(x).mean),
        log_loss(theirs(x)),
    ]
    return [*losses, seconds, their_seconds]


def main() -> None:
    options_of(__doc__)
    cases = list(itertools.product(SETS, OPTIMIZERS))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        runs = {case: [pool.submit(measured, *case, seed) for seed in range(SEEDS)] for case in cases}
        results = {case: [run.result() for run in of_case] for case, of_case in runs.items()}
    rows = medians(results, *[".3f"] * 5, ".2f", ".2f")
    head = [
        "data", "trained by", "network ↓", "default prior ↓", "`optimize_prior()` ↓",
        "`optimize_prior(validation=...)` ↓", "laplace-torch, gridsearch ↓", "search, CPU s",
        "laplace-torch's fit and search, CPU s",
    ]  # fmt: skip
    printed(head, rows)


if __name__ == "__main__":
    main()
