"""Models and losses in which samples meet, also by their place in the batch, their number, gates and masks: what is
defined by samples is refused, rows of all others are exact."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from support.cases.case import Raw
from support.combinations import in_pairs, in_turn, member
from support.comparisons import matches
from support.oracles import brute_force
from support.rows import all_of_rows

N = 6
ENTROPY = nn.CrossEntropyLoss()
GRAPH = torch.rand(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)


def layers(**more):
    return {"a": nn.Linear(4, 5), "b": nn.Linear(5, 3), **more}


def attend(m, x):
    h = m.a(x)
    return m.b((h @ h.T).softmax(1) @ h)


def centred(h):
    return h - 0.5 * h.mean(0)


def whitened(m, x):
    """Copies of a few samples have no covariance that can be factored, and one sample alone has none."""
    h = m.a(x)[:, :4]
    return m.b(torch.linalg.solve_triangular(torch.linalg.cholesky(h.T @ h / len(h)), h.T, upper=False).T)


def last_of_the_batch(m, x):
    h = m.a(x).tanh()
    return m.b(h + h[-1:])


def scaled_by_the_largest(m, x):
    return m.b(m.a(x) / m.a(x).abs().amax())


MEETING = {
    "centred": lambda: Raw(lambda m, x: m.b(m.a(x).tanh() - 0.5 * m.a(x).tanh().mean(0)), **layers()),
    "attention along the batch": lambda: Raw(attend, **layers()),
    "nodes of a graph": lambda: Raw(lambda m, x: GRAPH.to(x) @ m.b((GRAPH.to(x) @ m.a(x)).relu()), **layers()),
    "the last sample": lambda: Raw(last_of_the_batch, **layers()),
    "scaled": lambda: Raw(scaled_by_the_largest, **layers()),
    "cumulative": lambda: Raw(lambda m, x: m.b(torch.cumsum(m.a(x), dtype=x.dtype, dim=0)), **layers()),
    "whitened": lambda: Raw(whitened, a=nn.Linear(4, 5).requires_grad_(False), b=nn.Linear(4, 3)),
    "closed gate": lambda: Raw(lambda m, x: m.b(m.a(x) + m.gate * m.a(x).mean(0)), gate=nn.Parameter(torch.zeros(1)),
                               **layers()),
    "detached mean": lambda: Raw(lambda m, x: m.b(m.a(x) - m.a(x).mean(0).detach()), **layers()),
    "dropout, then centred": lambda: Raw(
        lambda m, x: m.b(F.dropout(m.a(x), 0.5) - F.dropout(m.a(x), 0.5).mean(0)), **layers()
    ),
    "a number of draws that depends on the data, then centred": lambda: Raw(
        lambda m, x: m.b(centred(F.rrelu(m.a(x), training=True))), **layers()
    ),
    "in a batch of which one sample alone draws": lambda: Raw(
        lambda m, x: m.b(m.a(x).tanh().cumsum(0)) * (1 + torch.rand(int(x[0, 0] > 0), 3).to(x).sum(0)), **layers()
    ),
    # as many for a sample alone: its output can be compared
    "divided by their number, beside random numbers": lambda: Raw(
        lambda m, x: m.b(m.a(x).tanh() / len(x) + torch.rand(5).to(x)), **layers()
    ),
    "deterministic in evaluation": lambda: Raw(
        lambda m, x: m.b(centred(F.rrelu(m.a(x), training=m.training))), **layers()
    ).eval(),
    "batch first by mistake": lambda: Raw(
        lambda m, x: m.b(m.mix(*[m.a(x)[:, None]] * 3)[0][:, 0]), mix=nn.MultiheadAttention(5, 1), **layers()
    ),
}  # fmt: skip
APART = {
    "dropout": lambda: Raw(lambda m, x: m.b(F.dropout(m.a(x), 0.5)), **layers()),
    "a number of draws that depends on the data": lambda: Raw(
        lambda m, x: m.b(F.rrelu(m.a(x), training=True)), **layers()
    ),
    "as many draws as the data say, of integers": lambda: Raw(
        lambda m, x: m.b(F.rrelu(m.a((3 * x).long().to(x)), training=True)), **layers()
    ),
    "deterministic in evaluation": lambda: Raw(
        lambda m, x: m.b(F.rrelu(m.a(x), training=m.training)), **layers()
    ).eval(),
    "tokens": lambda: Raw(lambda m, x: m.b(m.a(x).unflatten(1, (5, 1)).cumsum(1).flatten(1)), **layers()),
    "sorted": lambda: Raw(lambda m, x: m.b(m.a(x)[x[:, 0].argsort()][x[:, 0].argsort().argsort()]), **layers()),
    "position": lambda: Raw(lambda m, x: m.b(m.a(x) + m.p), p=(5,), **layers()),
}
FUNCTIONS = {
    "per_sample_gradients": curvature.per_sample_gradients,
    "per_sample_norms": curvature.per_sample_norms,
    "per_sample_gram": curvature.per_sample_gram,
    "clipped_gradient": lambda *a: curvature.clipped_gradient(*a, 1.0),
    "per_sample_fisher_diagonals": curvature.per_sample_fisher_diagonals,
    "empirical_fisher": lambda *a: curvature.empirical_fisher(*a).to_dense(),
    "kfac": curvature.kfac,
    "ekfac": curvature.ekfac,
    "laplace": curvature.laplace,
}
in_double = pytest.mark.usefixtures("double")
two_functions = pytest.mark.parametrize("function", ["per_sample_gradients", "kfac"])


def refuse(function, model, x, y, said="the output of a sample changes"):
    with pytest.raises(ValueError, match=said):
        FUNCTIONS[function](model, ENTROPY, x, y)


def prepared(make):
    torch.manual_seed(0)
    model = make().double()
    return model, torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))


@pytest.mark.parametrize("name", MEETING)
def test_gradients_of_samples_that_meet_are_refused_by_name(name):
    said = r"(\b[ab]|mix|model): the output of a sample changes.*gauss_newton\(\)"
    refuse("per_sample_gradients", *prepared(MEETING[name]), said)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_that_is_defined_by_samples_is_refused(function):
    refuse(function, *prepared(MEETING["centred"]))


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "laplace"])
def test_losses_in_which_samples_meet_are_refused(function):
    model, x, _ = prepared(APART["position"])
    y = torch.randn(N, 3, dtype=torch.float64)
    for loss in (lambda o, t: F.mse_loss(o, t).sqrt(), lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o)))):
        with pytest.raises(ValueError, match=r"lambda>: .* no weighted sum.*gauss_newton\(\)"):
            FUNCTIONS[function](model, loss, x, y)


@pytest.mark.parametrize("name", APART)
def test_samples_that_do_not_meet_are_not_refused(name):
    model, x, y = prepared(APART[name])
    before = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    if "draws" not in name and name != "dropout":
        expected = brute_force.per_sample_gradients(model, ENTROPY, x, y)
        for key, row in rows.items():
            torch.testing.assert_close(row, expected[key])


def test_random_numbers_of_an_accelerator_go_as_far_for_one_sample(accelerator):
    """As dropout on CUDA: a sample alone has another mask, and the generator is where it was for all."""
    drawn = lambda x: torch.rand(99, device=x.device)[: 5 * len(x)].view(-1, 5).to(x)
    model, x, y = prepared(lambda: Raw(lambda m, x: m.b(m.a(x) * (drawn(x) > 0.5)), **layers()))
    model, x, y = model.to(accelerator), x.to(accelerator), y.to(accelerator)
    rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
    with brute_force.forked():
        ENTROPY(model(x), y).backward()
    torch.testing.assert_close(rows["a.weight"].mean(0), model.a.weight.grad)


@pytest.mark.parametrize("count", range(2, 10))
def test_every_sample_is_asked(count):
    """Mixing that leaves some samples alone: of an odd batch that is turned round, the one in the middle."""
    torch.manual_seed(count)
    x, y = torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))
    x[count // 2] *= 10  # it alone knows the largest entry
    in_groups = lambda size: lambda x: x.unflatten(0, (-1, size)).roll(1, 1).flatten(0, 1)
    partners = {f"groups of {k}": in_groups(k) for k in range(2, count + 1) if count % k == 0}
    partners |= {"turned round": lambda x: x.flip(0), "the largest": lambda x: x.abs().amax().expand_as(x)}
    partners |= {f"moved by {k}": lambda x, k=k: x.roll(k, 0) for k in (1, -1, count // 2)}
    for name, partner in partners.items():
        model = Raw(lambda m, x, partner=partner: m.b(m.a(0.6 * x + 0.4 * partner(x)).tanh()), **layers()).double()
        with member(name):
            refuse("per_sample_gradients", model, x, y)


def sorted_sequences(m, x):
    """Refuses sequences that are not in the order of their lengths."""
    lengths = (x[:, 0].round().clamp(1, 4)).long().cpu()
    packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], lengths, batch_first=True)
    return m.b(centred(m.mix(packed)[1][0]))


def test_samples_in_an_order():
    model, x, y = prepared(lambda: Raw(sorted_sequences, mix=nn.RNN(1, 5), **layers()))
    x[:, 0] = torch.tensor([4.0, 3.0, 3.0, 2.0, 1.0, 1.0])
    refuse("per_sample_gradients", model, x, y)


MIXING = {
    "moved": lambda x: 0.6 * x + 0.4 * x.roll(1, 0),
    "permuted": lambda x: 0.6 * x + 0.4 * x[[3, 1, 5, 4, 0, 2]],
    "centred": lambda x: x - 0.5 * x.mean(0),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("function", ["per_sample_gradients", "kfac", "empirical_fisher"])
def test_a_hook_that_mixes_samples_after_the_first_call(name, function):
    model, x, y = prepared(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    FUNCTIONS[function](model, ENTROPY, x, y)
    hook = model.register_forward_pre_hook(lambda m, args: MIXING[name](*args))
    for _ in range(2):
        refuse(function, model, x, y)
    hook.remove()
    FUNCTIONS[function](model, ENTROPY, x, y)


NUMBERS = {
    "a shift": (lambda x, k: x + x.roll(k, 0) - x.roll(0, 0), 0, 1),
    "a gate": (lambda x, k: x + k * x.mean(0), 0.0, 0.1),
    "a list": (lambda x, k: x + 0.5 * x[k], list(range(N)), [1, 0, *range(2, N)]),
    "an array": (lambda x, k: x + 0.5 * x[k], np.arange(N), np.roll(np.arange(N), 1)),
    "a slice": (lambda x, k: x + 0.5 * torch.cat([x[k:], x[:k]]), 0, 2),
    "an axis": (lambda x, k: x - 0.5 * x.mean(dim=k, keepdim=True), 1, 0),
}


@pytest.mark.parametrize("name", NUMBERS)
@two_functions
def test_a_number_that_alone_mixes_samples(name, function):
    """At the input, where no graph of autograd says it."""
    mix, before, after = NUMBERS[name]
    model, x, y = prepared(lambda: Raw(lambda m, x: m.b(m.a(mix(x, m.number)).tanh()), **layers()))
    for model.number in (before, after, before):
        if model.number is before:
            FUNCTIONS[function](model, ENTROPY, x, y)
        else:
            refuse(function, model, x, y)


def test_numbers_that_move_nothing_are_not_asked_about():
    """Others for every batch, between the ends at which a term vanishes."""
    model, x, y = prepared(lambda: Raw(lambda m, x: m.b(m.a(x).tanh() * m.scale), **layers()))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    counts = []
    for model.scale in (0.5, 0.25, 0.7):
        curvature.per_sample_norms(model, ENTROPY, x, y)
        counts.append(passes.count(False))
    assert counts[0] and len(set(counts)) == 1


@in_turn(table=[(4, 2), (6, 2), (6, 3), (8, 2), (9, 3), (10, 5)], function=["per_sample_gradients", "kfac"])
def test_samples_that_change_places(table, function):
    """Of a table that is turned round: the first and the last one stay, and a sample alone cannot be turned."""
    count, rows = table
    turned = lambda m, x: m.b(m.a(x).tanh().reshape(rows, len(x) // rows, -1).transpose(0, 1).flatten(0, 1))
    model = prepared(lambda: Raw(turned, **layers()))[0]
    refuse(function, model, torch.randn(count, 4).double(), torch.randint(3, (count,)))


def by_capacity(m, x):
    """Mixture of two experts that take three samples each, the first that come; the others get nothing."""
    sent = F.one_hot((x[:, 0] > 0).long(), 2)
    taken = (sent * (sent.cumsum(0) <= m.capacity)).to(x)
    return torch.einsum("ne,neo->no", taken, torch.stack([m.b(m.a(x).tanh()), m.b(m.a(x).sin())], 1))


def by_index(m, x):
    """Samples with a mark are centred among each other."""
    h, marked = m.a(x), x[:, 0] > 0
    return m.b(h.index_put((marked,), h[marked] - h[marked].mean(0)))


@two_functions
def test_a_batch_in_which_no_expert_is_full(function):
    model, x, y = prepared(lambda: Raw(by_capacity, **layers()))
    model.capacity = N - 1
    x[:, 0] = torch.tensor([1.0, -1] * (N // 2))
    refuse(function, model, x, y)


def by_capacity_of_tokens(m, x):
    """Two tokens for each sample; an expert takes N of all tokens."""
    tokens = x.reshape(-1, 2)
    sent = F.one_hot((tokens[:, 0] > 0).long(), 2)
    taken = (sent * (sent.cumsum(dim=0) <= N)).to(x)
    h = torch.einsum("ne,neo->no", taken, torch.stack([m.c(tokens).tanh(), m.c(tokens).sin()], 1))
    return m.b(h.unflatten(0, (-1, 2)).sum(1))


@pytest.mark.parametrize("forward", [by_index, by_capacity_of_tokens])
@two_functions
def test_samples_that_meet_in_a_later_batch(function, forward):
    """By an index; by experts: at first each sample sends as many tokens to one as to the other, and so do copies."""
    model, x, y = prepared(lambda: Raw(forward, c=nn.Linear(2, 5), **layers()))
    model = model if forward is by_index else Raw(forward, c=model.c, b=model.b)
    alone, meeting = x.clone(), x.clone()
    if forward is by_index:
        alone[:, 0], meeting[:, 0] = -1, 1
    else:
        alone[:, ::2] = torch.tensor([1.0, -1.0])
        meeting[:, ::2] = torch.tensor([1.0, -1.0]) * torch.tensor([1.0, 0, 1, 0, 1, 0])[:, None] + 0.5
    for _ in range(2):
        FUNCTIONS[function](model, ENTROPY, alone, y)
        refuse(function, model, meeting, y)


def in_groups(m, x, group):
    same = (group[:, None] == group).to(x)
    return m.b(same @ m.a(x).tanh() / same.sum(1, keepdim=True))


def within_a_radius(m, x):
    near = (torch.cdist(x, x) < 0.5).to(x)
    return m.b(near @ m.a(x).tanh() / near.sum(1, keepdim=True))


def through_a_gate(m, x, gate=None):
    return m.b(m.a(x + (m.gate if gate is None else gate) * x.mean(0)).tanh())


APART_AT_FIRST = {
    "in groups": (in_groups, lambda m, x: (x, torch.arange(N)), lambda m, x: (x, torch.arange(N) // 2)),
    "in groups of token sequences": (
        lambda m, x, group: in_groups(m, F.one_hot(x, 4).sum(1).double(), group),
        lambda m, x: ((9 * x.abs()).long() % 4, torch.arange(N)),
        lambda m, x: ((9 * x.abs()).long() % 4, torch.arange(N) // 2),
    ),
    "within a radius": (within_a_radius, lambda m, x: 9 * x, lambda m, x: x / 9),
    "within a radius, all alike at first": (within_a_radius, lambda m, x: torch.ones_like(x), lambda m, x: x / 9),
    "a gate": (through_a_gate, lambda m, x: (x, x.new_zeros(())), lambda m, x: (x, x.new_ones(()))),
    "a gate for each sample": (through_a_gate, lambda m, x: (x, 0 * x[:, :1]), lambda m, x: (x, x[:, :1])),
    "an attribute": (
        through_a_gate,
        lambda m, x: [setattr(m, "gate", x.new_zeros(())), x][1],
        lambda m, x: [setattr(m, "gate", x.new_ones(())), x][1],
    ),
}


@pytest.mark.parametrize("name", APART_AT_FIRST)
@two_functions
def test_data_that_let_samples_meet_later(function, name):
    """By comparisons and products alone: nothing in the graph says that data decide."""
    forward, apart, meeting = APART_AT_FIRST[name]
    model, x, y = prepared(lambda: Raw(forward, **layers()))
    for _ in range(2):
        FUNCTIONS[function](model, ENTROPY, apart(model, x), y)
        refuse(function, model, meeting(model, x), y)


def test_a_loop_of_another_length_is_not_asked_again():
    """It is the same functions one after the other."""

    def repeated(m, x):
        h = m.a(x)
        for _ in range(m.times):
            h = (h + m.a(x)).tanh()
        return m.b(h)

    model, x, y = prepared(lambda: Raw(repeated, **layers()))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    for model.times in (4, 9, 2, 4, 3):
        rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
        assert passes.count(False) == 10  # of six samples
        torch.testing.assert_close(
            rows["b.weight"].mean(0), torch.autograd.grad(F.cross_entropy(model(x), y), model.b.weight)[0]
        )


@two_functions
def test_a_forward_pass_that_counts(function):
    """With a plain number no two passes are alike, whatever the samples do; a buffer begins anew."""

    def counting(m, x):
        m.count += 1
        return m.b(m.a(x).tanh() * (1 + m.count / 100))

    model, x, y = prepared(lambda: Raw(counting, **layers()))
    model.count = 0
    refuse(function, model, x, y, r"model: two passes over the same batch differ.*counter.*buffer")
    del model.count
    model.register_buffer("count", torch.zeros(()))
    FUNCTIONS[function](model, ENTROPY, x, y)
    assert not model.count


def own_loss(m, inputs, labels):
    """As the classifiers of transformers."""
    return SimpleNamespace(loss=F.cross_entropy(m.l(inputs), labels), logits=m.l(inputs))


def test_a_model_that_returns_its_own_loss():
    model, x, y = prepared(lambda: Raw(own_loss, l=nn.Linear(4, 3)))
    data, loss = {"inputs": x, "labels": y}, lambda output, target: output.loss
    expected = curvature.per_sample_gradients(model.l, ENTROPY, x, y)
    rows = curvature.per_sample_gradients(model, loss, data, None)
    torch.testing.assert_close(rows, {f"l.{name}": own for name, own in expected.items()})
    norms = curvature.per_sample_norms(model, loss, data, None)
    torch.testing.assert_close(norms, curvature.per_sample_norms(model.l, ENTROPY, x, y))
    for builder in (curvature.gauss_newton, curvature.hessian, curvature.kfac, curvature.fisher_diagonal):
        with pytest.raises(ValueError, match="loss: .*no attribute 'loss'.*pass the labels as y"):
            found = builder(model, loss, (data, None))
            found.to_dense()


def first_of_its_expert(m, x):
    """An expert takes one sample; all others get nothing."""
    taken = x[:, 0].abs().nonzero()[:1, 0]
    return m.b(m.a(x).tanh()).index_add(0, taken, m.c(x[taken]))


BY_PLACE = {
    "a table with a row for each place": lambda m, x: m.b((m.a(x) + m.table[: len(x)]).tanh()),
    "an index of places": lambda m, x: m.b(m.a(x) * m.table[torch.arange(len(x))]),
    "divided by the number of samples": lambda m, x: m.b(m.a(x)) / len(x),
    "the number of samples": lambda m, x: m.b((m.a(x) + len(x) * m.table[0]).tanh()),
    "the first of its expert": first_of_its_expert,
    "ranks": lambda m, x: m.b(m.a(x) * m.table[x[:, 0].argsort().argsort()]),
}
MATRICES = {"gauss_newton": curvature.gauss_newton, "hessian": curvature.hessian, "fisher": curvature.fisher}


def by_place(name, count):
    model, x, y = prepared(lambda: Raw(BY_PLACE[name], **layers(c=nn.Linear(4, 3), table=(8, 5))))
    return model, x[:count], y[:count]


@in_double
@in_pairs(name=BY_PLACE, function=MATRICES, count=[2, 5])
def test_matrices_of_samples_that_know_their_places_are_those_of_the_batch(name, function, count):
    model, x, y = by_place(name, count)
    reference = brute_force.of_the_batch(model, ENTROPY, x, y)[function == "hessian"]
    found = MATRICES[function](model, ENTROPY, (x, y))
    v = torch.linspace(0, 1, found.space.size)
    torch.testing.assert_close(found.to_dense(), reference)
    torch.testing.assert_close(found.diagonal(), reference.diagonal())
    torch.testing.assert_close(found @ v, reference @ v)


@in_pairs(
    name=BY_PLACE, function=["per_sample_gradients", "per_sample_norms", "kfac", "empirical_fisher"], count=[2, 5]
)
def test_what_is_defined_by_samples_that_know_their_places_is_refused(name, function, count):
    model, x, y = by_place(name, count)
    for _ in range(2):
        refuse(function, model, x, y)


def test_a_model_that_takes_no_single_sample_is_not_refused():
    def run(m, x):
        assert len(x) > 1
        return m.b(m.a(x).tanh())

    model, x, y = prepared(lambda: Raw(run, **layers()))
    rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
    torch.testing.assert_close(
        rows["b.weight"].mean(0), torch.autograd.grad(F.cross_entropy(model(x), y), model.b.weight)[0]
    )


def test_draws_of_each_sample_are_not_taken_for_places():
    run = lambda m, x: m.b(m.a(x) + 0.1 * torch.randn(len(x), 5, dtype=x.dtype))
    model, x, y = prepared(lambda: Raw(run, **layers()))
    curvature.per_sample_gradients(model, ENTROPY, x, y)


@in_double
@pytest.mark.parametrize("seed", range(5))
def test_rounding_where_a_layer_cancels_says_nothing(seed):
    """One sample alone is rounded in another way, and its output is as small as the rounding of what it consists of."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1, bias=False))
    x, y = torch.cat([torch.randn(19, 1), 1e-5 * torch.randn(1, 1)]), torch.randn(20, 1)
    with torch.no_grad():
        model[0].bias.mul_(0.01)
        model[0].weight[32:], model[0].bias[32:] = 1.01 * model[0].weight[:32], model[0].bias[:32]
        model[2].weight[:, :32] = 100 * torch.randn(32)
        model[2].weight[:, 32:] = -model[2].weight[:, :32]
    found = curvature.per_sample_gradients(model, nn.MSELoss(), x, y)
    model.zero_grad()
    nn.MSELoss()(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].mean(0), p.grad, rtol=1e-3, atol=1e-3)


def gated(m, x):
    return m.b(m.a(x) + m.gate * m.a(x).mean(0))


MASKS = torch.eye(N, dtype=torch.float64), torch.eye(N, dtype=torch.float64) + 0.5 * torch.eye(N).roll(1, 0)
BUFFERS = {
    "a gate": (gated, torch.zeros(()), torch.full((), 0.5)),
    "a mask": (lambda m, x: m.b(m.gate[: len(x), : len(x)] @ m.a(x)), *MASKS),
    "a switch": (lambda m, x: m.b(torch.where(m.gate, m.a(x) - m.a(x).mean(0), m.a(x))),
                 torch.tensor(False), torch.tensor(True)),
}  # fmt: skip


@in_double
@pytest.mark.parametrize("function", ["per_sample_gradients", "per_sample_norms", "kfac", "ekfac", "empirical_fisher"])
@pytest.mark.parametrize("name", [*BUFFERS, "an adjacency matrix that is an input"])
def test_what_alone_mixes_samples(name, function):
    inside = name in BUFFERS
    forward, shut, opened = BUFFERS[name] if inside else (lambda m, x, A: m.b((A @ m.a(x)).tanh()), *MASKS)
    model = Raw(forward, **layers(**({"gate": shut.clone()} if inside else {})))
    for state in (shut, opened, shut, opened if inside else opened.T):
        x, y = torch.randn(N, 4), torch.randint(3, (N,))
        given = x if inside else (x, state)
        if inside:
            model.gate.copy_(state)
        if state is shut:
            FUNCTIONS[function](model, ENTROPY, given, y)
            continue
        refuse(function, model, given, y)
        if inside:
            found = curvature.gauss_newton(model, ENTROPY, (x, y))
            torch.testing.assert_close(found.to_dense() @ torch.ones(43), found @ torch.ones(43))


def test_buffers_are_counted_once_where_they_stay(monkeypatch):
    counted, count = [], torch.count_nonzero
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    x, y = torch.randn(N, 4), torch.randint(3, (N,))
    monkeypatch.setattr(torch, "count_nonzero", lambda t: (counted.append(t), count(t))[1])
    for _ in range(3):
        curvature.per_sample_norms(model, ENTROPY, x, y)
    assert len(counted) == 3  # buffers


@in_double
def test_hooks_on_parameters_that_come_and_go():
    """As one that masks the gradient of a pruned weight."""
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(N, 4), torch.randint(3, (N,))
    mask = (torch.rand(5, 4) > 0.5).double()

    def compare():
        all_of_rows(model, ENTROPY, x, y, brute_force.per_sample_gradients(model, ENTROPY, x, y))
        reference = brute_force.Matrices(model, ENTROPY, (x, y)).gauss_newton
        found = curvature.gauss_newton(model, ENTROPY, (x, y))
        matches(found.to_dense(), reference)
        matches(found @ torch.ones(43), reference @ torch.ones(43))

    compare()
    for _ in range(2):
        hook = model[0].weight.register_hook(lambda g: g * mask)
        compare()
        hook.remove()
        compare()
