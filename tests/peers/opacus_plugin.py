"""Opacus' tests of per-sample gradients, with `curvature.per_sample_gradients` in place of its own.

A plugin of pytest. Each test compares what this gives with gradients of batches of one sample, by Opacus.
"""

from __future__ import annotations

from typing import Any

import opacus.utils.per_sample_gradients_utils as utils
import torch
from hypothesis import settings
from opacus.utils.module_utils import trainable_parameters
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

import curvature

settings.register_profile("few", max_examples=4, deadline=None)
settings.load_profile("few")


class Output(nn.Module):
    """The module, with an output that is one tensor along whose first axis samples are."""

    def __init__(self, inner: nn.Module, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.batch_first = inner, batch_first

    def forward(self, *x: Any) -> Any:
        output = self.inner(*x)
        if isinstance(output, PackedSequence):
            return torch.nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        return output if self.batch_first else output.transpose(0, 1)


def loss_of(reduction: str) -> Any:
    """The absolute error against zero, as Opacus has it: of sequences packed with others, over their own length."""

    def loss(output: Any, target: Any) -> Tensor:
        values, lengths = output if isinstance(output, tuple) else (output, None)
        total = values.abs().sum()
        if reduction == "sum":
            return total
        return total / (values.numel() if lengths is None else values.shape[-1] * int(lengths.sum()))

    loss.reduction = reduction  # type: ignore[attr-defined]
    return loss


def compute_grad_sample(
    x: Any, module: nn.Module, batch_first: bool = True, loss_reduction: str = "mean", grad_sample_mode: str = "hooks"
) -> dict[str, Tensor]:
    """In place of ``compute_opacus_grad_sample``."""
    model = Output(utils.clone_module(module), batch_first)
    dims = 0 if batch_first or isinstance(x, PackedSequence) else (1, 0, 0)
    torch.manual_seed(0)
    found = curvature.per_sample_gradients(model, loss_of(loss_reduction), x, None, sample_dim=dims)
    order = x.sorted_indices if isinstance(x, PackedSequence) else None  # that of the pack, for Opacus
    rows = {name: found[f"inner.{name}"] for name, _ in trainable_parameters(module)}
    return rows if order is None else {name: g[order] for name, g in rows.items()}


utils.compute_opacus_grad_sample = compute_grad_sample
