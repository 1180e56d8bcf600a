"""BackPACK's tests of its extensions, with this package in its place; what they compare with is autograd.

A plugin of pytest. Individual quantities are there of the loss as reduced: a mean's are divided by the batch size.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

import curvature


def small_network(num_classes: int = 1000) -> nn.Module:
    """Takes the place of a ResNet where torchvision, which breaks beside a CPU build of torch, is missing."""
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, num_classes))


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two convolutions beside a skip connection; named as in torchvision."""

    expansion = 1

    def __init__(
        self, inputs: int, outputs: int, stride: int = 1, downsample: nn.Module | None = None, *_: object, **__: object
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2, self.downsample = nn.BatchNorm2d(outputs), downsample

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(inner + (x if self.downsample is None else self.downsample(x)))


def stand_in(name: str, **content: object) -> None:
    """A module in the place of one that is missing, and that these tests hardly use."""
    root = name.partition(".")[0]
    if root in STAND_INS or importlib.util.find_spec(root) is None:
        STAND_INS.add(name)
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)


STAND_INS: set[str] = set()
stand_in("pytorch_memlab", MemReporter=object)
stand_in("torchvision")
stand_in("torchvision.models", resnet18=small_network)
stand_in("torchvision.models.resnet", BasicBlock=BasicBlock, conv1x1=conv1x1)

import test.extensions.implementation.backpack as implementation  # noqa: E402

Extensions = implementation.BackpackExtensions
EXACT = curvature.exact()


def of(self: Extensions) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    problem = self.problem
    return problem.model, problem.loss_function, problem.input, problem.target


def factor(self: Extensions) -> float:
    return 1 / len(self.problem.input) if self.problem.loss_function.reduction == "mean" else 1.0


def individual(self: Extensions, function: Callable[..., dict[str, Tensor]], *options: object) -> list[Tensor]:
    return [factor(self) * rows for rows in function(*of(self), *options).values()]


def batch_grad(self: Extensions, subsampling: list[int] | None) -> list[Tensor]:
    rows = individual(self, curvature.per_sample_gradients)
    return rows if subsampling is None else [g[subsampling] for g in rows]


def squared_norms(self: Extensions) -> list[Tensor]:
    return [(factor(self) * norm) ** 2 for norm in curvature.per_sample_norms_by_parameter(*of(self)).values()]


def sum_of_squares(self: Extensions) -> list[Tensor]:
    return [g.square().sum(0) for g in batch_grad(self, None)]


def fisher_diagonal(self: Extensions, inject: curvature.Injection = EXACT) -> list[Tensor]:
    model, loss, x, y = of(self)
    return list(curvature.fisher_diagonal(model, loss, (x, y), inject).values())


def hessian_diagonal(self: Extensions) -> list[Tensor]:
    model, loss, x, y = of(self)
    H = curvature.hessian(model, loss, (x, y))
    return list(H.to_dict(H.diagonal()).values())


def gauss_newton(self: Extensions, subsampling: list[int] | None = None) -> Tensor:
    model, loss, x, y = of(self)
    if subsampling is None:
        return curvature.gauss_newton(model, loss, (x, y)).to_dense()
    some = curvature.gauss_newton(model, loss, (x[subsampling], y[subsampling])).to_dense()
    return some * (len(subsampling) / len(x) if loss.reduction == "mean" else 1)


def factored(self: Extensions, inject: curvature.Injection = EXACT) -> list[Tensor]:
    """BackPACK's factors: of weights and biases apart."""
    model, loss, x, y = of(self)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    apart = {name: "dense" for name in names if name.endswith("bias")}
    found = curvature.kfac(model, loss, (x, y), inject, structure=apart)
    return [found[name].to_dense() for name in names]


for name, function in {
    "__init__": lambda self, problem: setattr(self, "problem", problem),
    "batch_grad": batch_grad,
    "batch_l2_grad": squared_norms,
    "batch_l2_grad_extension_hook": squared_norms,
    "sgs": sum_of_squares,
    "sgs_extension_hook": sum_of_squares,
    "variance": lambda self: [g.var(0, unbiased=False) for g in batch_grad(self, None)],
    "diag_ggn": fisher_diagonal,
    "diag_ggn_exact_batch": lambda self: individual(self, curvature.per_sample_fisher_diagonals),
    "diag_ggn_mc": lambda self, k: fisher_diagonal(self, curvature.sampled(k)),
    "diag_ggn_mc_chunk": lambda self, k, chunks=10: fisher_diagonal(self, curvature.sampled(k)),
    "diag_ggn_mc_batch": lambda self, k: individual(self, curvature.per_sample_fisher_diagonals, curvature.sampled(k)),
    "diag_ggn_mc_batch_chunk": lambda self, k, chunks=10: individual(
        self, curvature.per_sample_fisher_diagonals, curvature.sampled(k)
    ),
    "diag_h": hessian_diagonal,
    "diag_h_batch": lambda self: individual(self, curvature.per_sample_hessian_diagonals),
    "ggn": gauss_newton,
    "kflr_as_mat": factored,
}.items():
    setattr(Extensions, name, function)

torch.set_num_threads(1)
