"""`empirical()` takes each sample's own gradient, whatever its share in the loss of the batch.

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
from support.combinations import in_pairs
from support.training import natural_matrix

pytestmark = pytest.mark.fast

N, T, C = 6, 5, 3
OPTIMIZERS = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "NaturalGradient": NaturalGradient,
}
W = torch.tensor([0.2, 1.0, 3.0]).double()
EACH = torch.tensor([0.1, 2.0, 1.0, 0.5, 0.0, 3.0]).double()
by_weights = lambda o, y: (W[y] * F.cross_entropy(o, y, reduction="none")).sum() / W[y].sum()
shifted = lambda o, y: F.cross_entropy(*flat(o[:, :-1], y[:, :-1]), ignore_index=-100)
smoothed = lambda o, y: F.cross_entropy(*flat(o, y), label_smoothing=0.1)
simclr = lambda o, y: -(o[: N // 2] * o[N // 2 :]).sum(1).mean()


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


def zeros() -> tuple[nn.Module, Tensor, Tensor]:
    """The last layer lets no gradient through, which would tell where the samples are."""
    model, x, y = words()
    nn.init.zeros_(model.get_submodule("out").weight)
    return model, x, y


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
counted = lambda y: (y != -100).to(W)


def over_tokens(o: Tensor, y: Tensor) -> Tensor:
    """As written by hand: the mean over tokens that are no padding."""
    terms = F.cross_entropy(*flat(o, y), reduction="none")
    return (terms * counted(y).flatten()).sum() / counted(y).sum()


Loss = Callable[[Tensor, Tensor], Tensor]
# Losses that tell the shares of their samples: the batch, the loss of the loop.
KNOWN: dict[str, tuple[Callable[[], Any], Loss]] = {
    "mean": (rows, F.cross_entropy),
    "half a mean": (rows, lambda o, y: F.cross_entropy(o, y) / 2),
    "class weights": (rows, lambda o, y: F.cross_entropy(o, y, weight=W)),
    "twice with class weights": (rows, lambda o, y: 2 * F.cross_entropy(o, y, weight=W)),
    "class weights by hand": (rows, by_weights),
    "ignored samples": (padded, F.cross_entropy),
    "ignored samples, weights": (padded, lambda o, y: F.cross_entropy(o, y, weight=W)),
    "log-softmax": (rows, lambda o, y: F.nll_loss(o.log_softmax(1), y, weight=W)),
    "temperature": (padded, lambda o, y: F.cross_entropy(o / 3, y)),
    "tokens": (words, lambda o, y: F.cross_entropy(*flat(o, y))),
    "tokens, classes second": (words, lambda o, y: F.cross_entropy(o.transpose(1, 2), y)),
    "tokens, shifted": (words, shifted),
    "tokens, zeros": (zeros, lambda o, y: F.cross_entropy(*flat(o, y))),
    "tokens, weights": (words, lambda o, y: F.cross_entropy(*flat(o, y), weight=W)),
    "tokens by hand": (words, over_tokens),
    "tokens, a sum over their number": (
        words, lambda o, y: F.cross_entropy(*flat(o, y), reduction="sum") / counted(y).sum(),
    ),
    "pixels": (pixels, F.cross_entropy),
    "squares": (values, F.mse_loss),
    "squares by hand": (values, lambda o, y: (o - y).square().sum(1).mean()),
    "a penalty": (values, lambda o, y: F.mse_loss(o, y) + 0.1 * W.square().sum()),
    "two terms": (values, lambda o, y: F.mse_loss(o, y) + 0.1 * o.square().mean()),
    "entropy of probabilities": (rows, lambda o, y: F.cross_entropy(o, F.one_hot(y, C).to(o) * 0.8 + 0.2 / C)),
    "Poisson": (values, lambda o, y: F.poisson_nll_loss(o, y.exp())),
}  # fmt: skip


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


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_shares_that_the_loss_tells(kind: str, name: str, logged: pytest.LogCaptureFixture):
    make, loss = KNOWN[name]
    found = curvature_of(OPTIMIZERS[kind], make, loss)
    assert not logged.records
    expected = curvature_of(OPTIMIZERS[kind], make, own_losses(loss))
    torch.testing.assert_close(found, expected)


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


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sums(kind: str, name: str, logged: pytest.LogCaptureFixture):
    """A sum that nobody has named. `NaturalGradient` has the matrix of the sum, the others that of one sample."""
    make, loss, own = SUMS[name]
    found = curvature_of(OPTIMIZERS[kind], make, loss)
    assert not logged.records
    # a mean of losses that are sqrt(N) times as large has N times the matrix
    times = N**0.5 if kind == "NaturalGradient" else 1.0
    expected = curvature_of(OPTIMIZERS[kind], make, own_losses(lambda o, y: times * own(o, y)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_scaled_gradients(kind: str):
    """A scaler's factor is not the loss's own."""
    for name in ("class weights", "tokens by hand", "squares"):
        make, loss = KNOWN[name]
        named = {"loss": nn.CrossEntropyLoss(weight=None if make is words else W)} if name != "squares" else {}
        found = curvature_of(OPTIMIZERS[kind], make, loss, scale=1024.0, **named)
        expected = curvature_of(OPTIMIZERS[kind], make, own_losses(loss))
        torch.testing.assert_close(found, expected)


# Losses of which a module has to tell what they are.
NAMED: dict[str, tuple[Callable[[], Any], Loss, nn.Module]] = {
    "label smoothing": (words, smoothed, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "a sum of squares over N": (values, lambda o, y: (o - y).square().sum() / (N * C), nn.MSELoss()),
    "half a sum of squares": (values, lambda o, y: (o - y).square().sum() / 2, nn.MSELoss(reduction="sum")),
    "indexed": (rows, lambda o, y: -(o.log_softmax(1)[range(len(o)), y]).mean(), nn.CrossEntropyLoss()),
    "indexed, weights": (
        rows, lambda o, y: -(W[y] * o.log_softmax(1)[range(len(o)), y]).sum() / W[y].sum(), nn.CrossEntropyLoss(W),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["KFAC", "EKFAC"])
def test_shares_that_a_named_loss_tells(kind: str, name: str, logged: pytest.LogCaptureFixture):
    make, loss, named = NAMED[name]
    found = curvature_of(OPTIMIZERS[kind], make, loss, loss=named)
    assert not logged.records
    own = {  # a sum over N of a single sample is still over N
        "a sum of squares over N": lambda o, y: (o - y).square().mean()
    }.get(name, loss)
    torch.testing.assert_close(found, curvature_of(OPTIMIZERS[kind], make, own_losses(own)))


def contrastive(o: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(o)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(o)))


# Losses of which nothing tells how much samples count, or in which they meet.
UNKNOWN: dict[str, tuple[Callable[[], Any], Loss]] = {
    "weights of samples": (values, lambda o, y: (EACH * (o - y).square().mean(1)).sum() / EACH.sum()),
    "masked error": (values, lambda o, y: F.mse_loss(o[EACH > 0.7], y[EACH > 0.7])),
    "class weights over N": (rows, lambda o, y: (W[y] * F.cross_entropy(o, y, reduction="none")).sum() / N),
    "every value with every target": (values, lambda o, y: (o[:, :1] - y[:, 0]).square().mean()),
    "contrastive": (values, contrastive),
    "halves": (values, simclr),
    "root": (values, lambda o, y: F.mse_loss(o, y).sqrt()),
    "logarithm": (values, lambda o, y: F.mse_loss(o, y).log()),
    "norm": (values, lambda o, y: (o - y).norm()),
    "centred": (values, lambda o, y: F.mse_loss(o - o.mean(0), y)),
    "pairs": (values, lambda o, y: (o[:, None] - o[None]).square().mean()),
    "variance": (values, lambda o, y: F.mse_loss(o, y) - o.var(0).mean()),
    "product of losses": (values, lambda o, y: F.mse_loss(o, y) * F.l1_loss(o, y)),
    "ratio of losses": (values, lambda o, y: F.mse_loss(o, y) / o.square().mean()),
}


@in_pairs(name=UNKNOWN, kind=["KFAC", "NaturalGradient"], named=[False, True])
def test_what_nothing_tells_is_logged(kind: str, name: str, named: bool, logged: pytest.LogCaptureFixture):
    make, loss = UNKNOWN[name]
    curvature_of(OPTIMIZERS[kind], make, loss, loss=loss if named else None)
    (record,) = logged.records
    assert "empirical()" in record.message and "mean" in record.message


@pytest.mark.parametrize("name", ["root", "logarithm", "norm", "product of losses", "ratio of losses"])
def test_samples_that_meet_are_logged_whatever_the_named_loss(name: str, logged: pytest.LogCaptureFixture):
    make, loss = UNKNOWN[name]
    curvature_of(KFAC, make, loss, loss=nn.MSELoss())
    assert "samples meet in the loss" in logged.text


def heads() -> tuple[nn.Module, Tensor, Tensor]:
    parts = {"body": nn.Linear(4, 5), "one": nn.Linear(5, C), "other": nn.Linear(5, C)}
    model = Raw(lambda m, x: (m.one(h := m.body(x).tanh()), m.other(h)), **parts)
    return model, torch.randn(N, 4), torch.randint(C, (N,))


SEVERAL: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alike": lambda o, y: F.cross_entropy(o[0], y) + F.mse_loss(o[1], torch.ones_like(o[1])),
    "halves": lambda o, y: F.cross_entropy(o[0], y) / 2 + F.cross_entropy(o[1], y) / 2,
    "weighted": lambda o, y: F.cross_entropy(o[0], y, weight=W) + F.mse_loss(o[1], torch.ones_like(o[1])),
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_outputs(kind: str, name: str, logged: pytest.LogCaptureFixture):
    """One factor for what comes from all of them, or none and a word about it; rows have one for each output."""
    found = curvature_of(OPTIMIZERS[kind], heads, SEVERAL[name])
    is_unknown = name == "weighted" and kind != "NaturalGradient"
    assert ("there are several" in logged.text) == is_unknown
    if not is_unknown:
        own = own_losses(SEVERAL[name])
        torch.testing.assert_close(found, curvature_of(OPTIMIZERS[kind], heads, lambda o, y: own(Pair(*o), y)))


RETURNED: dict[str, Callable[[Any, Tensor], tuple[Tensor, ...]]] = {
    "apart": lambda m, x: (m.one(h := m.body(x).tanh()), m.other(h)),
    "one of another": lambda m, x: (h := m.body(x).tanh(), m.one(h)),
    "a chain": lambda m, x: (m.one(h := (z := m.body(x)).tanh()), h, z),
    "the same": lambda m, x: (z := m.one(m.body(x).tanh()), z),
}


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_outputs_are_as_one_that_holds_them(kind: str, name: str):
    """Each sample has one gradient, the sum of what comes from all of them."""

    def run(is_joined: bool) -> dict[str, Tensor]:
        model, x, y = heads()
        outputs = RETURNED[name]
        sizes = [z.shape[1] for z in outputs(model, x)]
        joined = lambda m, x: torch.cat(outputs(m, x), 1) if is_joined else outputs(m, x)
        loss = lambda o, y: sum(
            k * (z - 1).square().mean() for k, z in enumerate(o.split(sizes, 1) if is_joined else o, 1)
        )
        make = lambda: (Raw(joined, **dict(heads()[0].named_children())), x, y)
        found = curvature_of(OPTIMIZERS[kind], make, loss)
        return {k: value for k, value in found.items() if k != "outputs"}

    with seeded(4):
        found = run(False)
    with seeded(4):
        torch.testing.assert_close(found, run(True))


class Pair(tuple):
    """Two outputs that are cut together."""

    def __new__(cls, *outputs: Tensor) -> Pair:
        return super().__new__(cls, outputs)

    def __len__(self) -> int:
        return len(tuple.__getitem__(self, 0))

    def __getitem__(self, key: Any) -> Any:
        return Pair(*(x[key] for x in tuple(self))) if isinstance(key, slice) else tuple.__getitem__(self, key)


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_batches_before_one_step(kind: str, scale: float):
    """One in which samples count alike, one in which they do not, one without samples that count, and a plain pass."""

    def after(losses: list[Loss]) -> dict[str, Tensor]:
        with seeded(3):
            model, x, y = padded()
        model, x = model.double(), x.double()
        opt = OPTIMIZERS[kind](model, inject=empirical(), damping=0.1)
        opt.grad_scale = torch.tensor(scale)
        for loss in losses:
            (loss(model(x), y) * scale).backward()
        model(x)
        opt.step()
        return measured(opt)

    run: list[Loss] = [lambda o, y: F.cross_entropy(o, y, weight=W), F.cross_entropy]
    torch.testing.assert_close(after(run), after([own_losses(loss) for loss in run]))


@pytest.mark.parametrize("weight", [None, W], ids=["alike", "weighted"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_graph_that_is_used_twice(kind: str, weight: Any, logged: pytest.LogCaptureFixture):
    """As sums of gradients; samples that count differently are told, where there is no row of each."""
    found = []
    for times in (1, 2):
        with seeded(3):
            model, x, y = rows()
        opt = OPTIMIZERS[kind](model.double(), inject=empirical())
        loss = F.cross_entropy(model(x.double()), y, weight=weight) * (2 / times)
        for k in range(times):
            loss.backward(retain_graph=k == 0)
        opt.step()
        found.append({k: x for k, x in measured(opt).items() if k != "outputs"})
    is_unknown = weight is not None and kind != "NaturalGradient"
    assert ("assumed" in logged.text) == is_unknown
    if not is_unknown:
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
@pytest.mark.parametrize("make", [rows, padded, words, pixels])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_devices(kind: str, make: Any, is_there: bool, device: str, logged: pytest.LogCaptureFixture):
    """A backward pass on a device has a thread of its own, and the loss may be on the CPU."""
    loss = lambda o, y: F.cross_entropy(o.flatten(0, -2) if make is words else o, y.flatten(), weight=W.to(o.device))
    if make is pixels:
        loss = lambda o, y: F.cross_entropy(o, y, weight=W.to(o.device))
    found = curvature_of(
        OPTIMIZERS[kind], make, lambda o, y: loss(o, y.to(o.device)) if is_there else loss(o.cpu(), y), device=device
    )
    assert not logged.records
    expected = curvature_of(OPTIMIZERS[kind], make, own_losses(loss))
    # eigenvectors may have other signs on CUDA: there what inverses are made from
    left_out = "['inverse']" if device.startswith("cuda") else "nothing"
    own = lambda found: {k: x.cpu() for k, x in found.items() if left_out not in k}
    torch.testing.assert_close(own(found), own(expected), rtol=1e-4, atol=1e-5)


# -- loops that divide their losses by the number of their backward passes before a step

BATCH, ENTROPY = 12, F.cross_entropy
WHOLE = [(ENTROPY, slice(BATCH))]
parts = lambda k: [slice(n, n + BATCH // k) for n in range(0, BATCH, BATCH // k)]
over = lambda k: lambda o, y: ENTROPY(o, y) / k


def after(kind: str, *steps: Sequence[tuple[Loss, slice]], scale: float = 1.0) -> dict[str, Tensor]:
    """The running curvature after steps of some losses each, of these samples."""
    with seeded(3):
        model, x, y = rows(BATCH)
    model, x = model.double(), x.double()
    opt = OPTIMIZERS[kind](model, inject=empirical(), damping=0.1)
    opt.grad_scale = None if scale == 1 else torch.tensor(scale)
    for losses in steps:
        opt.zero_grad()
        for loss, some in losses:
            (loss(model(x[some]), y[some]) * scale).backward()
        opt.step()
    return measured(opt)


@pytest.mark.parametrize("scale", [1.0, 256.0])
@pytest.mark.parametrize("k", [2, 4, 12])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_means_over_parts_are_the_mean_over_the_batch(kind: str, k: int, scale: float) -> None:
    expected = after(kind, WHOLE)
    for loss in (over(k), lambda o, y: ENTROPY(o, y) * (1 / k)):
        torch.testing.assert_close(after(kind, [(loss, some) for some in parts(k)], scale=scale), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fewer_parts_at_the_end_of_the_data_are_divided_by_as_much(kind: str) -> None:
    four = [(over(4), some) for some in parts(4)]
    for rest in (1, 3):
        expected = after(kind, WHOLE, [(ENTROPY, slice(rest * BATCH // 4))])
        torch.testing.assert_close(after(kind, four, four[:rest]), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_that_are_not_divided_stay_as_they_are(kind: str) -> None:
    torch.testing.assert_close(after(kind, [(ENTROPY, some) for some in parts(3)]), after(kind, WHOLE))


# Losses that are the user's own as they stand.
OWN: dict[str, list[tuple[Loss, slice]]] = {
    "half, once": [(over(2), slice(BATCH))],
    "halves of three": [(over(2), some) for some in parts(3)],
    "unequal": [(over(4), slice(6)), (over(4 / 3), slice(6, 12))],
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_losses_that_are_scaled_otherwise(kind: str, name: str) -> None:
    expected = after(kind, [(own_losses(loss), some) for loss, some in OWN[name]])
    torch.testing.assert_close(after(kind, OWN[name]), expected)


SQUARES = lambda o, y: F.mse_loss(o, F.one_hot(y, C).to(o))


@pytest.mark.parametrize(
    "losses, is_said",
    [
        ([(SQUARES, some) for some in parts(2)], True),
        ([(SQUARES, slice(BATCH))], False),
        ([(ENTROPY, some) for some in parts(2)], False),
        ([(over(2), some) for some in parts(2)], False),
    ],
    ids=["squares", "squares, once", "a cross-entropy", "its halves"],
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_whose_division_nothing_tells_are_logged(
    kind: str, losses: Sequence[tuple[Loss, slice]], is_said: bool, logged: pytest.LogCaptureFixture
) -> None:
    after(kind, losses)
    assert ["divides its losses by their number" in r.getMessage() for r in logged.records] == [True] * is_said


@pytest.mark.parametrize("kind", ["KFAC", "EKFAC"])
def test_two_losses_of_one_output_are_no_two_parts(kind: str) -> None:
    def twice(loss: Loss) -> dict[str, Tensor]:
        with seeded(3):
            (model, x, y), other = rows(), torch.randint(C, (N,))
        opt = OPTIMIZERS[kind](model.double(), inject=empirical(), damping=0.1)
        o = model(x.double())
        loss(o, y).backward(retain_graph=True)
        loss(o, other).backward()
        opt.step()
        return measured(opt)

    torch.testing.assert_close(twice(over(2)), twice(own_losses(over(2))))
