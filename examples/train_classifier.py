"""A convolutional network on scikit-learn's digits in a plain loop: KFAC, a cosine schedule, a checkpoint every epoch.

At the end the second half of the run is repeated from its checkpoint: the parameters are the same to the last bit.

    python examples/train_classifier.py   # needs scikit-learn: pip install -e ".[demo]"
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optimizers import KFAC

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
EPOCHS = parser.parse_args().epochs
torch.set_num_threads(1)  # small matrices: more threads wait for each other
CHECKPOINTS = Path("out/train_classifier")
CHECKPOINTS.mkdir(parents=True, exist_ok=True)

images, labels = load_digits(return_X_y=True)
parts = train_test_split(images / 16, labels, test_size=360, random_state=0, stratify=labels)
train_images, test_images = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2])
train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
train_data = TensorDataset(train_images, train_labels)


def start():
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = KFAC(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS)
    return model, opt, schedule


def train(model, opt, schedule, epochs):
    for epoch in epochs:
        began, total = time.perf_counter(), 0.0
        order = torch.Generator().manual_seed(epoch)  # a resumed run sees the batches in the same order
        for x, y in DataLoader(train_data, batch_size=128, shuffle=True, generator=order):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            total += loss.item() * len(x)
        schedule.step()
        state = {"model": model.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}
        torch.save(state, CHECKPOINTS / f"{epoch}.pt")
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).double().mean()
        seconds = time.perf_counter() - began
        print(f"epoch {epoch}: loss {total / len(train_data):.4f}, test accuracy {accuracy:.1%}, {seconds:.1f} s")


model, opt, schedule = start()
train(model, opt, schedule, range(EPOCHS))
print(opt.summary())

half = EPOCHS // 2
print(f"again from the checkpoint of epoch {half - 1}:")
resumed, opt, schedule = start()
state = torch.load(CHECKPOINTS / f"{half - 1}.pt", weights_only=True)
resumed.load_state_dict(state["model"])
opt.load_state_dict(state["opt"])
schedule.load_state_dict(state["schedule"])
train(resumed, opt, schedule, range(half, EPOCHS))
same = all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
print(f"the resumed run ends in {'the same' if same else 'OTHER'} parameters")
