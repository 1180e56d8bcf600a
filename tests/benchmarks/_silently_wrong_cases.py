"""Small models and data that people have, for `silently_wrong.py`; with what the user did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, default_collate

from support.cases.case import Raw, seeded

ENTROPY = nn.CrossEntropyLoss
floats = lambda *shape: torch.randn(5, *shape)
words = lambda *shape: torch.randint(5, (5, *shape))
classes = lambda *shape: torch.randint(3, (5, *shape))
mlp = lambda outputs=3: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))
images = lambda layer, size: nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(size, 3))
image = lambda did, layer, size, *shape: of(did, lambda: images(layer(), size), shape)


@dataclass
class Case:
    """A model, a loss and data.

    `is_affine` says that every weight is read once, by the linear, convolutional or embedding layer that holds it: its
    Kronecker factors are those of the textbook. `is_folded` says that the targets of a batch come as one row. `loss` is
    None where the model is differentiated by its inputs.
    """

    model: nn.Module
    loss: nn.Module | None
    x: Tensor
    y: Tensor
    is_affine: bool = True
    is_folded: bool = False
    batch_size: int | None = None
    drop_last: bool = False
    name: str = ""
    did: str = ""

    @property
    def loader(self) -> DataLoader:
        samples = list(zip(self.x, self.y, strict=True))
        return DataLoader(samples, self.batch_size or len(samples), drop_last=self.drop_last, collate_fn=self._collate)

    def _collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        x, y = default_collate(samples)
        return [x, y.flatten() if self.is_folded else y]

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(x, y) for x, y in self.loader]


def normed(norm: nn.Module, inputs: int = 4, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), norm, nn.Tanh(), nn.Linear(6, outputs))


def raw(run: Callable[..., Tensor], width: int = 4, outputs: int = 3, **parts: Any) -> Callable[[], nn.Module]:
    """Of parts (shapes, or functions that make modules), a body 4 -> width and a head, unless they are among them."""
    usual = {"body": lambda: nn.Linear(4, width), "head": lambda: nn.Linear(width, outputs)}
    every = {name: part for name, part in parts.items() if name not in usual} | usual | parts
    made = lambda part: part if isinstance(part, tuple) else part()
    return lambda: Raw(run, **{name: made(part) for name, part in every.items() if part})


class TanhBetween(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self
        return second(torch.tanh(first(x)))


def padded_sentences() -> Case:
    y = classes(3)
    y[0, 1:] = y[2, 2:] = -100
    return Case(TAGGER(), ENTROPY(), floats(3, 4), y)


def tied() -> nn.Module:
    run = lambda m, x: m.head(m.body(m.words(x)).mean(1).tanh())
    model = raw(run, words=EMBEDDING, head=lambda: nn.Linear(4, 5, bias=False))()
    model.head.weight = model.words.weight
    return model


def frozen(prefix: str, model: nn.Module) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(prefix))
    return model


def evaluated() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    model(torch.randn(20, 4))
    return model.eval()


def of(
    did: str, model: Callable[[], nn.Module], x: tuple[int, ...] | Callable[[], Tensor] = (4,),
    y: Callable[[], Tensor] = classes, loss: Callable[[], nn.Module | None] = ENTROPY, **rest: Any,
) -> tuple[str, Callable[[], Case]]:  # fmt: skip
    """What the user did, and what makes the case; `x` may be the shape of a sample."""
    return did, lambda: Case(model(), loss(), floats(*x) if isinstance(x, tuple) else x(), y(), **rest)


def other(*given: Any, **options: Any) -> tuple[str, Callable[[], Case]]:
    """Whose factors are not those of the textbook."""
    return of(*given, is_affine=False, **options)


def by_inputs(did: str, norm: Callable[[], nn.Module]) -> tuple[str, Callable[[], Case]]:
    return of(f"the Laplacian of {did} by its inputs", lambda: normed(norm(), 2, 1), (2,), y=floats, loss=lambda: None)


def made(name: str) -> Case:
    """The random numbers of every case start from the same seed."""
    did, make = TABLE[name]
    with seeded(0):
        case = make()
    case.name, case.did = name, did
    return case


EMBEDDING = partial(nn.Embedding, 5, 4)
TAGGER = raw(lambda m, x: m.head(m.body(x).tanh()).mT, 5)  # (N, T, 4) to (N, 3, T)
CLASS_WEIGHTS = lambda: ENTROPY(torch.tensor([0.2, 1.0, 3.0]))
TABLE: dict[str, tuple[str, Callable[[], Case]]] = {
    "plain": of("an MLP with cross-entropy", mlp),
    "sum of losses": of('a loss with `reduction="sum"`', mlp, loss=lambda: ENTROPY(reduction="sum")),
    "uneven batches": of("data in batches of 3 and 2", mlp, batch_size=3),
    "last batch dropped": of("a `DataLoader(..., drop_last=True)`", mlp, batch_size=4, drop_last=True),
    "several outputs": of(
        "a regression with three outputs and `nn.MSELoss()`", mlp, y=lambda: floats(3), loss=nn.MSELoss),
    "class weights": of(
        "class weights, `nn.CrossEntropyLoss(weight)`",
        mlp, y=lambda: torch.tensor([0, 1, 2, 2, 0]), loss=CLASS_WEIGHTS),
    "class weights in two batches": of(
        "class weights, data in two batches",
        mlp, y=lambda: torch.tensor([0, 1, 0, 2, 2]), loss=CLASS_WEIGHTS, batch_size=3),
    "positive weight": of(
        "rare labels, `nn.BCEWithLogitsLoss(pos_weight=...)`",
        lambda: mlp(1), y=lambda: torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])[:, None],
        loss=lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([9.0]))),
    "label smoothing": of(
        "`nn.CrossEntropyLoss(label_smoothing=0.1)`", mlp, loss=lambda: ENTROPY(label_smoothing=0.1)),
    "unlabelled samples": of(
        "samples without a label, whose target is -100", mlp, y=lambda: torch.tensor([0, -100, 2, -100, 1])),
    "mean over tokens": of(
        "a label for each token, cross-entropy of (N, C, T)", TAGGER, (3, 4), y=lambda: classes(3)),
    "padded sentences": ("a label for each token, sentences padded with targets of -100", padded_sentences),
    "tokens folded into the batch": of(
        "tokens folded into the batch before the layers, `x.flatten(0, 1)`",
        raw(lambda m, x: m.head(m.body(x.flatten(0, 1)).tanh()), 5), (3, 4), y=lambda: classes(3), is_folded=True),
    "logits folded into the batch": of(
        "`logits.flatten(0, 1)` for the loss, as language models do",
        raw(lambda m, x: m.head(m.body(x).tanh()).flatten(0, 1), 5), (3, 4), y=lambda: classes(3), is_folded=True),
    "circular padding": image(
        '`nn.Conv2d(padding_mode="circular")`',
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 27, 2, 3, 3),
    "reflected padding": image(
        '`nn.Conv1d(padding_mode="reflect")`',
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), 12, 2, 4),
    "padding same": image('`nn.Conv2d(padding="same")`', lambda: nn.Conv2d(2, 3, 3, padding="same"), 27, 2, 3, 3),
    "padding same of an even kernel": image(
        '`nn.Conv2d(kernel_size=2, padding="same")`', lambda: nn.Conv2d(2, 3, 2, padding="same"), 27, 2, 3, 3),
    "strided and dilated": image(
        "`nn.Conv2d(stride=2, dilation=2, padding=1)`",
        lambda: nn.Conv2d(2, 3, 2, stride=2, dilation=2, padding=1), 12, 2, 4, 4),
    "grouped convolution": image("`nn.Conv2d(groups=2)`", lambda: nn.Conv2d(4, 6, 2, groups=2), 24, 4, 3, 3),
    "transposed convolution": image(
        "`nn.ConvTranspose2d(stride=2)`", lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), 48, 2, 2, 2),
    "pooling": of(
        "a convolution, max pooling, a global mean",
        lambda: nn.Sequential(*(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(3, 3))),
        (2, 5, 5)),
    "embedding": of(
        "the mean of a sentence's word vectors, `nn.Embedding`",
        raw(lambda m, x: m.head(m.words(x).mean(1)), words=EMBEDDING, body=None), lambda: words(3)),
    "padding index": of(
        "`nn.Embedding(padding_idx=0)`",
        raw(lambda m, x: m.head(m.words(x).mean(1).tanh()), words=partial(EMBEDDING, padding_idx=0), body=None),
        lambda: words(3)),
    "repeated words in a bag": other(
        "`nn.EmbeddingBag` over sentences in which a word occurs twice",
        raw(lambda m, x: m.head(m.words(x.flatten(), 3 * torch.arange(len(x)))),
            words=lambda: nn.EmbeddingBag(5, 4, mode="sum"), body=None),
        lambda: torch.tensor([[0, 0, 1], [2, 3, 4], [1, 4, 1], [3, 3, 3], [0, 1, 2]])),
    "decoder tied by a function": other(
        "a decoder that reads the embedding, `F.linear(h, self.words.weight)`",
        raw(lambda m, x: F.linear(m.body(m.words(x)).mean(1).tanh(), m.words.weight), words=EMBEDDING, head=None),
        lambda: words(3), y=words),
    "decoder tied by assignment": other("`self.head.weight = self.words.weight`", tied, lambda: words(3), y=words),
    "tied autoencoder": other(
        "an encoder that is read again as the decoder, `F.linear(h, self.encoder.weight.T)`",
        raw(lambda m, x: m.head(F.linear(m.encoder(x).tanh(), m.encoder.weight.T)),
            encoder=lambda: nn.Linear(4, 3), body=None)),
    "called twice": other(
        "a layer that is called twice in a row", raw(lambda m, x: m.head(m.body(m.body(x).tanh()).tanh()))),
    "siamese network": other(
        "two inputs of a sample through the same layer",
        raw(lambda m, x: m.head(m.body(x[:, 0]).tanh() * m.body(x[:, 1]).tanh())), (2, 4)),
    "layer read by a function": other(
        "`F.linear(x, self.body.weight, self.body.bias)` for `self.body(x)`",
        raw(lambda m, x: m.head(F.linear(x, m.body.weight, m.body.bias).tanh()))),
    "position embedding": other(
        "an `nn.Parameter` of the model added to its input (a vision transformer's positions)",
        raw(lambda m, x: m.head(m.body(x + m.position).tanh().mean(1)), position=(3, 4)), (3, 4)),
    "learnt scale": other(
        "an `nn.Parameter` of the model that scales its features",
        raw(lambda m, x: m.head(m.body(x).tanh() * m.scale), scale=(4,))),
    "low rank adapter": other(
        "a frozen layer with a low-rank adapter of two `nn.Parameter`",
        lambda: frozen("body", raw(lambda m, x: m.head((m.body(x) + x @ m.down @ m.up).tanh()),
                                   down=(4, 1), up=(1, 4))())),
    "frozen layer": of("a first layer with `requires_grad_(False)`", lambda: frozen("0", mlp())),
    "frozen bias": of("a frozen bias", lambda: frozen("0.bias", mlp())),
    "functional activation": of(
        "a module of one's own that calls `torch.tanh` between its layers",
        raw(lambda m, x: m.head(torch.tanh(m.body(x))), 5)),
    "subclass of sequential": of(
        "a subclass of `nn.Sequential` with a forward of its own",
        lambda: TanhBetween(nn.Linear(4, 5), nn.Linear(5, 3))),
    "residual connection": of("`x + self.body(x)`", raw(lambda m, x: m.head(x + m.body(x).tanh()))),
    "relu in place": of(
        "`nn.ReLU(inplace=True)` after a layer",
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))),
    "batch norm in training": other(
        "BatchNorm in training mode",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))),
    "batch norm in evaluation": other("BatchNorm in evaluation mode", evaluated),
    "layer norm": other("`nn.LayerNorm` between two layers", lambda: normed(nn.LayerNorm(6))),
    "group norm": other("`nn.GroupNorm` between two layers", lambda: normed(nn.GroupNorm(2, 6))),
    "layer norm over tokens": other(
        "`nn.LayerNorm` of each token",
        raw(lambda m, x: m.head(m.norm(x).tanh().mean(1)), norm=lambda: nn.LayerNorm(4), body=None), (3, 4)),
    "instance norm": other(
        "`nn.InstanceNorm1d(affine=True)` after a convolution",
        lambda: nn.Sequential(*(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), nn.Flatten(),
            nn.Linear(24, 3))),
        (2, 9)),
    "weight norm": other(
        "`torch.nn.utils.parametrizations.weight_norm` of a layer",
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))),
    "lstm": other(
        "the last state of `nn.LSTM(batch_first=True)`",
        raw(lambda m, x: m.head(m.body(x)[0][:, -1]), 3, body=lambda: nn.LSTM(4, 3, batch_first=True)), (3, 4)),
    "attention": other(
        "`nn.MultiheadAttention(batch_first=True)`",
        raw(lambda m, x: m.head(m.body(x, x, x, need_weights=False)[0].mean(1)),
            body=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        (3, 4)),
    "bounded regression": of(
        "a regression with `torch.tanh(self.head(h))` at its end",
        raw(lambda m, x: torch.tanh(m.head(torch.tanh(m.body(x)))), 5, 1), y=lambda: floats(1), loss=nn.MSELoss),
    "temperature": of(
        "logits divided by a fixed temperature, `self.head(h) / 0.1`",
        raw(lambda m, x: m.head(torch.tanh(m.body(x))) / 0.1, 5)),
    "layer in single precision": of(
        "one layer in float32, the others in float64",
        raw(lambda m, x: m.head(m.body(x.float()).double().tanh()), 5, body=lambda: nn.Linear(4, 5).float())),
    "physics informed network": by_inputs("an MLP", nn.Identity),
    "physics informed network with layer norm": by_inputs("a network with `nn.LayerNorm`", lambda: nn.LayerNorm(6)),
    "physics informed network with group norm": by_inputs("a network with `nn.GroupNorm`", lambda: nn.GroupNorm(2, 6)),
}  # fmt: skip

CASES: dict[str, Callable[[], Case]] = {name: partial(made, name) for name in TABLE}
