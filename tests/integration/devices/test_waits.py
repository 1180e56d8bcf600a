"""How often the host waits for the device, counted by the simulated one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.training import closure_of, task

pytestmark = pytest.mark.fast


@pytest.fixture
def simdev(device: str) -> Any:
    if device != "sim":
        pytest.skip("the simulated device counts waits: make test-device")
    return importlib.import_module("support.simulated_device.simdev")


def waits(simdev: Any, call: Callable[[], object]) -> Any:
    """What the host waited for within a call."""
    with simdev.syncs() as found:
        call()
    return found


def bounded(counts: list[int], opt: Any, after: int, ordinary: float, renewing: float) -> bool:
    """Whether steps that renew and others wait at most so often, each on average, after the first ones."""
    seen = list(zip(counts, opt.history, strict=True))[after:]
    of = {kind: [count for count, entry in seen if entry["renewed"] is kind] for kind in (False, True)}
    return all(sum(of[kind]) <= bound * len(of[kind]) for kind, bound in ((False, ordinary), (True, renewing)))


@pytest.mark.parametrize(
    ("kind", "options", "ordinary", "renewing"),
    [
        # Whether gradients are finite; of the second pass, whether its outputs and its loss are those of the first, and
        # whether there is curvature; all products; the losses that were tried. Renewals add three.
        (KFAC, {"adaptive": True}, 6, 9),
        (EKFAC, {"adaptive": True}, 6, 9),
        (NaturalGradient, {"adaptive": True}, 0, 9.2),
        # Each step renews: gradients, the last step, rows, decompositions, outputs, facts of the step, and dampings.
        (NaturalGradient, {"solver": "cg"}, 0, 8),
        (NaturalGradient, {}, 0, 7),
    ],
    ids=["adaptive", "adaptive, eigenvalues", "adaptive natural gradient", "conjugate gradients", "natural gradient"],
)
def test_waits_where_steps_must_look(
    kind: Any, options: dict, ordinary: float, renewing: float, simdev: Any, device: str
) -> None:
    """On average, after the first steps, which invert at each."""
    model, _, x, y = task("mlp", device)
    opt, counts = kind(model, **options), []
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    closed = [closure] if options.get("adaptive") else []
    for _ in range(20):
        if not options.get("adaptive"):
            closure()
        counts.append(waits(simdev, lambda: opt.step(*closed)).count)
    assert bounded(counts, opt, 6, ordinary, renewing), counts


def test_conjugate_gradients_over_sequences(simdev: Any, device: str) -> None:
    """Norms of layers with many places, which may cancel, cost one wait for all layers; a first step solves twice."""
    counts = []
    for depth in (1, 4):
        torch.manual_seed(0)
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(12, 12), nn.Tanh())]
        model = nn.Sequential(nn.Embedding(9, 12), *hidden, nn.Flatten(), nn.Linear(48, 3)).to(device)
        x, y = torch.arange(32).view(8, 4).remainder(9).to(device), torch.arange(8).remainder(3).to(device)
        opt = NaturalGradient(model, solver="cg")
        F.cross_entropy(model(x), y).backward()
        counts.append(waits(simdev, opt.step).count)
    assert counts[0] == counts[1] <= 9, counts


def with_buffers() -> tuple[nn.Module, Any]:
    """Closures are called again with the buffers of the first call."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 4)), torch.randn(32, 3, 10, 10)


def with_bags() -> tuple[nn.Module, Any]:
    """Bags of one size need no counting."""
    return nn.Sequential(nn.EmbeddingBag(9, 6), nn.Tanh(), nn.Linear(6, 4)), torch.arange(160).view(32, 5) % 9


def with_upsampling() -> tuple[nn.Module, Any]:
    """Pixels of the output see different entries of the kernel."""
    layers = [nn.ConvTranspose2d(3, 3, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(648, 4)), torch.randn(32, 3, 4, 4)


@pytest.mark.parametrize("task", [with_buffers, with_bags, with_upsampling])
def test_models_that_cost_no_waits(task: Any, simdev: Any, device: str) -> None:
    torch.manual_seed(0)
    model, x = (part.to(device) for part in task())
    y = torch.arange(32).remainder(4).to(device)
    opt = KFAC(model, adaptive=True)
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    found = [waits(simdev, lambda: opt.step(closure)) for _ in range(6)]
    # one look for each part of the blocks that are inverted together, of which the wide layer is one
    assert max(own.count for own in found[1:]) <= 10, found[-1].places("/optimizers/", "/curvature/")


class Experts(nn.Module):
    """Each sample goes to the two experts that a gate chooses, so that every step sees other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(4))

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(1).topk(2)
        for k, expert in enumerate(self.experts):
            rows, slots = (chosen == k).nonzero(as_tuple=True)
            x = x.index_add(0, rows, expert(x[rows]) * weights[rows, slots][:, None])
        return self.head(x)


@pytest.mark.parametrize(("kind", "ordinary", "renewing"), [(KFAC, 6, 9.5), (EKFAC, 6, 9.5), (NaturalGradient, 0, 11)])
def test_experts_that_are_chosen_by_index(
    kind: Any, ordinary: float, renewing: float, simdev: Any, device: str
) -> None:
    """Waits beyond the model's own for its indices, on average; learnt anew in each step, at times with more trials."""
    torch.manual_seed(0)
    model, x, y = Experts().to(device), torch.randn(24, 6).to(device), torch.arange(24).remainder(3).to(device)
    opt, counts = kind(model, adaptive=True), []
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    for _ in range(16):
        found = waits(simdev, lambda: opt.step(closure))
        counts.append(sum(s.kind != "event" and s.operator != "aten::nonzero" for s in found.all))
    assert bounded(counts, opt, 4, ordinary, renewing), (counts, found.places("/optimizers/", "/curvature/"))


def test_norms_and_inner_products_of_gradients(simdev: Any, device: str) -> None:
    """Places may cancel in each layer of a sequence model: one wait says whether they do."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Flatten(), nn.Linear(128, 3)).to(device)
    x, y = torch.randn(8, 2, 64, device=device), torch.arange(8).remainder(3).to(device)
    for quantity in (curvature.per_sample_norms, curvature.per_sample_norms_by_parameter, curvature.per_sample_gram):
        for _ in range(2):
            found = waits(simdev, functools.partial(quantity, model, nn.CrossEntropyLoss(), x, y))
        assert found.count == 1 and not found.uploads, found.places("/curvature/")


@pytest.mark.parametrize(("kind", "bound"), [(KFAC, 6.5), (NaturalGradient, 7)])
def test_waits_of_steps_on_residuals(kind: Any, bound: float, simdev: Any, device: str) -> None:
    """Losses are those of the CPU, although a line search tries several points before it reads their losses.

    Whether loss and Jacobian are finite is read first; then what each kind of decomposition says, and losses.
    """

    def run(where: str) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(where)
        points = torch.rand(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(where)
        opt, losses, counts = kind(field), [], []
        for _ in range(12):
            with simdev.syncs() as found:
                loss = opt.step(lambda: curvature.laplacian(field, points)[2][:, 0] - 1)
            losses.append(float(loss))
            counts.append(found.count)
        return losses, counts

    losses, counts = run(device)
    assert sum(counts[6:]) <= bound * len(counts[6:]), counts
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(run("cpu")[0]), rtol=1e-3, atol=0)
