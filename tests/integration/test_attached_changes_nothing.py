"""What is attached to a model changes nothing that the loop computes: gradients, and gradients of gradients."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.layers import RULES
from curvature.recording import capture
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Case, seeded
from support.cases.catalogue import CASES
from support.combinations import in_turn
from support.oracles import brute_force as oracle

ATTACHED = {"KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient}
BY_ID = {case.id: case for case in CASES}
# one of each rule, and what runs in another form while it is recorded; torch differentiates all of them twice
OF_RULES = [
    *("raw_addmm", "batch_norm2d", "bilinear", "conv1d_groups", "raw_einsum_heads", "raw_scale_and_shift"),
    *("embedding_padding", "group_norm_places", "instance_norm2d_eval", "layer_norm_places", "linear_2_leading"),
    *("raw_matmul_heads", "prelu_channels_places", "rms_norm_places", "raw_repeat", "raw_matmul_reversed"),
    *("conv_transpose1d_mixed", "weight_norm_linear", "weight_norm_conv", "weight_norm_old_linear"),
    *("attention_self_weights", "lstm_cell_unrolled", "lstm_projected_plain_batch_first", "gru_learned_state"),
    *("custom_function_mixed", "called_twice", "checkpoint"),
]


class Repeated(nn.Module):
    """A recurrent layer that is called more than once: its inputs or first states depend on its own weights."""

    def __init__(self, kind: str, way: str, **options: Any):
        super().__init__()
        self.way, self.head = way, nn.Linear(4, 3)
        self.layer = getattr(nn, kind)(4, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "own output":
            return self.head(self.layer(self.layer(x)[0])[0].mean(1))
        if self.way == "siamese":
            one, other = (self.layer(part)[0].mean(1) for part in (x, x.flip(1)))
            return self.head(one * other)
        if self.way == "embedded by it":  # the input is made of a weight of the layer
            return self.head(self.layer(x @ self.layer.weight_hh_l0[:4])[0].mean(1))
        state, outs = None, []
        for part in x.split(1 if self.way == "steps" else 2, 1):
            out, state = self.layer(part, state)
            outs.append(out)
        return self.head(torch.cat(outs, 1).mean(1))


WAYS = ("steps", "chunks", "siamese", "own output", "embedded by it")


def repeated(kind: str, way: str) -> Case:
    build = functools.partial(Repeated, kind, way, **({"num_layers": 2} if way == "chunks" else {}))
    target = lambda out: torch.randint(out.shape[1], out.shape[:1])
    return Case(f"{kind} {way}", build, lambda n: torch.randn(n, 4, 4), F.cross_entropy, target)


def gradients(case: Case, attach: Any) -> list[Tensor]:
    """Those of a loss, and of the loss with a penalty on them, of the first pass, which an optimizer records."""
    model, loss = case.build()
    x, y = case.batch(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    attached = attach(model) if attach else None
    with seeded(2):
        value = loss(oracle.forward(model, x), y)
        first = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
        (value + sum(g.square().sum() for g in first)).backward()
    del attached
    return [g.detach() for g in first] + [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def test_there_is_a_case_of_each_rule() -> None:
    seen = set()
    for name in OF_RULES:
        model, _ = BY_ID[name].build()
        with capture(model) as tape:
            oracle.forward(model, BY_ID[name].batch(model)[0])
        seen |= {type(use.rule) for use in tape.uses if use.rule is not None}
    missing = {type(rule).__name__ for rule in RULES.values()} - {rule.__name__ for rule in seen}
    assert missing == {"EmbeddingBagRule"}  # torch cannot differentiate its bags twice


@pytest.mark.parametrize("name", OF_RULES)
def test_gradients_with_a_penalty(name: str) -> None:
    right = gradients(BY_ID[name], None)
    for make in ATTACHED.values():
        for found, expected in zip(gradients(BY_ID[name], make), right, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@in_turn(way=WAYS, kind=["RNN", "GRU", "LSTM"])
def test_recurrent_layers_that_are_called_again(kind: str, way: str) -> None:
    case = repeated(kind, way)
    right = gradients(case, None)
    for make in ATTACHED.values():
        for found, expected in zip(gradients(case, make), right, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    model, loss = case.build()
    x, y = case.batch(model)
    expected = oracle.Matrices(model, loss, [(x, y)])
    for build, matrix in ((curvature.hessian, expected.hessian), (curvature.gauss_newton, expected.gauss_newton)):
        v = torch.randn(len(matrix), 2, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(build(model, loss, (x, y)) @ v, matrix @ v, rtol=1e-8, atol=1e-10)
