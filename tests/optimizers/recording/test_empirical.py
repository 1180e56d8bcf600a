"""`empirical()` takes what the loop sends back: each sample's part in the gradient, N times that of a mean.

The oracle is the loop over samples: the mean of the losses of single samples, each computed from its slice of the
output, is a mean in which all samples count alike.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvature import empirical
from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.training import natural_matrix

pytestmark = pytest.mark.fast

N, C = 6, 3
OPTIMIZERS = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "NaturalGradient": NaturalGradient,
}
W = torch.tensor([0.2, 1.0, 3.0]).double()


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    yield caplog
    warn_once.cache_clear()


def rows(n: int = N) -> tuple[nn.Module, Tensor, Tensor]:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C)), torch.randn(n, 4), torch.randint(C, (n,))


def words() -> tuple[nn.Module, Tensor, Tensor]:
    """The inner layer has places first, in which samples cannot be told by their sizes: there are as many of both."""
    run = lambda m, x: m.out(m.inner(m.table(x).transpose(0, 1)).tanh().transpose(0, 1))
    model = Raw(run, table=nn.Embedding(7, 4), inner=nn.Linear(4, N), out=nn.Linear(N, C))
    y = torch.randint(C, (N, N))
    y[torch.rand(N, N) < 0.4] = -100
    y[:, 0] = 1
    return model, torch.randint(7, (N, N)), y


def pixels() -> tuple[nn.Module, Tensor, Tensor]:
    y = torch.randint(C, (N, 3, 3))
    y[:4, 1] = -100
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, C, 1)), torch.randn(N, 2, 4, 4), y


def padded() -> tuple[nn.Module, Tensor, Tensor]:
    """Two samples are ignored."""
    model, x, y = rows()
    y[[1, 4]] = -100
    return model, x, y


def values() -> tuple[nn.Module, Tensor, Tensor]:
    model, x, _ = rows()
    return model, x, torch.randn(N, C)


flat = lambda o, y: (o.reshape(-1, C), y.reshape(-1))
Loss = Callable[[Tensor, Tensor], Tensor]
# Means over samples that all count alike: the batch, the loss of the loop.
MEANS: dict[str, tuple[Callable[[], Any], Loss]] = {
    "classes": (rows, F.cross_entropy),
    "half a mean": (rows, lambda o, y: F.cross_entropy(o, y) / 2),
    "places": (words, lambda o, y: F.cross_entropy(*flat(o, y.clamp(min=0)))),
    "indexed": (rows, lambda o, y: -(o.log_softmax(1)[range(len(o)), y]).mean()),
    "squares": (values, F.mse_loss),
    "squares by hand": (values, lambda o, y: (o - y).square().sum(1).mean()),
    "a penalty": (values, lambda o, y: F.mse_loss(o, y) + 0.1 * W.square().sum()),
    "two terms": (values, lambda o, y: F.mse_loss(o, y) + 0.1 * o.square().mean()),
    "entropy of probabilities": (rows, lambda o, y: F.cross_entropy(o, F.one_hot(y, C).to(o) * 0.8 + 0.2 / C)),
    "Poisson": (values, lambda o, y: F.poisson_nll_loss(o, y.exp())),
}
# Losses whose samples count differently.
WEIGHTED: dict[str, tuple[Callable[[], Any], Loss]] = {
    "class weights": (rows, lambda o, y: F.cross_entropy(o, y, weight=W)),
    "class weights by hand": (rows, lambda o, y: (W[y] * F.cross_entropy(o, y, reduction="none")).sum() / W[y].sum()),
    "ignored samples": (padded, F.cross_entropy),
    "tokens": (words, lambda o, y: F.cross_entropy(*flat(o, y))),
    "pixels": (pixels, F.cross_entropy),
    "a root": (values, lambda o, y: F.mse_loss(o, y).sqrt()),
}


def own_losses(loss: Loss) -> Loss:
    """The mean of the losses of single samples; zero for those of which nothing counts."""

    def mean(o: Tensor, y: Tensor) -> Tensor:
        each = [loss(o[n : n + 1], y[n : n + 1]) for n in range(len(o))]
        return torch.stack([x if x.isfinite() else 0 * o[0].sum() for x in each]).mean()

    return mean


def measured(opt: Any) -> dict[str, Tensor]:
    """The running curvature, and what the outputs were in its metric."""
    leaves = pytree.tree_flatten_with_path(opt.store.state_dict())[0]
    outputs = {"outputs": torch.tensor(opt.recorder.outputs.rms)}
    if isinstance(opt, NaturalGradient):
        return {"matrix": natural_matrix(opt)} | outputs
    return {pytree.keystr(k): x for k, x in leaves if isinstance(x, Tensor)} | outputs


def curvature_of(
    kind: Any, make: Callable[[], Any], run: Loss, scale: float = 1.0, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    """After one step."""
    with seeded(3):
        model, x, y = make()
        model = model.double().to(device)
    x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
    opt = kind(model, inject=empirical(), damping=0.1, **options)
    opt.grad_scale = None if scale == 1 else torch.tensor(scale)
    value = run(model(x.to(device)), y)
    (value if scale == 1 else value * scale).backward()
    opt.step()
    return measured(opt)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_means_over_samples(kind: str, name: str, logged: pytest.LogCaptureFixture):
    make, loss = MEANS[name]
    found = curvature_of(OPTIMIZERS[kind], make, loss)
    assert not logged.records
    torch.testing.assert_close(found, curvature_of(OPTIMIZERS[kind], make, own_losses(loss)))


@pytest.mark.parametrize("name", WEIGHTED)
def test_samples_that_count_differently_do_so_in_the_curvature(name: str, logged: pytest.LogCaptureFixture):
    """A documented limit: rows are N times each sample's part in the gradient, and their weights are squared."""
    make, loss = WEIGHTED[name]
    found = curvature_of(NaturalGradient, make, loss)["matrix"]
    assert not logged.records
    with seeded(3):
        model, x, y = make()
        model = model.double()
    x, y = (t.double() if t.is_floating_point() else t for t in (x, y))
    output = model(x)
    (sent,) = torch.autograd.grad(loss(output, y), output, retain_graph=True)
    parts = []
    for n in range(N):
        own = torch.zeros_like(sent).index_copy(0, torch.tensor([n]), sent[n : n + 1])
        gradients = torch.autograd.grad(output, list(model.parameters()), N * own, retain_graph=True)
        parts.append(torch.cat([g.flatten() for g in gradients]))
    expected = torch.stack(parts)
    torch.testing.assert_close(found, expected.mT @ expected / N)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_class_weights_that_the_loss_says_are_refused(kind: str):
    model = rows()[0]
    for loss in (nn.CrossEntropyLoss(W), nn.NLLLoss(W)):
        with pytest.raises(ValueError, match=rf"{type(loss).__name__} has weight=.*squared.*exact\(\)"):
            OPTIMIZERS[kind](model, loss=loss, inject=empirical())
    for loss in (nn.CrossEntropyLoss(W, reduction="sum"), nn.BCEWithLogitsLoss(W), nn.CrossEntropyLoss()):
        OPTIMIZERS[kind](model, loss=loss, inject=empirical())


SUMS: dict[str, tuple[Callable[[], Any], Loss, Loss]] = {
    "squares": (values, lambda o, y: F.mse_loss(o, y, reduction="sum"), lambda o, y: (o - y).square().sum()),
    "by hand": (values, lambda o, y: (o - y).square().sum(), lambda o, y: (o - y).square().sum()),
    "weighted classes": (
        rows, lambda o, y: F.cross_entropy(o, y, weight=W, reduction="sum"),
        lambda o, y: F.cross_entropy(o, y, weight=W, reduction="sum"),
    ),
    "two sums": (
        values, lambda o, y: (o - y).square().sum() + o.exp().sum(), lambda o, y: ((o - y).square() + o.exp()).sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sums(kind: str, name: str, scale: float):
    """As `loss` says. `NaturalGradient` has the matrix of the sum, the others that of one sample."""
    make, loss, own = SUMS[name]
    named = nn.CrossEntropyLoss(reduction="sum") if make is rows else nn.MSELoss(reduction="sum")
    found = curvature_of(OPTIMIZERS[kind], make, loss, scale=scale, loss=named)
    # a mean of losses that are sqrt(N) times as large has N times the matrix
    times = N**0.5 if kind == "NaturalGradient" else 1.0
    expected = curvature_of(OPTIMIZERS[kind], make, own_losses(lambda o, y: times * own(o, y)))
    of_samples = {k: x for k, x in expected.items() if kind != "NaturalGradient" or k != "outputs"}
    torch.testing.assert_close({k: found[k] for k in of_samples}, of_samples)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_scaled_gradients(kind: str):
    """A scaler's factor is not the loss's own."""
    for make, loss in (MEANS["squares"], WEIGHTED["class weights"], WEIGHTED["tokens"]):
        found = curvature_of(OPTIMIZERS[kind], make, loss, scale=1024.0)
        torch.testing.assert_close(found, curvature_of(OPTIMIZERS[kind], make, loss))


def heads() -> tuple[nn.Module, Tensor, Tensor]:
    parts = {"body": nn.Linear(4, 5), "one": nn.Linear(5, C), "other": nn.Linear(5, C)}
    model = Raw(lambda m, x: (m.one(h := m.body(x).tanh()), m.other(h)), **parts)
    return model, torch.randn(N, 4), torch.randint(C, (N,))


SEVERAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alike": lambda o, y: F.cross_entropy(o[0], y) + F.mse_loss(o[1], torch.ones_like(o[1])),
    "halves": lambda o, y: F.cross_entropy(o[0], y) / 2 + F.cross_entropy(o[1], y) / 2,
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_outputs(kind: str, name: str, logged: pytest.LogCaptureFixture):
    """One factor for what comes from all of them."""
    found = curvature_of(OPTIMIZERS[kind], heads, SEVERAL[name])
    assert not logged.records
    own = own_losses(SEVERAL[name])
    torch.testing.assert_close(found, curvature_of(OPTIMIZERS[kind], heads, lambda o, y: own(Pair(*o), y)))


class Pair(tuple):
    """Two outputs that are cut together."""

    def __new__(cls, *outputs: Tensor) -> Pair:
        return super().__new__(cls, outputs)

    def __len__(self) -> int:
        return len(tuple.__getitem__(self, 0))

    def __getitem__(self, key: Any) -> Any:
        return Pair(*(x[key] for x in tuple(self))) if isinstance(key, slice) else tuple.__getitem__(self, key)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_graph_that_is_used_twice(kind: str):
    """As sums of gradients."""
    found = []
    for times in (1, 2):
        with seeded(3):
            model, x, y = rows()
        opt = OPTIMIZERS[kind](model.double(), inject=empirical())
        loss = F.cross_entropy(model(x.double()), y, weight=W) * (2 / times)
        for k in range(times):
            loss.backward(retain_graph=k == 0)
        opt.step()
        found.append({k: x for k, x in measured(opt).items() if k != "outputs"})
    torch.testing.assert_close(*found)


def test_a_pass_that_waits_holds_no_graph():
    class Marked(torch.autograd.Function):
        contexts: ClassVar[list[Any]] = []

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Marked.contexts.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    model = Raw(lambda m, x: m.out(Marked.apply(m.inner(x))), inner=nn.Linear(4, 5), out=nn.Linear(5, C))
    opt = KFAC(model, inject=empirical())
    for _ in range(3):
        model(torch.randn(N, 4))
    gc.collect()
    assert len(Marked.contexts) == 3 and not any(ref() for ref in Marked.contexts)
    assert opt.steps == 0


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_devices(kind: str, is_there: bool, device: str):
    """A backward pass on a device has a thread of its own, and the loss may be on the CPU."""
    run = lambda o, y: F.cross_entropy(o, y.to(o.device)) if is_there else F.cross_entropy(o.cpu(), y)
    found = curvature_of(OPTIMIZERS[kind], rows, run, device=device)
    expected = curvature_of(OPTIMIZERS[kind], rows, own_losses(F.cross_entropy))
    # eigenvectors may have other signs on CUDA: there what inverses are made from
    left_out = "['inverse']" if device.startswith("cuda") else "nothing"
    own = lambda found: {k: x.cpu() for k, x in found.items() if left_out not in k}
    torch.testing.assert_close(own(found), own(expected), rtol=1e-4, atol=1e-5)


# -- several backward passes before a step

BATCH, ENTROPY = 12, F.cross_entropy
parts = lambda k: [slice(n, n + BATCH // k) for n in range(0, BATCH, BATCH // k)]
over = lambda k: lambda o, y: ENTROPY(o, y) / k


def after(kind: str, losses: Sequence[tuple[Loss, slice]], scale: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """The running curvature after a step of some losses, each of these samples."""
    with seeded(3):
        model, x, y = rows(BATCH)
    model, x = model.double(), x.double()
    opt = OPTIMIZERS[kind](model, inject=empirical(), damping=0.1, **options)
    opt.grad_scale = None if scale == 1 else torch.tensor(scale)
    for loss, some in losses:
        (loss(model(x[some]), y[some]) * scale).backward()
    opt.step()
    return measured(opt)


@pytest.mark.parametrize("scale", [1.0, 256.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_means_over_parts_are_the_mean_over_the_batch(kind: str, scale: float) -> None:
    """Parts of several sizes, too."""
    whole = after(kind, [(ENTROPY, slice(BATCH))])
    for some in (parts(3), [slice(5), slice(5, BATCH)]):
        torch.testing.assert_close(after(kind, [(ENTROPY, part) for part in some], scale), whole)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sums_over_parts_are_the_sum_over_the_batch(kind: str, logged: pytest.LogCaptureFixture) -> None:
    adds = nn.CrossEntropyLoss(reduction="sum")
    whole = after(kind, [(adds, slice(BATCH))], loss=adds)
    torch.testing.assert_close(after(kind, [(adds, part) for part in parts(3)], loss=adds), whole)
    assert not logged.records


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_that_are_divided_by_their_number(kind: str, logged: pytest.LogCaptureFixture) -> None:
    """A documented limit, which the log says once: the gradients of samples are too small by this number."""
    divided = after(kind, [(over(3), part) for part in parts(3)])
    assert ["k^2 times too small" in record.getMessage() for record in logged.records] == [True]
    torch.testing.assert_close(divided, after(kind, [(over(3), slice(BATCH))]))
