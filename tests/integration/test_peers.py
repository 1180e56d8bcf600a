"""Side by side with curvlinops, BackPACK, nngeometry and Opacus, on what they compute rightly.

Left out, as another matrix is computed there: means over terms that are weighed or ignored, in several batches
(curvlinops weighs each batch by its samples); Kronecker factors of convolutions in BackPACK (activations of "expand",
backprops of "reduce"); reduced factors in an eigenbasis, which few samples leave open; and what a peer refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature
from support.cases.case import floats, indices, seeded
from support.comparisons import matches

# What the peers and torch say about the peers' use of hooks and generators.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
REASON = "a peer of the bench extra is missing: make test installs it"
ENTROPY, SQUARES = nn.CrossEntropyLoss, nn.MSELoss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3))


def cnn() -> nn.Module:
    conv = nn.Conv2d(3, 2, 2, stride=2)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), conv, nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 4, 4))}
nets = pytest.mark.parametrize("net", NETS)
losses = pytest.mark.parametrize(
    "loss", [k(reduction=r) for k in (ENTROPY, SQUARES) for r in ("mean", "sum")], ids=repr
)


def task(net: str, loss: nn.Module, count: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape = NETS[net]
    with seeded(0):
        model, x = build().double(), floats(*shape)(count).double()
        y = indices(3)(count) if isinstance(loss, ENTROPY) else torch.rand(count, 3, dtype=x.dtype).round()
    return model, x, y


def columns(operator: Any) -> Tensor:
    return operator @ torch.eye(operator.shape[0], dtype=torch.float64)


@nets
@losses
def test_curvlinops(net: str, loss: nn.Module):
    peer = pytest.importorskip("curvlinops", reason=REASON)
    model, x, y = task(net, loss)
    data, parameters = [(x[:4], y[:4]), (x[4:], y[4:])], list(model.parameters())
    for theirs, ours in (
        (peer.GGNLinearOperator, curvature.gauss_newton),
        (peer.GGNLinearOperator, curvature.fisher),
        (peer.HessianLinearOperator, curvature.hessian),
        (peer.EFLinearOperator, curvature.empirical_fisher),
    ):
        expected = columns(theirs(model, loss, parameters, data))
        if isinstance(loss, SQUARES) and theirs is peer.EFLinearOperator and loss.reduction == "mean":
            expected = expected / 3  # theirs leaves out one of the two factors 1/3 of the mean over outputs
        matches(ours(model, loss, data).to_dense(), expected)


@nets
@losses
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_curvlinops_kfac(net: str, loss: nn.Module, sharing: str):
    peer = pytest.importorskip("curvlinops", reason=REASON)
    model, x, y = task(net, loss)
    data, parameters = [(x[:4], y[:4]), (x[4:], y[4:])], list(model.parameters())
    options = {"fisher_type": "type-2", "kfac_approx": sharing, "separate_weight_and_bias": False}
    expected = columns(peer.KFACLinearOperator(model, loss, parameters, data, **options))
    matches(curvature.kfac(model, loss, data, sharing=sharing).to_dense(), expected)
    if sharing == "expand":
        expected = columns(peer.EKFACLinearOperator(model, loss, parameters, data, **options))
        matches(curvature.ekfac(model, loss, data, sharing=sharing).to_dense(), expected, 1e-8)


def test_curvlinops_with_weights_and_ignored_places():
    """In one batch, where its mean is torch's."""
    peer = pytest.importorskip("curvlinops", reason=REASON)
    model, x, y = task("mlp", ENTROPY())
    loss = ENTROPY(torch.tensor([0.2, 1.0, 3.0], dtype=x.dtype), ignore_index=1, label_smoothing=0.1)
    expected = columns(peer.GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)]))
    matches(curvature.fisher(model, loss, (x, y)).to_dense(), expected)


def backpack(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, extension: Any) -> None:
    from backpack import backpack, extend

    with backpack(extension):
        extend(loss)(extend(model)(x), y).backward()


@nets
@pytest.mark.parametrize("loss", [ENTROPY(), ENTROPY(reduction="sum"), SQUARES()], ids=repr)
def test_backpack(net: str, loss: nn.Module):
    extensions = pytest.importorskip("backpack.extensions", reason=REASON)
    model, x, y = task(net, loss)
    ours = curvature.fisher_diagonal(model, loss, (x, y))
    second = curvature.hessian(model, loss, (x, y))
    hessian = second.to_dict(second.diagonal())
    backpack(model, loss, x, y, extensions.DiagGGNExact())
    for name, parameter in model.named_parameters():
        matches(ours[name], parameter.diag_ggn_exact)
    backpack(model, loss, x, y, extensions.DiagHessian())
    for name, parameter in model.named_parameters():
        matches(hessian[name], parameter.diag_h)


@pytest.mark.parametrize("loss", [ENTROPY(), ENTROPY(reduction="sum"), SQUARES()], ids=repr)
def test_backpack_kflr(loss: nn.Module):
    extensions = pytest.importorskip("backpack.extensions", reason=REASON)
    model, x, y = task("mlp", loss)
    ours = curvature.kfac(model, loss, (x, y)).to_dense()
    backpack(model, loss, x, y, extensions.KFLR())
    start = 0
    for parameter in model.parameters():
        factors = parameter.kflr
        expected = factors[0] if len(factors) == 1 else torch.kron(*factors)
        end = start + parameter.numel()
        matches(ours[start:end, start:end], expected)
        start = end


@pytest.fixture
def double() -> Iterator[None]:
    """What nngeometry makes has the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@nets
def test_nngeometry(net: str, double: None):
    """Of a classifier."""
    metrics = pytest.importorskip("nngeometry.metrics", reason=REASON)
    forms = pytest.importorskip("nngeometry.object", reason=REASON)
    model, x, y = task(net, ENTROPY())
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    theirs = lambda form: metrics.FIM(model, loader, form, variant="classif_logits")
    matches(curvature.fisher(model, ENTROPY(), loader).to_dense(), theirs(forms.PMatDense).to_torch())
    diagonal = curvature.fisher_diagonal(model, ENTROPY(), loader)
    matches(torch.cat([d.flatten() for d in diagonal.values()]), theirs(forms.PMatDiag).get_diag())
    matches(curvature.fisher_blocks(model, ENTROPY(), loader).to_dense(), theirs(forms.PMatBlockDiag).to_torch())
    matches(curvature.kfac(model, ENTROPY(), loader).to_dense(), theirs(forms.PMatKFAC).to_torch())


@nets
def test_opacus(net: str):
    """Clipped sums, by its hooks and by its ghost clipping; half of the samples are clipped."""
    peer = pytest.importorskip("opacus", reason=REASON)
    model, x, y = task(net, ENTROPY())
    c = float(curvature.per_sample_norms(model, ENTROPY(), x, y).median())
    found = curvature.clipped_gradient(model, ENTROPY(), x, y, c)
    theirs = peer.GradSampleModule(copy.deepcopy(model))
    opt = peer.optimizers.DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=c, expected_batch_size=6
    )
    ENTROPY()(theirs(x), y).backward()
    opt.clip_and_accumulate()
    ghost = peer.grad_sample.GradSampleModuleFastGradientClipping(copy.deepcopy(model), max_grad_norm=c)
    losses = nn.functional.cross_entropy(ghost(x), y, reduction="none")
    losses.mean().backward(retain_graph=True)
    weights = ghost.get_clipping_coef()
    ghost.disable_hooks()
    ghost.zero_grad()
    (weights * losses).sum().backward()
    for p, q, g in zip(theirs.parameters(), ghost.parameters(), found.values(), strict=True):
        matches(g, p.summed_grad, 1e-4)  # theirs divides by the norm plus 1e-6
        matches(g, q.grad, 1e-4)
