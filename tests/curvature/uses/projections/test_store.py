"""Files of projections: what is in them, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import curvature
import curvature.uses.projections
from support.cases.case import seeded

LOSS = nn.CrossEntropyLoss()
SIGNS = curvature.SignProjection(7)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
        return model, torch.randn(23, 4).double(), torch.randint(3, (23,))


def loader(x: Tensor, y: Tensor, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(x, y), **({"batch_size": 5} | options))


class Broken:
    """Data that raise after some batches, and count those asked for."""

    def __init__(self, data: DataLoader, batches: int, error: BaseException) -> None:
        self.data, self.batches, self.error = data, batches, error

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.data):
            if number == self.batches:
                raise self.error
            yield batch


def interrupted(path: Path, monkeypatch: pytest.MonkeyPatch, batches: int = 3) -> None:
    model, x, y = problem()
    data = Broken(loader(x, y), batches, KeyboardInterrupt())
    with monkeypatch.context() as patch:
        patch.setattr(curvature.uses.projections, "_number_of_samples", lambda *_: 23)
        with pytest.raises(KeyboardInterrupt):
            curvature.store_projections(model, LOSS, data, SIGNS, path)


@pytest.mark.fast
@pytest.mark.parametrize("projection", [SIGNS, curvature.KroneckerProjection(2)], ids=repr)
@pytest.mark.parametrize("kind", ["loader", "drop_last", "batches", "pair"])
def test_rows_are_in_the_order_of_the_data(projection: Any, kind: str, tmp_path: Path) -> None:
    model, x, y = problem()
    count = 20 if kind == "drop_last" else 23
    data = {
        "loader": loader(x, y),
        "drop_last": loader(x, y, drop_last=True),
        "batches": DataLoader(list(zip(x.split(5), y.split(5), strict=True)), batch_size=None),
        "pair": (x, y),
    }[kind]
    found = curvature.store_projections(model, LOSS, data, projection, tmp_path / "rows.npy")
    wanted = curvature.per_sample_projections(model, LOSS, x, y, projection)[:count]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12, atol=1e-14)
    assert isinstance(found, np.memmap) and not found.flags.writeable
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npy"]


def test_an_interrupted_pass_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.npy"
    interrupted(path, monkeypatch)
    assert not path.exists()
    model, x, y = problem()
    found = curvature.store_projections(model, LOSS, loader(x, y), SIGNS, path)
    np.testing.assert_allclose(found, curvature.per_sample_projections(model, LOSS, x, y, SIGNS).numpy())
    with pytest.raises(FileExistsError, match=r"rows\.npy exists: take another file"):
        curvature.store_projections(model, LOSS, loader(x, y), SIGNS, path)


def test_some_parameters(tmp_path: Path) -> None:
    model, x, y = problem()
    stored = curvature.store_projections(model, LOSS, loader(x, y), SIGNS, tmp_path / "rows.npy", parameters=["0"])
    wanted = curvature.per_sample_gradients(model, LOSS, x, y, parameters=["0"])
    torch.testing.assert_close(torch.as_tensor(stored.copy()), SIGNS(wanted))


def test_what_is_refused(tmp_path: Path) -> None:
    model, x, y = problem()
    call = lambda data, path="a.npy": curvature.store_projections(model, LOSS, data, SIGNS, tmp_path / path)

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(x, y, strict=True)

    with pytest.raises(
        ValueError, match=r"data: the DataLoader shuffles \(its sampler is a RandomSampler\).*shuffle=False"
    ):
        call(loader(x, y, shuffle=True))
    with pytest.raises(ValueError, match="data: a Stream does not tell how many samples"):
        call(DataLoader(Stream(), batch_size=5))
    with pytest.raises(ValueError, match="data: a generator does not tell"):
        call(pair for pair in [(x, y)])
    with pytest.raises(ValueError, match="data: no samples"):
        call([])
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.npy").write_text("precious")
    with pytest.raises(FileExistsError, match=r"mine\.npy exists"):
        call((x, y), "mine.npy")
    assert (tmp_path / "mine.npy").read_text() == "precious"
