"""A physics-informed network: the Poisson equation on a square, with `curvature.laplacian` and `NaturalGradient`.

The closure returns residuals: of the equation inside, and of the boundary values. `NaturalGradient` takes exact
Gauss-Newton steps for half the sum of their squares. The solution is known here, and with it the error.

    python examples/poisson.py   # needs nothing beside the package
"""

import argparse
import math
import time

import torch
from torch import nn

import curvature
from optimizers import NaturalGradient

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
STEPS = parser.parse_args().steps
torch.set_num_threads(1)  # small matrices: more threads wait for each other

torch.set_default_dtype(torch.float64)  # Gauss-Newton steps square the condition number
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

# laplacian(u) = f inside the unit square, u = 0 on its boundary
inside = torch.rand(900, 2)
t, side = torch.rand(120), torch.arange(120) % 4
boundary = torch.stack([torch.where(side < 2, t, side - 2.0), torch.where(side < 2, side.double(), t)], dim=1)
elsewhere = torch.rand(10_000, 2)  # where the error is measured


def solution(x):
    return torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])


def residuals():
    u, gradient, laplacian = curvature.laplacian(model, inside)  # of one forward pass
    equation = laplacian[:, 0] + 2 * math.pi**2 * solution(inside)
    return torch.cat([equation / len(inside) ** 0.5, model(boundary)[:, 0] / len(boundary) ** 0.5])


opt = NaturalGradient(model)
began = time.perf_counter()
for step in range(1, STEPS + 1):
    loss = opt.step(residuals)
    if step in (1, 2, 5) or step % 10 == 0:
        with torch.no_grad():
            error = (model(elsewhere)[:, 0] - solution(elsewhere)).square().mean().sqrt()
        print(f"step {step:2}: loss {loss:.1e}, error {error:.1e}, {time.perf_counter() - began:.1f} s")
