"""Files of projections: what is in them, going on after an interruption, and what they are not gone on with."""

import json
from collections.abc import Callable, Iterator
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
    assert json.loads((tmp_path / "rows.npy.json").read_text())["rows"] == count


def test_an_interrupted_pass_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    path = tmp_path / "rows.npy"
    interrupted(path, monkeypatch)
    wanted = curvature.per_sample_projections(model, LOSS, x, y, SIGNS).numpy()
    assert json.loads((tmp_path / "rows.npy.json").read_text())["rows"] == 15
    np.testing.assert_allclose(np.load(path)[:15], wanted[:15])
    calls: list[int] = []
    kept = curvature.per_sample_projections
    counted = lambda model, loss, x, *rest, **options: calls.append(len(x)) or kept(model, loss, x, *rest, **options)
    monkeypatch.setattr(curvature.uses.projections, "per_sample_projections", counted)
    found = curvature.store_projections(model, LOSS, loader(x, y), SIGNS, path)
    assert calls == [5, 5, 3]  # the first again, and the two that are missing
    np.testing.assert_allclose(found, wanted)
    curvature.store_projections(model, LOSS, loader(x, y), SIGNS, path)
    assert calls[3:] == [5]


def other_weight(model: nn.Module) -> None:
    model[3].weight.data[0, 0] += 1e-6


def other_buffer(model: nn.Module) -> None:
    model[1].running_mean += 1


def doubled(model: nn.Module) -> None:
    model[2].register_forward_hook(lambda module, args, output: 2 * output)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "weight": (other_weight, r"model: 3\.weight changed since"),
    "buffer": (other_buffer, r"model: 1\.running_mean changed since"),
    "frozen": (lambda model: model[0].bias.requires_grad_(False), r"model: 0\.bias changed since"),
    "layer": (lambda model: model.append(nn.Linear(3, 3).double()), r"model: 4\.weight, 4\.bias changed since"),
    "hook": (doubled, "sample 0 is not the one stored"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_does_not_go_on(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path / "rows.npy", monkeypatch)
    before = (tmp_path / "rows.npy").read_bytes()
    model, x, y = problem()
    CHANGES[change][0](model)
    with pytest.raises(ValueError, match=CHANGES[change][1]):
        curvature.store_projections(model, LOSS, loader(x, y), SIGNS, tmp_path / "rows.npy")
    assert (tmp_path / "rows.npy").read_bytes() == before


def test_other_data_do_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.npy"
    interrupted(path, monkeypatch)
    model, x, y = problem()
    call = lambda data, projection=SIGNS, loss=LOSS, **options: curvature.store_projections(
        model, loss, data, projection, path, **options
    )
    with pytest.raises(
        ValueError, match=r"projection: SignProjection\(k=7, seed=1\), but .* SignProjection\(k=7, seed=0\)"
    ):
        call(loader(x, y), curvature.SignProjection(7, seed=1))
    with pytest.raises(ValueError, match=r"samples: 20, but .*rows\.npy was begun with 23"):
        call(loader(x[:20], y[:20]))
    with pytest.raises(ValueError, match="batches: 4, but .* was begun with 5"):
        call(loader(x, y, batch_size=6))
    with pytest.raises(ValueError, match="sample 1 is not the one stored, .*the data, their order"):
        call(loader(x[[0, *range(2, 23), 1]], y[[0, *range(2, 23), 1]]))
    with pytest.raises(ValueError, match="sample 0 is not the one stored, .*the loss"):
        call(loader(x, y), loss=nn.CrossEntropyLoss(label_smoothing=0.3))
    with pytest.raises(
        ValueError, match=r"parameters: .* was begun with \['0\.weight', '0\.bias', .*; take another file"
    ):
        call(loader(x, y), parameters=["0"])
    call(loader(x, y))


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
    with pytest.raises(FileExistsError, match=r"mine\.npy exists, without mine\.npy\.json"):
        call((x, y), "mine.npy")
    assert (tmp_path / "mine.npy").read_text() == "precious"
