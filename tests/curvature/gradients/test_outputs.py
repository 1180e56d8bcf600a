"""Outputs that are no tensor: a loss that takes them has exact per-sample gradients; matrices say what to return."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributions as D

import curvature
from support.cases.case import Raw, seeded
from support.combinations import in_pairs, in_turn, member
from support.oracles import brute_force
from support.rows import all_of_rows, rows_of, same

pytestmark = pytest.mark.fast
N = 5
Wrap = Callable[[Tensor, Tensor], Any]


@dataclasses.dataclass
class Gaussian:
    mean: Tensor
    std: Tensor


class Pair(NamedTuple):
    mean: Tensor
    std: Tensor


class Bare:
    """As some libraries return: neither a dataclass nor a container."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean, self.std = mean, std


@dataclasses.dataclass
class WithLogits:
    logits: Tensor
    std: Tensor


def gaussian(output: Any, y: Tensor) -> Tensor:
    return (((output.mean - y) / output.std).square() / 2).mean() + output.std.log().mean()


def likelihood(output: Any, y: Tensor) -> Tensor:
    return -output.log_prob(y).mean()


OUTPUTS: dict[str, tuple[Wrap, Callable[[Any, Tensor], Tensor]]] = {
    "normal": (D.Normal, likelihood),
    "independent": (lambda a, b: D.Independent(D.Normal(a, b), 1), likelihood),
    "multivariate": (lambda a, b: D.MultivariateNormal(a, torch.diag_embed(b)), likelihood),
    "mixture": (
        lambda a, b: D.MixtureSameFamily(D.Categorical(logits=b), D.Normal(a, b)),
        lambda output, y: likelihood(output, y[:, 0]),
    ),
    "categorical": (lambda a, b: D.Categorical(logits=a * b), lambda o, y: likelihood(o, (y[:, 0] > 0).long())),
    "bernoulli": (lambda a, b: D.Bernoulli(logits=a * b), lambda output, y: likelihood(output, (y > 0).to(y))),
    "divergence": (
        lambda a, b: D.Categorical(logits=a * b),
        lambda output, y: D.kl_divergence(output, D.Categorical(logits=y)).mean(),
    ),
    "dataclass": (Gaussian, gaussian),
    "named tuple": (Pair, gaussian),
    "object": (Bare, gaussian),
    "dict": (lambda a, b: {"mean": a, "std": b}, lambda output, y: gaussian(Gaussian(**output), y)),
    "list of sizes": (lambda a, b: [a, b[:, :1]], lambda output, y: gaussian(Gaussian(*output), y)),
    "nested": (lambda a, b: {"of": [a, (b, None, 3)]}, lambda o, y: gaussian(Gaussian(o["of"][0], o["of"][1][0]), y)),
    "more than logits": (WithLogits, lambda output, y: gaussian(Gaussian(output.logits, output.std), y)),
    "one of each sample": (
        lambda a, b: [row.repeat(1 + int(row[0] > 0)) for row in a * b],
        lambda output, y: torch.stack([(row.sum() - t[0]).square() for row, t in zip(output, y, strict=True)]).mean(),
    ),
}  # fmt: skip


def problem(name: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    wrap, loss = OUTPUTS[name]
    with seeded(0):
        forward = lambda m, x: wrap(m.a(x), F.softplus(m.b(x)))
        model = Raw(forward, a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double()
        return model, loss, torch.randn(N, 3).double(), torch.randn(N, 2).double()


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_loss_of_such_an_output_has_rows_and_all_that_is_made_of_them(name: str) -> None:
    model, loss, x, y = problem(name)
    expected = rows_of(model, [loss(model(x[n : n + 1]), y[n : n + 1]) for n in range(N)])
    all_of_rows(model, loss, x, y, expected)
    same(curvature.per_sample_gradients(model, loss, x, y, chunk=3), expected)
    curvature.check_gradients(model, loss, x, y)


def test_the_check_goes_along_the_axis_of_the_samples() -> None:
    """Along the other one they meet."""
    with seeded(0):
        model, x, y = nn.Linear(3, 2).double(), torch.randn(4, N, 3).double(), torch.randn(4, N, 2).double()
    added = Raw(lambda m, x: m.inner(x).cumsum(0), inner=model)
    curvature.check_gradients(added, nn.MSELoss(), x, y, sample_dim=1)
    with pytest.raises(ValueError, match="changes with the other samples"):
        curvature.check_gradients(added, nn.MSELoss(), x, y)


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "more than logits"])
def test_matrices_say_what_was_found_and_what_to_return(name: str) -> None:
    model, loss, x, y = problem(name)
    said = rf"found a {type(model(x)).__name__}.*; return all .* as one tensor"
    for build in (curvature.fisher_diagonal, curvature.kfac, curvature.gauss_newton):
        with member(build.__name__), pytest.raises(TypeError, match=said):
            found = build(model, loss, (x, y))
            found @ torch.ones(found.shape[1], dtype=torch.float64)


# of the outputs above those whose samples nobody can tell apart
OPAQUE = {"normal", "independent", "multivariate", "mixture", "categorical", "bernoulli", "divergence", "object"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_rows_are_of_the_pass_of_the_same_seed(name: str) -> None:
    """Or are refused, where nobody can tell the samples of the output apart."""
    inner, loss, x, y = problem(name)
    model = Raw(lambda m, x: m.inner(F.dropout(x, 0.5)), inner=inner).double()
    if name in OPAQUE:
        said = r"draws random numbers.*(Normal|Independent|Multi|Mixture|Cat|Bern|Bare|shape)"
        with pytest.raises(ValueError, match=said):
            curvature.per_sample_gradients(model, loss, x, y)
        return
    for _ in range(2):
        with seeded(3):
            rows = curvature.per_sample_gradients(model, loss, x, y)
        with seeded(3):
            h = F.dropout(x, 0.5)
        same(rows, rows_of(model, [loss(inner(h[n : n + 1]), y[n : n + 1]) for n in range(N)]))


def test_the_log_says_why_samples_may_meet_in_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that the model returns has no axis of samples, and no random numbers are to blame."""
    inner, _, x, y = problem("dataclass")
    model = Raw(lambda m, x, y: {"loss": gaussian(m.inner(x), y)}, inner=inner)
    caplog.set_level(logging.INFO, "curvature")
    curvature.per_sample_gradients(model, lambda output, _: output["loss"], (x, y), y)
    assert "not tried whether samples meet in the loss: its output" in caplog.text
    assert "random numbers" not in caplog.text


SIZES = {
    "a divisor": [2, 4, 2, 6], "all of the batch": [4, 8, 4, 4], "alike": [4, 4, 4, 4], "unlike": [1, 2, 3, 1],
    "none": [0, 2, 4, 2],
}  # fmt: skip


def listed(form: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """As many rows of each sample as its first entry says."""
    return lambda m, x: [form(m.inner(row[1:] * torch.arange(1, 1 + int(row[0]))[:, None].to(x))) for row in x]


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensors": (lambda t: t, lambda o: o),
    "dicts": (lambda t: {"boxes": t, "scores": t[:, 0]}, lambda o: o["boxes"] * o["scores"][:, None]),
    "tuples": (lambda t: (t, t.square()), lambda o: o[0] - o[1]),
}


def of_sizes(sizes: str, form: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    make, read = FORMS[form]
    with seeded(4):
        x = torch.cat([torch.tensor(SIZES[sizes])[:, None], torch.randn(4, 3)], 1).double()
        model, y = Raw(listed(make), inner=nn.Linear(3, 2)).double(), torch.randn(4, 2).double()
    one = lambda o, t: (read(o) - t).square().sum()
    return model, lambda output, y: torch.stack([one(o, t) for o, t in zip(output, y, strict=True)]).mean(), x, y


@in_pairs(sizes=SIZES, form=FORMS, chunk=[None, 1, 2, 3, 4])
def test_a_list_with_an_entry_for_each_sample(sizes: str, form: str, chunk: int | None) -> None:
    """Sizes that the number of samples divides are no axis of samples."""
    model, loss, x, y = of_sizes(sizes, form)
    expected = rows_of(model, [loss(model(x[n : n + 1]), y[n : n + 1]) for n in range(4)])
    for _ in range(2):
        same(curvature.per_sample_gradients(model, loss, x, y, chunk=chunk), expected)


@in_turn(sizes=SIZES, form=FORMS)
def test_such_a_list_after_dropout_is_of_the_recorded_pass(sizes: str, form: str) -> None:
    inner, loss, x, y = of_sizes(sizes, form)

    def forward(m: Any, x: Tensor) -> Any:
        return m.inner(torch.cat([x[:, :1], F.dropout(x[:, 1:], 0.5)], 1))

    with seeded(3):
        rows = curvature.per_sample_gradients(Raw(forward, inner=inner).double(), loss, x, y)
    with seeded(3):
        h = torch.cat([x[:, :1], F.dropout(x[:, 1:], 0.5)], 1)
    expected = rows_of(inner, [loss(inner(h[n : n + 1]), y[n : n + 1]) for n in range(4)])
    same(rows, {f"inner.{name}": g for name, g in expected.items()})


@in_turn(sizes=SIZES, form=FORMS)
def test_samples_that_meet_before_such_a_list(sizes: str, form: str) -> None:
    inner, loss, x, y = of_sizes(sizes, form)
    centred = Raw(lambda m, x: m.inner(torch.cat([x[:, :1], x[:, 1:] - x[:, 1:].mean(0)], 1)), inner=inner)
    with pytest.raises(ValueError, match="changes with the other samples"):
        curvature.per_sample_gradients(centred, loss, x, y)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_loss_of_such_a_list_makes_up_that_of_the_batch(sizes: str) -> None:
    """Entries may count by their lengths, but not meet."""
    model, _, x, y = of_sizes(sizes, "tensors")
    targets = lambda output, y: torch.cat([t.expand_as(o) for o, t in zip(output, y, strict=True)])
    loss = lambda output, y: F.mse_loss(torch.cat(output), targets(output, y))
    one = lambda n: torch.cat(model(x[n : n + 1])) - y[n]
    expected = rows_of(model, [one(n).square().sum() / max(1, one(n).numel()) for n in range(4)])
    found = curvature.per_sample_gradients(model, loss, x, y)
    same({k: g.nan_to_num(0.0) for k, g in found.items()}, expected)
    met = lambda output, y: torch.stack([o.sum() for o in output]).var(correction=0) + y.sum()
    with pytest.raises(ValueError, match="of its gradient at the output of a sample is not of that"):
        curvature.per_sample_gradients(model, met, x, y)


def test_as_many_heads_as_samples() -> None:
    """A tuple of two heads, of a batch of two, holds samples along its axis."""
    model, loss, x, y = problem("list of sizes")
    expected = rows_of(model, [loss(model(x[n : n + 1]), y[n : n + 1]) for n in range(2)])
    same(curvature.per_sample_gradients(model, loss, x[:2], y[:2]), expected)
    centred = Raw(lambda m, x: m.inner(x - x.mean(0)), inner=model)
    with pytest.raises(ValueError, match="changes with the other samples"):
        curvature.per_sample_gradients(centred, loss, x[:2], y[:2])
    dropped = Raw(lambda m, x: m.inner(F.dropout(x, 0.5)), inner=model).double()
    with seeded(3):
        rows = curvature.per_sample_gradients(dropped, loss, x[:2], y[:2])
    with seeded(3):
        h = F.dropout(x[:2], 0.5)
    expected = rows_of(model, [loss(model(h[n : n + 1]), y[n : n + 1]) for n in range(2)])
    same(rows, {f"inner.{name}": g for name, g in expected.items()})


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("has_rules", [True, False])
def test_outputs_that_are_as_wide_as_the_batch(has_rules: bool):
    """A sample alone has fewer entries, to which the vector of one in its batch could be broadcast."""
    mapped = torch.vmap(lambda h, w: (h * w.exp()).sum(), (0, None))
    numbers = (lambda m, x: m.l(x)[:, 0]) if has_rules else (lambda m, x: mapped(m.l(x), m.w))
    w = nn.Parameter(torch.ones(1), requires_grad=not has_rules)
    model, x, y = Raw(lambda m, x: numbers(m, x).diag(), l=nn.Linear(3, 1), w=w), torch.randn(N, 3), torch.randn(N, N)
    G, _ = brute_force.of_the_batch(model, nn.MSELoss(), x, y)
    found = curvature.fisher_diagonal(model, nn.MSELoss(), x, y)
    torch.testing.assert_close(torch.cat([d.flatten() for d in found.values()]), G.diagonal())
    torch.testing.assert_close(curvature.gauss_newton(model, nn.MSELoss(), x, y).to_dense(), G)


@pytest.mark.usefixtures("double")
def test_outputs_that_end_with_the_longest_sequence():
    """With a parameter that no rule explains, and a sample alone that is shorter."""
    mapped = torch.vmap(lambda h, w: (h * w.exp()).tanh(), (0, None))
    model = Raw(lambda m, x: mapped(m.l(x[:, x.any(-1).any(0)]), m.w), l=nn.Linear(3, 2), w=nn.Parameter(torch.ones(2)))
    x, y = torch.randn(N, 4, 3), torch.randn(N, 3, 2)
    for n, length in enumerate((2, 3, 1, 2, 1)):
        x[n, length:] = 0
    G, _ = brute_force.of_the_batch(model, nn.MSELoss(), x, y)
    torch.testing.assert_close(curvature.gauss_newton(model, nn.MSELoss(), x, y).to_dense(), G)
