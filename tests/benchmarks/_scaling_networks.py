"""The networks and ranks of the simulation of scaling."""

from __future__ import annotations

from collections.abc import Sequence

from _scaling_model import Costs, Layer, Network, step


def mlp(depth: int, width: int) -> list[Layer]:
    return [Layer(width + 1, width)] * depth


def _stage(i: int, o: int, side: int, count: int) -> list[Layer]:
    """`count` basic blocks with `side` x `side` outputs; the first has another width."""
    skip = [Layer(i, o, side**2)] if i != o else []
    return [Layer(9 * i, o, side**2), *skip, *[Layer(9 * o, o, side**2)] * (2 * count - 1)]


def resnet18() -> list[Layer]:
    """For 32 x 32 images; without the norms."""
    stages = ((64, 64, 32), (64, 128, 16), (128, 256, 8), (256, 512, 4))
    return [Layer(27, 64, 1024), *(layer for i, o, side in stages for layer in _stage(i, o, side, 2)), Layer(513, 100)]


def resnet50() -> list[Layer]:
    """For 224 x 224 images (arXiv:1512.03385, table 1); without the norms."""
    found, i = [Layer(147, 64, 112**2)], 64
    for width, side, count in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)):
        for k in range(count):
            o = 4 * width
            found += [Layer(i, width, side**2), Layer(9 * width, width, side**2), Layer(width, o, side**2)]
            found += [Layer(i, o, side**2)] if k == 0 else []
            i = o
    return [*found, Layer(2049, 1000)]


def gpt2(layers: int = 12, d: int = 768, tokens: int = 256, words: int = 50257) -> list[Layer]:
    """With a tied head, whose side of the words is a diagonal; without norms and positions."""
    block = [Layer(i, o, tokens) for i, o in ((d + 1, 3 * d), (d + 1, d), (d + 1, 4 * d), (4 * d + 1, d))]
    return [*block * layers, Layer(d, words, tokens, flat=True)]


RANKS = tuple(2**k for k in range(11))
DEPTHS, WIDTHS = (4, 16, 64), (256, 512, 1024, 2048, 4096, 8192)
FAMILY_RANKS = 64
GLOBAL = 1024  # samples of all ranks together, where they are divided
FRACTIONS = {"1/p": 0.0, "1/2": 0.5, "1": 1.0}  # of the ranks that keep a layer's inverses
NETWORKS: dict[str, tuple[list[Layer], int]] = {  # layers and samples of a rank
    "MLP 16 x 1,024": (mlp(16, 1024), 128),
    "MLP 16 x 8,192": (mlp(16, 8192), 128),
    "ResNet-18, 32x32": (resnet18(), 128),
    "ResNet-50, 224x224": (resnet50(), 32),
    "GPT-2 small": (gpt2(), 8),
}
SUPPOSED = 300.0, 10.0  # how much faster products and decompositions are on an accelerator; supposed, not measured


def divided(layers: Sequence[Layer], costs: Costs, network: Network, name: str) -> list[float]:
    steps = [step(layers, GLOBAL // p, p, 1.0, costs, network) for p in RANKS]
    return [s.sgd if name == "SGD" else s.seconds for s in steps]
