"""Where the samples are in the output of every use; checks of plans in half precision."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.gradients import per_sample
from curvature.gradients.plans import find_layouts
from curvature.layers import Layout
from support.cases.case import Raw
from support.plans import plans_of

pytestmark = pytest.mark.fast

N = 4


class Folding(nn.Module):
    """A sequence-first layer, one with (time, sample) flattened, one with (sample, time), and a shared table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N, N)  # as many rows and columns as samples, to be mistaken for them
        self.first, self.minor, self.major = (nn.Linear(N, N) for _ in range(3))

    def forward(self, x):
        h = x + self.table(torch.arange(N, device=x.device))
        h = self.first(h.transpose(0, 1)).tanh()  # (T, N, d)
        h = self.minor(h.reshape(-1, N)).tanh().view(N, -1, N).transpose(0, 1)
        return self.major(h.reshape(-1, N)).view(-1, N, N)


@pytest.mark.parametrize("count", [N, 3])
def test_layouts_are_found_among_equal_sizes(count, device):
    model = Folding().double().to(device)
    with curvature.capture(model) as tape:
        output = model(torch.randn(count, N, N, dtype=torch.float64, device=device))
    layouts = curvature.sample_layouts(tape, output)
    found = {next(iter(use.names)).split(".")[0]: k for use, k in zip(tape.uses, layouts, strict=True)}
    assert found["first"] == (1, 1, count, 1)
    assert found["minor"] == (0, N, count, 1)
    assert found["major"] == (0, 1, count, N)
    assert layouts[0] is None and tape.uses[0].names == {"table.weight"}  # shared by the samples


def find_layout(b: Tensor, weighted: Tensor, weights: Tensor) -> tuple[list[Layout], bool]:
    """Of a single use."""
    (layouts,), (certain,) = find_layouts([b], [weighted], weights)
    return layouts, certain


def test_one_entry_in_many_makes_a_layout_wrong():
    """Of which some are looked at first."""
    b, weights = torch.randn(3, 100_000).double(), torch.tensor([0.5, 0.9, 1.4]).double()
    weighted = weights[:, None] * b
    assert find_layout(b, weighted, weights) == ([(0, 1, 3, 1)], True)
    weighted[1, 54_321] += 1
    assert find_layout(b, weighted, weights) == ([], True)


def test_all_entries_belong_to_a_single_sample():
    b, weights = torch.randn(4, 1, 6).double(), torch.tensor([0.7]).double()
    assert find_layout(b, 0.7 * b, weights) == ([(1, 1, 1, 1), (0, 1, 1, 4), (2, 1, 1, 6)], True)
    assert not find_layout(0 * b, 0 * b, weights)[1]  # nothing was seen


def test_samples_that_meet_have_no_layout():
    weights = torch.tensor([0.5, 0.9, 1.4]).double()
    b = torch.randn(3, 2).double()
    mixing = torch.randn(3, 3).double()
    assert find_layout(b, weights[:, None] * b, weights) == ([(0, 1, 3, 1)], True)
    assert find_layout(mixing @ b, mixing @ (weights[:, None] * b), weights)[0] == []


def test_weak_backprops_have_their_own_digits():
    """Below the noise of others all guesses fit; of these, the one counts that fits by its own rounding."""
    weights = torch.tensor([0.5, 0.9, 1.4])
    b, noise, strong = torch.randn(3, 3), torch.randn(3, 3), torch.full((3, 1), 1e8)
    for weighted, dim, is_certain in [(weights[:, None] * b, 0, True), (b * weights, 1, True), (noise, 0, False)]:
        found = find_layouts([b, strong], [weighted, weights[:, None] * strong], weights)
        assert found == ([[(dim, 1, 3, 1)], [(0, 1, 3, 1)]], [is_certain, True])


def test_a_deep_narrow_network_is_learnt_once(device):
    """As wide as the batch, with gradients that vanish."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 1)).to(device)
    x, y = torch.randn(8, 8, device=device), torch.randn(8, 1, device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    curvature.per_sample_norms(model, nn.MSELoss(), x, y)
    assert len(plans_of(model)) == 1


def test_two_kinds_of_passes_alternate(device, monkeypatch):
    """Matrices run attention in another form than per-sample quantities: each is learnt once."""
    learnt = []
    for module in (per_sample, curvature.gradients):
        own = module.learn
        monkeypatch.setattr(module, "learn", lambda *a, own=own, **k: (learnt.append(k), own(*a, **k))[1])
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).to(device)
    x, y = torch.randn(3, 5, 4, device=device), torch.randn(3, 5, 4, device=device)
    for _ in range(3):
        curvature.per_sample_norms(model, nn.MSELoss(), x, y)
        curvature.fisher_diagonal(model, nn.MSELoss(), (x, y))
    # for heads of two numbers the CPU alone has a fused kernel
    assert len(learnt) == (2 if device == "cpu" else 1)


def test_plans_of_ever_other_passes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("curvature.gradients.plans.MOST_KINDS", 2)
    model, x = nn.Linear(3, 3).double(), torch.randn(4, 3).double()
    for depth in range(1, 5):
        values = x
        for _ in range(depth):
            values = model(values)
        curvature.Jacobian.of(values.sum(1), model)
        assert len(plans_of(model)) == min(depth, 2)


def test_what_stands_in_for_parameters_is_not_the_models_own():
    """`torch.func.functional_call` inside: gradients of these are none of the model's."""
    model = nn.Linear(3, 2)
    others = {name: nn.Parameter(torch.randn_like(p)) for name, p in model.named_parameters()}
    with curvature.capture(model) as tape:
        torch.func.functional_call(model, others, (torch.randn(4, 3),))
        assert not tape.uses
        model(torch.randn(4, 3))
    assert [use.shape for use in tape.uses] == [(4, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_sample_that_outweighs_all_others_hides_nothing(dtype):
    """As where the gradient of a norm over two features vanishes, but for the sample whose features are near."""
    weights = torch.tensor([0.5, 0.9, 1.4], dtype=dtype)
    right = Layout(0, 5, 3, 1)
    b = torch.randn(15, 4, generator=torch.Generator().manual_seed(0)).to(dtype) * 1e-4
    b[0] = 10
    layouts, certain = find_layout(b, b * weights.repeat(5)[:, None], weights)
    assert layouts == [right] and not certain


def sorted_words(m, x):
    """Words with a table of positions that all samples share, put in an order that the data decide."""
    h = m.last(m.words(x) + 2 * m.positions)
    order = h[..., 0].detach().argsort(1)
    return h.gather(1, order[..., None].expand_as(h)).mean(1) + (0 * torch.rand(()) if m.is_noisy else 0)


def test_what_one_sample_beside_its_copy_has_told_is_not_forgotten():
    """A pass that draws random numbers has no copy to be compared with: it confirms the plan that is known."""
    model = Raw(sorted_words, words=nn.Embedding(5, 4), last=nn.Linear(4, 2), positions=(3, 4))
    data = [(torch.randint(5, (1, 3)), torch.randn(1, 2))]
    model.is_noisy = False
    curvature.kfac(model, nn.MSELoss(), data)
    known = [plan.layouts for plan in plans_of(model)]
    assert all([] in layouts for layouts in known)  # the table has no axis of samples
    model.is_noisy = True
    curvature.kfac(model, nn.MSELoss(), data)
    assert [plan.layouts for plan in plans_of(model)] == known


class Hidden(torch.autograd.Function):
    """A product with a weight that no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,), (x, w) = gradients, ctx.saved_tensors
        return g @ w.T, x.T @ g


def sorted_samples() -> nn.Module:
    """Samples change places on the way, as where they go to experts."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.plain(x) + m.head(m.inner(x[order]).tanh())[order.argsort()]

    return Raw(run, plain=nn.Linear(4, 3), inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


def two_change_places() -> nn.Module:
    """All samples but the last two stay where they are; every parameter sees these exchanged."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        order[-2:] = order[-2:].flip(0)
        return m.head(m.inner(x[order]).tanh())[order]

    return Raw(run, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


def hidden_weight(scale: float) -> nn.Module:
    """Its gradient is this share of the others, about."""
    run = lambda m, x: m.plain(x) + scale * Hidden.apply(x, m.w)
    return Raw(run, plain=nn.Linear(4, 3), w=nn.Parameter(torch.randn(4, 3)))


def is_right(make: Any, precision: Any, seed: int, count: int = 5) -> bool:
    """Whether the rows of all parameters are those of double precision, but for rounding."""
    torch.manual_seed(seed)
    is_autocast, loss = precision == "autocast", nn.CrossEntropyLoss()
    model = make().to(torch.float32 if is_autocast else precision)
    x, y = torch.randn(count, 4).to(next(model.parameters()).dtype), torch.randint(3, (count,))
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", dtype=torch.bfloat16) if is_autocast else nullcontext():
        found = curvature.per_sample_gradients(model, loss, x, y)
    for name, p in exact.named_parameters():
        rows = [torch.autograd.grad(loss(exact(x[n : n + 1].double()), y[n : n + 1]), p)[0] for n in range(count)]
        expected = torch.stack(rows)
        if (found[name].double() - expected).norm() > 0.05 * expected.norm():
            return False
    return True


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (sorted_samples, torch.bfloat16),
        (sorted_samples, torch.float16),
        (sorted_samples, "autocast"),
        (partial(hidden_weight, 0.1), torch.bfloat16),  # autocast does not see it
        (partial(hidden_weight, 0.03), torch.float16),
        (partial(hidden_weight, 0.005), torch.bfloat16),
        (partial(hidden_weight, 1e-6), torch.float32),
    ],
)
def test_wrong_terms_are_not_taken_for_rounding(make: Any, precision: Any) -> None:
    assert all(is_right(make, precision, seed) for seed in range(6))


@pytest.mark.parametrize("count", [2, 9, 40, 150])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, "autocast"])
def test_two_samples_that_change_places_among_many(precision: Any, count: int) -> None:
    """Theirs is a small part of what all samples send back, and their weights may be alike."""
    assert all(is_right(two_change_places, precision, seed, count) for seed in range(2))
