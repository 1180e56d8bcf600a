"""`report()`: a table that fits a terminal, and reasons that stand alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw


@pytest.mark.parametrize("kind", [KFAC, EKFAC, NaturalGradient])
def test_fits_100_columns(kind: type[KFAC] | type[EKFAC] | type[NaturalGradient]):
    """Long names and lists of factors break after commas; every reason is written out once, below."""
    inner = Raw(
        lambda m, x: m.out(m.norm(x + m.attention(x, x, x, need_weights=False)[0])),
        attention=nn.MultiheadAttention(8, 2),
        norm=nn.LayerNorm(8),
        out=nn.Linear(8, 3000),
        unused=(3,),
    )
    model = nn.ModuleDict({"a_decoder_of_a_language_model_with_a_long_name": inner})
    model.forward = inner.forward  # type: ignore[method-assign]
    opt = kind(model)
    for _ in range(3):
        lines = opt.report().splitlines()
        assert max(map(len, lines)) <= 100
        assert all(sum(name in line for line in lines) == 1 for name, _ in model.named_parameters())
        notes = [line for line in lines if line.startswith("[")]
        marks = set(re.findall(r"\[\d+\]", "\n".join(line for line in lines if not line.startswith("["))))
        assert {note.split()[0] for note in notes} == marks and len(set(notes)) == len(notes)
        model(torch.randn(3, 6, 8)).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("solver", ["woodbury", "cg"])
def test_memory_that_depends_on_the_batch_is_not_told_before_the_first_step(solver: str):
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 10))
    opt = NaturalGradient(model, solver=solver)
    loss = model(torch.randn(40, 30)).square().mean()
    before = opt.report().splitlines()
    loss.backward()
    opt.step()
    for early, late in zip(before, opt.report().splitlines(), strict=True):
        told, kept = (re.findall(r" (\d+\.\d\d)$", line) for line in (early, late))
        assert not told or float(told[0]) >= float(kept[0])
    assert before[-1] == "in all"


def test_a_replaced_layer_has_one_row_for_each_parameter():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    opt = KFAC(model)
    model[1] = nn.Linear(3, 5)
    model(torch.randn(6, 4)).square().mean().backward()
    opt.step()
    rows = [line for line in opt.report().splitlines() if line.startswith("1.")]
    assert [row.split() for row in rows] == [["1.weight", "not", "trained", "[1]"], ["1.bias", "not", "trained", "[1]"]]


def test_a_recurrent_layer_within_a_checkpoint_says_why_it_has_no_factors():
    model = Raw(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=nn.LSTM(4, 3, batch_first=True), head=nn.Linear(3, 2))
    opt = KFAC(model)
    checkpoint(model, torch.randn(5, 2, 4), use_reentrant=False).square().mean().backward()
    opt.step()
    reason = "no Kronecker factors exist for lstm as one kernel, which is how it runs within torch.utils.checkpoint"
    assert reason in " ".join(opt.report().split())
