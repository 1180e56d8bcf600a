"""Ways to invert a Kronecker factor, on the factors that KFAC has after 30 steps on the race's problems.

    python tests/benchmarks/inverses.py [--threads 2] [--rounds 7]

Each is damped by 0.05 of its mean eigenvalue. "prepare" is paid at an inversion, "apply" at every step, to the layer's
gradient. The error is that of the applied result on the layer's own gradient, relative, against a solution in double
precision. Iterations (Newton and Schulz: X <- X (2 I - M X), the inverse-free way) begin with the inverse of the factor
one renewal earlier, or with a multiple of the identity, and end where ||I - M X|| is below 1 % of ||I||.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _race_problems import PROBLEMS
from torch import Tensor

import optimizers
from curvature.linalg.low_rank import low_rank_inverses
from curvature.preconditioners.kronecker import KroneckerBlock

SHARE, STEPS, ITERATIONS = 0.05, 30, 40
LAYERS = (("autoencoder", "0.weight"), ("autoencoder", "2.weight"), ("cnn", "12.weight"), ("tanh", "4.weight"))


def factors_of(problem: str, name: str, steps: int) -> tuple[Tensor, Tensor]:
    """The activations' factor of a layer after so many steps, renewed at every one, and the layer's gradient."""
    task = PROBLEMS[problem]("cpu")
    torch.manual_seed(0)
    (model,) = task.make()
    opt = optimizers.KFAC(model, factor_every=1, decompose_every=1)
    for _, (x, y) in zip(range(steps), task.batches(0), strict=False):
        opt.zero_grad()
        task.loss(model(x), y).backward()
        opt.step()
    (block,) = (b for b in opt.store.blocks if isinstance(b, KroneckerBlock) and b.names[0] == name)
    gradients = [dict(model.named_parameters())[k].grad for k in block.names]
    assert block.column_side is not None
    return block.column_side.dense()[0].clone(), block.scheme.arrangement.to_matrices(gradients)[0].clone()


def schulz(matrix: Tensor, start: Tensor) -> tuple[Tensor, int]:
    """The inverse and how many iterations it took."""
    eye, found = torch.eye(len(matrix)), start
    for k in range(ITERATIONS):
        rest = eye - matrix @ found
        if rest.norm() <= 0.01 * len(matrix) ** 0.5:
            return found, k
        found = found + found @ rest
    return found, ITERATIONS


def ways(matrix: Tensor, before: Tensor) -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
    """Preparation of each way; what it returns is applied to a gradient (o, i) from the right."""
    unit = lambda m: m / (m.trace() / len(m))
    damped = lambda m: unit(m) + SHARE * torch.eye(len(m))
    old = torch.cholesky_inverse(torch.linalg.cholesky(damped(before)))
    (start,) = low_rank_inverses([lambda: unit(before)], SHARE, [None])
    bound = torch.linalg.matrix_norm(damped(matrix), 1)

    def cholesky() -> Callable[[Tensor], Tensor]:
        found = torch.cholesky_inverse(torch.linalg.cholesky(damped(matrix)))
        return lambda g: g @ found

    def by_eigenvalues() -> Callable[[Tensor], Tensor]:
        values, vectors = torch.linalg.eigh(damped(matrix))
        return lambda g: (g @ vectors / values) @ vectors.mT

    def largest(first: Tensor | None) -> Callable[[Tensor], Tensor]:
        (found,) = low_rank_inverses([lambda: unit(matrix)], SHARE, [first])
        if found is None:
            raise ValueError("too many stand out")
        return lambda g: (g - (g @ found[0]) @ found[0].mT) * found[1]

    def iterated(first: Tensor) -> Callable[[Tensor], Tensor]:
        found, _ = schulz(damped(matrix), first)
        return lambda g: g @ found

    found = {
        "Cholesky": cholesky,
        "eigenvalues": by_eigenvalues,
        "iteration, from the last": lambda: iterated(old),
        "iteration, from the identity": lambda: iterated(torch.eye(len(matrix)) / bound),
        "largest eigenvalues, cold": lambda: largest(None),
    }
    return found | ({"largest eigenvalues, warm": lambda: largest(start[0])} if start is not None else {})


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def compare(problem: str, name: str, rounds: int) -> None:
    matrix, gradient = factors_of(problem, name, STEPS)
    before, _ = factors_of(problem, name, STEPS - 1)
    wide = matrix.double()
    wide = wide / (wide.trace() / len(wide)) + SHARE * torch.eye(len(wide)).double()  # in the units of the ways
    exact = torch.linalg.solve(wide, gradient.double().mT).mT
    prepared: dict[str, Callable[[Tensor], Tensor]] = {}
    times: dict[str, tuple[list[float], list[float]]] = {}
    for way, prepare in ways(matrix, before).items():
        try:
            prepared[way] = prepare()
            times[way] = [], []
        except ValueError as error:
            print(f"| {problem} | {name}, {len(matrix)} | {way} | {error} | | |")
    for _ in range(rounds):
        for way in prepared:
            times[way][0].append(timed(ways(matrix, before)[way]))
            times[way][1].append(timed(lambda way=way: prepared[way](gradient)))
    for way, (first, second) in times.items():
        error = (prepared[way](gradient).double() - exact).norm() / exact.norm()
        row = f"{statistics.median(first):.3g} | {statistics.median(second):.3g} | {error:.1g}"
        print(f"| {problem} | {name}, {len(matrix)} | {way} | {row} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| problem | layer, rows of its A | way | prepare, ms | apply, ms | error |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for problem, name in LAYERS:
        compare(problem, name, options.rounds)


if __name__ == "__main__":
    main()
