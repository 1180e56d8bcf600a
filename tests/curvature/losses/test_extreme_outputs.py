"""Injections at outputs of nearly certain classes, of one class, and of 50,000."""

import pytest
import torch
from torch import nn

from curvature.losses.injections import exact, propagated, sampled
from support.moments import randn

pytestmark = pytest.mark.fast


LOGITS = [[0.0, 0, 0], [40, 0, -40], [-40, 0, 40], [300, -300, -300], [-300, 300, -300], [1, -90, -90], [-90, -95, 1]]


@pytest.mark.parametrize("logits", LOGITS, ids=str)
def test_cross_entropy_keeps_all_digits(logits):
    """In single precision, where one class is nearly certain and others have vanished, too."""
    output, loss = torch.tensor([logits], dtype=torch.float32), nn.CrossEntropyLoss()
    p = output.double().softmax(1)[0]
    want = -p[:, None] * p
    for k in range(3):
        want[k, k] = p[k] * p[torch.arange(3) != k].sum()  # 1 - p[k] may have no digits left
    (pair,) = exact().pairs(output, loss, count=1)
    assert len(pair[0]) == 2
    found = torch.einsum("kni,knj->ij", pair[0].double(), pair[0].double())
    product = exact().product(output, loss, count=1)(torch.eye(3)[:, None])[:, 0].double()
    diagonal = exact().known_diagonal(output, loss, count=1)[0].double()
    allowed = 1e-5 * want.diagonal().sqrt()[:, None] * want.diagonal().sqrt() + 1e-37
    assert ((found - want).abs() <= allowed).all()
    assert ((product - want).abs() <= allowed).all()
    assert ((diagonal - want.diagonal()).abs() <= allowed.diagonal()).all()


def test_one_class_has_no_curvature():
    (pair,) = exact().pairs(randn(2, 1), nn.CrossEntropyLoss(), count=2)
    assert pair[0].shape == (1, 2, 1) and not pair[0].any()


@pytest.mark.parametrize("inject", [exact(), sampled(), propagated()], ids=str)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MSELoss()])
def test_many_classes_stream(inject, loss):
    """50,000 classes at 3 places: all of the root would be 180 GB, a few of its columns are a few MB."""
    output = randn(3, 50_000).float().log_softmax(1)
    left, right = next(iter(inject.pairs(output, loss, count=1, size=4)))
    assert left.shape == (inject.number(output, 1) if inject != exact() else 4, 3, 50_000) and right is None
    z = randn(2, 3, 50_000).float()
    p = output.exp()
    got = exact().product(output, loss, count=1)(z)
    want = {"CrossEntropyLoss": p * (z - (p * z).sum(2, keepdim=True)) / 3, "NLLLoss": p * z / 3, "MSELoss": z / 75_000}
    torch.testing.assert_close(got, want[type(loss).__name__])
