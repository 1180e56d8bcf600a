"""Jacobians of all outputs, and diagonals of each sample's own matrix, against autograd and brute force."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvature
from support.cases.case import Raw, floats, indices, seeded
from support.comparisons import matches
from support.moments import within_five_errors
from support.oracles.brute_force import Matrices, jacobian

CNN = [nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten()]
# samples along axis 1; and what vmap cannot follow
recurrent = lambda: Raw(lambda m, x: m.head(m.rnn(x)[0][-1]), rnn=nn.RNN(2, 3), head=nn.Linear(3, 3))
branch = lambda m, x: m.first(x).tanh() * (2 if float(x.detach().abs().sum()) else 1)
attention = lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), floats(3), 0),
    "scalar": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Flatten(0)), floats(3), 0),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Softplus(), nn.Linear(4, 2)), floats(3), 0),
    "convolution": (lambda: nn.Sequential(*CNN), floats(2, 3, 3), 0),
    "embedding": (lambda: nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(6, 3)), indices(4, 2), 0),
    "branch": (lambda: Raw(branch, first=nn.Linear(3, 3)), floats(3), 0),
    "recurrent": (recurrent, lambda count: floats(2, 2)(count).transpose(0, 1), (1, 0, 0)),
    "attention": (lambda: nn.Sequential(attention(), nn.Flatten()), floats(2, 4), 0),
}
LOSSES = {
    "entropy": (nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0])), True),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), True),
    "squares": (nn.MSELoss(), False),
    "callable": (lambda output, target: (output - target).exp().mean() + output.prod(1).mean(), False),
}
CASES = [("linear", loss) for loss in LOSSES] + [(name, "squares") for name in list(MODELS)[1:-1]]


def task(name: str, loss: str = "squares", count: int = 4):
    make, data, dim = MODELS[name]
    chosen, is_class = LOSSES[loss]
    with seeded(0):
        model, x = make().double(), data(count)
        x = x.double() if x.is_floating_point() else x
        shape = model(x).shape[1:]
        y = indices(3)(count) if is_class else floats(*shape)(count).double()
    return model, chosen.double() if isinstance(chosen, nn.Module) else chosen, x, y, dim


def alone(name: str, matrix: str, model: nn.Module, loss, x: Tensor, y: Tensor) -> Tensor:
    """(N, P) of brute force, sample by sample."""
    if name == "recurrent":
        inner, x = model, x.transpose(0, 1)
        model = Raw(lambda m, x: m.inner(x.transpose(0, 1)), inner=inner)
    samples = [(x[n : n + 1], y[n : n + 1]) for n in range(len(y))]
    return torch.stack([getattr(Matrices(model, loss, sample), matrix).diagonal() for sample in samples])


def flat(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([rows.flatten(1) for rows in found.values()], 1)


@pytest.mark.parametrize("name, loss", CASES)
def test_against_each_sample_alone(name: str, loss: str):
    model, loss, x, y, dim = task(name, loss)
    of = model, loss, x, y
    found = curvature.per_sample_fisher_diagonals(*of, sample_dim=dim)
    assert {key: (4, *p.shape) for key, p in model.named_parameters()} == {k: t.shape for k, t in found.items()}
    matches(flat(found), alone(name, "gauss_newton", *of))
    found = curvature.per_sample_fisher_diagonals(*of, curvature.empirical(), sample_dim=dim)
    matches(flat(found), alone(name, "empirical_fisher", *of))
    found = curvature.per_sample_hessian_diagonals(*of, sample_dim=dim)
    assert list(found) == [key for key, _ in model.named_parameters()]
    matches(flat(found), alone(name, "hessian", *of))


def test_the_batch_and_random_vectors():
    """With one term per sample the rows average to the diagonal of the batch; random vectors have the mean of a row."""
    model, _, x, y, _ = task("linear", "sum")
    loss = nn.CrossEntropyLoss()
    exact = curvature.per_sample_fisher_diagonals(model, loss, x, y)
    for name, whole in curvature.fisher_diagonal(model, loss, (x, y)).items():
        matches(exact[name].mean(0), whole)
    many = x[:1].expand(2000, -1), y[:1].expand(2000)
    found = curvature.per_sample_fisher_diagonals(model, loss, *many, curvature.sampled())
    within_five_errors(found["2.weight"].flatten(1)[:, :, None], exact["2.weight"][0].flatten()[:, None])


def test_some_parameters_half_precision_and_no_samples():
    model, loss, x, y, _ = task("linear")
    for function in (curvature.per_sample_fisher_diagonals, curvature.per_sample_hessian_diagonals):
        whole = function(model, loss, x, y)
        (found,) = function(model, loss, x, y, parameters=["2.weight"]).values()
        matches(found, whole["2.weight"])
        none = function(model, loss, x[:0], y[:0])
        assert {key: t.shape for key, t in none.items()} == {key: (0, *t.shape[1:]) for key, t in whole.items()}
    small = model.bfloat16(), loss, x.bfloat16(), y.bfloat16()
    found = curvature.per_sample_fisher_diagonals(*small)
    assert {t.dtype for t in found.values()} == {torch.float32}


def test_what_is_refused():
    model, loss, x, y, _ = task("linear")
    for function in (curvature.per_sample_fisher_diagonals, curvature.per_sample_hessian_diagonals):
        with pytest.raises(ValueError, match="1"):
            function(nn.Sequential(model, nn.BatchNorm1d(3)).double(), loss, x, y)
    with pytest.raises(ValueError, match="1: BatchNorm in training mode"):
        curvature.per_sample_jacobians(nn.Sequential(model, nn.BatchNorm1d(3)).double(), x)
    with pytest.raises(TypeError, match="inject"):
        curvature.per_sample_fisher_diagonals(model, loss, x, y, "exact")
    noisy = nn.Sequential(model, nn.Dropout())
    with pytest.raises(ValueError, match="random numbers"):
        curvature.per_sample_hessian_diagonals(noisy, loss, x, y)
    with pytest.raises(ValueError, match="random numbers"):
        curvature.per_sample_jacobians(noisy, x, create_graph=True)


@pytest.mark.parametrize("name", MODELS)
def test_jacobians_with_a_graph(name: str):
    """The same values; their derivatives in inputs and parameters are those of autograd's Jacobian of a sample."""
    model, _, x, _, dim = task(name)
    axis = dim[0] if isinstance(dim, tuple) else dim
    x = x.requires_grad_(x.is_floating_point())
    found = curvature.per_sample_jacobians(model, x, sample_dim=dim, create_graph=True)
    plain = curvature.per_sample_jacobians(model, x, sample_dim=dim)
    assert not any(rows.requires_grad for rows in plain.values())
    torch.testing.assert_close(plain, {key: rows.detach() for key, rows in found.items()})
    weights = {key: torch.randn(rows.shape, dtype=rows.dtype) for key, rows in found.items()}
    parameters = dict(model.named_parameters())
    total, expected = sum((rows * weights[key]).sum() for key, rows in found.items()), 0
    for n in range(4):
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
            output = model(x.narrow(axis, n, 1)).flatten()
        for j, entry in enumerate(output):
            grads = torch.autograd.grad(entry, list(parameters.values()), create_graph=True)
            for (key, rows), g in zip(found.items(), grads, strict=True):
                matches(rows[n].reshape(len(output), *g.shape)[j].detach(), g.detach())
                expected = expected + (weights[key][n].reshape(len(output), *g.shape)[j] * g).sum()
    leaves = [*([x] if x.requires_grad else []), *parameters.values()]
    each = [torch.autograd.grad(t, leaves, materialize_grads=True, retain_graph=True) for t in (total, expected)]
    for ours, theirs in zip(*each, strict=True):
        matches(ours, theirs)


def test_jacobians_of_no_samples():
    model, _, x, _, _ = task("convolution")
    found = curvature.per_sample_jacobians(model, x[:0])
    assert {key: t.shape for key, t in found.items()} == {k: (0, 2, *p.shape) for k, p in model.named_parameters()}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_several_rows_for_each_sample(count: int, last: bool, create_graph: bool, device: str) -> None:
    """(N, 5, 3) to (N * 5, 2), or (2, N * 5)."""
    torch.manual_seed(0)
    forward = lambda m, x: m.linear(x).flatten(0, 1).T if last else m.linear(x).flatten(0, 1)
    model = Raw(forward, linear=nn.Linear(3, 2)).double().to(device)
    x = torch.randn(count, 5, 3, dtype=torch.float64).to(device)
    found = curvature.per_sample_jacobians(model, x, sample_dim=(0, int(last), 0), create_graph=create_graph)
    for n in range(count):
        _, expected = jacobian(model, x[n : n + 1])  # by entry of the output
        shape = (2, 5) if last else (5, 2)
        for key, own in zip(found, expected.split([6, 2], 1), strict=True):
            rows = own.reshape(*shape, *model.get_parameter(key).shape)
            matches(found[key][n], rows.movedim(1, 0) if last else rows)


def test_frozen_and_unused_parameters(device: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    model[0].weight.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(2, device=device))
    found = curvature.per_sample_jacobians(model, torch.randn(5, 3).to(device))
    assert {name: tuple(rows.shape) for name, rows in found.items()} == {
        "spare": (5, 2, 2),
        "0.bias": (5, 2, 4),
        "2.weight": (5, 2, 2, 4),
        "2.bias": (5, 2, 2),
    }
    assert not found["spare"].any()


WEIGHT = torch.tensor([0.5, 1.0, 2.0]).double()
# the same loss of (N, ...) and of (..., N)
TURNED = {
    "entropy": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), nn.BCEWithLogitsLoss(pos_weight=WEIGHT[:, None])),
    "weight": (nn.BCEWithLogitsLoss(weight=WEIGHT), nn.BCEWithLogitsLoss(weight=WEIGHT[:, None])),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("builder", [curvature.per_sample_fisher_diagonals, curvature.per_sample_hessian_diagonals])
def test_losses_whose_axes_mean_something_with_the_samples_last(name: str, builder) -> None:
    """As with the samples first: their axes must not be permuted, as those of squared errors may."""
    of_classes = name == "entropy"
    with seeded(0):
        model, x = nn.Linear(5, 3).double(), torch.randn((4, 2, 5) if of_classes else (4, 5)).double()
        y = torch.randint(3, (4, 2)) if of_classes else torch.randint(2, (4, 3)).double()
    first, last = ((0, 2, 1), (1, 2, 0)) if of_classes else ((0, 1), (1, 0))
    turned = lambda order: Raw(lambda m, x: m.layer(x).permute(*order), layer=model)
    loss, other = TURNED[name]
    want = builder(turned(first), loss, x, y)
    found = builder(turned(last), other, x, y.T, sample_dim=(0, len(last) - 1, 1))
    matches(flat(found), flat(want))
