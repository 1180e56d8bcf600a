"""Small models with their losses and data, all drawn from a seed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from support.cases.case import Raw, both, classes, floats, indices, token_loss, tokens
from support.oracles.brute_force import map_tensors

Draw = Callable[[int], Any]
Entries = Iterator[tuple[str, Any]]


def called(model: nn.Module, x: Any) -> Any:
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def drawn(*shape: int) -> Tensor:
    """Always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@dataclass(frozen=True)
class Problem:
    """A model, its loss, and how n samples of its input and of its target are drawn."""

    model: Callable[[], nn.Module]
    inputs: Draw
    loss: Any = field(default_factory=nn.CrossEntropyLoss)
    target: Callable[[Any], Any] = classes
    sample_dim: int | tuple[int, int, int] = 0

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, Any]:
        """The model, with nothing left at zeros or ones, and the loss."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
            for p in model.parameters():
                p.data.add_(0.2 * torch.randn(p.shape))
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
        loss = copy.deepcopy(self.loss)
        return model.to(dtype), loss.to(dtype) if isinstance(loss, nn.Module) else loss

    def batch(self, model: nn.Module, n: int, seed: int = 1) -> tuple[Any, Any]:
        """(x, y) in the precision of the model, whose buffers and random state stay as they are."""
        dtype = next(model.parameters()).dtype
        cast = lambda t: t.to(dtype) if t.is_floating_point() else t
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            x = map_tensors(cast, self.inputs(n))
            return x, map_tensors(cast, self.target(called(copy.deepcopy(model), x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


def cnn() -> nn.Module:
    """Grouped, transposed and strided convolutions."""
    grouped, back = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.ConvTranspose2d(4, 3, 3, 2, 1, 1)
    strided = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(grouped, nn.Tanh(), back, nn.Tanh(), strided, nn.Flatten(), nn.Linear(36, 3))


def dilated() -> nn.Module:
    circular = nn.Conv1d(2, 4, 3, padding=2, dilation=2, padding_mode="circular")
    depthwise = nn.ConvTranspose1d(4, 4, 2, groups=4)
    return nn.Sequential(circular, nn.PReLU(), depthwise, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))


def norms() -> nn.Module:
    images = [nn.Conv2d(2, 4, 2), nn.Tanh(), nn.GroupNorm(2, 4), nn.Tanh(), nn.BatchNorm2d(4), nn.Tanh()]
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(36, 4), nn.LayerNorm(4), nn.Linear(4, 3)).eval()


def instance_normed() -> nn.Module:
    return nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.InstanceNorm3d(3, affine=True), nn.Tanh(), nn.Flatten())


def batch_normed() -> nn.Module:
    images = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*images, nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3))


def tied() -> nn.Module:
    """A decoder that is the embedding."""
    decode = lambda m, x: F.linear(m.norm(x + m.layer(x).tanh()), m.words.weight, m.bias)
    parts = {"words": nn.Embedding(7, 4, padding_idx=1), "layer": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    return Raw(lambda m, x: decode(m, m.words(x)), **parts, bias=(7,))


def lstm() -> nn.Module:
    layer = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
    return Raw(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=nn.Linear(8, 3))


def gru() -> nn.Module:
    """Samples along the second axis."""
    return Raw(lambda m, x: m.head(m.layer(x)[0]), layer=nn.GRU(3, 4, 2), head=nn.Linear(4, 2))


def self_attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return Raw(lambda m, x: m.head(m.layer(x).mean(1)), layer=layer, head=nn.Linear(4, 3))


def cross_attention() -> nn.Module:
    run = lambda m, x, z: m.head(m.layer(x, z, z)[0].tanh().sum(1))
    return Raw(run, layer=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3))


def vision() -> nn.Module:
    """A class token, a table of positions and a scale, all raw parameters."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = torch.cat([m.token.expand(len(x), -1, -1), m.enter(x)], 1) + m.places
        return m.head((x + m.scale * m.mix(x).tanh()).mean(1))

    parts = {"enter": nn.Linear(3, 4), "mix": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    return Raw(run, **parts, token=(1, 1, 4), places=(5, 4), scale=(4,))


def bag() -> nn.Module:
    run = lambda m, x, weights: m.head(m.words(x, per_sample_weights=weights).tanh())
    return Raw(run, words=nn.EmbeddingBag(6, 4, mode="sum"), head=nn.Linear(4, 3))


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def shared() -> nn.Module:
    """A layer that is called three times."""
    run = lambda m, x: m.head(m.layer(m.layer(m.layer(x).tanh()).relu()))
    return Raw(run, layer=nn.Linear(4, 4), head=nn.Linear(4, 3))


def two_outputs() -> nn.Module:
    run = lambda m, x: (m.one(h := m.body(x).tanh()), m.two(h))
    return Raw(run, body=nn.Linear(5, 6), one=nn.Linear(6, 3), two=nn.Linear(6, 2))


def two_losses(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output[0], target[0]) + F.mse_loss(output[1], target[1])


def with_logits() -> nn.Module:
    return Raw(lambda m, a, b: SimpleNamespace(logits=m.pair(a, b)), pair=nn.Bilinear(3, 4, 2))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def without_rule() -> nn.Module:
    """A parameter that only the general path explains, between layers."""
    run = lambda m, x: m.two(m.one(x).tanh() * torch.special.erf(m.p))
    return Raw(run, one=nn.Linear(5, 4), p=(4,), two=nn.Linear(4, 3))


def checkpointed() -> nn.Module:
    run = lambda m, x: m.head(x + checkpoint(m.block, x, use_reentrant=False))
    block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    return Raw(run, block=block, head=nn.Linear(4, 3))


def loss_only(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Raw(lambda m, x, y: loss(m.inner(x), y), inner=mlp())


def own_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Written in no loss function of torch."""
    return (output.logsumexp(1) - output.gather(1, target[:, None])[:, 0]).mean()


def wide() -> nn.Module:
    """A side of more than 2,048 rows."""
    return nn.Sequential(nn.Linear(6, 2060), nn.Tanh(), nn.Linear(2060, 3))


def low_rank(n: int) -> Tensor:
    """300 numbers a sample that nearly lie in 8 dimensions."""
    return torch.randn(n, 8) @ torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) + torch.randn(n, 300) / 9


def small_field() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def field_of_two() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))


normal = torch.randn_like
the_loss = lambda output, target: output
MODELS: dict[str, Problem] = {
    "mlp": Problem(mlp, floats(5)),
    "cnn": Problem(cnn, floats(4, 3, 3)),
    "dilated": Problem(dilated, floats(2, 7)),
    "norms": Problem(norms, floats(2, 4, 4), nn.MSELoss(), normal),
    "conv3d": Problem(instance_normed, floats(2, 3, 3, 3), nn.MSELoss(), normal),
    "tied": Problem(tied, indices(7, 5), token_loss, tokens),
    "lstm": Problem(lstm, floats(5, 3)),
    "gru": Problem(gru, lambda n: torch.randn(4, n, 3), nn.MSELoss(), normal, 1),
    "self_attention": Problem(self_attention, floats(5, 4)),
    "cross_attention": Problem(cross_attention, both(floats(3, 4), floats(5, 4))),
    "vision": Problem(vision, floats(4, 3)),
    "bag": Problem(bag, lambda n: {"x": torch.randint(6, (n, 4)), "weights": torch.rand(n, 4)}),
    "weight_normed": Problem(weight_normed, floats(4)),
    "shared": Problem(shared, floats(4)),
    "two_outputs": Problem(two_outputs, floats(5), two_losses, lambda outputs: (classes(outputs[0]), outputs[1] + 1)),
    "with_logits": Problem(with_logits, both(floats(3), floats(4)), target=lambda output: classes(output.logits)),
    "frozen": Problem(frozen, floats(5)),
    "without_rule": Problem(without_rule, floats(5)),
    "checkpointed": Problem(checkpointed, floats(4)),
}

# For training only.
TRAINED: dict[str, Problem] = MODELS | {
    "batch_normed": Problem(batch_normed, floats(2, 6, 6)),
    "loss_only": Problem(loss_only(F.cross_entropy), both(floats(5), indices(3)), the_loss, lambda loss: ()),
    "own_loss_only": Problem(loss_only(own_entropy), both(floats(5), indices(3)), the_loss, lambda loss: ()),
    "wide": Problem(wide, floats(6)),
    "low_rank": Problem(lambda: nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 3)), low_rank),
    "regression": Problem(mlp, floats(5), nn.MSELoss(), normal),
    "small_field": Problem(small_field, lambda n: torch.rand(n, 2), nn.MSELoss(), normal),
    "field": Problem(field_of_two, lambda n: torch.rand(n, 2), nn.MSELoss(), normal),
}


def log_cosh(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).cosh().log().sum(1).mean()


def headed(*head: nn.Module, outputs: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs), *head)


def losses() -> dict[str, Problem]:
    """Every kind of loss on a small network."""
    weights, counts = torch.tensor([0.5, 2.0, 1.0, 0.1]), lambda output: torch.poisson(torch.ones_like(output) * 2)
    plain, positive = headed(), headed(nn.Softplus())
    labels = lambda output: torch.rand_like(output).round()
    fractions = lambda output: torch.rand_like(output).softmax(1)
    some_ignored = lambda output: classes(output).masked_fill(torch.rand(output.shape[0]) < 0.3, 1)
    table: dict[str, tuple[Any, Any, Any]] = {
        "cross_entropy": (plain, nn.CrossEntropyLoss(), classes),
        "cross_entropy_weight": (plain, nn.CrossEntropyLoss(weights), classes),
        "cross_entropy_ignored": (plain, nn.CrossEntropyLoss(ignore_index=1), some_ignored),
        "cross_entropy_smoothing": (plain, nn.CrossEntropyLoss(weights, label_smoothing=0.2), classes),
        "cross_entropy_probabilities": (plain, nn.CrossEntropyLoss(), fractions),
        "cross_entropy_sum": (plain, nn.CrossEntropyLoss(reduction="sum"), classes),
        "cross_entropy_places": (headed(nn.Unflatten(1, (2, 2))), nn.CrossEntropyLoss(ignore_index=1), classes),
        "nll": (headed(nn.LogSoftmax(1)), nn.NLLLoss(), classes),
        "mse": (plain, nn.MSELoss(), normal),
        "mse_sum": (plain, nn.MSELoss(reduction="sum"), normal),
        "huber": (plain, nn.HuberLoss(), normal),
        "bce_logits": (plain, nn.BCEWithLogitsLoss(pos_weight=weights), labels),
        "bce": (headed(nn.Sigmoid()), nn.BCELoss(), labels),
        "poisson": (plain, nn.PoissonNLLLoss(), counts),
        "poisson_rate": (positive, nn.PoissonNLLLoss(log_input=False), counts),
        "gaussian": (positive, nn.GaussianNLLLoss(), lambda output: torch.randn_like(output[:, :2])),
        "function": (plain, F.cross_entropy, classes),
        "callable": (plain, log_cosh, normal),
        "without": (plain, None, classes),
    }
    return {name: Problem(model, floats(5), loss, target) for name, (model, loss, target) in table.items()}
