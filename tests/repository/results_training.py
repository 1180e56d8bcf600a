"""Runs of the optimizers: the loss at every step, what the optimizer says of the run, the parameters at its end."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Case, Raw, both, classes, floats, indices, randomise
from support.cases.catalogue import CASES
from support.cases.layers import mlp
from support.oracles.brute_force import forward, map_tensors

Entries = Iterator[tuple[str, Any]]
BY_ID = {case.id: case for case in CASES}


def two_outputs() -> nn.Module:
    run = lambda m, x: (m.one(h := m.body(x).tanh()), m.two(h))
    return Raw(run, body=nn.Linear(5, 6), one=nn.Linear(6, 3), two=nn.Linear(6, 2))


def two_losses(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output[0], target[0]) + F.mse_loss(output[1], target[1])


def with_logits() -> nn.Module:
    return Raw(lambda m, a, b: SimpleNamespace(logits=m.pair(a, b)), pair=nn.Bilinear(3, 4, 2))


def batch_normed() -> nn.Module:
    images = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*images, nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3))


def loss_only(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Raw(lambda m, x, y: loss(m.inner(x), y), inner=mlp())


def own_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Written in no loss function of torch."""
    return (output.logsumexp(1) - output.gather(1, target[:, None])[:, 0]).mean()


def low_rank(n: int) -> Tensor:
    """300 numbers a sample that nearly lie in 8 dimensions."""
    return torch.randn(n, 8) @ torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) + torch.randn(n, 300) / 9


def tanh_net(*widths: int) -> nn.Module:
    layers = [part for i, o in zip(widths, widths[1:], strict=False) for part in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


entropy, points = nn.CrossEntropyLoss(), lambda n: torch.rand(n, 2)
the_loss = lambda output, target: output
both_targets = lambda outputs: (classes(outputs[0]), outputs[1] + 1)
MODELS = {id: BY_ID[id] for id in (
    "mlp", "resnet", "conv2d_twice", "conv1d_mixed", "conv_transpose1d_mixed", "prelu_after_conv", "convnext",
    "batch_norm_net", "group_norm_places", "instance_norm3d", "gpt", "tied_padding", "lstm_bidirectional_time_first",
    "gru_all_samples_second", "encoder_layer_plain_batch_first", "attention_cross_batch_first", "vit", "bag_weights",
    "weight_norm_linear", "called_in_loop", "frozen_first_layer", "custom_function_mixed", "checkpoint",
)} | {
    "two_outputs": Case("two_outputs", two_outputs, floats(5), two_losses, both_targets),
    "with_logits": Case("with_logits", with_logits, both(floats(3), floats(4)), entropy, classes),
}  # fmt: skip
OF_LOSSES = both(floats(5), indices(3))
TRAINED = MODELS | {
    case.id: case
    for case in (
        Case("batch_normed", batch_normed, floats(2, 6, 6), entropy, classes),
        Case("loss_only", functools.partial(loss_only, F.cross_entropy), OF_LOSSES, the_loss, lambda loss: ()),
        Case("own_loss_only", functools.partial(loss_only, own_entropy), OF_LOSSES, the_loss, lambda loss: ()),
        # A side of more than 2,048 rows.
        Case("wide", functools.partial(tanh_net, 6, 2060, 3), floats(6), entropy, classes),
        Case("low_rank", functools.partial(tanh_net, 300, 40, 3), low_rank, entropy, classes),
        Case("regression", mlp, floats(5)),
        Case("small_field", functools.partial(tanh_net, 2, 3, 1), points),
        Case("field", functools.partial(tanh_net, 2, 12, 8, 1), points),
    )
}

Make = Callable[[nn.Module], Any]
SAMPLES, BATCHES = 48, 4
ENTROPY = nn.CrossEntropyLoss()
EXACT: dict[str, Any] = {"inject": curvature.exact(), "loss": ENTROPY}
EMPIRICAL: dict[str, Any] = {"inject": curvature.empirical()}
INJECTIONS: dict[str, dict[str, Any]] = {
    "isotropic": {"inject": curvature.isotropic(3)},
    "exact": EXACT,
    "sampled": {"inject": curvature.sampled(2), "loss": ENTROPY},
    "propagated": {"inject": curvature.propagated(), "loss": ENTROPY},
    "empirical": EMPIRICAL,
}


class Training:
    """A model with its optimizer and data; `make` makes an optimizer of a model."""

    def __init__(self, problem: str, make: Make, dtype: torch.dtype = torch.float64, samples: int = SAMPLES) -> None:
        self.problem, self.make, self.dtype = TRAINED[problem], make, dtype
        self.model, self.loss = self.problem.build(dtype=dtype)
        self.opt = make(self.model)
        self.batches = [self.problem.batch(self.model, samples, seed) for seed in range(BATCHES)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)

    def forward(self, step: int, part: slice = slice(None)) -> Tensor:
        """The loss of the step's batch, or of part of it."""
        x, y = map_tensors(lambda t: t[part], self.batches[step % BATCHES])
        return self.loss(forward(self.model, x), y)

    def backward(self, step: int) -> Tensor:
        loss = self.forward(step)
        loss.backward()
        return loss

    def resume(self) -> None:
        """Go on in a new model and optimizer, from a file."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.opt.state_dict()], file)
        file.seek(0)
        self.model, _ = self.problem.build(dtype=self.dtype)
        randomise(self.model)  # what is not loaded shows
        self.opt = self.make(self.model)
        for part, state in zip((self.model, self.opt), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)


Loop = Callable[[Training, int], Tensor]


# -- one step of training, in loops of several kinds


def plain(run: Training, step: int) -> Tensor:
    run.opt.zero_grad()
    loss = run.backward(step)
    run.opt.step()
    return loss


def by_closure(run: Training, step: int) -> Tensor:
    def closure() -> Tensor:
        run.opt.zero_grad()
        return run.backward(step)

    return run.opt.step(closure)


def accumulated(run: Training, step: int) -> Tensor:
    run.opt.zero_grad()
    losses = [run.forward(step, part) / 2 for part in (slice(None, SAMPLES // 3), slice(SAMPLES // 3, None))]
    for loss in losses:
        loss.backward()
    run.opt.step()
    return torch.stack(losses)


def autocast(run: Training, step: int) -> Tensor:
    run.opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = run.backward(step)
    run.opt.step()
    return loss


def scaled(run: Training, step: int) -> Tensor:
    run.opt.zero_grad()
    loss = run.forward(step)
    run.scaler.scale(loss).backward()
    run.scaler.step(run.opt)
    run.scaler.update()
    return loss


def clipped(run: Training, step: int) -> Tensor:
    run.opt.zero_grad()
    loss = run.backward(step)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.opt.step()
    return loss


def scheduled(run: Training, step: int) -> Tensor:
    for group in run.opt.param_groups:
        group["lr"] = min(1.0, step / 4)
    return plain(run, step)


def thawed(run: Training, step: int) -> Tensor:
    """The first layer is frozen in some steps."""
    run.model[0].requires_grad_(not 4 <= step < 8)
    return plain(run, step)


def looked_at(run: Training, step: int) -> Tensor:
    """With passes of the model that are not trained on."""
    run.model(run.batches[1][0]).sum()
    with torch.no_grad():
        run.model(run.batches[2][0])
    return plain(run, step)


def with_bad_batch(loop: Loop, at: int = 6) -> Loop:
    """One batch is not finite."""

    def one(run: Training, step: int) -> Tensor:
        kept = run.batches
        if step == at:
            run.batches = [(x * math.nan, y) for x, y in kept]
        loss = loop(run, step)
        run.batches = kept
        return loss

    return one


def by_residuals(run: Training, step: int) -> Tensor:
    """Of a Poisson equation, in two pieces."""
    inside, edge = run.batches[0][0], run.batches[1][0][:6].round()

    def closure() -> Tensor:
        _, _, laplacian = curvature.laplacian(run.model, inside)
        right = torch.sin(3 * inside[:, 0]) * inside[:, 1]
        return torch.cat([(laplacian[:, 0] - right) / len(inside) ** 0.5, run.model(edge)[:, 0]])

    return run.opt.step(closure)


def by_nested_residuals(run: Training, step: int) -> Tensor:
    def closure() -> Tensor:
        x = run.batches[0][0].clone().requires_grad_()
        u = run.model(x)[:, 0]
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return slope[:, 0] - u * slope[:, 1] - 1

    return run.opt.step(closure)


# -- runs


def trained(
    kind: Any,
    problem: str = "mlp",
    loop: Loop = plain,
    *,
    steps: int = 16,
    dtype: torch.dtype = torch.float64,
    samples: int = SAMPLES,
    resumes: bool = False,
    groups: dict[str, Any] | None = None,
    **options: Any,
) -> Entries:
    """A run; `groups` are the options of the first parameter, in a group of its own."""

    def make(model: nn.Module) -> Any:
        opt = kind(model, **options)
        if groups is not None:
            first = opt.param_groups[0]["params"].pop(0)
            opt.add_param_group({"params": [first], **groups})
        return opt

    run = Training(problem, make, dtype, samples)
    losses = []
    for step in range(steps):
        if resumes and step == steps // 2:
            run.resume()
        losses.append(loop(run, step).detach())
    yield "losses", torch.stack(losses)
    yield "parameters", run.model.state_dict()
    yield from told(run.opt, dtype)


def told(opt: Any, dtype: torch.dtype) -> Entries:
    """What an optimizer says of the run, but for seconds. Numbers are as precise as what they come from."""
    history = opt.history
    for name in sorted({name for entry in history for name in entry} - {"seconds"}):
        yield f"history/{name}", rounded([entry.get(name) for entry in history], dtype)
    for name, value in opt.stats().items():
        if not name.startswith("seconds"):
            yield f"stats/{name}", rounded(value, dtype)
    yield "report", opt.report()
    yield "summary", opt.summary().partition("; seconds so far")[0]
    yield "counts", [opt.steps, opt.skipped]


def rounded(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part, dtype) for name, part in value.items()}
    if isinstance(value, list):
        has_floats = any(isinstance(part, float) for part in value)
        return torch.tensor([math.nan if x is None else x for x in value], dtype=dtype) if has_floats else str(value)
    return torch.tensor(value, dtype=dtype) if isinstance(value, float) else value


Table = dict[str, dict[str, Any]]
SINGLE = torch.float32
RESIDUALS: dict[str, Any] = {"problem": "field", "loop": by_residuals, "samples": 256, "steps": 6}
# How KFAC and EKFAC are used, and NaturalGradient but for what it does not take.
COMMON: Table = {
    "defaults": {"steps": 24},
    "float32": {"steps": 24, "dtype": SINGLE},
    "resumed": {"resumes": True},
    "damping": {"damping": 0.01},
    "momentum 0": {"momentum": 0.0},
    "momentum": {"momentum": 0.6, "damping": 0.02},
    "weight_decay": {"weight_decay": 0.02, "lr": 0.5},
    "seed": {"seed": 3, "factor_decay": 0.5},
    **{f"inject {name}": options for name, options in INJECTIONS.items()},
    "closure": {"loop": by_closure},
    "adaptive": {"loop": by_closure, "adaptive": True, "steps": 12},
    "adaptive resumed": {"loop": by_closure, "adaptive": True, "resumes": True, "weight_decay": 0.01, "steps": 12},
    "adaptive bad batch": {"loop": with_bad_batch(by_closure), "adaptive": True, "steps": 12},
    "accumulated": {"loop": accumulated, **EXACT},
    "accumulated empirical": {"loop": accumulated, **EMPIRICAL},
    "bad batch": {"loop": with_bad_batch(plain)},
    "bad first batch": {"loop": with_bad_batch(plain, at=0)},
    "autocast": {"loop": autocast, "dtype": SINGLE},
    "scaled": {"loop": scaled, "dtype": SINGLE},
    "scaled bad batch": {"loop": with_bad_batch(scaled), "dtype": SINGLE},
    "clipped": {"loop": clipped},
    "scheduled": {"loop": scheduled},
    "looked at": {"loop": looked_at},
    "frozen": {"problem": "frozen_first_layer"},
    "thawed": {"loop": thawed},
    "loss only": {"problem": "loss_only"},
    "own loss only": {"problem": "own_loss_only"},
    "checkpointed": {"problem": "checkpoint"},
    "regression": {"problem": "regression", "loss": nn.MSELoss(), "inject": curvature.exact()},
    "cnn": {"problem": "resnet"},
    "two outputs": {"problem": "two_outputs"},
    "batch_normed": {"problem": "batch_normed", "dtype": SINGLE},
}
FACTORED: Table = {
    **{model: {"problem": model} for model in MODELS},
    **{f"{model} reduce": {"problem": model, "sharing": "reduce"} for model in ("convnext", "vit")},
    "attention empirical": {"problem": "encoder_layer_plain_batch_first", **EMPIRICAL, "damping": 0.01},
    "adaptive cnn": {"problem": "resnet", "loop": by_closure, "adaptive": True, "steps": 10},
    "intervals": {"factor_every": 2, "decompose_every": 3},
    "groups": {"groups": {"lr": 0.3, "damping": 0.5, "weight_decay": 0.1}, "damping": 0.1},
    "over 256 rows": {"problem": "low_rank", "dtype": SINGLE, "samples": 512},
    "over 2,048 rows": {"problem": "wide", "dtype": SINGLE, "steps": 4},
}
# Factors with several eigenvalues of zero, of which EKFAC makes what rounding says.
DEFICIENT: Table = {
    f"{model} reduce": {"problem": model, "sharing": "reduce"}
    for model in ("conv1d_mixed", "encoder_layer_plain_batch_first", "instance_norm3d")
}
WITH_RESIDUALS: Table = {
    "residuals": RESIDUALS,
    "residuals, few": RESIDUALS | {"samples": 4, "steps": 3},
    "residuals resumed": RESIDUALS | {"resumes": True},
    "residuals damping": RESIDUALS | {"damping": 1e-3},
    "residuals momentum": RESIDUALS | {"momentum": 0.5, "lr": 0.5, "weight_decay": 0.01},
    "residuals adaptive": RESIDUALS | {"adaptive": True},
    "nested residuals": RESIDUALS | {"loop": by_nested_residuals},
    "residuals float32": RESIDUALS | {"dtype": SINGLE, "damping": 1e-2},
}
WHOLE: Table = {
    "search": {"loop": by_closure, "line_search": True, "loss": ENTROPY},
    "groups": {"groups": {"lr": 0.3, "weight_decay": 0.1}},
    **{
        f"{solver}{' exact' if options else ''}{' resumed' if resumes else ''}": {
            "solver": solver, "resumes": resumes, "momentum": 0.3, "steps": 8, **options,
        }
        for solver in ("woodbury", "cg")
        for resumes in (False, True)
        for options in ({}, {"loss": ENTROPY})
    },
}  # fmt: skip
# Without damping what counts is that the problem is well-conditioned.
FEW_PARAMETERS: Table = {name: {**run, "problem": "small_field", "steps": 4} for name, run in WITH_RESIDUALS.items()}
RUNS: dict[Any, Table] = {
    KFAC: COMMON | FACTORED | DEFICIENT | WITH_RESIDUALS,
    EKFAC: COMMON | FACTORED,
    NaturalGradient: COMMON | WHOLE | FEW_PARAMETERS,
}


def cases() -> dict[str, Callable[[], Entries]]:
    return {
        f"training/{kind.__name__}/{name}": functools.partial(trained, kind, **options)
        for kind, table in RUNS.items()
        for name, options in table.items()
    } | {f"copies/{kind.__name__}": functools.partial(copies, kind) for kind in RUNS}


def copies(kind: Any) -> Entries:
    """A copy of an optimizer, made in the middle of a run, trains a copy of the model."""
    run = Training("mlp", kind)
    for step in range(4):
        plain(run, step)
    run.model, run.opt = copy.deepcopy((run.model, run.opt))
    yield "losses", torch.stack([plain(run, step).detach() for step in range(4, 8)])
    yield "parameters", run.model.state_dict()
    yield "options", {name: value for name, value in run.opt.param_groups[0].items() if name != "params"}
    yield "report", kind(run.model).report()
