"""The table of docs/guides/layers.md, from what the package does with one model of each kind.

python tests/support/layer_table.py        # writes the table into the guide
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import curvature
from optimizers import KFAC
from support.plans import plans_of

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a program
from support.cases.case import Case, Raw, floats
from support.cases.catalogue import CASES
from support.oracles.brute_force import forward

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "layers.md"
HEAD = ("layer", "per-sample gradients and norms", "`curvature.kfac`", "`optimizers.KFAC`")
WORDS = {"Kronecker": "Kronecker factors", "Dense": "exact block", "Diagonal": "diagonal"}
BY_ID = {case.id: case for case in CASES}
by_experts = lambda m, x: torch.bmm(x.expand(len(m.p), -1, -1), m.p).movedim(1, 0)
LAYERS: dict[str, str | Case] = {
    "Linear": "linear",
    "Linear on tokens": "linear_1_leading",
    "Bilinear": "bilinear",
    "Conv1d": "conv1d_plain",
    "Conv2d": "conv2d_padding",
    "Conv2d with groups": "conv2d_groups",
    "Conv3d": "conv3d_plain",
    "ConvTranspose2d": "conv_transpose2d_stride",
    "Embedding": "embedding_plain",
    "EmbeddingBag": "bag_mean_plain",
    "LayerNorm": "layer_norm_places",
    "RMSNorm": "rms_norm_places",
    "GroupNorm": "group_norm_image",
    "InstanceNorm2d": "instance_norm2d",
    "BatchNorm2d, `eval()`": "batch_norm2d",
    "BatchNorm2d, `train()`": Case("", lambda: nn.BatchNorm2d(4), floats(4, 6, 6)),
    "PReLU": "prelu_channels_image",
    "RNN": "rnn_tanh_plain_batch_first",
    "LSTM": "lstm_plain_batch_first",
    "GRU": "gru_plain_batch_first",
    "LSTMCell": "lstm_cell_once",
    "MultiheadAttention": "attention_self_plain",
    "TransformerEncoderLayer": "encoder_layer_plain_batch_first",
    "weight_norm(Linear)": "weight_norm_linear",
    "embedding tied to the decoder": "tied_matmul",
    "a position table, `x + p`": "raw_add_first",
    "layer scale, `x * p`": "raw_mul",
    "a class token, `torch.cat`": "raw_class_token_plain",
    "`x @ p`, `F.linear(x, p)`": "raw_matmul_places",
    "`einsum`, one weight for each head": "raw_einsum_heads",
    "experts, `torch.bmm(x, p)`": Case("", lambda: Raw(by_experts, p=(2, 4, 3)), floats(4)),
    "a computed weight, `x * p.exp()`": "raw_temperature",
    "an autograd.Function of one's own": "custom_function",
}


def cells(name: str, case: Case) -> list[str]:
    model, loss = case.build()
    setting = model, loss, *case.batch(model)
    return [name, per_sample(*setting), blocks(*setting), trained(*setting)]


def per_sample(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> str:
    try:
        curvature.per_sample_norms(model, loss, x, y)
    except ValueError:
        return "refused"
    general = set().union(*(plan.general for plan in plans_of(model)))
    return "general path" if general else "rule"


def blocks(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> str:
    try:
        found = curvature.kfac(model, loss, (x, y)).blocks.values()
    except ValueError:
        return "refused"
    return joined(WORDS[type(block).__name__] for block in found)


def trained(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> str:
    own = copy.deepcopy(model)
    opt = KFAC(own)
    loss(forward(own, x), y).backward()
    opt.step()
    return joined(WORDS[block.structure.capitalize()] for block in opt.preconditioner.blocks)


def joined(kinds: Any) -> str:
    return ", ".join(dict.fromkeys(kinds))


def table() -> str:
    cases = {name: BY_ID[case] if isinstance(case, str) else case for name, case in LAYERS.items()}
    lines = [HEAD, ["---"] * len(HEAD), *(cells(*named) for named in cases.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_table(text: str, found: str) -> str:
    """The guide with another table."""
    start = text.index("| layer |")
    return text[:start] + found + text[text.index("\n\n", start) :]


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text("utf-8"), table()), "utf-8")
