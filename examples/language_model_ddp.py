"""A language model of characters on the help texts of Python, under DistributedDataParallel on two processes.

Each process draws its own half of every batch; `KFAC` sums its statistics over both and shares the decompositions. The
loop is that of one process. On GPUs, "gloo" becomes "nccl", and model and tensors go to the process's device.

    torchrun --standalone --nproc-per-node 2 examples/language_model_ddp.py   # needs nothing beside the package
"""

import argparse
import gc
import math
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from optimizers import KFAC

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
STEPS = parser.parse_args().steps
CONTEXT, BATCH = 64, 16  # characters of a sequence; sequences of each process

dist.init_process_group("gloo")
rank, processes = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)

characters = sorted(set(text := "\n".join(topics.values())))
tokens = torch.tensor([characters.index(c) for c in text])
train_tokens, test_tokens = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


class LanguageModel(nn.Module):
    def __init__(self, width=64, layers=2):
        super().__init__()
        self.token, self.place = nn.Embedding(len(characters), width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(characters))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.layers(h, mask, is_causal=True))


def sequences(tokens, starts):
    rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


torch.manual_seed(0)
model = DistributedDataParallel(LanguageModel())
opt = KFAC(model)
draw = torch.Generator().manual_seed(rank)
test_x, test_y = sequences(test_tokens, range(0, len(test_tokens) - CONTEXT - 1, 10 * CONTEXT))
began = time.perf_counter()
for step in range(1, STEPS + 1):
    x, y = sequences(train_tokens, torch.randint(len(train_tokens) - CONTEXT, (BATCH,), generator=draw))
    opt.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    opt.step()
    if rank == 0 and (step in (1, STEPS) or step % 50 == 0):
        with torch.no_grad():
            bits = F.cross_entropy(model.module(test_x).flatten(0, 1), test_y.flatten()) / math.log(2)
        print(f"step {step:3}: {bits:.2f} bits per character of unseen text, {time.perf_counter() - began:.0f} s")

mine = nn.utils.parameters_to_vector(model.parameters()).detach()
copies = [torch.empty_like(mine) for _ in range(processes)]
dist.all_gather(copies, mine)
if rank == 0:
    same = all(torch.equal(copies[0], other) for other in copies)
    print(f"{processes} processes end in {'the same' if same else 'DIFFERENT'} parameters, to the last bit")
del model, opt
gc.collect()  # threads of DistributedDataParallel that outlive the group may abort the process
dist.destroy_process_group()
