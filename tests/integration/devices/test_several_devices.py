"""Models on a device that is not the current one, and on several devices."""

from __future__ import annotations

import pytest

from optimizers import EKFAC, KFAC
from support.training import task

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_bad_batches_on_another_than_the_current_device(kind: type[KFAC], two_devices: tuple[str, str]) -> None:
    """Every one of them is skipped, the last included, of which nobody has asked anything yet."""
    model, loss, x, y = task("mlp", two_devices[1])
    opt = kind(model)
    for step in range(40):
        bad = step > 20 and step % 4 == 0
        opt.zero_grad()
        loss(model(x * float("nan") if bad else x), y).backward()
        opt.step()
    assert opt.skipped == 4 and opt.steps == 36 and all(p.isfinite().all() for p in model.parameters())
