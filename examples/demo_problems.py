"""The two problems of the demo, on the 1,797 real 8x8 digits that scikit-learn ships."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

WIDTHS = (64, 256, 128, 64, 16)  # of the encoder; the decoder is its mirror image


@dataclass(frozen=True)
class Problem:
    """A model to train, its data and loss, and the learning rates that the rivals are tuned over."""

    name: str
    text: str
    unit: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int
    grids: dict[str, tuple[float, ...]]
    labelled: bool  # the targets are labels, so that an accuracy exists
    floors: tuple[float, float] = (0.0, 0.0)  # no model has a lower loss than this on the training and test part


def autoencoder() -> nn.Sequential:
    """Tanh layers and a linear code; the output is one logit per pixel."""
    layers: list[nn.Module] = [nn.Flatten()]
    for widths in (WIDTHS, WIDTHS[::-1]):
        for i, o in pairwise(widths):
            layers += [nn.Linear(i, o), nn.Tanh()]
        layers.pop()
    return nn.Sequential(*layers)


def cnn() -> nn.Sequential:
    """Three convolutions, each with BatchNorm and an in-place ReLU, and a linear layer."""
    layers: list[nn.Module] = []
    for i, o, stride in ((1, 8, 1), (8, 16, 2), (16, 16, 2)):
        layers += [nn.Conv2d(i, o, 3, stride, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 2 * 2, 10))


def pixel_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the pixels of an image and averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum") / len(logits)


def floor(images: Tensor) -> float:
    """The least possible `pixel_loss`: a grey pixel costs its own entropy even where it is predicted exactly."""
    return float(F.binary_cross_entropy(images, images, reduction="sum") / len(images))


def problems(device: torch.device) -> list[Problem]:
    """The autoencoder and the classifier, with one split of the digits (the same whatever the seed)."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    kept, held = train_test_split(range(len(labels)), test_size=360, stratify=digits.target, random_state=0)
    x, y, x_test, y_test = images[kept], labels[kept], images[held], labels[held]
    return [
        Problem(
            name="deep autoencoder",
            text="""\
The MNIST autoencoder of Martens & Grosse (2015), 784-1000-500-250-30 and its mirror image, scaled to the 8x8 digits:
64-256-128-64-16-64-128-256-64 (hidden layers about a quarter as wide, half the code), tanh, linear code, initialised as
torch does; binary cross-entropy with logits, summed over the pixels and averaged over the images, without their weight
penalty; batches of 256 images where theirs grow.""",
            unit="nats per image",
            make=autoencoder,
            loss=pixel_loss,
            train=(x, x),
            test=(x_test, x_test),
            batch=256,
            grids={"SGD": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "AdamW": (1e-3, 3e-3, 1e-2, 3e-2)},
            labelled=False,
            floors=(floor(x), floor(x_test)),
        ),
        Problem(
            name="small CNN",
            text="""\
A classifier of the same digits: three 3x3 convolutions (8, 16, 16 channels, strides 1, 2, 2), each with BatchNorm and
an in-place ReLU, and a linear layer; mean cross-entropy; batches of 128 images. Losses are those of eval mode.""",
            unit="nats per label",
            make=cnn,
            loss=F.cross_entropy,
            train=(x, y),
            test=(x_test, y_test),
            batch=128,
            grids={"SGD": (1e-2, 3e-2, 1e-1, 3e-1, 1.0), "AdamW": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)},
            labelled=True,
        ),
    ]
