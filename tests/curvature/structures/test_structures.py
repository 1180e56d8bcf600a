"""One class for builders and optimizers: the built-in ones, and one that is written outside of the package."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.structures import DenseStructure, DiagonalStructure, average_structures
from optimizers import EKFAC, KFAC
from support.cases.case import seeded
from support.running_blocks import block_of
from support.training import train

pytestmark = pytest.mark.fast

LOSS = nn.CrossEntropyLoss()
SHARE = 0.05  # of the mean eigenvalue, that is added by default


class Multiple(curvature.Structure):
    """A multiple of the identity, as in docs/guides/choosing.md."""

    name = "multiple"

    def add(self, chunk: Any) -> None:
        for u, w in chunk.rows(self.space):
            self.add_to("trace", chunk.weights.to(u) @ (u * w).sum(1))

    def operator(self) -> curvature.Operator:
        return curvature.Diagonal(self.space, self.trace().expand(self.space.size) / self.space.size)

    def trace(self) -> Tensor:
        return self.tensors["trace"]


class Named(Multiple):
    """Has the name of a built-in one."""

    name = "kronecker"


def problem(device: str = "cpu") -> tuple[nn.Sequential, Tensor, Tensor]:
    """A layer that is read at two places of a sample, a norm, and a head."""
    with seeded(0):
        layers = nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Flatten(), nn.Linear(6, 3)
        model = nn.Sequential(*layers).to(device, torch.float64)
        return model, torch.randn(8, 2, 4).double().to(device), torch.randint(3, (8,)).to(device)


def stepped(optimizer: type[KFAC], structure: Any, steps: int = 1, **options: Any) -> tuple[nn.Module, KFAC]:
    model, x, y = problem()
    opt = optimizer(model, structure=structure, inject=curvature.isotropic(3), **options)
    train(model, opt, F.cross_entropy, x, y, steps)
    return model, opt


@pytest.mark.parametrize("builder", ["kfac", "ekfac", "fisher_blocks"])
def test_builders_sum_one_of_ones_own(builder: str, device: str):
    model, x, y = problem(device)
    make = getattr(curvature, builder)
    K = make(model, LOSS, [(x[:3], y[:3]), (x[3:], y[3:])], structure={"4": Multiple, "0.bias": Multiple})
    exact = curvature.fisher_blocks(model, LOSS, x, y)["4"]
    eye = torch.eye(21, dtype=torch.float64, device=device)
    torch.testing.assert_close(K["4"].to_dense(), exact.trace() / 21 * eye)
    assert K["0.bias"].space.names == ("0.bias",) and isinstance(K["0.bias"], curvature.Diagonal)
    v = torch.sin(torch.arange(21.0, dtype=torch.float64, device=device))
    torch.testing.assert_close(K["4"].solve(v, 0.1), v / (exact.trace() / 21 + 0.1))


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
@pytest.mark.parametrize("choice", ["dense", Multiple, "diagonal"])
@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_optimizers_average_what_builders_sum(optimizer: type[KFAC], choice: Any, layer: str):
    model, opt = stepped(optimizer, {layer: choice})
    before, x, y = problem()
    K = curvature.fisher_blocks(before, LOSS, x, y, curvature.isotropic(3), structure={layer: choice})[layer]
    blocks = [block for block in opt.store.blocks if block.names[0].startswith(layer)]
    found = torch.cat([block.average.operator().diagonal() for block in blocks])
    torch.testing.assert_close(found, K.diagonal())
    if choice != "diagonal":
        (block,) = blocks
        torch.testing.assert_close(block.average.operator().to_dense(), K.to_dense())
    names = [name for block in blocks for name in block.names]
    assert names == list(K.space.names)
    assert {block.structure for block in opt.store.blocks if block.names[0] not in names} <= {
        "kronecker", "eigen", "diagonal",
    }  # fmt: skip


@pytest.mark.parametrize("damping", [None, 0.3])
def test_solves_are_those_of_the_damped_average(damping: float | None):
    """A dense mean of few rows has more added: three times its size over their number, in mean eigenvalues."""
    for choice, rank in ((DenseStructure, 21), (Multiple, 0)):
        model, opt = stepped(KFAC, {"4": choice}, damping=damping)
        block = block_of(opt.store, model, "4.weight")
        matrix = block.average.operator().to_dense()
        rows = 8 * 3  # of each sample one for each vector
        share = SHARE + 3 * rank / rows
        added = damping if damping is not None else share * matrix.trace() / 21
        gradients = [torch.sin(torch.arange(18.0)).view(3, 6).double(), torch.ones(3).double()]
        flat = torch.cat([g.flatten() for g in gradients])
        expected = torch.linalg.solve(matrix + added * torch.eye(21).double(), flat)
        torch.testing.assert_close(torch.cat([u.flatten() for u in block.solve(gradients)]), expected)


def test_averages_and_sums_over_processes():
    _, opt = stepped(KFAC, {"4": "dense"}, 6, factor_every=1)
    block = block_of(opt.store, opt.model, "4.weight")
    assert block.updates == 6
    total = block.kind(block.space(torch.device("cpu")), {"matrix": torch.eye(21).double()})
    total.counts = [2.0, 3.0]
    again = block.statistics_from({key: 2 * x for key, x in total.sums(0, 2).items()})
    assert again.counts == [4.0, 6.0]
    torch.testing.assert_close(again.tensors["matrix"], 2 * torch.eye(21).double())


@pytest.mark.parametrize("choice", ["dense", Multiple])
def test_resumed_runs_are_the_same(choice: Any):
    model, opt = stepped(KFAC, {"4": choice}, 5)
    _, x, y = problem()
    other = copy.deepcopy(model)
    resumed = KFAC(other, structure={"4": choice}, inject=curvature.isotropic(3))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, o in ((model, opt), (other, resumed)):
        train(each, o, F.cross_entropy, x, y, 4)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    model.float()  # state follows
    train(model, opt, F.cross_entropy, x.float(), y, 2)
    with pytest.raises(ValueError, match="structure"):
        KFAC(problem()[0], inject=curvature.isotropic(3)).load_state_dict(resumed.state_dict())


@pytest.mark.parametrize(
    "options", [{"adaptive": True}, {"inject": curvature.empirical()}, {"sharing": "reduce"}], ids=repr
)
def test_steps_of_every_kind(options: Any):
    model, x, y = problem()
    opt = KFAC(model, structure={"4": "dense", "0.weight": Multiple}, **options)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    first = float(closure().detach())
    for _ in range(15):
        opt.step(closure)
    assert float(closure().detach()) < 0.8 * first
    assert {block.structure for block in opt.store.blocks} >= {"dense", "multiple"}


def test_failed_decompositions_leave_the_diagonal(monkeypatch: pytest.MonkeyPatch):
    def fails(self: Any, damping: float) -> Any:
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(DenseStructure, "inverse", fails)
    model, opt = stepped(KFAC, {"4": "dense"}, damping=0.1)
    block = block_of(opt.store, model, "4.weight")
    ones = [torch.ones(3, 6).double(), torch.ones(3).double()]
    found = torch.cat([u.flatten() for u in block.solve(ones)])
    torch.testing.assert_close(found, 1 / (block.average.operator().diagonal() + 0.1))
    assert block.has_correlations and block.failures == 1


def test_reports_name_it():
    _, opt = stepped(KFAC, {"4": Multiple, "0": "diagonal"})
    report = str(opt.report())
    assert "multiple" in report and "chosen by structure=" in report


def test_what_is_refused():
    model, x, y = problem()
    for make in (lambda s: KFAC(model, structure=s), lambda s: curvature.kfac(model, LOSS, x, y, structure=s)):
        with pytest.raises(ValueError, match="no layer 'head' with trainable parameters; there are 0, 2, 4"):
            make({"head": "dense"})
        with pytest.raises(ValueError, match="'4' has 'sparse'; expected one of kronecker, .*diagonal, dense"):
            make({"4": "sparse"})
        with pytest.raises(TypeError, match="'4' has <class 'int'>; expected a name, or a subclass of Structure"):
            make({"4": int})
        with pytest.raises(TypeError, match="has no name, by which checkpoints"):
            make({"4": type("Nameless", (Multiple.__mro__[1],), {})})
        with pytest.raises(ValueError, match="has the name of Kronecker factors, 'kronecker'"):
            make({"4": Named})
    with pytest.raises(ValueError, match="Multiple is called 'multiple', too"):
        type("Other", (Multiple,), {"name": "multiple"})
    with pytest.raises(ValueError, match=r"structure: 2\.weight has no Kronecker factors"):
        stepped(KFAC, {"2": "kronecker"})
    opt = KFAC(model, structure={"4": "dense"})
    with pytest.raises(ValueError, match="structure: residuals have Kronecker factors"):
        opt.step(lambda: model(x).flatten())


def test_structures_are_linear():
    space = curvature.Space(("w",), ((3,),), torch.float64)
    torch.manual_seed(0)
    for form, name, shape in (
        (DiagonalStructure, "w", (3,)),
        (DenseStructure, "matrix", (3, 3)),
        (Multiple, "trace", ()),
    ):
        drawn = [torch.randn(shape).double() for _ in range(2)]
        one, other = (form(space, {name: x.clone()}) for x in drawn)
        dense = [value.operator().to_dense() for value in (one, other)]
        first, mean = average_structures([other, other], [None, one], [0.25, 0.25])
        assert first is other
        torch.testing.assert_close(mean.operator().to_dense(), 0.75 * dense[0] + 0.25 * dense[1])
        torch.testing.assert_close(one.scaled(3).operator().to_dense(), 3 * dense[0])
        torch.testing.assert_close(one.trace(), dense[0].trace())
        assert form.most_entries(space) >= one.flat().numel()
        one.add_(other)
        torch.testing.assert_close(one.operator().to_dense(), dense[0] + dense[1])
