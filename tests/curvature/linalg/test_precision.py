"""Full precision: torch's settings of both kinds inside it, and that they are afterwards what they were."""

import subprocess
import sys
import threading

import pytest
import torch

from curvature.linalg import full_precision
from curvature.linalg.devices import SWITCH
from support.architecture import ROOT

SETTINGS = (
    "",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
    "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.mkldnn.conv.fp32_precision = 'bf16'",
    # torch's own test helpers freeze the flags; then plain assignment to `torch.backends.cudnn` raises
    "torch.backends.cudnn.allow_tf32 = True; torch.backends.disable_global_flags()",
)
# A setting cannot be taken back to that of a fresh process: each runs in a fork of one that has set nothing.
SCRIPT = """
import os, sys, torch
torch.accelerator.is_available = lambda: True  # without one, its settings round nothing
from curvature.linalg import full_precision

def older(read):
    try:
        return read()
    except RuntimeError:
        return "raises"

def found():
    b = torch.backends
    operators = b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn
    new = [one.fp32_precision for one in operators]
    reads = (lambda: b.cuda.matmul.allow_tf32, lambda: b.cudnn.allow_tf32, torch.get_float32_matmul_precision)
    return [*map(older, reads)], new, [b.fp32_precision, b.cudnn.fp32_precision, b.mkldnn.fp32_precision]

def check(setting):
    exec(setting)
    before = found()
    with full_precision():
        old, new, _ = found()
        assert set(new) <= {"ieee", "none"}, new
        for one, other, exact in zip(before[0], old, (False, False, "highest")):
            assert other == exact or one == other == "raises", (before, old)
    assert found() == before, (before, found())

failed = 0
for setting in sys.argv[1:]:
    if not (child := os.fork()):
        check(setting)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("fails after:", setting or "nothing was set", file=sys.stderr)
        failed = 1
sys.exit(failed)
"""


def test_settings_of_both_kinds() -> None:
    """Inside nothing rounds, and what could be read before can be read; afterwards all is as before."""
    subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT, *SETTINGS], check=True, cwd=ROOT)


def test_two_threads() -> None:
    """The first to leave does not take it from the other; the last restores what was."""
    products = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_precision():
            entered.set()
            leave.wait(30)

    try:
        thread = threading.Thread(target=other)
        with full_precision():
            thread.start()
            assert entered.wait(30)
        assert products.fp32_precision == "ieee"
        leave.set()
        thread.join()
        assert products.fp32_precision == "tf32"
    finally:
        leave.set()
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("operator", ["matmul", "conv", "rnn"])
@pytest.mark.parametrize("has_accelerator", [False, True])
def test_settings_of_devices_that_there_are_count(
    operator: str, has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own for cuDNN is TF32; without an accelerator nobody computes with it, and nothing is switched."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    own, other = getattr(torch.backends.mkldnn, operator), torch.backends.cudnn.conv
    before = own.fp32_precision, other.fp32_precision
    try:
        own.fp32_precision, other.fp32_precision = "ieee", "tf32"
        with full_precision():
            assert bool(SWITCH.entered) == has_accelerator
        own.fp32_precision = "bf16"
        with full_precision():
            assert SWITCH.entered and own.fp32_precision == "ieee"
        assert own.fp32_precision == "bf16"
    finally:
        own.fp32_precision, other.fp32_precision = before
