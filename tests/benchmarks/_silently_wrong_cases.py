"""Small models and data that people have, for `silently_wrong.py`; the docstring of each says what its user did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from support.cases.case import Raw, seeded

ENTROPY = nn.CrossEntropyLoss


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


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Enters a case, by its name; its random numbers start from the same seed."""
    name = make.__name__.replace("_", " ")

    def seeded_case() -> Case:
        with seeded(0):
            made = make()
        made.name, made.did = name, make.__doc__ or ""
        return made

    CASES[name] = seeded_case
    return seeded_case


def floats(*shape: int) -> Tensor:
    return torch.randn(5, *shape)


def words(*shape: int) -> Tensor:
    return torch.randint(5, (5, *shape))


def classes(*shape: int) -> Tensor:
    return torch.randint(3, (5, *shape))


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def images(layer: nn.Module, size: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(size, 3))


@case
def plain() -> Case:
    """an MLP with cross-entropy"""
    return Case(mlp(), ENTROPY(), floats(4), classes())


@case
def sum_of_losses() -> Case:
    """a loss with `reduction="sum"`"""
    return Case(mlp(), ENTROPY(reduction="sum"), floats(4), classes())


@case
def uneven_batches() -> Case:
    """data in batches of 3 and 2"""
    return Case(mlp(), ENTROPY(), floats(4), classes(), batch_size=3)


@case
def last_batch_dropped() -> Case:
    """a `DataLoader(..., drop_last=True)`"""
    return Case(mlp(), ENTROPY(), floats(4), classes(), batch_size=4, drop_last=True)


@case
def several_outputs() -> Case:
    """a regression with three outputs and `nn.MSELoss()`"""
    return Case(mlp(), nn.MSELoss(), floats(4), floats(3))


@case
def class_weights() -> Case:
    """class weights, `nn.CrossEntropyLoss(weight)`"""
    return Case(mlp(), ENTROPY(torch.tensor([0.2, 1.0, 3.0])), floats(4), torch.tensor([0, 1, 2, 2, 0]))


@case
def class_weights_in_two_batches() -> Case:
    """class weights, data in two batches"""
    loss = ENTROPY(torch.tensor([0.2, 1.0, 3.0]))
    return Case(mlp(), loss, floats(4), torch.tensor([0, 1, 0, 2, 2]), batch_size=3)


@case
def positive_weight() -> Case:
    """rare labels, `nn.BCEWithLogitsLoss(pos_weight=...)`"""
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([9.0]))
    return Case(mlp(1), loss, floats(4), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])[:, None])


@case
def label_smoothing() -> Case:
    """`nn.CrossEntropyLoss(label_smoothing=0.1)`"""
    return Case(mlp(), ENTROPY(label_smoothing=0.1), floats(4), classes())


@case
def unlabelled_samples() -> Case:
    """samples without a label, whose target is -100"""
    return Case(mlp(), ENTROPY(), floats(4), torch.tensor([0, -100, 2, -100, 1]))


def tagger() -> nn.Module:
    """(N, T, 4) to (N, 3, T)."""
    return Raw(lambda m, x: m.head(m.body(x).tanh()).mT, body=nn.Linear(4, 5), head=nn.Linear(5, 3))


@case
def mean_over_tokens() -> Case:
    """a label for each token, cross-entropy of (N, C, T)"""
    return Case(tagger(), ENTROPY(), floats(3, 4), classes(3))


@case
def padded_sentences() -> Case:
    """a label for each token, sentences padded with targets of -100"""
    y = classes(3)
    y[0, 1:] = y[2, 2:] = -100
    return Case(tagger(), ENTROPY(), floats(3, 4), y)


@case
def tokens_folded_into_the_batch() -> Case:
    """tokens folded into the batch before the layers, `x.flatten(0, 1)`"""
    run = lambda m, x: m.head(m.body(x.flatten(0, 1)).tanh())
    model = Raw(run, body=nn.Linear(4, 5), head=nn.Linear(5, 3))
    return Case(model, ENTROPY(), floats(3, 4), classes(3), is_folded=True)


@case
def logits_folded_into_the_batch() -> Case:
    """`logits.flatten(0, 1)` for the loss, as language models do"""
    run = lambda m, x: m.head(m.body(x).tanh()).flatten(0, 1)
    model = Raw(run, body=nn.Linear(4, 5), head=nn.Linear(5, 3))
    return Case(model, ENTROPY(), floats(3, 4), classes(3), is_folded=True)


@case
def circular_padding() -> Case:
    """`nn.Conv2d(padding_mode="circular")`"""
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    return Case(images(layer, 27), ENTROPY(), floats(2, 3, 3), classes())


@case
def reflected_padding() -> Case:
    """`nn.Conv1d(padding_mode="reflect")`"""
    layer = nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect")
    return Case(images(layer, 12), ENTROPY(), floats(2, 4), classes())


@case
def padding_same() -> Case:
    """`nn.Conv2d(padding="same")`"""
    return Case(images(nn.Conv2d(2, 3, 3, padding="same"), 27), ENTROPY(), floats(2, 3, 3), classes())


@case
def padding_same_of_an_even_kernel() -> Case:
    """`nn.Conv2d(kernel_size=2, padding="same")`"""
    return Case(images(nn.Conv2d(2, 3, 2, padding="same"), 27), ENTROPY(), floats(2, 3, 3), classes())


@case
def strided_and_dilated() -> Case:
    """`nn.Conv2d(stride=2, dilation=2, padding=1)`"""
    layer = nn.Conv2d(2, 3, 2, stride=2, dilation=2, padding=1)
    return Case(images(layer, 12), ENTROPY(), floats(2, 4, 4), classes())


@case
def grouped_convolution() -> Case:
    """`nn.Conv2d(groups=2)`"""
    return Case(images(nn.Conv2d(4, 6, 2, groups=2), 24), ENTROPY(), floats(4, 3, 3), classes())


@case
def transposed_convolution() -> Case:
    """`nn.ConvTranspose2d(stride=2)`"""
    return Case(images(nn.ConvTranspose2d(2, 3, 2, stride=2), 48), ENTROPY(), floats(2, 2, 2), classes())


@case
def pooling() -> Case:
    """a convolution, max pooling, a global mean"""
    layers = nn.Conv2d(2, 3, 2), nn.Tanh(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    return Case(nn.Sequential(*layers), ENTROPY(), floats(2, 5, 5), classes())


@case
def embedding() -> Case:
    """the mean of a sentence's word vectors, `nn.Embedding`"""
    run = lambda m, x: m.head(m.words(x).mean(1))
    return Case(Raw(run, words=nn.Embedding(5, 4), head=nn.Linear(4, 3)), ENTROPY(), words(3), classes())


@case
def padding_index() -> Case:
    """`nn.Embedding(padding_idx=0)`"""
    run = lambda m, x: m.head(m.words(x).mean(1).tanh())
    model = Raw(run, words=nn.Embedding(5, 4, padding_idx=0), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), words(3), classes())


@case
def repeated_words_in_a_bag() -> Case:
    """`nn.EmbeddingBag` over sentences in which a word occurs twice"""
    run = lambda m, x: m.head(m.words(x.flatten(), 3 * torch.arange(len(x))))
    model = Raw(run, words=nn.EmbeddingBag(5, 4, mode="sum"), head=nn.Linear(4, 3))
    x = torch.tensor([[0, 0, 1], [2, 3, 4], [1, 4, 1], [3, 3, 3], [0, 1, 2]])
    return Case(model, ENTROPY(), x, classes(), is_affine=False)


@case
def decoder_tied_by_a_function() -> Case:
    """a decoder that reads the embedding, `F.linear(h, self.words.weight)`"""
    run = lambda m, x: F.linear(m.body(m.words(x)).mean(1).tanh(), m.words.weight)
    model = Raw(run, words=nn.Embedding(5, 4), body=nn.Linear(4, 4))
    return Case(model, ENTROPY(), words(3), words(), is_affine=False)


@case
def decoder_tied_by_assignment() -> Case:
    """`self.head.weight = self.words.weight`"""
    run = lambda m, x: m.head(m.body(m.words(x)).mean(1).tanh())
    model = Raw(run, words=nn.Embedding(5, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 5, bias=False))
    model.head.weight = model.words.weight
    return Case(model, ENTROPY(), words(3), words(), is_affine=False)


@case
def tied_autoencoder() -> Case:
    """an encoder that is read again as the decoder, `F.linear(h, self.encoder.weight.T)`"""
    run = lambda m, x: m.head(F.linear(m.encoder(x).tanh(), m.encoder.weight.T))
    model = Raw(run, encoder=nn.Linear(4, 3), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def called_twice() -> Case:
    """a layer that is called twice in a row"""
    run = lambda m, x: m.head(m.body(m.body(x).tanh()).tanh())
    model = Raw(run, body=nn.Linear(4, 4), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def siamese_network() -> Case:
    """two inputs of a sample through the same layer"""
    run = lambda m, x: m.head(m.body(x[:, 0]).tanh() * m.body(x[:, 1]).tanh())
    model = Raw(run, body=nn.Linear(4, 4), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(2, 4), classes(), is_affine=False)


@case
def layer_read_by_a_function() -> Case:
    """`F.linear(x, self.body.weight, self.body.bias)` for `self.body(x)`"""
    run = lambda m, x: m.head(F.linear(x, m.body.weight, m.body.bias).tanh())
    model = Raw(run, body=nn.Linear(4, 4), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def position_embedding() -> Case:
    """an `nn.Parameter` of the model added to its input (a vision transformer's positions)"""
    run = lambda m, x: m.head(m.body(x + m.position).tanh().mean(1))
    model = Raw(run, position=(3, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(3, 4), classes(), is_affine=False)


@case
def learnt_scale() -> Case:
    """an `nn.Parameter` of the model that scales its features"""
    run = lambda m, x: m.head(m.body(x).tanh() * m.scale)
    model = Raw(run, scale=(4,), body=nn.Linear(4, 4), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def low_rank_adapter() -> Case:
    """a frozen layer with a low-rank adapter of two `nn.Parameter`"""
    run = lambda m, x: m.head((m.body(x) + x @ m.down @ m.up).tanh())
    model = Raw(run, down=(4, 1), up=(1, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 3))
    model.body.requires_grad_(False)
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def frozen_layer() -> Case:
    """a first layer with `requires_grad_(False)`"""
    model = mlp()
    model[0].requires_grad_(False)
    return Case(model, ENTROPY(), floats(4), classes())


@case
def frozen_bias() -> Case:
    """a frozen bias"""
    model = mlp()
    model[0].bias.requires_grad_(False)
    return Case(model, ENTROPY(), floats(4), classes())


@case
def functional_activation() -> Case:
    """a module of one's own that calls `torch.tanh` between its layers"""
    run = lambda m, x: m.head(torch.tanh(m.body(x)))
    return Case(Raw(run, body=nn.Linear(4, 5), head=nn.Linear(5, 3)), ENTROPY(), floats(4), classes())


class TanhBetween(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self
        return second(torch.tanh(first(x)))


@case
def subclass_of_sequential() -> Case:
    """a subclass of `nn.Sequential` with a forward of its own"""
    return Case(TanhBetween(nn.Linear(4, 5), nn.Linear(5, 3)), ENTROPY(), floats(4), classes())


@case
def residual_connection() -> Case:
    """`x + self.body(x)`"""
    run = lambda m, x: m.head(x + m.body(x).tanh())
    return Case(Raw(run, body=nn.Linear(4, 4), head=nn.Linear(4, 3)), ENTROPY(), floats(4), classes())


@case
def relu_in_place() -> Case:
    """`nn.ReLU(inplace=True)` after a layer"""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    return Case(model, ENTROPY(), floats(4), classes())


@case
def batch_norm_in_training() -> Case:
    """BatchNorm in training mode"""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def batch_norm_in_evaluation() -> Case:
    """BatchNorm in evaluation mode"""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    model(torch.randn(20, 4))
    return Case(model.eval(), ENTROPY(), floats(4), classes(), is_affine=False)


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3))


@case
def layer_norm() -> Case:
    """`nn.LayerNorm` between two layers"""
    return Case(normed(nn.LayerNorm(6)), ENTROPY(), floats(4), classes(), is_affine=False)


@case
def group_norm() -> Case:
    """`nn.GroupNorm` between two layers"""
    return Case(normed(nn.GroupNorm(2, 6)), ENTROPY(), floats(4), classes(), is_affine=False)


@case
def layer_norm_over_tokens() -> Case:
    """`nn.LayerNorm` of each token"""
    run = lambda m, x: m.head(m.norm(x).tanh().mean(1))
    model = Raw(run, norm=nn.LayerNorm(4), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(3, 4), classes(), is_affine=False)


@case
def instance_norm() -> Case:
    """`nn.InstanceNorm1d(affine=True)` after a convolution"""
    layers = nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    return Case(nn.Sequential(*layers), ENTROPY(), floats(2, 9), classes(), is_affine=False)


@case
def weight_norm() -> Case:
    """`torch.nn.utils.parametrizations.weight_norm` of a layer"""
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    return Case(model, ENTROPY(), floats(4), classes(), is_affine=False)


@case
def lstm() -> Case:
    """the last state of `nn.LSTM(batch_first=True)`"""
    run = lambda m, x: m.head(m.body(x)[0][:, -1])
    model = Raw(run, body=nn.LSTM(4, 3, batch_first=True), head=nn.Linear(3, 3))
    return Case(model, ENTROPY(), floats(3, 4), classes(), is_affine=False)


@case
def attention() -> Case:
    """`nn.MultiheadAttention(batch_first=True)`"""
    run = lambda m, x: m.head(m.body(x, x, x, need_weights=False)[0].mean(1))
    model = Raw(run, body=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3))
    return Case(model, ENTROPY(), floats(3, 4), classes(), is_affine=False)


def with_output(change: Callable[[Tensor], Tensor], outputs: int) -> nn.Module:
    run = lambda m, x: change(m.head(torch.tanh(m.body(x))))
    return Raw(run, body=nn.Linear(4, 5), head=nn.Linear(5, outputs))


@case
def bounded_regression() -> Case:
    """a regression with `torch.tanh(self.head(h))` at its end"""
    return Case(with_output(torch.tanh, 1), nn.MSELoss(), floats(4), floats(1))


@case
def temperature() -> Case:
    """logits divided by a fixed temperature, `self.head(h) / 0.1`"""
    return Case(with_output(lambda f: f / 0.1, 3), ENTROPY(), floats(4), classes())


@case
def layer_in_single_precision() -> Case:
    """one layer in float32, the others in float64"""
    run = lambda m, x: m.head(m.body(x.float()).double().tanh())
    model = Raw(run, body=nn.Linear(4, 5).float(), head=nn.Linear(5, 3))
    return Case(model, ENTROPY(), floats(4), classes())


def field(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), norm, nn.Tanh(), nn.Linear(6, 1))


@case
def physics_informed_network() -> Case:
    """the Laplacian of an MLP by its inputs"""
    return Case(field(nn.Identity()), None, floats(2), floats())


@case
def physics_informed_network_with_layer_norm() -> Case:
    """the Laplacian of a network with `nn.LayerNorm` by its inputs"""
    return Case(field(nn.LayerNorm(6)), None, floats(2), floats())


@case
def physics_informed_network_with_group_norm() -> Case:
    """the Laplacian of a network with `nn.GroupNorm` by its inputs"""
    return Case(field(nn.GroupNorm(2, 6)), None, floats(2), floats())
