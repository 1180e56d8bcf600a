"""Matrices whose sums are in files: interrupted passes, data in several parts, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature
from curvature.matrices import stored_sums
from support.builders import dense
from support.cases.case import Raw, seeded
from support.comparisons import matches

MEAN, SUM = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 3.0]).double()), nn.CrossEntropyLoss(reduction="sum")
BUILDERS = ("kfac", "ekfac", "fisher_blocks", "fisher_diagonal")


def attending(m: Any, x: Tensor) -> Tensor:
    """Every structure of accumulators: factors, factors of ranges of rows, a dense block, a diagonal."""
    h = torch.tanh(m.first(x))
    return m.head(m.cross(h, x, x)[0].mean(1) + m.shift)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        cross = nn.MultiheadAttention(4, 1, batch_first=True)
        model = Raw(attending, first=nn.Linear(4, 4), cross=cross, shift=(4,), head=nn.Linear(4, 3))
        return model.double().eval(), torch.randn(11, 2, 4).double(), torch.randint(3, (11,))


def loader(x: Tensor, y: Tensor, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(x, y), **({"batch_size": 3} | options))


def build(builder: str, model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    if builder in ("kfac", "ekfac"):
        options |= {"structure": {"head": "diagonal"}}
    return dense(getattr(curvature, builder)(model, loss, data, **options))


class Broken:
    """Data that raise after some batches, of all passes together."""

    def __init__(self, data: DataLoader, batches: int) -> None:
        self.data, self.batches, self.given = data, batches, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            if self.given == self.batches:
                raise KeyboardInterrupt
            self.given += 1
            yield batch


@pytest.mark.parametrize(("builder", "stop"), [*zip(BUILDERS, (1, 3, 3, 1), strict=True), ("ekfac", 6)])
def test_goes_on_where_it_stopped(builder: str, stop: int, tmp_path: Path) -> None:
    """Also with random vectors, of which it draws those that it would have drawn."""
    model, x, y = problem()
    path = tmp_path / "sums.pt"
    options = {"inject": curvature.sampled(2)}
    whole = build(builder, model, MEAN, loader(x, y), **options)
    with pytest.raises(KeyboardInterrupt):
        build(builder, model, MEAN, Broken(loader(x, y), stop), store=path, **options)
    written = tmp_path / ("sums.pt.factors" if (builder, stop) == ("ekfac", 3) else "sums.pt")
    assert torch.load(written, weights_only=True)["batches"] == (stop - 4 if stop > 4 else stop)
    again = build(builder, model, MEAN, loader(x, y), store=path, **options)
    assert torch.equal(again, whole) or builder == "ekfac"
    matches(again, whole, 1e-10)
    matches(build(builder, model, MEAN, loader(x, y), store=path, **options), whole, 1e-10)
    assert not list(tmp_path.glob("*.part"))


def test_passes_over_what_is_there(tmp_path: Path) -> None:
    model, x, y = problem()
    passes: list[int] = []
    model.register_forward_hook(lambda m, args, out: passes.append(len(out)))
    counts = []
    for _ in range(2):
        curvature.kfac(model, MEAN, loader(x, y), store=tmp_path / "sums.pt")
        counts.append(sum(n > 1 for n in passes))  # of several samples
    assert counts[0] >= 4 and counts[1] == counts[0] + 1


def test_an_error_inside_a_batch_keeps_the_batches_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of half a batch are never written."""
    model, x, y = problem()
    path = tmp_path / "sums.pt"
    monkeypatch.setattr(stored_sums, "SHARE", 1e9)  # after every batch
    add, calls = curvature.matrices.accumulators.KroneckerAccumulator.add, []

    def failing(self: Any, chunk: Any) -> None:
        calls.append(1)
        if len(calls) == 10:
            raise MemoryError
        add(self, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(curvature.matrices.accumulators.KroneckerAccumulator, "add", failing)
        with pytest.raises(MemoryError):
            curvature.kfac(model, MEAN, loader(x, y), store=path)
    batches = torch.load(path, weights_only=True)["batches"]
    assert 0 < batches < 4
    part = curvature.kfac(model, MEAN, (x[: 3 * batches], y[: 3 * batches])).to_dense()
    matches(curvature.combine([path]).to_dense(), part, 1e-10)
    whole = curvature.kfac(model, MEAN, (x, y)).to_dense()
    matches(curvature.kfac(model, MEAN, loader(x, y), store=path).to_dense(), whole, 1e-10)


@pytest.mark.parametrize(("builder", "loss"), [*((builder, MEAN) for builder in BUILDERS), ("kfac", SUM)])
def test_data_in_parts(builder: str, loss: Any, tmp_path: Path) -> None:
    """Parts of unequal size and weight are one pass over all of them; of ekfac, in the basis of the factors of all."""
    model, x, y = problem()
    whole = build(builder, model, loss, (x, y))
    parts = [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]
    paths = [tmp_path / f"{k}.pt" for k in range(3)]
    options = {}
    if builder == "ekfac":
        for path, part in zip(paths, parts, strict=True):
            build("kfac", model, loss, part, store=path)
        K = curvature.combine(paths)
        K.save(tmp_path / "K.pt")
        options = {"factors": curvature.load(tmp_path / "K.pt")}
        paths = [tmp_path / f"eigen{k}.pt" for k in range(3)]
        matches(build(builder, model, loss, (x, y), factors=K), whole, 1e-10)
    for path, part in zip(paths, parts, strict=True):
        build(builder, model, loss, part, store=path, **options)
    matches(curvature.combine(iter(paths)).to_dense(), whole, 1e-10)


def stored(path: Path, **options: Any) -> None:
    model, x, y = problem()
    arguments = {"model": model, "loss": MEAN, "data": loader(x, y)} | options
    curvature.kfac(**arguments, store=path)


def changed(name: str) -> nn.Module:
    model = problem()[0]
    with torch.no_grad():
        model.get_parameter(name).add_(1.0)
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "other values": (lambda: {"model": changed("head.bias")}, r"model: head\.bias changed since"),
    "other vectors": (lambda: {"inject": curvature.sampled(3)}, r"inject: sampled\(k=3\), but"),
    "another reduction": (lambda: {"loss": SUM}, "reduction: sum, but"),
    "another loss": (lambda: {"loss": nn.CrossEntropyLoss()}, "the first batch does not give what it gave"),
    "other data": (lambda: {"data": loader(*(t.flip(0) for t in problem()[1:]))}, "the first batch does not"),
    "fewer data": (lambda: {"data": loader(*(t[:7] for t in problem()[1:]))}, "batches: 3, but"),
    "data that shuffle": (lambda: {"data": loader(*problem()[1:], shuffle=True)}, "the DataLoader shuffles"),
    "other parameters": (lambda: {"parameters": ["head"]}, "parameters: head.weight, head.bias, but"),
    "another structure": (lambda: {"sharing": "reduce"}, "structure: kfac, reduce"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "sums.pt"
    stored(path)
    before = path.read_bytes()
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        stored(path, **options())
    assert path.read_bytes() == before


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("1.pt", "2.pt", "3.pt"))
    model, x, y = problem()
    for path, data in ((one, (x[:4], y[:4])), (two, (x[4:], y[4:]))):
        curvature.ekfac(model, MEAN, data, store=path)
    stored(three, model=changed("shift"))
    with pytest.raises(ValueError, match=r"other bases; make all with ekfac\(..., factors=K\)"):
        curvature.combine([one, two])
    with pytest.raises(ValueError, match="model: shift changed since"):
        curvature.combine([f"{one}.factors", three])
    with pytest.raises(ValueError, match="a file comes twice"):
        curvature.combine([one, tmp_path / "." / "1.pt"])
    with pytest.raises(ValueError, match="there is no file"):
        curvature.combine([])
    for path in (one, str(one)):
        with pytest.raises(TypeError, match=r"expected a list of files, found one: pass \['.*1.pt'\]"):
            curvature.combine(path)
    torch.save({"x": 1}, three)
    with pytest.raises(ValueError, match="holds no sums"):
        curvature.combine([three])
    three.write_text("sums")
    with pytest.raises(ValueError, match="holds no sums"):
        curvature.combine([three])
    with pytest.raises(ValueError, match="factors: expected those of"):
        curvature.ekfac(model, MEAN, (x, y), factors=curvature.kfac(model, MEAN, (x, y), parameters=["head"]))
