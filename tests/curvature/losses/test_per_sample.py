"""Per-sample losses against the plain loop of batch size one, written here and nowhere else."""

import logging
import math
from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature.losses.table import per_sample_losses, reduction_of
from support.combinations import in_pairs
from support.moments import randn, source

# torch's advice on shapes and on the mean of a KL divergence, where a test means exactly that
pytestmark = pytest.mark.filterwarnings("ignore:(Using a target size|reduction. 'mean'|There is a performance drop)")

C = 4
DOUBLE = torch.float64


rand = lambda *shape, seed=0: torch.rand(shape, dtype=DOUBLE, generator=source(seed)) * 0.9 + 0.05
randint = lambda high, shape, seed=1: torch.randint(high, shape, generator=source(seed))


def loop(loss, output, target, count, output_dim=0, target_dim=0):
    """The definition: the loss on each sample alone, one after the other."""
    targets = [None] * count if target is None else target.tensor_split(count, target_dim)
    return torch.stack([loss(o, t) for o, t in zip(output.tensor_split(count, output_dim), targets, strict=True)])


def agree(loss, output, target, count, output_dim=0, target_dim=0, reference=None):
    """Value and gradient equal those of the loop (of `reference`: what the loop should be, where it is not plain)."""
    output = output.detach().requires_grad_()
    got = per_sample_losses(loss, output, target, count, output_dim, target_dim)
    want = loop(loss, output, target, count, output_dim, target_dim) if reference is None else reference(output)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    weights = torch.linspace(0.5, 2.0, count, dtype=DOUBLE)  # all different: a row given to another sample is seen
    got, want = (torch.autograd.grad(values, output, weights)[0] for values in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


# Where the samples are: shape of the output, sample dims of output and of a target with the class dim taken out.
LAYOUTS = {
    "NC": lambda n: ((n, C), 0, 0),
    "NCT": lambda n: ((n, C, 5), 0, 0),
    "NCHW": lambda n: ((n, C, 2, 3), 0, 0),
    "flat": lambda n: ((n * 5, C), 0, 0),
    "flat_T": lambda n: ((n * 2, C, 3), 0, 0),
    "BCN": lambda n: ((2, C, n), 2, 1),
    "BCTN_flat": lambda n: ((2, C, 3, n * 2), -1, -1),
}
REDUCTIONS, COUNTS = ["mean", "sum"], [1, 3]
reductions, counts = pytest.mark.parametrize("reduction", REDUCTIONS), pytest.mark.parametrize("count", COUNTS)


def options(kind, **values):
    """`kind` with every combination of the options named, each present or absent."""
    chosen = [{}]
    for name, value in values.items():
        chosen += [{**option, name: value} for option in chosen]
    return {"+".join([kind.__name__, *option]): (kind, option) for option in chosen}


WEIGHT = torch.tensor([0.3, 2.0, 0.7, 1.4], dtype=DOUBLE)
OF_INDICES = options(nn.CrossEntropyLoss, weight=WEIGHT, ignore_index=2, label_smoothing=0.2)
OF_INDICES |= options(nn.NLLLoss, weight=WEIGHT, ignore_index=0)


@in_pairs(loss=OF_INDICES, layout=LAYOUTS, reduction=REDUCTIONS, count=COUNTS)
def test_class_indices(loss, layout, reduction, count):
    kind, option = OF_INDICES[loss]
    shape, output_dim, target_dim = LAYOUTS[layout](count)
    target = randint(C, (shape[0], *shape[2:]))
    agree(kind(reduction=reduction, **option), randn(*shape), target, count, output_dim, target_dim)


@in_pairs(name=OF_INDICES, shape=[(3, C), (3, C, 5), (3, C, 2, 3), (15, C)], reduction=REDUCTIONS)
def test_sample_without_valid_place(name, shape, reduction):
    """All places ignored: torch's value (nan for a mean, 0 for a sum) and a gradient of exactly zero, also twice."""
    kind, option = OF_INDICES[name]
    loss = kind(reduction=reduction, **option)
    target = randint(C, (shape[0], *shape[2:]))
    rows = shape[0] // 3
    target[rows : 2 * rows] = option.get("ignore_index", -100)
    agree(loss, randn(*shape), target, 3)

    output = randn(*shape).requires_grad_()
    values = per_sample_losses(loss, output, target, 3)
    assert values[1].isnan() if reduction == "mean" else values[1] == 0
    first = torch.autograd.grad(values, output, torch.ones(3, dtype=DOUBLE), create_graph=True)[0]
    assert (first[rows : 2 * rows] == 0).all()
    if kind is nn.CrossEntropyLoss:
        second = torch.autograd.grad(first, output, randn(*shape, seed=2))[0]
        assert (second[rows : 2 * rows] == 0).all() and second.isfinite().all()


def test_class_of_weight_zero_and_indices_of_one_byte():
    """The first sample's loss is 0/0, with gradient zero, as where all is ignored."""
    loss, target = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 2, 3], dtype=DOUBLE)), [[0, 0], [0, 1], [2, 3]]
    counted = lambda output: torch.cat(
        [torch.full((1,), math.nan), loop(loss, output[1:], torch.tensor(target[1:]), 2)]
    )
    for given in (loss, lambda o, t: loss(o, t)):
        agree(given, randn(3, C, 2), torch.tensor(target), 3, reference=counted)
    agree(nn.NLLLoss(weight=WEIGHT, ignore_index=1), randn(6, C), randint(C, (6,)).byte(), 3)


counted = lambda *shape, high=6: randint(high, shape).to(DOUBLE)


binary = partial(counted, high=2)

# name: (loss with `reduction`, output, target), each a function of the shape
POINTWISE = {
    "mse": (nn.MSELoss, randn, partial(randn, seed=1)),
    "l1": (nn.L1Loss, randn, partial(randn, seed=1)),
    "smooth_l1": (partial(nn.SmoothL1Loss, beta=0.4), randn, partial(randn, seed=1)),
    "huber": (partial(nn.HuberLoss, delta=0.4), randn, partial(randn, seed=1)),
    "bce": (nn.BCELoss, rand, partial(rand, seed=1)),
    "bce_logits": (nn.BCEWithLogitsLoss, randn, partial(rand, seed=1)),
    "poisson": (nn.PoissonNLLLoss, randn, counted),
    "poisson_full": (partial(nn.PoissonNLLLoss, full=True), randn, counted),
    "poisson_rate": (partial(nn.PoissonNLLLoss, log_input=False, eps=1e-3), rand, counted),
    "kl": (nn.KLDivLoss, randn, partial(rand, seed=1)),
    "kl_log": (partial(nn.KLDivLoss, log_target=True), randn, partial(randn, seed=1)),
    "kl_batchmean": (lambda reduction: nn.KLDivLoss(reduction="batchmean"), randn, partial(rand, seed=1)),
    "soft_margin": (nn.SoftMarginLoss, randn, lambda *s: 2 * binary(*s) - 1),
    "multilabel_soft": (nn.MultiLabelSoftMarginLoss, randn, binary),
}


# no dim of classes here
OTHERS = {
    "N": lambda n: ((n,), 0, 0),
    "N1": lambda n: ((n, 1), 0, 0),
    "flat_N": lambda n: ((n * 4,), 0, 0),
    "TN": lambda n: ((5, n), 1, 1),
}


@in_pairs(name=POINTWISE, layout=[*LAYOUTS, *OTHERS], reduction=REDUCTIONS, count=COUNTS)
def test_losses_of_entries(name, layout, reduction, count):
    shape, dim, _ = (LAYOUTS | OTHERS)[layout](count)
    kind, output, target = POINTWISE[name]
    agree(kind(reduction=reduction), output(*shape), target(*shape), count, dim, dim)


@reductions
@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.BCELoss])
@pytest.mark.parametrize("shape, weight", [((3,), (3,)), ((3, C), (3, 1)), ((3, 3), (3, 1)), ((3, C), (3, C))], ids=str)
def test_bce_weight_per_sample(shape, weight, kind, reduction):
    """A weight whose dim of samples has size N belongs to the samples: sample n alone has its own."""
    rows, target = rand(*weight, seed=3), binary(*shape)

    def reference(output):
        alone = [kind(reduction=reduction, weight=rows[n : n + 1]) for n in range(3)]
        return torch.stack([f(output[n : n + 1], target[n : n + 1]) for n, f in enumerate(alone)])

    agree(kind(reduction=reduction, weight=rows), rand(*shape), target, 3, reference=reference)


TORCH = (ValueError, RuntimeError)  # torch itself says no, in its own way


def refuse(match, loss, output, target, count=3, output_dim=0, target_dim=0, error=ValueError):
    with pytest.raises(error, match=match):
        per_sample_losses(loss, output, target, count, output_dim, target_dim)


@pytest.mark.parametrize("name", ["mse", "l1", "smooth_l1", "huber", "poisson", "kl", "kl_batchmean"])
def test_broadcasting_across_samples_is_refused(name):
    loss = POINTWISE[name][0](reduction="mean")
    refuse(r"\(3, 1\).*\(3,\)", loss, randn(3, 1), rand(3))
    refuse(r"\(3, 5\).*\(5, 3\)", loss, randn(3, 5), rand(5, 3), 3, 0, 1)
    agree(loss, randn(3, 5), rand(3, 1), 3)
    agree(loss, randn(1, 1), rand(1), 1)


def test_shapes_that_disagree_are_refused():
    refuse("must be the same", nn.BCEWithLogitsLoss(), randn(3, 1), rand(3))
    refuse("target", nn.NLLLoss(), randn(3, C), randint(C, (3, C)), error=TORCH)
    refuse("target", nn.MultiMarginLoss(), randn(3, C), randint(C, (3, C)), error=TORCH)
    # weights that are larger than the output
    refuse("weight must broadcast", nn.MultiLabelSoftMarginLoss(weight=rand(3, 3, C)), randn(3, C), rand(3, C))
    refuse("broadcast", nn.BCEWithLogitsLoss(weight=rand(2, 3, C)), randn(3, C), rand(3, C), error=TORCH)
    # square: nothing but the dims says that samples would be mixed
    refuse("same shape", nn.MSELoss(), randn(3, 3), rand(3, 3), 3, 0, 1)
    refuse("must be the same", nn.BCEWithLogitsLoss(), randn(3, 3), rand(3, 3), 3, 0, 1)
    refuse("target", nn.CrossEntropyLoss(), randn(3, C, 3), randint(C, (3, 3)), 3, 0, 1, TORCH)


class Doubled(nn.MSELoss):
    def forward(self, output, target):
        return 2 * super().forward(output, target[:, None].expand_as(output).to(output)).sqrt()


class Contrast(nn.Module):
    reduction = "sum"

    def forward(self, output, target):
        return (output.mean(0) - target).square().sum()


def branches(output, target):
    """A value of Python in between: nothing that vmap can follow."""
    return output.square().sum() if float(output.detach().sum()) > 0 else (output - target).abs().sum()


def inplace(output, target):
    return output.sub_(target).square_().mean()


CALLABLES = {
    "functional": F.cross_entropy,
    "weighted": partial(F.cross_entropy, weight=WEIGHT, ignore_index=1, label_smoothing=0.1),
    "sum": partial(F.cross_entropy, reduction="sum"),
    "lambda": lambda output, target: (output.logsumexp(1) * target).mean(),
    "branches": branches,
    "overridden": Doubled(),  # not the loss that it derives from
}


@counts
@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.parametrize("rows", [1, 4])
def test_callables(rows, name, count):
    agree(CALLABLES[name], randn(count * rows, C), randint(C, (count * rows,)), count)


def test_output_and_target_of_unlike_sizes():
    agree(Contrast(), randn(12, C), randn(3, C, seed=1), 3)
    agree(Contrast(), randn(12, C), randn(C, 3, seed=1).T, 3)
    agree(lambda output, target: output.sum() + target.sum(), randn(6, 0), randn(3, 2), 3)
    agree(lambda output, target: output.square().mean() if target is None else None, randn(6, C), None, 3)
    agree(lambda output, _: output.square().sum() * float(output.detach().sum()), randn(6, C), None, 3)


Pair = namedtuple("Pair", "label scale")


def follow(output, label, scale):
    return (F.cross_entropy(output, label, reduction="none") * scale).mean()


def stop(output, label, scale):
    return follow(output, label, scale) if float(output.detach().sum()) else None


@pytest.mark.parametrize("f", [follow, stop])
def test_targets_in_containers(f):
    label, scale = randint(C, (6,)), rand(3, 1)
    losses = {
        "tuple": (lambda o, t: f(o, t[0], t[1]), (label, scale)),
        "pair": (lambda o, t: f(o, t.label, t.scale), Pair(label, scale)),
        "dict": (lambda o, t: f(o, t["y"][0], t["w"]), {"y": (label, None), "w": scale}),
    }

    def want(o):
        pairs = [slice(2 * n, 2 * n + 2) for n in range(3)]
        return torch.stack([f(o[pair], label[pair], scale[n : n + 1]) for n, pair in enumerate(pairs)])

    for loss, target in losses.values():
        agree(loss, randn(6, C), target, 3, reference=want)


@pytest.mark.parametrize("target", [["a"], (1, 2, 3), {"y": "a"}, (torch.zeros(3), [1, 2, 3])], ids=str)
def test_targets_that_cannot_be_cut_are_refused(target):
    refuse("tensor, None, a tuple, list or dict", lambda o, t: o.sum(), randn(3, C), target)


@pytest.mark.parametrize("loss", [inplace, lambda o, t: inplace(o, t) * float(t.exp_().sum())])
def test_in_place_callables_change_nothing(loss):
    output, target = randn(3, C), randn(3, C, seed=1)
    kept = output.clone(), target.clone()
    alone = lambda o, t: loss(o.clone(), t.clone())
    agree(loss, output, target, 3, reference=lambda o: loop(alone, o, target, 3))
    torch.testing.assert_close(per_sample_losses(loss, output, target, 3), loop(alone, output, target, 3))
    assert output.equal(kept[0]) and target.equal(kept[1])


def test_the_loss_stays_as_it_is_and_samples_draw_for_themselves():
    loss, random = nn.CrossEntropyLoss(weight=WEIGHT), torch.get_rng_state()
    state = dict(vars(loss))
    per_sample_losses(loss, randn(3, C), randint(C, (3,)), 3)
    assert vars(loss) == state and torch.get_rng_state().equal(random)
    values = per_sample_losses(lambda o, t: F.dropout(o).sum(), torch.ones(8, 50), None, 8)
    assert len(set(values.tolist())) > 1


def test_errors_of_the_loss_and_values_that_are_no_scalars():
    for loss in (lambda o, t: (o - t).square().mean(1), lambda o, t: 1.0, lambda o, t: o - t):
        refuse("scalar", loss, randn(3, C), randn(3, C))
    refuse("mine", lambda o, t: {}["mine"], randn(3, C), None, error=KeyError)


def test_losses_that_do_not_take_a_single_sample():
    squeezed = lambda o, t: F.binary_cross_entropy_with_logits(o.squeeze(), t)
    output, target = randn(3, 1), torch.rand(3, dtype=torch.float64)
    refuse(r"lambda>: it takes the batch, but not one of its samples.*squeeze\(-1\)", squeezed, output, target)
    per_sample_losses(lambda o, t: F.binary_cross_entropy_with_logits(o.squeeze(-1), t), output, target, 3)


def test_the_loop_is_logged_once_per_kind(caplog):
    class Branch(nn.Module):
        forward = staticmethod(branches)

    with caplog.at_level(logging.DEBUG, "curvature"):
        for _ in range(2):
            per_sample_losses(Branch(), randn(3, C), randn(3, C), 3)
        per_sample_losses(nn.MSELoss(), randn(3, C), randn(3, C), 3)
    assert [("Branch" in r.getMessage(), r.name) for r in caplog.records] == [(True, "curvature")]


@pytest.mark.parametrize("output, target, count, dims, match", [
    ((5, C), (3,), 3, (0, 0), "output.*5.*3"),
    ((6, C), (4,), 3, (0, 0), "target.*4.*3"),
    ((0, C), (0,), 3, (0, 0), "output.*0.*3"),
    ((3, C), (3,), 0, (0, 0), "count.*0"),
    ((3, C), (3,), 3, (2, 0), r"output.*\(3, 4\).*2"),
    ((3, C), (3,), 3, (0, -2), r"target.*\(3,\).*-2"),
    ((3, C), (), 3, (0, 0), r"target.*\(\)"),
])  # fmt: skip
def test_sizes_are_checked(output, target, count, dims, match):
    refuse(match, nn.CrossEntropyLoss(), randn(*output), torch.zeros(target).long(), count, *dims)


def test_reduction_of():
    assert reduction_of(nn.MSELoss()) == reduction_of(F.mse_loss) == reduction_of(nn.Linear(1, 1)) == "mean"
    assert reduction_of(nn.MSELoss(reduction="sum")) == reduction_of(Contrast()) == "sum"
    assert reduction_of(nn.KLDivLoss(reduction="batchmean")) == "mean"
    for loss in (nn.MSELoss(reduction="none"), nn.MSELoss(reduction="batchmean"), nn.MSELoss(reduction="mode")):
        with pytest.raises(ValueError, match=f"{loss.reduction}.*mean.*sum"):
            reduction_of(loss)
        refuse(loss.reduction, loss, randn(3, C), randn(3, C))


@reductions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype, reduction):
    output, index, target = randn(3, C, 5), randint(C, (3, 5)), rand(3, C, 5)
    weighted = nn.CrossEntropyLoss(reduction=reduction, weight=WEIGHT.to(dtype))
    for loss, y in ((weighted, index), (nn.MSELoss(reduction=reduction), target.to(dtype)), (F.cross_entropy, index)):
        got = per_sample_losses(loss, output.to(dtype), y, 3)
        assert got.dtype == dtype
        torch.testing.assert_close(got, loop(loss, output.to(dtype), y, 3), rtol=4 * torch.finfo(dtype).eps, atol=0)
