"""Error bars for a trained network by a Laplace posterior, on scikit-learn's diabetes data (progression after a year).

The marginal likelihood of the posterior also says how much weight decay the network should have had, so it is trained
three times, without any validation data. A quarter of the patients, of high body mass index, are unlike the others.

    python examples/laplace_posterior.py   # needs scikit-learn: pip install -e ".[demo]"
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn

import curvature
from optimizers import KFAC

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
STEPS = parser.parse_args().steps
torch.set_num_threads(1)  # small matrices: more threads wait for each other

torch.manual_seed(0)
x, y = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True, scaled=True))
order = torch.randperm(len(x))
x, y = x[order] / x.std(), y[order, None]
unlike = x[:, 2] > x[:, 2].quantile(0.75)  # body mass index
train_x, train_y = x[~unlike][:250], y[~unlike][:250]
groups = {"patients like them": (x[~unlike][250:], y[~unlike][250:]), "heavier ones": (x[unlike], y[unlike])}
mean, scale = train_y.mean(), train_y.std()
train = train_x, (train_y - mean) / scale

model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
opt = KFAC(model)
weight_decay = 1 / len(train_x)
for run in (1, 2, 3):
    began = time.perf_counter()
    for _ in range(STEPS):
        opt.zero_grad()
        squares = sum(p.square().sum() for p in model.parameters())
        loss = F.mse_loss(model(train[0]), train[1])
        (loss + weight_decay / 2 * squares).backward()  # the posterior is about the minimum of this sum
        opt.step()
    trained = time.perf_counter() - began
    began = time.perf_counter()
    posterior = curvature.laplace(model, nn.MSELoss(), train).optimize_prior()
    print(f"run {run}: weight decay {weight_decay:.4f}, error on the training data {loss.sqrt() * scale:.0f}")
    print(f"    {posterior}; trained in {trained:.1f} s, posterior in {time.perf_counter() - began:.1f} s")
    weight_decay = (2 * posterior.noise**2 * posterior.prior / len(train_x)).item()  # docs/guides/laplace.md
    for name, (inputs, targets) in groups.items():
        predicted, variance = posterior.predict(inputs)
        error = predicted * scale + mean - targets
        bar = variance.sqrt() * scale
        inside = (error.abs() < 1.96 * bar).double().mean()
        print(f"    {name + ':':20} error {error.square().mean().sqrt():.0f}, error bar {bar.mean():.0f}; "
              f"{inside:.0%} are within 1.96 bars")  # fmt: skip
