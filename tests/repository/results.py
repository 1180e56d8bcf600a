"""Records what runs of the optimizers give, which no oracle says, so that two commits can be compared.

    export PYTHONPATH=.:tests
    python tests/repository/results.py save before.pt       # in a checkout of the old commit
    python tests/repository/results.py compare before.pt    # in the new one: exits with 1 if a result differs

A result is a tensor or a text under a key such as "KFAC/adaptive/losses": losses of all steps, parameters at the end,
and what the optimizer says of the run. Every run starts from the same seed, in one thread; an exception is one, too.
Faults, resumed runs and loops of other kinds have references of their own, in tests/integration.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Case, Raw, both, classes, floats, indices
from support.cases.catalogue import CASES
from support.cases.layers import mlp
from support.oracles.brute_force import forward

TOLERANCE = 1e-6  # relative
SAMPLES, BATCHES = 48, 4
DECIMAL = re.compile(r"-?\d+\.\d+(e[-+]\d+)?")  # numbers in texts, which rounding may change
Results = dict[str, Any]

# -- models


def tanh_net(*widths: int) -> nn.Module:
    layers = [part for i, o in zip(widths, widths[1:], strict=False) for part in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def batch_normed() -> nn.Module:
    images = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*images, nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3))


def own_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Written in no loss function of torch."""
    return (output.logsumexp(1) - output.gather(1, target[:, None])[:, 0]).mean()


def loss_only(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Raw(lambda m, x, y: loss(m.inner(x), y), inner=mlp())


def low_rank(n: int) -> Tensor:
    """300 numbers a sample that nearly lie in 8 dimensions."""
    return torch.randn(n, 8) @ torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) + torch.randn(n, 300) / 9


ENTROPY, OF_LOSSES = nn.CrossEntropyLoss(), both(floats(5), indices(3))
BY_ID = {case.id: case for case in CASES}
MODELS = [
    "mlp", "resnet", "conv2d_twice", "conv1d_mixed", "conv_transpose1d_mixed", "prelu_after_conv", "convnext",
    "batch_norm_net", "group_norm_places", "instance_norm3d", "gpt", "tied_padding", "lstm_bidirectional_time_first",
    "gru_all_samples_second", "encoder_layer_plain_batch_first", "attention_cross_batch_first", "vit", "bag_weights",
    "weight_norm_linear", "called_in_loop", "frozen_first_layer", "custom_function_mixed", "checkpoint",
]  # fmt: skip
PROBLEMS = {name: BY_ID[name] for name in MODELS} | {
    case.id: case
    for case in (
        Case("batch_normed", batch_normed, floats(2, 6, 6), ENTROPY, classes),
        Case("loss_only", lambda: loss_only(F.cross_entropy), OF_LOSSES, lambda o, t: o, lambda loss: ()),
        Case("own_loss_only", lambda: loss_only(own_entropy), OF_LOSSES, lambda o, t: o, lambda loss: ()),
        Case("wide", lambda: tanh_net(6, 2060, 3), floats(6), ENTROPY, classes),  # a side of more than 2,048 rows
        Case("low_rank", lambda: tanh_net(300, 40, 3), low_rank, ENTROPY, classes),
        Case("regression", mlp, floats(5)),
        Case("field", lambda: tanh_net(2, 12, 8, 1), lambda n: torch.rand(n, 2)),
    )
}

# -- what an optimizer is stepped with: None, or a closure


Batches = list[tuple[Any, Tensor]]
Closure = Callable[[], Tensor]


def loss_of(model: nn.Module, loss: Any, opt: Any, batches: Batches, step: int) -> Closure:
    def closure() -> Tensor:
        opt.zero_grad()
        x, y = batches[step % BATCHES]
        value = loss(forward(model, x), y)
        value.backward()
        return value

    return closure


def residuals_of(model: nn.Module, loss: Any, opt: Any, batches: Batches, step: int) -> Closure:
    """Of a Poisson equation, in two pieces."""
    inside, edge = batches[0][0], batches[1][0][:6].round()

    def closure() -> Tensor:
        _, _, laplacian = curvature.laplacian(model, inside)
        right = torch.sin(3 * inside[:, 0]) * inside[:, 1]
        return torch.cat([(laplacian[:, 0] - right) / len(inside) ** 0.5, model(edge)[:, 0]])

    return closure


def nested_residuals_of(model: nn.Module, loss: Any, opt: Any, batches: Batches, step: int) -> Closure:
    def closure() -> Tensor:
        x = batches[0][0].clone().requires_grad_()
        u = model(x)[:, 0]
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return slope[:, 0] - u * slope[:, 1] - 1

    return closure


# -- runs


def run(
    kind: Any, problem: str = "mlp", by_closure: Any = None, *, steps: int = 16, dtype: torch.dtype = torch.float64,
    samples: int = SAMPLES, groups: dict[str, Any] | None = None, **options: Any,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """By name; `groups` are the options of the first parameter, in a group of its own."""
    case = PROBLEMS[problem]
    model, loss = case.build(dtype=dtype)
    opt = kind(model, **options)
    if groups is not None:
        opt.add_param_group({"params": [opt.param_groups[0]["params"].pop(0)], **groups})
    batches = [case.batch(model, samples, seed) for seed in range(BATCHES)]
    losses = []
    for step in range(steps):
        closure = (by_closure or loss_of)(model, loss, opt, batches, step)
        losses.append(opt.step(closure) if by_closure else closure())
        if not by_closure:
            opt.step()
    yield "losses", torch.stack(losses).detach()
    for name, value in model.state_dict().items():
        yield f"parameters/{name}", value.clone()
    for name in sorted({name for entry in opt.history for name in entry} - {"seconds"}):
        yield f"history/{name}", str([entry.get(name) for entry in opt.history])
    yield "stats", str({name: value for name, value in opt.stats().items() if not name.startswith("seconds")})
    yield "report", opt.report()


SINGLE = torch.float32
WITH_LOSS: dict[str, Any] = {"loss": ENTROPY}
RESIDUALS: dict[str, Any] = {"problem": "field", "by_closure": residuals_of, "samples": 256, "steps": 6}
ADAPTIVE: dict[str, Any] = {"by_closure": loss_of, "adaptive": True, "steps": 12}
Table = dict[str, dict[str, Any]]
COMMON: Table = {
    "defaults": {"steps": 24},
    "float32": {"steps": 24, "dtype": SINGLE},
    "damping": {"damping": 0.01},
    "momentum 0": {"momentum": 0.0},
    "momentum": {"momentum": 0.6, "damping": 0.02},
    "weight_decay": {"weight_decay": 0.02, "lr": 0.5},
    "seed": {"seed": 3, "factor_decay": 0.5},
    "groups": {"groups": {"lr": 0.3, "weight_decay": 0.1}},
    "isotropic": {"inject": curvature.isotropic(3)},
    "exact": {"inject": curvature.exact(), **WITH_LOSS},
    "sampled": {"inject": curvature.sampled(2), **WITH_LOSS},
    "propagated": {"inject": curvature.propagated(), **WITH_LOSS},
    "empirical": {"inject": curvature.empirical()},
    "adaptive": ADAPTIVE,
    "loss only": {"problem": "loss_only"},
    "own loss only": {"problem": "own_loss_only"},
    "regression": {"problem": "regression", "loss": nn.MSELoss(), "inject": curvature.exact()},
    "batch_normed": {"problem": "batch_normed", "dtype": SINGLE},
    "residuals": RESIDUALS | {"damping": 1e-3},
    "residuals momentum": RESIDUALS | {"momentum": 0.5, "lr": 0.5, "weight_decay": 0.01},
    "residuals adaptive": RESIDUALS | {"adaptive": True},
    "nested residuals": RESIDUALS | {"by_closure": nested_residuals_of},
}
FACTORED: Table = {
    **{model: {"problem": model} for model in MODELS},
    **{f"{model} reduce": {"problem": model, "sharing": "reduce"} for model in ("convnext", "vit")},
    "attention empirical": {"problem": "encoder_layer_plain_batch_first", "inject": curvature.empirical()},
    "adaptive cnn": ADAPTIVE | {"problem": "resnet"},
    "intervals": {"factor_every": 2, "decompose_every": 3},
    "over 256 rows": {"problem": "low_rank", "dtype": SINGLE, "samples": 512},
    "over 2,048 rows": {"problem": "wide", "dtype": SINGLE, "steps": 4},
}
WHOLE: Table = {
    "search": {"by_closure": loss_of, "line_search": True, **WITH_LOSS},
    **{solver: {"solver": solver, "momentum": 0.3, "steps": 8} for solver in ("woodbury", "cg")},
    **{f"{solver} exact": {"solver": solver, "steps": 8, **WITH_LOSS} for solver in ("woodbury", "cg")},
}
RUNS: dict[Any, Table] = {
    KFAC: COMMON | FACTORED, EKFAC: COMMON | FACTORED, NaturalGradient: COMMON | WHOLE,
}  # fmt: skip


def recorded(only: str) -> Results:
    """The results of all runs whose names match."""
    results: Results = {}
    for kind, table in RUNS.items():
        for name, options in table.items():
            key = f"{kind.__name__}/{name}"
            if not re.search(only, key):
                continue
            torch.manual_seed(0)
            try:
                results |= {f"{key}/{part}": value for part, value in run(kind, **options)}
            except Exception as error:
                results[f"{key}/exception"] = f"{type(error).__name__}: {error}"
    return results


# -- comparison


def difference(one: Any, other: Any, tolerance: float) -> str:
    """How two results differ, if they do so by more than the tolerance; texts may differ in decimals."""
    if isinstance(one, str) or isinstance(other, str):
        same = one == other if tolerance == 0 else DECIMAL.sub("0", str(one)) == DECIMAL.sub("0", str(other))
        return "" if same else f"{one} -> {other}"[:300]
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {tuple(one.shape)} -> {other.dtype} {tuple(other.shape)}"
    relative = distance(one.double(), other.double())
    return "" if relative <= tolerance else f"relative difference {relative:.2g}"


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, relative to that of the first; infinite where other entries are not finite."""
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return math.inf
    gap, scale = float((one - other)[finite].norm()), float(one[finite].norm())
    return gap / scale if scale else math.inf if gap else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["save", "compare"])
    parser.add_argument("file", type=Path, help="where the results are written to, or read from")
    parser.add_argument("--only", default="", metavar="REGEX", help="the runs whose names it is found in")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="relative; 0 for equality to the last bit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    after = recorded(options.only)
    if options.action == "save":
        torch.save(after, options.file)
        return 0
    before = {key: value for key, value in torch.load(options.file).items() if re.search(options.only, key)}
    lines = [f"{key}: {'missing now' if key in before else 'new'}" for key in before.keys() ^ after.keys()]
    for key in before.keys() & after.keys():
        if what := difference(before[key], after[key], options.tolerance):
            lines.append(f"{key}: {what}")
    print("\n".join([*sorted(lines), f"{len(lines)} differences in {len(before)} results"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
