"""Models with their losses and data: those of the catalogue that stand for the others, and some that it has not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import Case, Raw, both, classes, floats, indices
from support.cases.catalogue import CASES
from support.cases.layers import mlp

Entries = Iterator[tuple[str, Any]]
BY_ID = {case.id: case for case in CASES if not case.id.startswith("hf_")}


def drawn(*shape: int) -> Tensor:
    """Always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def two_outputs() -> nn.Module:
    run = lambda m, x: (m.one(h := m.body(x).tanh()), m.two(h))
    return Raw(run, body=nn.Linear(5, 6), one=nn.Linear(6, 3), two=nn.Linear(6, 2))


def two_losses(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output[0], target[0]) + F.mse_loss(output[1], target[1])


def with_logits() -> nn.Module:
    return Raw(lambda m, a, b: SimpleNamespace(logits=m.pair(a, b)), pair=nn.Bilinear(3, 4, 2))


def batch_normed() -> nn.Module:
    images = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*images, nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3))


def loss_only(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Raw(lambda m, x, y: loss(m.inner(x), y), inner=mlp())


def own_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Written in no loss function of torch."""
    return (output.logsumexp(1) - output.gather(1, target[:, None])[:, 0]).mean()


def low_rank(n: int) -> Tensor:
    """300 numbers a sample that nearly lie in 8 dimensions."""
    return torch.randn(n, 8) @ torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) + torch.randn(n, 300) / 9


def tanh_net(*widths: int) -> nn.Module:
    layers = [part for i, o in zip(widths, widths[1:], strict=False) for part in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


entropy, points = nn.CrossEntropyLoss(), lambda n: torch.rand(n, 2)
the_loss = lambda output, target: output
both_targets = lambda outputs: (classes(outputs[0]), outputs[1] + 1)
MODELS = {id: BY_ID[id] for id in (
    "mlp", "resnet", "conv2d_twice", "conv1d_mixed", "conv_transpose1d_mixed", "prelu_after_conv", "convnext",
    "batch_norm_net", "group_norm_places", "instance_norm3d", "gpt", "tied_padding", "lstm_bidirectional_time_first",
    "gru_all_samples_second", "encoder_layer_plain_batch_first", "attention_cross_batch_first", "vit", "bag_weights",
    "weight_norm_linear", "called_in_loop", "frozen_first_layer", "custom_function_mixed", "checkpoint",
)} | {
    "two_outputs": Case("two_outputs", two_outputs, floats(5), two_losses, both_targets),
    "with_logits": Case("with_logits", with_logits, both(floats(3), floats(4)), entropy, classes),
}  # fmt: skip
OF_LOSSES = both(floats(5), indices(3))
# For training only.
TRAINED = MODELS | {
    case.id: case
    for case in (
        Case("batch_normed", batch_normed, floats(2, 6, 6), entropy, classes),
        Case("loss_only", functools.partial(loss_only, F.cross_entropy), OF_LOSSES, the_loss, lambda loss: ()),
        Case("own_loss_only", functools.partial(loss_only, own_entropy), OF_LOSSES, the_loss, lambda loss: ()),
        # A side of more than 2,048 rows.
        Case("wide", functools.partial(tanh_net, 6, 2060, 3), floats(6), entropy, classes),
        Case("low_rank", functools.partial(tanh_net, 300, 40, 3), low_rank, entropy, classes),
        Case("regression", mlp, floats(5)),
        Case("small_field", functools.partial(tanh_net, 2, 3, 1), points),
        Case("field", functools.partial(tanh_net, 2, 12, 8, 1), points),
    )
}
