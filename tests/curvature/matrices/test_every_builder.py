"""Every builder and injection on one small network, against brute force; other models and options are beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import seeded
from support.comparisons import matches
from support.moments import source, within_five_errors
from support.oracles import brute_force as oracle
from support.oracles.brute_force import Matrices
from support.oracles.kronecker import affine_layers, kronecker

pytestmark = pytest.mark.fast

LOSS = nn.CrossEntropyLoss()


def layers(of: Matrices, matrix: Tensor) -> Tensor:
    """`matrix` without what is between the two layers."""
    groups = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    return oracle.blocks(of.model, matrix, groups)


BUILDERS: dict[str, Callable[[Matrices], Tensor]] = {
    "fisher": lambda of: of.fisher,
    "fisher_diagonal": lambda of: of.fisher.diagonal(),
    "fisher_blocks": lambda of: layers(of, of.fisher),
    "gauss_newton": lambda of: of.gauss_newton,
    "empirical_fisher": lambda of: of.empirical_fisher,
    "hessian": lambda of: of.hessian,
    "kfac": lambda of: kronecker(affine_layers(of)),
    "ekfac": lambda of: torch.stack([layer.rescaled(of.fisher) for layer in affine_layers(of)]).sum(0),
}


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        return model, (torch.randn(5, 2).double(), torch.randint(3, (5,)))


def build(name: str, model: nn.Module, data: tuple[Tensor, Tensor], **options: object) -> Tensor:
    found = getattr(curvature, name)(model, LOSS, data, **options)
    return torch.cat([part.flatten() for part in found.values()]) if isinstance(found, dict) else found.to_dense()


@pytest.mark.parametrize("builder", BUILDERS)
def test_builder(builder: str) -> None:
    model, data = network()
    matches(build(builder, model, data), BUILDERS[builder](Matrices(model, LOSS, data)), 1e-8)


INJECTIONS: dict[str, Callable[[Matrices], Tensor]] = {
    "exact": lambda of: of.fisher,
    "empirical": lambda of: of.empirical_fisher,
    "sampled": lambda of: of.fisher,
    "propagated": lambda of: of.fisher,
    "isotropic": lambda of: of.isotropic,
}


@pytest.mark.parametrize("inject", INJECTIONS)
def test_injection(inject: str) -> None:
    """Random ones on average."""
    model, data = network()
    expected = INJECTIONS[inject](Matrices(model, LOSS, data))
    injection = getattr(curvature, inject)()
    if inject in ("exact", "empirical"):
        matches(build("fisher", model, data, inject=injection), expected)
        return
    generator = source(3)
    found = [build("fisher", model, data, inject=injection, generator=generator) for _ in range(60)]
    within_five_errors(torch.stack(found), expected)
