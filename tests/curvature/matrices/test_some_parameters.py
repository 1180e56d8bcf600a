"""`parameters=`: matrices and per-sample quantities of some parameters, against the brute force of all."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import curvature
from support.builders import dense
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles import brute_force as oracle
from support.oracles.brute_force import Matrices
from support.oracles.kronecker import affine_layers, kronecker
from support.rows import all_of_rows, same

LOSS = nn.CrossEntropyLoss()


def read(m: Any, x: Tensor) -> Tensor:
    """A convolution, a table that is read twice, and two linear layers."""
    return m.again(m.scale * torch.tanh(m.body(m.conv(x[:, None]).flatten(1))))


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with seeded(0):
        body = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3, bias=False))
        parts = {"conv": nn.Conv1d(1, 2, 2), "body": body, "scale": nn.Parameter(torch.rand(3))}
        model = Raw(read, **parts, again=nn.Linear(3, 3, bias=False))
        model.again.weight = body[2].weight
        return model.double(), (torch.randn(5, 3).double(), torch.randint(3, (5,)))


SUBSETS = {
    "a layer": (["body.0"], ["body.0.weight", "body.0.bias"]),
    "a weight without its bias": (["conv.weight"], ["conv.weight"]),
    "a bias without its weight": (["body.0.bias"], ["body.0.bias"]),
    "the order of the model": (["body", "scale"], ["scale", "body.0.weight", "body.0.bias", "body.2.weight"]),
    "by its other name": (["again"], ["body.2.weight"]),
}
BUILDERS = {
    "fisher": lambda of: of.fisher,
    "gauss_newton": lambda of: of.gauss_newton,
    "empirical_fisher": lambda of: of.empirical_fisher,
    "hessian": lambda of: of.hessian,
    "fisher_diagonal": lambda of: of.fisher.diagonal().diag(),
}


def part(model: nn.Module, names: list[str], matrix: Tensor) -> Tensor:
    where = oracle.positions(model)
    index = torch.cat([where[name].flatten() for name in names])
    return matrix[index[:, None], index]


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("builder", BUILDERS)
def test_matrices_are_the_part_of_the_whole(builder: str, subset: str) -> None:
    model, data = network()
    chosen, names = SUBSETS[subset]
    found = getattr(curvature, builder)(model, LOSS, data, parameters=iter(chosen))
    assert list(found if isinstance(found, dict) else found.space.names) == names
    expected = part(model, names, BUILDERS[builder](Matrices(model, LOSS, data)))
    matches(dense(found), expected, 1e-8)
    if builder in ("fisher", "gauss_newton", "hessian"):
        v = torch.randn(len(expected), 2, dtype=torch.float64)
        matches(found @ v, expected @ v, 1e-8)
        matches(found @ v[:, 0], expected @ v[:, 0], 1e-8)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("subset", SUBSETS)
def test_per_sample_quantities(subset: str) -> None:
    model, (x, y) = network()
    chosen, names = SUBSETS[subset]
    rows = oracle.per_sample_gradients(model, LOSS, x, y)
    rows = {name: rows[name] for name in names}
    all_of_rows(model, LOSS, x, y, rows, parameters=chosen)
    curvature.check_gradients(model, LOSS, x, y, parameters=chosen)
    projection = curvature.KroneckerProjection(2)
    found = curvature.per_sample_projections(model, LOSS, x, y, projection, parameters=chosen)
    matches(found, projection(rows))
    columns = projection.columns(model, chosen)
    assert list(columns) == names and columns[names[-1]].stop == found.shape[1]
    whole = curvature.per_sample_jacobians(model, x)
    same(curvature.per_sample_jacobians(model, x, parameters=chosen), {name: whole[name] for name in names})


@pytest.mark.parametrize("builder", ["kfac", "ekfac", "fisher_blocks"])
def test_blocks(builder: str) -> None:
    """A layer at a time gives the blocks of the whole; a weight alone that of a model with its bias frozen."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        data = torch.randn(6, 3).double(), torch.randint(3, (6,))
    whole = getattr(curvature, builder)(model, LOSS, data)
    for layer in ("0", "2"):
        one = getattr(curvature, builder)(model, LOSS, data, parameters=[layer])
        assert one.space.names == (f"{layer}.weight", f"{layer}.bias")
        matches(one.to_dense(), whole[layer].to_dense(), 1e-10)
    one = getattr(curvature, builder)(model, LOSS, data, parameters=["0.weight"]).to_dense()
    model[0].bias.requires_grad_(False)
    of = Matrices(model, LOSS, data)
    expected = {
        "kfac": lambda: kronecker(affine_layers(of)),
        "ekfac": lambda: torch.stack([layer.rescaled(of.fisher) for layer in affine_layers(of)]).sum(0),
        "fisher_blocks": lambda: of.fisher,
    }[builder]()
    matches(one, part(model, ["0.weight"], expected), 1e-8)


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (["boby"], ValueError, "called 'boby'; near are body"),
        (["bo"], ValueError, "called 'bo'; near are body"),
        (["body.0.wait"], ValueError, "near are body.0.weight"),
        (["body", "conv.bias"], ValueError, "nothing of 'conv.bias' requires a gradient"),
        ("body", TypeError, r"names of parameters or modules, as in \['body'\]"),
        ([], ValueError, "there is no name"),
        ([0], TypeError, "expected names of parameters or modules, found one of type int"),
        (0, TypeError, "expected names of parameters or modules, found 0"),
    ],
)
def test_refused(chosen: Any, error: type[Exception], message: str) -> None:
    model, data = network()
    model.conv.bias.requires_grad_(False)
    for call in (curvature.kfac, curvature.fisher_diagonal, curvature.hessian):
        with pytest.raises(error, match=message):
            call(model, LOSS, data, parameters=chosen)
    with pytest.raises(error, match=message):
        curvature.per_sample_norms(model, LOSS, *data, parameters=chosen)
    with pytest.raises(error, match=message):
        curvature.clipped_gradient(model, LOSS, *data, 1.0, parameters=chosen)


class Saved(TorchFunctionMode):
    """The functions of linear layers that are called with gradients, and what autograd keeps of each."""

    def __init__(self) -> None:
        super().__init__()
        self.with_graph: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.with_graph.append(out.requires_grad)
        return out


@pytest.mark.parametrize("call", ["kfac", "fisher", "per_sample_norms"])
def test_what_is_not_asked_for_has_no_graph(call: str) -> None:
    """Neither do the layers before the first that is asked for keep their activations, nor is anything sent to them."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    data = torch.randn(5, 3), torch.randint(3, (5,))
    sent: list[int] = []
    for k, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, k=k: sent.append(k))
    with Saved() as seen:
        if call == "per_sample_norms":
            curvature.per_sample_norms(model, LOSS, *data, parameters=["2"])
        else:
            dense(getattr(curvature, call)(model, LOSS, data, parameters=["2"]))
    assert seen.with_graph[:4] == [False, False, True, True]
    assert set(sent) <= {2, 3}
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError):
        curvature.kfac(model, LOSS, (torch.randn(5, 4), torch.randint(3, (5,))), parameters=["1"])
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]


def test_a_parameter_that_nothing_reads() -> None:
    """Zero beside others; alone it is a mistake."""
    model, data = network()
    model.unread = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for call in (curvature.fisher, curvature.ekfac, curvature.hessian, curvature.fisher_diagonal):
        found = dense(call(model, LOSS, data, parameters=["unread", "scale"]))
        assert found[0, 0] and not found[-2:].any()
        with pytest.raises(ValueError, match="its output depends on none of the parameters unread"):
            dense(call(model, LOSS, data, parameters=["unread"]))


@pytest.mark.parametrize("builder", ["kfac", "ekfac", "fisher_blocks"])
def test_layers_that_a_later_batch_reads_first(builder: str) -> None:
    """They have factors like the others; an expert that no batch is sent to has a block of zeros."""
    with seeded(0):
        experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        model = Raw(lambda m, x: m.experts[int(x[0, 0] > 0)](x), experts=experts).double()
        x, y = torch.randn(6, 3).double().abs(), torch.randint(3, (6,))
    batches = [(-x[:2], y[:2]), (x[2:], y[2:])]
    found = getattr(curvature, builder)(model, nn.CrossEntropyLoss(reduction="sum"), batches)
    for expert, data in zip(model.experts, batches, strict=False):
        alone = getattr(curvature, builder)(nn.Sequential(expert), nn.CrossEntropyLoss(reduction="sum"), data)
        name = "experts.0" if expert is model.experts[0] else "experts.1"
        assert type(found[name]) is type(alone["0"])
        matches(found[name].to_dense(), alone.to_dense(), 1e-10)
    assert not found["experts.2.weight"].to_dense().any()
