"""Private training: `Private` clips the gradient of each digit and adds noise, around torch's own SGD (DP-SGD).

Opacus' accountant says how private the result is. Accuracy with more and more noise is the price.

    python examples/private_training.py   # needs scikit-learn and opacus: pip install scikit-learn opacus
"""

import argparse
import time

import torch
from opacus.accountants import RDPAccountant
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from optimizers import Private

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
STEPS = parser.parse_args().steps
torch.set_num_threads(1)  # small matrices: more threads wait for each other
RATE, DELTA = 0.1, 1e-4  # each digit is in a batch with this probability; below one over the number of digits

images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=360, random_state=0, stratify=labels)
train_images, test_images = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
train_labels, test_labels = (torch.tensor(part) for part in parts[2:])


def train(noise, max_norm):
    """Accuracy on unseen digits, and epsilon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
    size = RATE * len(train_images)
    opt = Private(sgd, model, nn.CrossEntropyLoss(), max_norm=max_norm, noise=noise, expected_batch_size=size)
    accountant = RDPAccountant()
    for _ in range(STEPS):
        drawn = torch.rand(len(train_images)) < RATE  # Poisson sampling, which the accountant assumes
        opt.step(train_images[drawn], train_labels[drawn])  # in place of loss, backward() and step()
        if noise:
            accountant.step(noise_multiplier=noise, sample_rate=RATE)
    accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    return accuracy, accountant.get_epsilon(DELTA) if noise else float("inf")


print(f"{len(train_images):,} digits, {STEPS} steps; epsilon at delta {DELTA}")
for noise, max_norm in ((0.0, 1e9), (1.0, 1.0), (2.0, 1.0), (4.0, 1.0)):
    began = time.perf_counter()
    accuracy, epsilon = train(noise, max_norm)
    print(f"noise {noise}: accuracy {accuracy:.1%}, epsilon {epsilon:.1f}, {time.perf_counter() - began:.1f} s")
