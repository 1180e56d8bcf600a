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


# -- and the other way round: what is computed of a model between the lines of a loop changes nothing that the loop does

CALLS = {
    "kfac": curvature.kfac,
    "fisher_diagonal": curvature.fisher_diagonal,
    "gauss_newton": lambda *setting: curvature.gauss_newton(*setting).trace(),
    "hessian": lambda *setting: curvature.hessian(*setting).to_dense(),
    "empirical_fisher": lambda *setting: curvature.empirical_fisher(*setting).to_dense(),
    "per_sample_gradients": lambda model, loss, data: curvature.per_sample_gradients(model, loss, *data),
    "per_sample_norms": lambda model, loss, data: curvature.per_sample_norms(model, loss, *data),
    "per_sample_jacobians": lambda model, loss, data: curvature.per_sample_jacobians(model, data[0]),
    "check_gradients": lambda model, loss, data: curvature.check_gradients(model, loss, *data),
    "noise": lambda model, loss, data: curvature.gradient_noise_scale(model, loss, data),
}
OPTIMIZERS = ATTACHED | {
    "sampled": functools.partial(KFAC, loss=nn.CrossEntropyLoss(), inject=curvature.sampled()),
    "empirical": functools.partial(KFAC, inject=curvature.empirical()),
}
PLACES = "before zero_grad", "before the forward pass", "before backward", "before the step"


def trained(make: Any, call: Any, place: str) -> Tensor:
    """The parameters after a few steps, with a call on other samples at one place of each."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        x, y = torch.randn(30, 4, dtype=torch.float64), torch.randint(3, (30,))
    opt, loss, others = make(model), nn.CrossEntropyLoss(), (5 * x[:7], y[:7])
    at = lambda here: call(model, loss, others) if place == here else None
    for k in range(4):
        at(PLACES[0])
        opt.zero_grad()
        at(PLACES[1])
        value = loss(model(x[5 * k : 5 * k + 10]), y[5 * k : 5 * k + 10])
        at(PLACES[2])
        value.backward()
        at(PLACES[3])
        opt.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@in_turn(place=PLACES, call=CALLS, optimizer=OPTIMIZERS)
def test_what_is_computed_between_the_lines_of_a_loop_changes_no_step(place: str, call: str, optimizer: str) -> None:
    make = OPTIMIZERS[optimizer]
    expected = trained(make, lambda *setting: None, place)
    torch.testing.assert_close(trained(make, CALLS[call], place), expected, rtol=0, atol=0)


def test_a_builder_raises_nothing_of_an_optimizer_that_refuses_the_loop() -> None:
    """Its `loss=` has classes on axis 1, those of the loop and of the builder are on the last."""
    with seeded(0):
        model, x = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), torch.randint(7, (6, 5))
    loss = lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())
    opt = KFAC(model, loss=nn.CrossEntropyLoss(), inject=curvature.exact())
    curvature.kfac(model, loss, (x, x), inject=curvature.isotropic())
    curvature.per_sample_gradients(model, loss, x, x)
    with pytest.raises(RuntimeError, match="KFAC: loss= has classes on axis 1"):
        loss(model(x), x).backward()
    del opt
