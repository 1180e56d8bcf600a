"""Parts of an optimizer on their own: `Monitor` and `Preconditioner`, given plain tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from curvature import capture
from curvature.preconditioners import BatchFacts, BlockDiagonalCurvature
from curvature.recording import warn_once
from optimizers import KFAC
from optimizers.distributed.processes import Distributed
from optimizers.distributed.team import Teams
from optimizers.monitor import Monitor
from optimizers.preconditioner import Preconditioner, Renewal
from optimizers.recording.backward_passes import Measured, Passes
from optimizers.recording.model_outputs import OutputScale
from optimizers.schedule import Schedule

pytestmark = pytest.mark.fast


def test_entries_are_plain_numbers() -> None:
    """What a rule of one's own leaves in tensors among them."""
    monitor = Monitor()
    kept = monitor.note_step({"accepted": True, "step_size": torch.tensor(0.5), "damping": None})
    kept["seconds"] = 2.0  # as the optimizer adds
    assert monitor.history() == [{"step": 0, "accepted": True, "step_size": 0.5, "damping": None, "seconds": 2.0}]
    assert type(monitor.last()["step_size"]) is float and (monitor.steps, monitor.skipped) == (1, 0)
    monitor.history()[0]["step"] = 9  # a copy
    assert monitor.last()["step"] == 0


def test_bad_batches_are_counted_apart() -> None:
    monitor = Monitor()
    assert monitor.was_accepted and monitor.last() == {}
    for good in (True, False, False, True):
        if good:
            monitor.note_step({"accepted": True})
        else:
            monitor.skip()
        assert monitor.was_accepted is good
    expected = [(0, True), (1, False), (1, False), (1, True)]
    assert [(entry["step"], entry["accepted"]) for entry in monitor.history()] == expected
    assert (monitor.stats()["steps"], monitor.stats()["skipped"]) == (2, 2)


def test_failures_and_skipped_batches_are_counted() -> None:
    monitor = Monitor()
    monitor.note_step({"accepted": False, "loss": 2.0})
    monitor.skip()
    assert (monitor.steps, monitor.skipped, monitor.stats()["failures"]) == (1, 1, 1)
    again = Monitor()
    again.load_state_dict(monitor.state_dict())
    assert (again.steps, again.skipped, again.stats()["failures"]) == (1, 1, 1)


def preconditioner(factor_decay: float = 0.9) -> tuple[Preconditioner, Passes]:
    store, passes = BlockDiagonalCurvature(), Passes()
    teams = Teams(Distributed(), torch.device("cpu"), store, passes)
    recorder: Any = SimpleNamespace(
        passes=passes, settle=passes.settle, outputs=OutputScale(), was_empty=True, has_measured=False
    )
    return Preconditioner(store, recorder, Schedule(1, 1), teams, Monitor(), factor_decay, "KFAC"), passes


def test_a_solution_is_that_with_the_dense_inverse() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    trained: dict[str, Any] = dict(model.named_parameters())
    part, passes = preconditioner()
    with capture(model) as tape:
        output = model(x)
    vectors = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 5, 2)
    passes.total.add_(Measured(part.store.measure(tape, [output], [vectors], BatchFacts(len(x)))))
    gradients = {name: torch.randn_like(p) for name, p in trained.items()}
    assert part.renew(gradients, trained, dict.fromkeys(trained, {"damping": 0.1})) == Renewal(True, 1)
    assert not passes.total.curvature  # it is taken once
    found = part.solve(gradients, trained)

    inputs = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1)
    matrix = torch.kron(torch.eye(2, dtype=torch.float64), inputs.mT @ inputs / 5) + 0.1 * torch.eye(8)
    right = torch.cat([gradients["weight"], gradients["bias"][:, None]], 1)
    expected = torch.linalg.solve(matrix, right.flatten()).reshape(2, 4)
    torch.testing.assert_close(found, {"weight": expected[:, :3], "bias": expected[:, 3]})


def test_without_a_pass_gradients_are_the_directions(caplog: pytest.LogCaptureFixture) -> None:
    part, _ = preconditioner()
    assert not part.is_idle() and part.knows_nothing()
    part.recorder.was_empty = False
    assert not part.knows_nothing()
    warn_once.cache_clear()
    assert part.renew({}, {}, {}) == Renewal(True)
    assert "KFAC.step: no forward pass" in caplog.text
    gradients = {"weight": torch.randn(2, 3)}
    torch.testing.assert_close(part.solve(gradients, {"weight": torch.zeros(2, 3)}), gradients)


def test_parameters_that_the_optimizer_was_not_given_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A head replaced after the optimizer was made: the log says so once, the report at any time."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = KFAC(model)
    model[1] = nn.Linear(4, 5)
    for _ in range(3):
        model(torch.ones(6, 3)).square().mean().backward()
        opt.step()
    (message,) = [record.message for record in caplog.records if "not trained" in record.message]
    assert "1.bias, 1.weight" in message and "add_param_group" in message
    assert "not trained" in opt.report()
    opt.add_param_group({"params": list(model[1].parameters())})
    before = model[1].weight.detach().clone()
    model(torch.ones(6, 3)).square().mean().backward()
    opt.step()
    assert not torch.equal(model[1].weight, before)


def test_statistics_have_four_digits() -> None:
    model = nn.Linear(3, 2)
    opt = KFAC(model)
    model(torch.ones(6, 3)).square().mean().backward()
    opt.step()
    stats = opt.stats()
    for value in (stats["step_size"], stats["seconds"], *stats["seconds_in"].values(), *stats["conditions"].values()):
        assert value == float(f"{value:.4g}")
