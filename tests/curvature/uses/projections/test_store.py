"""Files of projections: what is in them, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import curvature
from curvature.uses import projections
from support.cases.case import seeded

LOSS = nn.CrossEntropyLoss()
SIGNS = curvature.SignProjection(7)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
        return model, torch.randn(23, 4).double(), torch.randint(3, (23,))


def loader(x: Tensor, y: Tensor, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(x, y), **({"batch_size": 5} | options))


class Stream(IterableDataset):
    """Data that do not say how many samples they have."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.samples = zip(x, y, strict=True)

    def __iter__(self) -> Iterator[Any]:
        return self.samples


class Counting(BatchSampler):
    """A batch sampler of one's own, that counts its passes."""

    passes, shuffle = 0, False

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        return super().__iter__()


def interrupted(x: Tensor, y: Tensor) -> Iterator[Any]:
    yield x[:5], y[:5]
    yield x[5:10], y[5:10]
    raise KeyboardInterrupt


@pytest.mark.fast
@pytest.mark.parametrize("projection", [SIGNS, curvature.KroneckerProjection(2)], ids=repr)
@pytest.mark.parametrize("kind", ["loader", "drop_last", "batches", "pair", "stream", "generator", "empty batches"])
def test_rows_are_in_the_order_of_the_data(projection: Any, kind: str, tmp_path: Path) -> None:
    model, x, y = problem()
    count = 20 if kind == "drop_last" else 23
    data = {
        "loader": loader(x, y),
        "drop_last": loader(x, y, drop_last=True),
        "batches": DataLoader(list(zip(x.split(5), y.split(5), strict=True)), batch_size=None),
        "pair": (x, y),
        "stream": DataLoader(Stream(x, y), batch_size=5),
        "generator": zip(x.split(5), y.split(5), strict=True),
        "empty batches": [(x[a:b], y[a:b]) for a, b in ((0, 0), (0, 6), (6, 6), (6, 23))],
    }[kind]
    found = curvature.store_projections(model, LOSS, data, projection, tmp_path / "rows.npy")
    wanted = curvature.per_sample_projections(model, LOSS, x, y, projection)[:count]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12, atol=1e-14)
    assert isinstance(found, np.memmap) and not found.flags.writeable
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npy"]


def test_an_interrupted_pass_leaves_no_file(tmp_path: Path) -> None:
    path, (model, x, y) = tmp_path / "rows.npy", problem()
    with pytest.raises(KeyboardInterrupt):
        curvature.store_projections(model, LOSS, interrupted(x, y), SIGNS, path)
    assert not path.exists()
    found = curvature.store_projections(model, LOSS, loader(x, y), SIGNS, path)
    np.testing.assert_allclose(found, curvature.per_sample_projections(model, LOSS, x, y, SIGNS).numpy())
    with pytest.raises(FileExistsError, match=r"rows\.npy exists: take another file"):
        curvature.store_projections(model, LOSS, loader(x, y), SIGNS, path)


def test_the_data_are_gone_over_once(tmp_path: Path) -> None:
    model, x, y = problem()
    sampler = Counting(SequentialSampler(x), 5, False)
    data = DataLoader(TensorDataset(x, y), batch_sampler=sampler)
    stored = curvature.store_projections(model, LOSS, data, SIGNS, tmp_path / "rows.npy")
    assert stored.shape == (23, 7) and sampler.passes == 1


def test_some_parameters(tmp_path: Path) -> None:
    model, x, y = problem()
    stored = curvature.store_projections(model, LOSS, loader(x, y), SIGNS, tmp_path / "rows.npy", parameters=["0"])
    wanted = curvature.per_sample_gradients(model, LOSS, x, y, parameters=["0"])
    torch.testing.assert_close(torch.as_tensor(stored.copy()), SIGNS(wanted))


def test_a_header_that_has_grown_overwrites_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    write = projections._write_header
    monkeypatch.setattr(projections, "_write_header", lambda file, rows, count: write(file, rows, count) + count)
    with pytest.raises(ValueError, match=r"rows.npy.part: the header for 23 rows takes 151 bytes, where 128 were left"):
        curvature.store_projections(model, LOSS, loader(x, y), SIGNS, tmp_path / "rows.npy")
    assert not (tmp_path / "rows.npy").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    model, x, y = problem()
    call = lambda data, path="a.npy": curvature.store_projections(model, LOSS, data, SIGNS, tmp_path / path)

    with pytest.raises(
        ValueError, match=r"data: the DataLoader shuffles \(its sampler is a RandomSampler\).*shuffle=False"
    ):
        call(loader(x, y, shuffle=True))
    for none in ([], [(x[:0], y[:0])]):
        with pytest.raises(ValueError, match="data: no samples"):
            call(none)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.npy").write_text("precious")
    with pytest.raises(FileExistsError, match=r"mine\.npy exists"):
        call((x, y), "mine.npy")
    assert (tmp_path / "mine.npy").read_text() == "precious"
