"""Every matrix is that of exactly the loss of all data, or is refused: losses of the user's own, samples that meet."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from support.cases.case import Raw
from support.odd.functions import SineByNumpy
from support.oracles.brute_force import of_the_batch

N, DOUBLE = 6, torch.float64
WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=DOUBLE)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


X, Y, GRAPH = drawn(N, 4), drawn(N, 3, seed=1), drawn(N, N, seed=2).softmax(1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2])
SUMS = {
    "sum": (lambda o, t: 0.5 * (o - t).square().sum(), Y),
    "partial": (partial(F.cross_entropy, reduction="sum"), LABELS),
    "class weights": (lambda o, t: F.cross_entropy(o, t, weight=WEIGHT), LABELS),
    "sample weights": (
        lambda o, t: (t[1] * F.cross_entropy(o, t[0], reduction="none")).sum() / t[1].sum(),
        (LABELS, Y[:, 0].exp()),
    ),
    "masked": (lambda o, t: ((o - t).square() * (t > 0)).sum() / (t > 0).sum(), Y),
    "mean": (lambda o, t: F.huber_loss(o, t), Y),
}
MEETING = {
    "contrastive": (lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))), Y),
    "root": (lambda o, t: F.mse_loss(o, t).sqrt(), Y),
    "root of one entry": (lambda o, t: F.mse_loss(o[:, 0], t[:, 0]).sqrt(), Y),
    "two scales": (lambda o, t: F.cross_entropy(o, t) + 0.1 * o.square().sum(), LABELS),
}
MODELS = {
    "linear": lambda: Raw(lambda m, x: m.l(x), l=nn.Linear(4, 3)),
    "mlp": lambda: Raw(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 5), b=nn.Linear(5, 3)),
}
MIXING = {
    "centred": lambda: Raw(lambda m, x: m.b(m.a(x).tanh() - 0.5 * m.a(x).tanh().mean(0)), a=nn.Linear(4, 5),
                           b=nn.Linear(5, 3)),
    "graph": lambda: Raw(lambda m, x: GRAPH @ m.b((GRAPH @ m.a(x)).relu()), a=nn.Linear(4, 5), b=nn.Linear(5, 3)),
    "attention": lambda: Raw(lambda m, x: m.b((m.a(x) @ m.a(x).T).softmax(1) @ m.a(x)), a=nn.Linear(4, 5),
                             b=nn.Linear(5, 3)),
    "one output": lambda: Raw(lambda m, x: m.b(m.a(x) - m.a(x).mean(0)) * m.s, a=nn.Linear(4, 5), b=nn.Linear(5, 1),
                              s=(3,)),
}  # fmt: skip


def built(make):
    torch.manual_seed(3)
    return make().double()


def assert_all_forms(operator, expected):
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)
    eye, v = torch.eye(len(expected), dtype=DOUBLE), drawn(len(expected))
    close(operator @ eye, expected)
    close(operator @ v, expected @ v)
    close(operator.to_dense(), expected)
    close(operator.diagonal(), expected.diagonal())
    close(operator.trace(), expected.trace())
    close(operator.solve(v, damping=20.0), torch.linalg.solve(expected + 20 * eye, v))


def cut(y, some):
    return tuple(t[some] for t in y) if isinstance(y, tuple) else y[some]


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SUMS)
def test_losses_of_the_users_own(name, model, sizes):
    (loss, y), model = SUMS[name], built(MODELS[model])
    G, H = of_the_batch(model, loss, X, y)
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    data = [(X[b - a : b], cut(y, slice(b - a, b))) for a, b in zip(sizes, ends, strict=True)]
    assert_all_forms(curvature.gauss_newton(model, loss, data), G)
    assert_all_forms(curvature.fisher(model, loss, data), G)
    assert_all_forms(curvature.hessian(model, loss, data), H)
    diagonal = torch.cat([d.flatten() for d in curvature.fisher_diagonal(model, loss, data).values()])
    torch.testing.assert_close(diagonal, G.diagonal())
    blocks = curvature.fisher_blocks(model, loss, data).to_dense()
    torch.testing.assert_close(blocks.diagonal(), G.diagonal())
    traces = [float(curvature.kfac(model, loss, [(X[n : n + 1], cut(y, slice(n, n + 1))) for n in range(N)]).trace())]
    torch.testing.assert_close(traces[0], float(curvature.kfac(model, loss, data).trace()))


ADVANTAGES = drawn(N, 1, seed=4) * F.one_hot(LABELS)
SIGNED = {
    "advantages": (nn.CrossEntropyLoss(), ADVANTAGES),
    "advantages, summed": (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), ADVANTAGES),
    "weights of outputs": (nn.BCEWithLogitsLoss(weight=drawn(3, seed=5)), Y.sigmoid()),
    "weights of positive labels": (nn.BCEWithLogitsLoss(pos_weight=-1 - WEIGHT), Y.sigmoid()),
}


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("name", SIGNED)
def test_negative_weights_of_torchs_losses(name, sizes):
    """As in policy gradients: the matrix is indefinite. What draws labels or takes roots refuses it."""
    (loss, y), model = SIGNED[name], built(MODELS["mlp"])
    G, H = of_the_batch(model, loss, X, y)
    assert torch.linalg.eigvalsh(G)[0] < -1e-3
    data = list(zip(X.split(sizes), y.split(sizes), strict=True))
    assert_all_forms(curvature.gauss_newton(model, loss, data), G)
    assert_all_forms(curvature.hessian(model, loss, data), H)
    diagonal = torch.cat([d.flatten() for d in curvature.fisher_diagonal(model, loss, data).values()])
    torch.testing.assert_close(diagonal, G.diagonal())
    for inject in (curvature.sampled(), curvature.propagated(), curvature.isotropic()):
        with pytest.raises(ValueError, match="not convex"):
            curvature.fisher_diagonal(model, loss, data, inject)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", MEETING)
def test_losses_in_which_samples_meet(name, model):
    (loss, y), model = MEETING[name], built(MODELS[model])
    G, H = of_the_batch(model, loss, X, y)
    assert_all_forms(curvature.gauss_newton(model, loss, (X, y)), G)
    assert_all_forms(curvature.hessian(model, loss, (X, y)), H)
    for builder in (curvature.fisher, curvature.empirical_fisher):
        operator = builder(model, loss, (X, y))
        for form in (operator.to_dense, operator.diagonal, operator.trace, lambda op=operator: op @ drawn(len(G))):
            with pytest.raises(ValueError, match="no weighted sum"):
                form()
    for builder in (curvature.fisher_diagonal, curvature.fisher_blocks, curvature.kfac, curvature.ekfac):
        with pytest.raises(ValueError, match="no weighted sum"):
            builder(model, loss, (X, y))
    halves = [(X[:3], cut(y, slice(0, 3))), (X[3:], cut(y, slice(3, 6)))]
    for builder in (curvature.gauss_newton, curvature.hessian):
        with pytest.raises(ValueError, match="several batches.*all data as one batch"):
            builder(model, loss, halves).to_dense()


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda o, t: F.cross_entropy(o, t, reduction="sum")])
@pytest.mark.parametrize("name", MIXING)
def test_models_in_which_samples_meet(name, loss):
    model = built(MIXING[name])
    G, H = of_the_batch(model, loss, X, LABELS)
    data = (X, LABELS)
    assert_all_forms(curvature.gauss_newton(model, loss, data), G)
    assert_all_forms(curvature.fisher(model, loss, data), G)
    assert_all_forms(curvature.hessian(model, loss, data), H)
    diagonal = torch.cat([d.flatten() for d in curvature.fisher_diagonal(model, loss, data).values()])
    torch.testing.assert_close(diagonal, G.diagonal())
    for inject in (curvature.sampled(2), curvature.isotropic(2), curvature.propagated(2)):
        if isinstance(loss, nn.Module) or "sampled" not in repr(inject):
            operator = curvature.fisher(model, loss, data, inject)
            assert_all_forms(operator, operator.to_dense())
    operator = curvature.empirical_fisher(model, loss, data)
    for form in (operator.to_dense, operator.diagonal, lambda: operator @ drawn(len(G))):
        with pytest.raises(ValueError, match="the output of a sample changes"):
            form()


@pytest.mark.parametrize("name", [name for name in MIXING if name != "graph"])  # of a fixed number of nodes
def test_models_in_which_samples_meet_have_no_matrix_of_several_batches(name):
    """It would be that of another model, in which samples meet only within their batch."""
    for ends in ((3, 6), (1, 6), (5, 6)):
        model = built(MIXING[name])
        data = [(X[a:b], LABELS[a:b]) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        said = r"(b|model): the output of a sample changes.*all data as one batch"
        for builder in (curvature.gauss_newton, curvature.fisher, curvature.hessian):
            for _ in range(2):
                operator = builder(model, nn.CrossEntropyLoss(), data)
                for form in (operator.to_dense, operator.diagonal, lambda op=operator: op @ drawn(op.space.size)):
                    with pytest.raises(ValueError, match=said):
                        form()
        for builder in (curvature.fisher_diagonal, curvature.fisher_blocks):
            with pytest.raises(ValueError, match=said):
                builder(model, nn.CrossEntropyLoss(), data)


def test_whether_samples_meet_is_asked_once_of_each_batch():
    model = built(lambda: Raw(lambda m, x: m.b(m.a(x)[torch.arange(len(x))].tanh()), a=nn.Linear(4, 5),
                              b=nn.Linear(5, 3)))  # fmt: skip
    G = curvature.gauss_newton(model, nn.CrossEntropyLoss(), [(X[:3], LABELS[:3]), (X[3:], LABELS[3:])])
    G @ drawn(G.space.size)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    G @ drawn(G.space.size)
    assert len(passes) == 2


@pytest.mark.parametrize("builder", [curvature.gauss_newton, curvature.hessian])
def test_samples_that_meet_in_the_loss_only_of_a_later_batch(builder):
    """Pairs of samples with different labels: there are none in the first batch, but there are between the batches."""

    def ranks(o, y):
        return (F.softplus(o[:, :1].T - o[:, :1]) * (y[:, None] > y)).sum()

    model, y = built(MODELS["mlp"]), torch.tensor([0, 0, 0, 1, 0, 2])
    for parts in ([slice(0, 3), slice(3, 6)], [slice(3, 6), slice(0, 3)]):
        with pytest.raises(ValueError, match="all data as one batch"):
            builder(model, ranks, [(X[some], y[some]) for some in parts]).to_dense()


STATIONARY = {  # at every output
    "divergence": lambda o, t: F.kl_div(o.log_softmax(1), o.detach().log_softmax(1), log_target=True,
                                        reduction="batchmean"),
    "divergence from it": lambda o, t: F.kl_div(o.detach().log_softmax(1), o.log_softmax(1), log_target=True,
                                                reduction="none").sum(),
    "squares": lambda o, t: (o - o.detach()).square().mean(),
    "weighted": lambda o, t: ((o - o.detach()).square().sum(1) * t[:, 0].exp()).sum() / t[:, 0].exp().sum(),
}  # fmt: skip


@pytest.mark.parametrize("sizes", [(6,), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("name", STATIONARY)
def test_losses_whose_gradient_is_zero(name, sizes):
    """As of the divergence of a policy from itself, whose Hessian is the Fisher matrix."""
    loss, model = STATIONARY[name], built(MODELS["mlp"])
    G, H = of_the_batch(model, loss, X, Y)
    torch.testing.assert_close(G, H)
    data = list(zip(X.split(list(sizes)), Y.split(list(sizes)), strict=True))
    for builder in (curvature.gauss_newton, curvature.fisher, curvature.hessian):
        assert_all_forms(builder(model, loss, data), G)
    diagonal = torch.cat([d.flatten() for d in curvature.fisher_diagonal(model, loss, data).values()])
    torch.testing.assert_close(diagonal, G.diagonal())
    rows = curvature.per_sample_gradients(model, loss, X, Y)
    assert all(own.abs().max() < 1e-12 for own in rows.values())


def test_losses_whose_gradient_is_zero_and_in_which_samples_meet():
    loss, model = (
        lambda o, t: ((o - o.detach()) @ t.T).square().mean() + (o - o.detach()).sum().square(),
        built(MODELS["mlp"]),
    )
    G, _ = of_the_batch(model, loss, X, Y)
    assert_all_forms(curvature.gauss_newton(model, loss, (X, Y)), G)
    for function in (curvature.fisher_diagonal, curvature.per_sample_gradients):
        with pytest.raises(ValueError, match="no weighted sum"):
            function(model, loss, X, Y)


def test_the_hessian_of_a_loss_whose_gradient_is_zero_is_refused_where_torch_loses_a_part():
    model = Raw(lambda m, x: SineByNumpy.apply(m.a(x)), a=nn.Linear(4, 3)).double()
    with pytest.raises(RuntimeError, match=r"\(SineByNumpy\)"):
        curvature.hessian(model, STATIONARY["squares"], (X, Y)).to_dense()
