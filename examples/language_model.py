"""A small GPT-2 of characters, trained on Python's help by KFAC, EKFAC, AdamW and Muon under a linear schedule.

All have the same CPU seconds, and a learning rate that falls to zero over them. Of AdamW and of Muon it is the best of
1e-3, 3e-3, 1e-2 and of 1e-2, 3e-2, 1e-1; ours have nothing set.

    python examples/language_model.py   # needs transformers: pip install -e ".[test]"
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, logging

from optimizers import EKFAC, KFAC

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=15)
SECONDS = parser.parse_args().seconds
logging.set_verbosity_error()
torch.set_num_threads(1)  # small matrices: more threads wait for each other

pages = sorted(topics.values(), key=len)
symbols = {symbol: i for i, symbol in enumerate(sorted(set("".join(pages))))}
windows = torch.tensor([symbols[symbol] for symbol in "".join(pages)]).unfold(0, 64, 64)
held_out, train = windows[::10], torch.cat([windows[i::10] for i in range(1, 10)])
print(f"{len(train):,} windows of 64 characters, {len(symbols)} different; {len(held_out):,} held out")


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(symbols), bos_token_id=None, eos_token_id=None, **size))


def muon(model: GPT2LMHeadModel) -> list[torch.optim.Optimizer]:
    """Matrices of blocks by Muon; embeddings, biases and norms by AdamW."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".h." not in name]
    return [torch.optim.Muon(matrices, lr=0.03, weight_decay=0.01), torch.optim.AdamW(rest, lr=0.01)]


OPTIMIZERS = {
    "KFAC": lambda model: [KFAC(model)],
    "EKFAC": lambda model: [EKFAC(model)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), lr=3e-3)],
    "Muon": muon,
}

for name, make in OPTIMIZERS.items():
    model = network()
    optimizers = make(model)
    rates = [(group, group["lr"]) for opt in optimizers for group in opt.param_groups]
    steps, seconds = 0, 0.0
    while seconds < SECONDS:
        began = time.process_time()
        for group, lr in rates:
            group["lr"] = lr * (1 - seconds / SECONDS)
        batch = train[torch.randint(len(train), (16,))]
        loss = model(input_ids=batch, labels=batch).loss  # shifts the labels itself
        for opt in optimizers:
            opt.zero_grad()
        loss.backward()
        for opt in optimizers:
            opt.step()
        steps, seconds = steps + 1, seconds + time.process_time() - began
    model.eval()
    with torch.no_grad():
        value = model(input_ids=held_out[:400], labels=held_out[:400]).loss
    print(f"{name:5}  {steps:4} steps, held-out loss {value:.3f} nats a character")
