"""Several processes train one model: all alike, and as one process on the whole batch."""

from __future__ import annotations

import functools
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, Distributed, NaturalGradient
from optimizers.distributed.processes import Workers, form_of, match_layout, vectors_of_global_batch
from support.cases.case import seeded
from support.distributed import scenarios
from support.distributed.processes import on_processes
from support.training import mlp, train


def apart(rank: int, size: int) -> Tensor:
    """Models that are trained apart from each other: each on its own data, and differently long."""
    alone = [dist.new_group([other]) for other in range(size)][rank]
    x, y = scenarios.part(rank, size)
    ends = []
    for _ in range(2):
        with seeded(0):
            model = mlp()
        train(model, KFAC(model, distributed=Distributed(alone)), F.cross_entropy, x, y, 3 + rank)
        ends.append(scenarios.flat(model))
    return torch.tensor(torch.equal(*ends))


def not_averaged(rank: int, size: int) -> str:
    model = mlp()
    opt = KFAC(model)
    before = scenarios.flat(model)
    x, y = scenarios.part(rank, size)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="gradients differ between the 2 processes") as error:
        opt.step()
    assert torch.equal(before, scenarios.flat(model))
    return str(error.value)


def without_gradients(rank: int, size: int, kind: type[KFAC], lacking: int, before: int) -> list[str]:
    """After some steps one process has no gradient, in another none is finite; then all go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt, said = kind(model), []
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    opt.step()  # where none has any, nothing moves
    for step in range(before + 3):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if step != before or rank != lacking:
            (loss * math.nan if step == before + 1 and rank == lacking else loss).backward()
        try:
            opt.step()
        except RuntimeError as error:
            said.append(str(error))
    assert (opt.steps, opt.skipped) == (before + 1, 1)
    return said


def saved(rank: int, size: int, folder: str) -> Tensor:
    """Half of a run; one process writes what it has, all go on."""
    return _run_on(rank, size, None, f"{folder}/half-{size}" if rank == 0 else None)


def _run_on(rank: int, size: int, start: str | None, end: str | None) -> Tensor:
    with seeded(0):
        model = mlp().double()
    x, y = scenarios.part(0, 1, [scenarios.EACH * scenarios.WHOLE]) if size == 1 else scenarios.part(rank, size)
    opt = KFAC(model, inject=curvature.exact(), **scenarios.ENTROPY)
    if start:
        state = torch.load(start, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
    for step in range(7 if start else 14):
        if step == 7 and end:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, end)
        opt.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        scenarios.average(model, size)
        opt.step()
    return scenarios.flat(model)


def sharded_checkpoint(rank: int, size: int, folder: str) -> Tensor:
    """A sharded run, and one that goes on from what it has saved; what sharded parameters cannot do."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    models = []
    for _ in range(2):
        with seeded(0):
            models.append(mlp().double())
        fully_shard(models[-1])
    opts = [KFAC(model) for model in models]
    x, y = scenarios.part(rank, size)

    def train(k: int, steps: int) -> None:
        for _ in range(steps):
            opts[k].zero_grad()
            F.cross_entropy(models[k](x.double()), y).backward()
            nn.utils.clip_grad_norm_(models[k].parameters(), 1.0)
            opts[k].step()

    states = lambda k: dict(zip(("model", "optimizer"), get_state_dict(models[k], opts[k]), strict=True))
    train(0, 12)
    checkpoint.save(states(0), checkpoint_id=folder)
    found = states(1)
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(models[1], opts[1], model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for k in (0, 1):
        train(k, 5)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    for make in (lambda: KFAC(models[0], adaptive=True), lambda: NaturalGradient(models[0])):
        with pytest.raises(NotImplementedError, match=r"1\.weight is spread over processes"):
            make()
    return torch.tensor(all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs))


def dies(rank: int, size: int) -> str:
    """One of them is gone: the others hear of it within the process group's own time."""
    model = mlp()
    opt = KFAC(model)
    x, y = scenarios.part(rank, size)
    for step in range(3):
        if step == 2 and rank == 1:
            time.sleep(4)  # longer than the others wait
            return ""
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():  # the same everywhere, without a collective that would notice first
            p.grad = torch.ones_like(p)
        start = time.monotonic()
        try:
            opt.step()
        except RuntimeError as error:
            return f"{time.monotonic() - start:.1f} s: {error}"
    return ""


@functools.cache
def results(size: int) -> list[dict[str, Any]]:
    names = {name: scenarios.run(scenarios.one_of_many, name) for name in scenarios.OF[size]}
    return on_processes(size, names, seconds=20)


def test_processes_on_their_own(tmp_path):
    """Also: what two processes have begun one ends, and the other way round."""
    one = _run_on(0, 1, None, str(tmp_path / "half-1"))
    names = {
        "apart": apart,
        "not averaged": not_averaged,
        "saved": scenarios.run(saved, folder=str(tmp_path)),
        "on": scenarios.run(_run_on, start=str(tmp_path / "half-1"), end=None),
        "sharded": scenarios.run(sharded_checkpoint, folder=str(tmp_path / "sharded")),
    }
    found = on_processes(2, names, seconds=20)
    assert [result["sharded"] for result in found] == [True, True]
    assert all(result["apart"] for result in found)
    assert all("wrap the model in DistributedDataParallel" in result["not averaged"] for result in found)
    for other in (found[0]["saved"], found[1]["on"], _run_on(0, 1, str(tmp_path / "half-2"), None)):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


def test_a_process_that_dies_leaves_none_waiting():
    found = on_processes(2, {"dies": dies}, seconds=2)
    assert float(found[0]["dies"].split()[0]) < 4, found


def test_arguments():
    with pytest.raises(TypeError, match="group"):
        Distributed("all")
    with pytest.raises(TypeError, match="distributed"):
        KFAC(mlp(), distributed=2)


def test_only_what_is_drawn_is_drawn_for_all():
    """Memory of the vectors: not times the number of processes where nothing or much is drawn."""
    output, y = torch.randn(6, 10), torch.arange(6)
    loss, processes = nn.CrossEntropyLoss(), SimpleNamespace(rank=1, size=4)
    sizes: list[int] = []

    def drawn(inject: Any) -> Tensor:
        def vectors(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            sizes.append(len(x))
            return type(inject).vectors(inject, x, *args, **kwargs)

        seen = SimpleNamespace(is_random=inject.is_random, number=inject.number, vectors=vectors)
        return vectors_of_global_batch(seen, output, loss, y, processes, lambda: 5)

    assert torch.equal(drawn(curvature.exact()), curvature.exact().vectors(output, loss, y))
    assert torch.equal(
        drawn(curvature.sampled()),
        curvature.sampled().vectors(output.repeat(4, 1), loss, y.repeat(4), generator=torch.Generator().manual_seed(5))[
            :, 6:12
        ],
    )
    many = curvature.propagated(40_000)
    assert torch.equal(drawn(many), many.vectors(output, loss, y, generator=torch.Generator().manual_seed(6)))
    assert sizes == [6, 24, 6]


def test_what_is_handed_on_lies_in_memory_as_before():
    """A root by columns that arrives by rows costs a copy in every solve, more than the solve itself."""
    for x in (torch.randn(2, 5, 3).mT, torch.randn(4, 3), torch.randn(1, 6, 6).mT, torch.tensor(2.0), torch.ones(0, 3)):
        found = match_layout(x.contiguous(), form_of(x))
        assert torch.equal(found, x)
        assert x.numel() < 2 or found.stride()[1:] == x.stride()[1:]
    column = torch.randn(8, 3)[:, 1]  # of more than itself
    assert torch.equal(match_layout(column.contiguous(), form_of(column)), column)


def test_work_is_shared_out():
    """No process has more than the fair share and one block more."""
    costs = [5.0, 1.0, 1.0, 3.0, 2.0, 8.0, 2.0, 2.0]
    blocks = [
        SimpleNamespace(names=(str(k),), cost=cost, broadcast_fields=("inverse",)) for k, cost in enumerate(costs)
    ]
    for size in (1, 2, 4):
        teams = [Workers(SimpleNamespace(size=size, rank=rank)) for rank in range(size)]
        for workers in teams:
            workers.assign(blocks)
        made = [[b for b in blocks if workers.makes(b)] for workers in teams]
        assert sorted(b.names for own in made for b in own) == [b.names for b in blocks]
        loads = [sum(b.cost for b in own) for own in made]
        assert max(loads) <= sum(costs) / size + max(costs)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in scenarios.OF.items() for name in names])
def test_as_one_process_on_the_whole_batch(size: int, name: str, monkeypatch):
    found = [result.get(name, "it did not come so far") for result in results(size)]
    assert all(isinstance(x, Tensor) for x in found), next(x for x in found if not isinstance(x, Tensor))
    assert all(torch.equal(x, found[0]) for x in found)
    monkeypatch.setattr(scenarios, "WHOLE", size)
    # sums over shards are added up in single precision
    allowed = {"rtol": 1e-5, "atol": 1e-6} if "sharded" in name else {"rtol": 1e-9, "atol": 1e-10}
    allowed = {"rtol": 1e-7, "atol": 1e-8} if name in scenarios.ILL else allowed
    torch.testing.assert_close(scenarios.SAME[name](0, 1), found[0], **allowed)


def test_processes_that_come_later_are_seen(monkeypatch):
    """A state that is loaded, or a pass that is seen, before torch.distributed is initialised: not alone for ever."""
    model = mlp()
    opt = KFAC(model)
    opt.load_state_dict(opt.state_dict())
    x, _ = scenarios.part(0, 1, [scenarios.EACH])
    model(x)
    assert opt.team.current().processes.size == 1
    given = {"is_initialized": True, "get_rank": 1, "get_world_size": 3, "get_process_group_ranks": [0, 1, 2]}
    for name, value in given.items():
        monkeypatch.setattr(dist, name, lambda *args, value=value: value)
    assert (opt.team.current().processes.rank, opt.team.current().processes.size) == (1, 3)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert opt.team.current().processes.size == 1


@pytest.mark.parametrize("kind", [KFAC, EKFAC, NaturalGradient])
def test_a_process_without_gradients_is_named_on_all(kind: type[KFAC]) -> None:
    """At the first step and later, the first process and another; none waits for the others in vain."""
    cases = {
        f"{lacking} {before}": functools.partial(without_gradients, kind=kind, lacking=lacking, before=before)
        for lacking, before in ((0, 0), (1, 0), (1, 2), (0, 5))
    }
    for found in on_processes(2, cases, seconds=30.0):
        for name in cases:
            (message,) = found[name]
            assert f"{kind.__name__}.step: no parameter has a gradient on rank {name[0]} of the 2" in message
