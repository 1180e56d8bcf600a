"""Buffers that come back, contexts that end, functions of parameters as modules, dicts that are one argument."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import curvature
import optimizers
from support.comparisons import matches
from support.training import train

pytestmark = pytest.mark.fast


def function(p: dict[str, Tensor], x: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * (x @ p["first.weight"] + p["first.bias"]).tanh()[:, p["order"]] @ p["head"]


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    p = {"first.weight": torch.randn(3, 4), "first.bias": torch.randn(4), "head": torch.randn(4, 2)}
    return {"order": torch.tensor([2, 0, 1, 3]), **{name: t.double() for name, t in p.items()}}


def test_function_model():
    p = values()
    trained = {name: t for name, t in p.items() if t.is_floating_point()}
    model = curvature.FunctionModel(function, p)
    assert [name for name, _ in model.named_parameters()] == ["head", "first.weight", "first.bias"]
    assert model.head.data_ptr() == p["head"].data_ptr()
    x, y = torch.randn(5, 3).double(), torch.randint(2, (5,))
    matches(model(x, scale=2.0).detach(), function(p, x, scale=2.0))

    def loss(trained: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(function({**p, **trained}, x[None]), y[None])

    expected = vmap(grad(loss), (None, 0, 0))(trained, x, y)
    found = curvature.per_sample_gradients(model, nn.CrossEntropyLoss(), x, y)
    assert found.keys() == trained.keys()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    K = curvature.kfac(model, nn.CrossEntropyLoss(), (x, y))
    assert isinstance(K["first.weight"], curvature.Kronecker)
    before, opt = F.cross_entropy(model(x), y), optimizers.KFAC(model)
    train(model, opt, F.cross_entropy, x, y, 10)
    assert F.cross_entropy(function(p, x), y) < before  # the tensors that were given


def test_parameters_that_are_shared_or_wrong():
    weight = nn.Parameter(torch.ones(2))
    assert curvature.FunctionModel(lambda p: p["w"], {"w": weight}).w is weight
    with pytest.raises(TypeError, match="w: expected a tensor, found list"):
        curvature.FunctionModel(lambda p: p["w"], {"w": [1.0]})
    with pytest.raises(KeyError, match="forward"):
        curvature.FunctionModel(lambda p: p["forward"], {"forward": weight})


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["a"]) + batch["b"]


def test_a_dict_that_is_one_argument():
    """With or without a tuple around it; not where the keys are the arguments."""
    torch.manual_seed(0)
    model = OfDict()
    x, y = {"a": torch.randn(4, 3), "b": torch.randn(4, 2)}, torch.randint(2, (4,))
    plain = lambda function, x: function(model, nn.CrossEntropyLoss(), x, y)
    of_data = lambda builder, x: builder(model, nn.CrossEntropyLoss(), (x, y))
    for function in (curvature.per_sample_gradients, curvature.per_sample_hessian_diagonals):
        torch.testing.assert_close(plain(function, x), plain(function, (x,)))
    torch.testing.assert_close(of_data(curvature.fisher_diagonal, x), of_data(curvature.fisher_diagonal, (x,)))
    for builder in (curvature.kfac, curvature.gauss_newton, curvature.hessian):
        torch.testing.assert_close(of_data(builder, x).to_dense(), of_data(builder, (x,)).to_dense())
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        curvature.per_sample_norms(nn.Bilinear(3, 2, 2), nn.CrossEntropyLoss(), x, y)
    by_name = {"input1": x["a"], "input2": x["b"]}
    assert curvature.per_sample_norms(nn.Bilinear(3, 2, 2), nn.CrossEntropyLoss(), by_name, y).shape == (4,)
