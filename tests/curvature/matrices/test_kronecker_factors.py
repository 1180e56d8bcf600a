"""Where Kronecker factors are exact, and what stands in for them; those of every layer are in test_catalogue.py."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Case, Raw, floats, indices, seeded
from support.cases.matrices import batches, deep_linear, reference, small
from support.comparisons import check_operator, matches
from support.oracles import brute_force as oracle
from support.oracles.kronecker import AFFINE, affine_layers, kronecker

name_of = lambda case: case.id
sharings = pytest.mark.parametrize("sharing", ["expand", "reduce"])


@sharings
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_factors(reduction: str, sharing: str):
    """Each sample counts once, however many of its terms do."""
    model, loss = convolutional(), nn.CrossEntropyLoss(reduction=reduction)
    x, y = floats(2, 6)(5).double(), indices(3, 4)(5)
    y[1, :3] = -100
    of = oracle.Matrices(model, loss, (x, y), torch.full((5,), 0.2 if reduction == "mean" else 1.0, dtype=x.dtype))
    square = lambda *sample: torch.outer(*2 * [oracle.loss_gradient(*sample).flatten()])
    found = curvature.kfac(model, loss, (x, y), inject=curvature.empirical(), sharing=sharing).to_dense()
    matches(found, kronecker(affine_layers(of, curvature=square), sharing))


def convolutional() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv1d(4, 3, 1)).double()


def exact_blocks(of: oracle.Matrices) -> Tensor:
    groups = [[f"{layer.name}.{name}" for name in layer.parameters] for layer in affine_layers(of)]
    return oracle.blocks(of.model, of.fisher, groups)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing, other", [("expand", "reduce"), ("reduce", "expand")])
def test_exact_with_a_term_for_every_place_or_where_places_are_averaged(sharing: str, other: str, reduction: str):
    """Deep linear networks and squares, the mean over places taken before the loss: arXiv:2311.00636, section 3.2."""
    with seeded(0):
        model = deep_linear(3, 4, 4, 2).double()
        data = floats(5, 3)(6).double(), floats(*[5] * (sharing == "expand"), 2)(6).double()
    model = model if sharing == "expand" else Raw(lambda m, x: m.layers(x).mean(1), layers=model)
    loss = nn.MSELoss(reduction=reduction)
    expected = exact_blocks(oracle.Matrices(model, loss, data))
    for some in (data, batches(data, 1, 3, 2)):
        matches(curvature.kfac(model, loss, some, sharing=sharing).to_dense(), expected)
    found = curvature.kfac(model, loss, data, sharing=other).to_dense()
    assert (found - expected).norm() > 0.1 * expected.norm()


def test_rows_that_are_never_read_are_zero():
    """Rows that are read otherwise in another batch are not left out of the sum: they are refused."""
    with seeded(0):
        model = Raw(lambda m, x: F.linear(x, m.w[1:3]).tanh(), w=(5, 3)).double()
    data = floats(3)(6).double(), floats(2)(6).double()
    expected = oracle.Matrices(model, nn.MSELoss(), data).fisher
    found = curvature.ekfac(model, nn.MSELoss(), data)
    matches(found.trace(), expected.trace())
    for some in (slice(3), slice(9, None)):
        matches(found.diagonal()[some], expected.diagonal()[some])
    model = Raw(lambda m, x: F.linear(x, m.w[: x.shape[1]]).sum((1, 2)), w=(5, 3)).double()
    data = [(floats(t, 3)(4).double(), floats()(4).double()) for t in (2, 4)]
    for builder in (curvature.kfac, curvature.ekfac):
        with pytest.raises(ValueError, match="w: rows 0 to 4"):
            builder(model, nn.MSELoss(), data)
    found = curvature.kfac(model, nn.MSELoss(), data, structure={"w": "dense"})
    matches(found.to_dense(), curvature.fisher(model, nn.MSELoss(), data).to_dense(), 1e-12)


@sharings
def test_a_tied_weight_has_the_trace_of_its_uses(sharing: str):
    """One product stands for the sum of two; the untied copy says what each is."""
    run = lambda m, x: m.head(m.middle(m.words(x)).tanh())
    parts = lambda: {"words": nn.Embedding(5, 3), "middle": nn.Linear(3, 3), "head": nn.Linear(3, 5, bias=False)}
    with seeded(0):
        tied, untied = Raw(run, **parts()).double(), Raw(run, **parts()).double()
        x, y = indices(5, 4)(6), indices(5, 4)(6)
    tied.head.weight = tied.words.weight
    untied.load_state_dict(tied.state_dict())
    loss = lambda output, target: F.cross_entropy(output.mT, target)
    of = oracle.Matrices(untied, loss, (x, y), torch.full((6,), 1 / 6, dtype=torch.float64))
    uses = {layer.name: layer.dense(sharing) for layer in affine_layers(of)}
    found = curvature.kfac(tied, loss, (x, y), sharing=sharing).to_dense()
    matches(found[:15, :15].trace(), uses["words"].trace() + uses["head"].trace())
    matches(found[15:, 15:], uses["middle"][15:27, 15:27])
    # a Kronecker product: as a matrix of blocks (d d', v v') it has rank one
    rearranged = found[:15, :15].view(5, 3, 5, 3).transpose(1, 2).reshape(25, 9)
    assert torch.linalg.svdvals(rearranged)[1] < 1e-12 * found.abs().max()


@sharings
def test_a_weight_tied_between_layers_with_and_without_bias(sharing: str):
    """One block, in which the bias's input is zero where it is not read. The untied copy says what each read is."""
    run = lambda m, x: m.second(m.first(x).tanh())
    parts = lambda: {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3, bias=False)}
    with seeded(0):
        tied, untied = Raw(run, **parts()).double(), Raw(run, **parts()).double()
        data = floats(4, 3)(5).double(), floats(4, 3)(5).double()
    tied.second.weight = tied.first.weight
    untied.load_state_dict(tied.state_dict())
    layers = affine_layers(oracle.Matrices(untied, nn.MSELoss(), data))
    index = layers[0].index[0]  # (o, i), the bias last
    reads = [
        (torch.cat([F.pad(a, (0, 4 - a.shape[2])) for a, _ in uses]), torch.cat([b for _, b in uses], 1))
        for uses in zip(*(layer.records for layer in layers), strict=True)
    ]
    if sharing == "reduce":
        reads = [(a.mean(0, keepdim=True), b.sum(1, keepdim=True)) for a, b in reads]
    seen = torch.cat([a[:, 0] for a, _ in reads])
    B = torch.stack([torch.einsum("kto,ktp->op", b[:, :, 0], b[:, :, 0]) for _, b in reads]).mean(0)
    expected = torch.zeros(12, 12).double()
    expected[index.flatten()[:, None], index.flatten()] = torch.kron(B, seen.T @ seen / len(seen))
    matches(curvature.kfac(tied, nn.MSELoss(), data, sharing=sharing).to_dense(), expected)
    exact = oracle.Matrices(tied, nn.MSELoss(), data).fisher
    matches(curvature.fisher_blocks(tied, nn.MSELoss(), data).to_dense(), exact)
    matches(curvature.ekfac(tied, nn.MSELoss(), data, sharing=sharing).trace(), exact.trace())


@pytest.mark.parametrize("order", [1, -1])
def test_a_matrix_that_a_bilinear_form_reads_too_has_its_exact_block(order: int):
    """Both axes of the matrix are inputs of the form: it has no factors in common with the layer."""
    reads = [lambda m, x: F.linear(x, m.w).tanh(), lambda m, x: torch.einsum("ni,ij,nj->n", x[:, :2], m.w, x)[:, None]]
    with seeded(0):
        model = Raw(lambda m, x: sum(read(m, x) for read in reads[::order]), w=(2, 3)).double()
        data = floats(3)(5).double(), floats(2)(5).double()
    exact = oracle.Matrices(model, nn.MSELoss(), data).fisher
    for builder in (curvature.kfac, curvature.ekfac):
        matches(builder(model, nn.MSELoss(), data).to_dense(), exact)


def net() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("builder", ["kfac", "ekfac", "fisher_blocks"])
def test_a_structure_of_ones_own_choice(builder: str):
    model, data = net(), (floats(3)(6).double(), indices(3)(6))
    build = functools.partial(getattr(curvature, builder), model, nn.CrossEntropyLoss(), data)
    plain, exact = build().to_dense(), oracle.Matrices(model, nn.CrossEntropyLoss(), data).fisher
    expected = plain.clone()
    expected[:16, :16] = exact[:16, :16]
    expected[16:36, 16:36] = exact[16:36, 16:36].diagonal().diag()
    found = build(structure={"0": "dense", "2": "diagonal"}).to_dense()
    matches(found, expected)
    if builder == "fisher_blocks":
        factors = curvature.kfac(model, nn.CrossEntropyLoss(), data).to_dense()
        matches(build(structure={"4": "kronecker"}).to_dense()[36:, 36:], factors[36:, 36:])
    if builder != "fisher_blocks":
        with pytest.raises(ValueError, match="sharing"):
            build(sharing="both")


@sharings
@pytest.mark.parametrize("chosen", [{"0.bias": "dense"}, {"0.weight": "kronecker"}], ids=str)
def test_weight_and_bias_apart(chosen: dict[str, str], sharing: str):
    """The factors of the weight are those of the layer without the bias's input; the bias has its exact block."""
    with seeded(0):
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    data = floats(2, 3, 3)(5).double(), indices(3)(5)
    of = oracle.Matrices(model, nn.CrossEntropyLoss(), data)
    joint, *_ = affine_layers(of)
    build = functools.partial(curvature.kfac, model, nn.CrossEntropyLoss(), data, sharing=sharing)
    found, weight = build(structure=chosen), slice(0, 24)
    matches(found["0.weight"].to_dense(), joint.dense(sharing)[weight, weight])
    matches(found["0.bias"].to_dense(), of.fisher[24:27, 24:27])
    matches(found["3"].to_dense(), build()["3"].to_dense())
    refined = curvature.ekfac(model, nn.CrossEntropyLoss(), data, structure=chosen, sharing=sharing)
    matches(refined["0.weight"].trace(), of.fisher[weight, weight].trace())
    matches(refined["0.bias"].to_dense(), of.fisher[24:27, 24:27])
    with pytest.raises(ValueError, match="0.bias has no Kronecker factors"):
        build(structure={"0.bias": "kronecker"})


def test_blocks_by_layer():
    found = curvature.kfac(net(), nn.CrossEntropyLoss(), (floats(3)(6).double(), indices(3)(6)))
    assert found["2"] is found["2.bias"] is found.blocks["2.weight"]
    for name, text in {"head": "0 blocks are called 'head'", "2.weigh": "0 blocks"}.items():
        with pytest.raises(KeyError, match=text):
            found[name]
    with pytest.raises(TypeError, match="not iterable"):
        iter(found)


FALLBACK = {"raw_power", "raw_erf", "raw_lerp", "raw_gate", "prelu_after_conv", "bag_max_plain", "raw_temperature"}


@pytest.mark.parametrize("case", [c for c in small("layers", "raw") if c.id in FALLBACK], ids=name_of)
def test_layers_without_factors_have_their_exact_block(case: Case):
    """All but the weights of Linear and convolution."""
    model, loss = case.build()
    data = case.batch(model)
    of = reference(case, model, loss, data)
    factored_inverses = [f"{name}." for name, module in model.named_modules() if isinstance(module, AFFINE)]
    for builder in ("kfac", "ekfac"):
        found = getattr(curvature, builder)(model, loss, data)
        for block in found.blocks.values():
            names = block.space.names
            if not names[0].startswith(tuple(factored_inverses)):
                index = torch.cat([oracle.positions(model)[name].flatten() for name in names])
                matches(block.to_dense(), of.fisher[index[:, None], index])


@pytest.mark.parametrize("builder", ["kfac", "ekfac", "fisher_blocks"])
def test_what_fills_the_memory_is_built_when_asked_for_alone(builder: str):
    """Of 30,001 classes, 3.6 GB in single precision: named with what to choose instead."""
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 30_001))
    build = functools.partial(getattr(curvature, builder), model, nn.CrossEntropyLoss(), inject=curvature.sampled())
    data = floats(2)(3).float(), indices(30_001)(3)
    wanted = r"head: the (factor of its outputs|exact block) would have (30001|90003) x .* \((4|32) GB\), .*choose"
    with pytest.raises(ValueError, match=wanted + r" structure={'head': 'diagonal'}"):
        build(data)
    found = build(data, structure={"head": "diagonal"})
    assert isinstance(found.blocks["head.weight"], curvature.Diagonal)


class Unrolled(nn.Module):
    """A recurrent layer as the loop over its steps, each of its two weights a Linear."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.ih, self.hh = (nn.Linear(*w.T.shape).double() for w in (layer.weight_ih_l0, layer.weight_hh_l0))
        self.kind, self.size = type(layer), layer.hidden_size
        state = layer.state_dict()
        self.load_state_dict(
            {f"{at}.{kind}": state[f"{kind}_{at}_l0"] for at in ("ih", "hh") for kind in ("weight", "bias")}
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(len(x), self.size)
        outputs = []
        for step in x.unbind(1):
            one, two = self.ih(step), self.hh(hidden)
            if self.kind is nn.RNN:
                hidden = (one + two).tanh()
            elif self.kind is nn.GRU:
                (r, z, n), (s, y, m) = one.chunk(3, 1), two.chunk(3, 1)
                new = (n + (r + s).sigmoid() * m).tanh()
                hidden = new + (z + y).sigmoid() * (hidden - new)
            else:
                i, f, g, o = (one + two).chunk(4, 1)
                cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                hidden = o.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1)


@sharings
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_are_shared_over_their_steps(kind: type[nn.RNNBase], sharing: str):
    with seeded(0):
        layer = kind(2, 3, batch_first=True).double()
        data = floats(4, 2)(3).double(), floats(4, 3)(3).double()
    model, other = Raw(lambda m, x: m.layer(x)[0], layer=layer), Unrolled(layer)
    expected = kronecker(affine_layers(oracle.Matrices(other, nn.MSELoss(), data)), sharing)
    where = oracle.positions(other)
    order = [where[name].flatten() for name in ("ih.weight", "hh.weight", "ih.bias", "hh.bias")]  # as in torch's layer
    found = curvature.kfac(model, nn.MSELoss(), data, sharing=sharing).to_dense()
    matches(found, expected[torch.cat(order)][:, torch.cat(order)])


@sharings
@pytest.mark.parametrize("builder", ["kfac", "ekfac"])
@pytest.mark.parametrize("apart", [True, False])
def test_projections_have_factors_of_their_own(builder: str, sharing: str, apart: bool):
    """Queries, keys and values are rows of one weight, which each read another input, or all the same."""
    with seeded(0):
        layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
        data = tuple(floats(t, 4)(20).double() for t in (2, 3, 3)), floats(2, 4)(20).double()
    data = data if apart else (data[0][:1], data[1])
    names = ("q", "k", "v") if apart else ("qkv",)

    def attend(m: nn.Module, *inputs: Tensor) -> Tensor:
        projected = [getattr(m, name)(x) for name, x in zip(names, inputs, strict=True)]
        parts = projected if apart else projected[0].chunk(3, -1)
        heads = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in parts)
        return m.leave(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    model = Raw(lambda m, *x: m.layer(*(x if apart else x * 3), need_weights=False)[0], layer=layer)
    sizes = dict.fromkeys(names, 12 // len(names)) | {"leave": 4}
    other = Raw(attend, **{name: nn.Linear(4, size).double() for name, size in sizes.items()})
    given = zip(layer.in_proj_weight.chunk(len(names)), layer.in_proj_bias.chunk(len(names)), strict=True)
    with torch.no_grad():
        for p, q in zip(
            other.parameters(), [*(p for pair in given for p in pair), *layer.out_proj.parameters()], strict=True
        ):
            p.copy_(q)
    where = oracle.positions(other)
    order = [f"{name}.{kind}" for some in (names, ["leave"]) for kind in ("weight", "bias") for name in some]
    index = torch.cat([where[name].flatten() for name in order])
    found = getattr(curvature, builder)(model, nn.MSELoss(), data, sharing=sharing)
    expected = getattr(curvature, builder)(other, nn.MSELoss(), data, sharing=sharing).to_dense()
    if builder == "kfac":
        matches(expected, kronecker(affine_layers(oracle.Matrices(other, nn.MSELoss(), data)), sharing))
    matches(found.to_dense(), expected[index][:, index], 1e-8)
    check_operator(model, found)


def test_factors_in_whose_data_no_ranges_of_rows_are_read_apart():
    """Of data that do not reach the layer, or read it whole; and factors of ranges where the weight is read whole."""
    apart = lambda m, x: F.linear(x, m.w[:2]) * F.linear(x.flip(1), m.w[2:])
    reads = {"apart": apart, "whole": lambda m, x: F.linear(x, m.w).unflatten(1, (2, 2)).prod(1), "not": lambda m, x: x}
    with seeded(0):
        model = Raw(lambda m, x: m.head(m.read(m, x)), w=(4, 2), head=nn.Linear(2, 2)).double()
        data = floats(2)(5).double(), floats(2)(5).double()

    def refined(first: str, second: str, **options: Any) -> Any:
        model.read = reads[first]
        K = curvature.kfac(model, nn.MSELoss(), data)
        model.read = reads[second]
        return curvature.ekfac(model, nn.MSELoss(), data, factors=K, **options)

    for first in ("whole", "not"):
        with pytest.raises(ValueError, match=r"factors: expected blocks of w\[0:2\], w\[2:4\], which are read apart"):
            refined(first, "apart")
    with pytest.raises(ValueError, match="factors: expected Kronecker factors of w"):
        refined("apart", "whole")
    with pytest.raises(ValueError, match="(?s)factors: found BlockDiagonal.*no such factors"):
        refined("apart", "apart", structure={"w": "dense"})
