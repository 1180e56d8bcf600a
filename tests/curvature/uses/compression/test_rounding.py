"""Rounded and pruned parameters against the surgeon's updates on the dense matrix, one weight at a time."""

import pytest
import torch
from torch import nn

import curvature
from curvature.operators import BlockDiagonal, Dense, Diagonal, MatrixFree
from curvature.operators.kronecker import Kronecker
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles import compression as oracle
from support.snapshots import unchanged
from support.structures import ARRANGEMENTS, Source, kronecker, places, structures

LOSS = nn.CrossEntropyLoss()


def grids_of(space, w, bits):
    """For each entry of the flat vector its levels, or None."""
    found = []
    for tensor in space.split(w).values():
        for row in tensor if tensor.ndim > 1 else ():
            found += [oracle.levels(row.flatten(), bits)] * row.numel()
        found += [None] * (tensor.numel() if tensor.ndim < 2 else 0)
    return found


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("diagonal", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", [name for name in ARRANGEMENTS if name != "scale"])
def test_kronecker_factors(name, diagonal, bits):
    op, _ = kronecker(ARRANGEMENTS[name], *diagonal)(Source())
    assert isinstance(op, Kronecker)
    w = Source(seed=1).normal(op.space.size)
    w[3] = 0
    damped = op.factored_damping(0.1)
    H, (*_, i), grids = damped.to_dense(), op.sides, grids_of(op.space, w, bits)
    inner = i - len(op.space.names) + 1
    mean = lambda side: (side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)).mean(0)
    rows, columns = mean(damped.B).argsort(descending=True), mean(damped.A)[:inner].argsort(descending=True)
    where = places(op.arrangement, "cpu")
    order = [int(where[g, r, c]) for g in range(len(where)) for c in columns for r in rows]
    found = curvature.quantize(op, op.space.split(w), bits, 0.1)
    matches(op.space.flatten(found), oracle.rounded(H, w, order, grids), 1e-8)
    assert list(found) == list(op.space.names) and op.space.flatten(found)[3] == 0
    assert all(len(row.unique()) <= 2**bits for row in found["weight"])


@pytest.mark.parametrize("structure", ["dense", "matrix_free", "scaled", "total", "eigen bias", "diagonal", "blocks"])
def test_other_structures(structure):
    op, matrix = structures()[structure](Source())
    w = Source(seed=1).normal(op.space.size)
    H, grids = matrix + 0.1 * torch.eye(len(w)).to(matrix), grids_of(op.space, w, 2)
    found = op.space.flatten(curvature.quantize(op, op.space.split(w), 2, 0.1))
    if structure == "blocks":
        return matches(found[:12], curvature.quantize(op["w"], op.space.split(w), 2, 0.1)["w"].flatten())
    matches(found, oracle.rounded(H, w, H.diagonal().argsort(descending=True).tolist(), grids), 1e-8)


def network(inputs: int = 6, hidden: int = 8, count: int = 40) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        return model, (torch.randn(count, inputs).double(), torch.arange(count) % 3)


def test_rows_that_are_read_apart():
    with seeded(0):
        attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
        x, y = (torch.randn(6, 3, 4).double(), torch.randn(6, 5, 4).double()), torch.randn(6, 3, 4).double()

    model = Raw(lambda m, a, b: m.inner(a, b, b, need_weights=False)[0], inner=attention)
    K = curvature.kfac(model, nn.MSELoss(), (x, y))
    assert any(isinstance(block, BlockDiagonal) for block in K.blocks.values())
    found = curvature.quantize(K, model, 2)
    weight, bias = attention.in_proj_weight.detach(), attention.in_proj_bias.detach()
    part = K["inner.in_proj_weight"]["inner.in_proj_weight[0:4]"]
    mean = 0.01 * float(K.trace()) / K.space.size
    named = {"inner.in_proj_weight[0:4]": weight[:4], "inner.in_proj_bias[0:4]": bias[:4]}
    matches(found["inner.in_proj_weight"][:4], curvature.quantize(part, named, 2, mean)["inner.in_proj_weight[0:4]"])


def test_what_cannot_be_rounded_is_refused():
    model, data = network()
    K = curvature.kfac(model, LOSS, data)
    for bits in (0, 17, 2.5, True):
        with pytest.raises(ValueError, match="whole number from 1 to 16"):
            curvature.quantize(K, model, bits)
    for name in ("0.bias", "1.weight"):
        with pytest.raises(ValueError, match=f"no weight {name} with two dimensions"):
            curvature.quantize(K, model, {name: 4})
    with pytest.raises(ValueError, match="Use a damping above"):
        curvature.quantize(K, model, 4, damping=0.0)


DAMPING = 0.3


@pytest.mark.parametrize("structure", structures())
def test_saliencies_and_one_round(structure):
    """A diagonal lets nothing follow; of all others the removal of one weight, and of many, is that of the surgeon."""
    op, matrix = structures()[structure](Source())
    w = Source(seed=1).normal(op.space.size)
    H = matrix + DAMPING * torch.eye(len(w)).to(matrix)
    found = op.space.flatten(curvature.saliencies(op, op.space.split(w), DAMPING))
    expected = torch.stack([oracle.saliency(H, w, q) for q in range(len(w))])
    matches(found, expected, 1e-8)
    names = [name for name, shape in zip(op.space.names, op.space.shapes, strict=True) if len(shape) > 1]
    if names:
        new, masks = curvature.prune(op, op.space.split(w), 0.4, DAMPING, rounds=1)
        assert list(new) == list(op.space.names) and list(masks) == names
        places = op.space.positions(names)
        flat = torch.cat([masks[name].flatten() for name in names])
        least = found[places].argsort()[: round(0.4 * len(places))]
        assert set((~flat).nonzero()[:, 0].tolist()) == set(least.tolist())
        matches(op.space.flatten(new), oracle.without(H, w, places[least].tolist()), 1e-7)


def test_a_dense_matrix_with_a_round_for_each_weight_is_optimal_brain_surgeon():
    source = Source()
    space = source.space(a=(4, 3), b=(3,), c=(2, 2))
    matrix, w = source.definite(d=19), source.normal(19)
    H, prunable = matrix + 0.01 * torch.eye(19).to(matrix), [*range(12), *range(15, 19)]
    for count in (1, 7, 13):
        expected, removed = oracle.surgeon(H, w, prunable, count)
        new, masks = curvature.prune(Dense(space, matrix), space.split(w), count / 16, 0.01, rounds=40)
        matches(space.flatten(new), expected, 1e-8)
        gone = torch.cat([~masks["a"].flatten(), torch.zeros(3, dtype=torch.bool), ~masks["c"].flatten()])
        assert set(gone.nonzero()[:, 0].tolist()) == set(removed)


def test_a_block_without_weights_before_the_last_round():
    source = Source()
    space = source.space(a=(2, 2), b=(2, 3))
    blocks = [Dense(space.subspace([name]), source.definite(d=d)) for name, d in (("a", 4), ("b", 6))]
    matrix, w = BlockDiagonal(space, blocks), source.normal(10)
    w[:4] *= 1e-6
    new, masks = curvature.prune(matrix, space.split(w), 0.8, 0.01, rounds=2)
    assert not masks["a"].any() and int(masks["b"].sum()) == 2
    H = matrix.to_dense() + 0.01 * torch.eye(10).to(w)
    gone = (~torch.cat([masks[name].flatten() for name in space.names])).nonzero()[:, 0].tolist()
    matches(space.flatten(new), oracle.without(H, w, gone), 1e-7)


def test_rounds_of_other_matrices_end_where_the_surgeon_ends_with_their_masks():
    model, data = network(4, 5, 9)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    for K in (curvature.kfac(model, LOSS, data), curvature.ekfac(model, LOSS, data)):
        with unchanged(model):
            new, masks = curvature.prune(K, model, 0.6, 1e-3)
        assert masks.keys() == {"0.weight", "2.weight"}
        assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.6 * 35)
        kept = {name: masks.get(name, torch.ones_like(p, dtype=torch.bool)) for name, p in new.items()}
        removed = (~torch.cat([m.flatten() for m in kept.values()])).nonzero()[:, 0].tolist()
        H = K.to_dense() + 1e-3 * torch.eye(len(theta)).double()
        flat = torch.cat([p.flatten() for p in new.values()])
        assert not flat[removed].any() and flat.count_nonzero() == len(flat) - len(removed)
        matches(flat, oracle.without(H, theta, removed), 1e-7)


def test_later_rounds_look_at_the_weights_as_they_are_then():
    source = Source()
    space, matrix, theta = source.space(a=(4, 5)), source.definite(d=20, rank=6), source.normal(20)
    H = matrix + 0.01 * torch.eye(20).to(matrix)
    alone, w = 1 / torch.linalg.inv(H).diagonal(), theta
    K, named = MatrixFree(space, lambda V: matrix @ V), space.split(theta)
    with_rounds = lambda rounds: curvature.prune(K, named, 0.6, 0.01, rounds=rounds)
    for count in [round(20 * (1 - 0.4 ** (r / 4))) for r in range(1, 5)]:
        w = oracle.without(H, theta, (w.square() * alone).argsort()[:count].tolist())
    # all but the last of these systems are solved roughly, which changes no choice here
    matches(with_rounds(4)[0]["a"].flatten(), w, 1e-7)
    assert not torch.equal(with_rounds(4)[1]["a"], with_rounds(1)[1]["a"])


def test_diagonals_are_optimal_brain_damage_and_ones_are_magnitude():
    model, data = network(4, 5, 9)
    d = curvature.fisher_diagonal(model, LOSS, data)
    space = curvature.Space.of(d)
    named = dict(model.named_parameters())
    found = curvature.saliencies(Diagonal(space, space.flatten(d)), model)
    for name, s in found.items():
        matches(s, d[name] * named[name].detach() ** 2 / 2)
    new, masks = curvature.prune(Diagonal(space, torch.ones(space.size).double()), model, {"0.weight": 0.5})
    weights = named["0.weight"].detach()
    assert torch.equal(masks["0.weight"], weights.abs() > weights.abs().flatten().sort().values[9])
    matches(new["0.weight"], weights * masks["0.weight"])
    assert list(masks) == ["0.weight"] and all(torch.equal(new[n], named[n]) for n in named if n != "0.weight")


def test_pruning_goes_on_in_double_precision_where_products_are_too_coarse(monkeypatch):
    def solved(op, v, **options):
        if op.space.dtype == torch.float32:
            raise RuntimeError("conjugate gradients reached a relative residual of 2e-4")
        return curvature.conjugate_gradient(op, v, **options)

    model, data = (part.float() if isinstance(part, nn.Module) else part for part in network(4, 5, 9))
    data = data[0].float(), data[1]
    K = curvature.kfac(model, LOSS, data)
    found = [curvature.prune(K, model, 0.4, rounds=rounds) for rounds in (1, 3)]
    monkeypatch.setattr(curvature.uses.compression, "conjugate_gradient", solved)
    for rounds, (parameters, masks) in zip((1, 3), found, strict=True):
        again, left = curvature.prune(K, model, 0.4, rounds=rounds)
        for name, p in parameters.items():
            assert again[name].dtype == torch.float32
            torch.testing.assert_close(again[name], p, rtol=0.0, atol=1e-2 if rounds > 1 else 1e-3)
        assert rounds > 1 or all(torch.equal(left[name], mask) for name, mask in masks.items())
    K = curvature.empirical_fisher(model, LOSS, data)
    with pytest.raises(RuntimeError, match="relative residual of 2e-4"):
        curvature.prune(K, model, 0.4, damping=0.1)


def test_what_cannot_be_pruned_is_refused():
    model, data = network(4, 5, 9)
    K = curvature.kfac(model, LOSS, data)
    for share in (-0.1, 90, float("nan")):
        with pytest.raises(ValueError, match="share of zeros between 0 and 1"):
            curvature.prune(K, model, share)
    with pytest.raises(ValueError, match="1.weight is none of 0.weight"):
        curvature.prune(K, model, {"1.weight": 0.5})
    with pytest.raises(ValueError, match="rounds: expected a whole number of at least 1, found 0"):
        curvature.prune(K, model, 0.5, rounds=0)
    with pytest.raises(TypeError, match=r"rounds: expected a whole number, found 2\.5"):
        curvature.prune(K, model, 0.5, rounds=2.5)
    with pytest.raises(KeyError, match="curvature is of .*2.weight"):
        curvature.saliencies(K, model[:1])
    with pytest.raises(ValueError, match="Use a damping above"):
        curvature.saliencies(K, model, damping=0.0)
    space = Source().space(a=(2, 2))
    with pytest.raises(ValueError, match="least entry is -1"):
        curvature.saliencies(
            Diagonal(space, torch.tensor([1.0, -1.0, 1.0, 1.0]).double()), {"a": torch.ones(2, 2).double()}
        )
    with pytest.raises(ValueError, match="not finite"):
        curvature.saliencies(K, {name: p / 0 for name, p in model.named_parameters()})
    bias = BlockDiagonal(Source().space(b=(2,)), [MatrixFree(Source().space(b=(2,)), lambda V: V)])
    for K_of_another in ({"nope": torch.ones(3)}, {"0.weight": torch.ones(5, 4), "nope": torch.ones(3)}):
        with pytest.raises(KeyError, match="curvature is of nope, which the model does not have.*named_parameters"):
            curvature.prune(K_of_another, model, 0.5)
    with pytest.raises(ValueError, match="none of b has two dimensions.*{'b': 0.5}"):
        curvature.prune(bias, {"b": torch.ones(2).double()}, 0.5)
