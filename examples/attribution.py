"""Which training digits are behind the mistakes of a network? Influence by EKFAC factors that are kept on disk.

To test the scores, the network is trained again without the highest of them, and without as many random digits.

    python examples/attribution.py   # needs scikit-learn: pip install -e ".[demo]"
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import curvature

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
STEPS = parser.parse_args().steps
torch.set_num_threads(1)  # small matrices: more threads wait for each other
FACTORS = Path(f"out/attribution/{STEPS}_steps.pt")
FACTORS.parent.mkdir(parents=True, exist_ok=True)

images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
images = images.float() / 16
train_images, train_labels, test_images, test_labels = images[:1200], labels[:1200], images[1200:], labels[1200:]


def trained(left_out=()):
    torch.manual_seed(0)
    kept = torch.tensor([n for n in range(len(train_images)) if n not in left_out])
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = kept[torch.randint(len(kept), (100,))]
        opt.zero_grad()
        F.cross_entropy(model(train_images[batch]), train_labels[batch]).backward()
        opt.step()
    return model


began = time.perf_counter()
model, loss = trained(), nn.CrossEntropyLoss()
answers = model(test_images).argmax(1)
mistakes = (answers != test_labels).nonzero()[:, 0]
print(f"{len(mistakes)} mistakes in {len(test_images)} digits; trained in {time.perf_counter() - began:.1f} s")

train = DataLoader(TensorDataset(train_images, train_labels), batch_size=200)  # in a fixed order
began = time.perf_counter()
K = curvature.ekfac(model, loss, train)
K.save(FACTORS)
print(f"factors, computed: {time.perf_counter() - began:.2f} s, {FACTORS.stat().st_size / 1e3:.0f} kB")
began = time.perf_counter()
K = curvature.load(FACTORS)
print(f"factors, loaded: {time.perf_counter() - began:.2f} s")

began = time.perf_counter()
queries = test_images[mistakes], answers[mistakes]  # what is behind the model's own answers?
scores = curvature.influence(model, loss, train, queries, K)  # (mistakes, training digits)
print(f"{scores.numel():,} scores in {time.perf_counter() - began:.2f} s")

print("\n                                                    the loss of the answer rises by, without")
print("digit, answer   labels of the digits most behind it   those 20    20 random ones")
for query in range(5):
    image, answer = test_images[mistakes[query], None], answers[mistakes[query], None]
    behind = scores[query].topk(20).indices.tolist()
    before = F.cross_entropy(model(image), answer).item()
    rises = []
    for left_out in (behind, torch.randperm(len(train_images))[:20].tolist()):
        rises.append(F.cross_entropy(trained(left_out)(image), answer).item() - before)
    label, top = test_labels[mistakes[query]].item(), train_labels[behind[:8]].tolist()
    print(f"{label:5} {answer.item():7}   {top}          {rises[0]:8.2f} {rises[1]:17.2f}")
