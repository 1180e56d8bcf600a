"""Records what runs of the optimizers give, which no oracle says, so that two trees can be compared.

    python tests/repository/results.py save before.pt       # in a checkout of the old commit, or with --tree
    python tests/repository/results.py compare before.pt    # in the new one: exits with 1 if a result differs

A result is a tensor, a number or a string under a flat key such as "training/KFAC/adaptive/losses". Every case starts
from the same seed, in one thread. An exception is a result too, and ends no more than its case. To record an older tree
that has no such file, copy the files of this folder, or name that tree by --tree.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = "curvature", "optimizers"
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative
# What rounding is multiplied in: by how the key begins. Iterations that end early, systems without damping, losses that
# the next step depends on.
LOOSE = (
    (re.compile(r"training/NaturalGradient/cg"), 1e-2),
    (re.compile(r"training/NaturalGradient/(nested )?residuals"), 1e-3),
    (re.compile(r"training/\w+/adaptive"), 1e-5),
    (re.compile(r"training/\w+/over 256 rows"), 1e-3),
    (re.compile(r"training/\w+/over 2,048 rows/stats/conditions"), 1e-2),
)
TINY = re.compile(r"-?\d(\.\d+)?e-(1[2-9]|[2-9]\d)")  # numbers in texts that are nothing but rounding
DECIMAL = re.compile(r"-?\d+\.\d+(e[-+]\d+)?")

# A case gives results by name; a function stands for what it returns, or raises.
Case = Callable[[], Iterable[tuple[str, Any]]]
Results = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["save", "compare"])
    parser.add_argument("file", type=Path, help="where the results are written to, or read from")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2], help="checkout to be run")
    parser.add_argument("--only", default="", metavar="REGEX", help="run the cases whose names it is found in")
    parser.add_argument("--tolerance", type=float, help="relative; 0 for equality to the last bit")
    options = parser.parse_args()

    start = time.perf_counter()
    cases = {name: case for name, case in cases_of(options.tree.resolve()).items() if re.search(options.only, name)}
    found = recorded(cases)
    seconds = time.perf_counter() - start
    if options.action == "save":
        torch.save(found, options.file)
        print(f"{len(found)} results of {len(cases)} cases, {seconds:.0f} s")
        return 0
    before: Results = torch.load(options.file, weights_only=True)
    if options.only:
        before = {key: value for key, value in before.items() if any(key.startswith(f"{name}/") for name in cases)}
    lines = list(differences(before, found, options.tolerance))
    print("\n".join([*lines, f"{len(lines)} differences in {len(before)} results, {seconds:.0f} s"]))
    return 1 if lines else 0


def cases_of(tree: Path) -> dict[str, Case]:
    """All cases, to be run with the packages of this tree.

    Raises:
        ImportError: they were found elsewhere.
    """
    sys.path.insert(0, str(tree))
    for package in PACKAGES:
        place = importlib.import_module(package).__file__
        if place is None or not Path(place).is_relative_to(tree):
            raise ImportError(f"{package}: expected that of {tree}, found {place}")
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # for support; the packages' own tests are there, too
    return importlib.import_module("results_training").cases()


def recorded(cases: Mapping[str, Case]) -> Results:
    """The results of all cases."""
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    results: Results = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        state = torch.get_rng_state()
        try:
            for key, value in case():
                results.update(flat(f"{name}/{key}", value_of(value) if callable(value) else value))
        except Exception as error:
            results[f"{name}/exception"] = described(error)
        if not torch.equal(torch.get_rng_state(), state):
            results[f"{name}/next random number"] = torch.rand(()).item()
    return results


def value_of(function: Callable[[], Any]) -> Any:
    """What it returns, or a description of what it raises."""
    try:
        return function()
    except Exception as error:
        return described(error)


def flat(key: str, value: Any) -> Results:
    """Tensors, numbers and strings in nested dicts and sequences, by keys like "a/b/0"."""
    if isinstance(value, Tensor):
        return {key: value.detach().clone()}
    if value is None or isinstance(value, bool | int | float | str):
        return {key: value}
    if not isinstance(value, Mapping | list | tuple):
        raise TypeError(f"{key}: a result of type {type(value).__name__}")
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {k: v for name, part in parts for k, v in flat(f"{key}/{name}", part).items()}


def described(error: Exception) -> str:
    """Its text, and its type, or the base of it that is none of ours."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__.split(".")[0] not in PACKAGES)
    return f"{kind.__name__}: {re.sub(r'0x[0-9a-f]+', '0x...', str(error))}"


def differences(before: Results, after: Results, tolerance: float | None = None) -> Iterator[str]:
    """A line for every key that is missing or new, and for every result that differs."""
    for key in [*before, *(key for key in after if key not in before)]:
        if key not in after or key not in before:
            one = "missing now, was" if key in before else "new"
            yield f"{key}: {one} {shown(before.get(key, after.get(key)))}"
        elif what := difference(before[key], after[key], loose(key) if tolerance is None else tolerance):
            yield f"{key}: {what}"


def loose(key: str) -> float | None:
    return next((tolerance for pattern, tolerance in LOOSE if pattern.match(key)), None)


def difference(one: Any, other: Any, tolerance: float | None) -> str:
    """How two results differ, if they do so by more than rounding."""
    both = f"{shown(one)} -> {shown(other)}"
    one, other = (torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for x in (one, other))
    if type(one) is not type(other):
        return both
    if isinstance(one, str) and tolerance != 0:
        numbers = TINY if tolerance is None else DECIMAL
        return "" if numbers.sub("0", one) == numbers.sub("0", other) else both
    if not isinstance(one, Tensor):
        return "" if one == other else both
    if one.shape != other.shape or one.dtype != other.dtype:
        return both
    relative = distance(one.double(), other.double())
    allowed = TOLERANCES.get(one.dtype, 0.0) if tolerance is None else tolerance
    return "" if relative <= allowed else f"relative difference {relative:.2g}, {both}"


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, relative to that of the first; infinite where other entries are not finite."""
    finite = one.isfinite()
    others = torch.allclose(one[~finite], other[~finite], rtol=0, atol=0, equal_nan=True)
    if not others or not other[finite].isfinite().all():
        return math.inf
    gap, scale = float((one - other)[finite].norm()), float(one[finite].norm())
    return gap / scale if scale else math.inf if gap else 0.0


def shown(value: Any) -> str:
    """A line at most."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value.item() if isinstance(value, Tensor) else value)[:200]


if __name__ == "__main__":
    sys.exit(main())
