"""Backprops in portions are those of one backward pass, each parameter once; curvature measured of them is the same."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature.preconditioners.block_diagonal as block_diagonal
from curvature.linalg import ByDevice
from curvature.preconditioners import BatchFacts, BlockDiagonalCurvature
from curvature.recording import capture, stream_backprops
from support.cases.case import Case, Raw, seeded
from support.cases.catalogue import CASES
from support.oracles.brute_force import forward


def tied(m: Any, x: Tensor) -> Tensor:
    """A weight read first and last, one read transposed, a layer that the output does not need."""
    h = m.first(m.words(x).mean(1)).tanh()
    m.unused(h)
    return (h @ m.turned.weight).sin() @ m.words.weight.T


LAYERS = {"first": nn.Linear(4, 5), "turned": nn.Linear(4, 5), "unused": nn.Linear(5, 2), "words": nn.Embedding(6, 4)}
MODELS = {
    "tied": (lambda: Raw(tied, **LAYERS), lambda: torch.randint(6, (3, 2))),
    "layers": (lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), lambda: torch.randn(3, 4)),
    "an input with a gradient": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)),
                                 lambda: torch.randn(3, 2, 2, requires_grad=True)),
    "a token beside it": (lambda: Raw(lambda m, x: m.last(m.first(x.sin()) + m.token), first=nn.Linear(4, 3),
                                      token=nn.Parameter(torch.randn(3)), last=nn.Linear(3, 2)),
                          lambda: torch.randn(3, 4, requires_grad=True)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True),
                                           nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 3)),
                     lambda: torch.randn(3, 1, 6, 6)),
}  # fmt: skip


def run(name: str, device: str) -> tuple[nn.Module, Any, Tensor, Tensor]:
    with seeded(0):
        make, draw = MODELS[name]
        model, x = copy.deepcopy(make()).to(device), draw().to(device)
    with capture(model) as tape:
        output = model(x)
    with seeded(1):
        return model, tape, output, torch.randn(output.shape).to(device)


def test_layers_come_one_after_the_other() -> None:
    _, tape, output, vector = run("layers", "cpu")
    portions: list[frozenset[str]] = []
    stream_backprops(tape, [output], [vector], lambda _, names: portions.append(names), 0)
    assert portions == [{f"{k}.weight", f"{k}.bias"} for k in range(5, -1, -1)]


@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.id)
def test_statistics(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all, and with room for none."""
    model, _ = case.build(device)
    x, _ = case.batch(model)
    displacement = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with capture(model) as tape:
        output = forward(model, x)
    with seeded(2):
        vectors = torch.randn(2, *output.shape, dtype=output.dtype).to(device)
    stores = [BlockDiagonalCurvature(kind="eigen") for _ in range(2)]
    found = []
    for store, most in zip(stores, [2**30, 0], strict=True):
        monkeypatch.setattr(block_diagonal, "MOST_BYTES", ByDevice(most, most))
        found.append(store.measure(tape, [output], [vectors], BatchFacts(case.n, displacement=displacement)))
    first, second = found
    assert [block.names for block in stores[0].blocks] == [block.names for block in stores[1].blocks]
    assert set(first.blocks) == set(second.blocks)
    for name, block in first.blocks.items():
        torch.testing.assert_close(second.blocks[name].sums(0, 1), block.sums(0, 1))
    assert second.along.blocks == first.along.blocks
    torch.testing.assert_close(second.along.value, first.along.value)
