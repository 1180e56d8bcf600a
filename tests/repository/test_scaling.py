"""The simulation of scaling: its limits, its sums, and who is given what."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import curvature.kronecker.second_moments
import curvature.kronecker.sides
import curvature.preconditioners.block_diagonal

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
RANKS = (1, 2, 3, 8, 64, 1024)
FRACTIONS = (0.0, 0.5, 1.0)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_scaling_model")


@pytest.fixture
def costs(model: ModuleType) -> Any:
    """Of a machine of 50 Gflop/s and 10 GB/s, with decompositions of 1 d^3 and 10 d^3 operations."""
    sizes = (1.0, 64.0, 4096.0)
    cubes = model.Curve(sizes, tuple(d**3 / 5e10 for d in sizes))
    return model.Costs(model.Curve(sizes, (4e-11,) * 3), cubes, cubes.faster(0.1), 4e-10, 5e-6)


@pytest.fixture
def network(model: ModuleType) -> Any:
    return model.Network(1e-5, 25e9)


def listed() -> ModuleType:
    return importlib.import_module("_scaling_networks")


def networks(model: ModuleType) -> list[list[Any]]:
    return [listed().mlp(4, 256), listed().mlp(3, 4096), listed().resnet18(), listed().resnet50(), listed().gpt2()]


def test_sizes_are_those_of_the_package(model: ModuleType) -> None:
    assert model.LARGEST == curvature.preconditioners.block_diagonal.MAX_SIDE
    sides = curvature.kronecker.sides
    assert (model.RANK, model.ROWS) == (sides.SKETCH_RANK, sides.MAX_SKETCH_ROWS)
    assert (model.ROWS_PER_INPUT, model.MIN_SUBSAMPLE) == (
        curvature.kronecker.second_moments.ROWS_PER_INPUT,
        curvature.kronecker.second_moments.MIN_SUBSAMPLE,
    )


def test_curves_go_through_what_was_measured(model: ModuleType) -> None:
    curve = model.Curve((10.0, 100.0, 1000.0), (1.0, 10.0, 10_000.0))
    for size, wanted in ((10, 1), (100, 10), (1000, 1e4), (1, 0.1), (1e4, 1e7), (31.6228, 3.16228)):
        assert curve(size) == pytest.approx(wanted, rel=1e-5)


def test_one_rank_communicates_nothing(model: ModuleType, costs: Any, network: Any) -> None:
    for layers, fraction in itertools.product(networks(model), FRACTIONS):
        alone = model.step(layers, 32, 1, fraction, costs, network)
        assert alone.received == alone.ordinary == 0
        assert alone.parts["averages"] == alone.parts["inverses sent"] == alone.parts["gradients sent"] == 0
        assert alone == model.step(layers, 32, 1, fraction, costs, model.Network(1.0, 1.0))
        work = sum(model.inversion(layer, costs) for layer in layers)
        assert alone.parts["inversions"] == pytest.approx(work / model.EVERY)


def test_bytes_by_hand(model: ModuleType, costs: Any, network: Any) -> None:
    """Two equal layers, two ranks: each owns one."""
    layers = listed().mlp(2, 3)  # 3 x 4: gradients 48 bytes, factors and inverses 4 (9 + 16) = 100
    owner, everyone = (model.step(layers, 5, 2, f, costs, network) for f in (0.0, 1.0))
    assert (owner.ordinary, everyone.ordinary) == (96 + 48, 96)
    assert owner.received == pytest.approx(96 + 48 + 200 / 10)
    assert everyone.received == pytest.approx(96 + 200 / 10 + 100 / 10)
    assert (owner.memory, everyone.memory) == (100, 200)
    uneven = [model.Layer(4, 3), model.Layer(4, 7)]  # 48 and 112 bytes: the rank of the first has more to receive
    assert model.step(uneven, 5, 2, 0.0, costs, network).ordinary == 160 + 112
    large = model.Layer(2049, 10)
    assert (large.statistics, large.inverses) == (4 * (257 * 2049 + 100), 4 * (128 * 2049 + 100))
    tied = model.Layer(8, 50_000, flat=True)
    assert tied.statistics == tied.inverses == 4 * (64 + 50_000)


def test_all_reduce_by_hand(model: ModuleType) -> None:
    network = model.Network(1e-5, 1e9)
    assert network.all_reduce(8e6, 4) == pytest.approx(2 * 2 * 1e-5 + 2 * 3 / 4 * 8e6 / 1e9)
    assert network.all_reduce(8e6, 1) == network.all_reduce(0, 4) == network.gather(0, 4) == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_work_is_kept_and_well_divided(model: ModuleType, ranks: int) -> None:
    for seed in range(20):
        source = random.Random(seed)
        work = [source.random() ** 3 for _ in range(source.randint(1, 40))]
        owners = model.assigned(work, ranks)
        assert len(owners) == len(work) and set(owners) <= set(range(ranks))
        loads = [sum(w for w, owner in zip(work, owners, strict=True) if owner == r) for r in range(ranks)]
        assert sum(loads) == pytest.approx(sum(work))
        assert model.longest(work, owners) == pytest.approx(max(loads))
        least = max(sum(work) / ranks, max(work))
        assert least <= max(loads) * (1 + 1e-12)
        assert max(loads) <= (4 / 3) * least + max(work) / 3 + 1e-12
        in_turn = [k % ranks for k in range(len(work))]
        alone = [model.longest(work, x) for x in (in_turn, [0] * len(work))]
        assert max(loads) <= alone[1] * (1 + 1e-12)


def test_networks_have_the_parameters_of_the_papers(model: ModuleType) -> None:
    count = lambda layers: sum(layer.inputs * layer.outputs for layer in layers) / 1e6
    assert count(listed().resnet50()) == pytest.approx(25.5, abs=0.1)  # 25.6 with the norms
    assert count(listed().resnet18()) == pytest.approx(11.2, abs=0.1)
    assert count(listed().gpt2()) == pytest.approx(123.6, abs=0.2)  # 124.4 with positions and norms
    assert len(listed().resnet50()) == 54 and len(listed().resnet18()) == 21


def test_kept_rows_are_those_of_the_package(model: ModuleType) -> None:
    import torch

    from curvature.terms import OuterProduct

    for inputs, samples, places in ((5, 64, 32), (5, 15, 100), (40, 64, 1), (4, 41, 9)):
        a, b = torch.zeros(samples, places, 1, inputs), torch.zeros(samples, places, 1, 2)
        (kept,) = curvature.kronecker.second_moments.subsample_samples([OuterProduct(a, b, (2, inputs))], "expand")
        assert model.kept_rows(model.Layer(inputs, 2, places), samples) == len(kept) * places


def test_it_runs(model: ModuleType, costs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling, figure = (importlib.import_module(name) for name in ("scaling", "_scaling_figure"))
    for module in (scaling, figure, listed()):
        monkeypatch.setattr(module, "RANKS", (1, 8, 1024))
    monkeypatch.setattr(scaling, "NETWORKS", {k: v for k, v in listed().NETWORKS.items() if k in figure.SHOWN})
    files = {kind: tmp_path / f"scaling.{kind}" for kind in ("json", "md", "png")}
    files["json"].write_text(json.dumps(asdict(costs)))
    names = zip(("costs", "out", "figure"), files.values(), strict=True)
    scaling.main([part for name, path in names for part in (f"--{name}", str(path))])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    text = files["md"].read_text()
    assert "| GPT-2 small | 1024 |" in text and "| 64 x 8,192 |" in text
    assert "| Cholesky inverse, 64 rows | 0.00524 ms |" in text
    assert "nan" not in text and "inf" not in text


def test_operations_are_measured(model: ModuleType) -> None:
    found = importlib.import_module("_scaling_measure").measured(products=(1, 8), rows=(8, 32), side=16)
    assert (found.product.sizes, found.inverse.sizes, found.eigen.sizes) == ((1, 8), (8, 32), (8, 32))
    for curve in (found.product, found.inverse, found.eigen):
        assert min(curve.seconds) > 0
    assert found.touch > 0 and found.call > 0
