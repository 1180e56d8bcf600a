"""The catalogue against brute force: diagonals, blocks, Kronecker factors, whole matrices and products, each case with
one reference for all; and the same of one batch or many uneven ones.

Per-sample gradients, norms and Gram matrices of the catalogue are in tests/curvature/gradients/test_per_sample.py.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.kronecker import factors
from support.builders import BUILDERS
from support.cases.case import Case
from support.cases.matrices import batch_of, batches, extra, reference, shared_reference, small
from support.combinations import member
from support.comparisons import check_operator, matches
from support.oracles import brute_force as oracle
from support.oracles.kronecker import Layer, affine_layers, kronecker
from support.snapshots import unchanged

# Recurrent modules and attention: one layout and no given states; the per-sample gradients are tested with the rest.
SEQUENCES = [case for case in small("sequences") if not case.id.endswith(("_state", "time_first"))]
EXTRA = list(extra())
# Diagonals and blocks: every second of those that vary one option of a layer.
BY_BLOCKS = [*small("layers")[::2], *small("raw")[::2], *SEQUENCES[::2], *small("shared", "models"), *EXTRA]
# Where the names alone tell which bias belongs to which weight; queries that are parameters take both apart.
PLAIN = {case.id for case in [*small("layers"), *SEQUENCES]} - {"attention_latents"}

# Factors: of the convolutions in two and three dimensions a few, since the references of all take minutes. A frequency
# over the batch is no matter of one sample, and statistics that are tracked leave an instance norm to the general path.
WIDE = {f"conv2d_{name}" for name in ("twice", "oblong", "circular_oblong", "groups", "mixed", "same_even", "stride")}
WIDE |= {"conv3d_stride", "conv3d_mixed", "conv_transpose2d_oblong", "conv_transpose2d_output_size"}
WIDE |= {"conv_transpose3d_padding", "conv2d_equal_sizes", "conv2d_channels_last"}
NAMES = ("linear", "mlp", "conv1d", "conv_transpose1d", "embedding", "layer_", "rms_", "group_", "instance_", "batch_")
LAYERS = [
    case
    for case in small("layers")
    if (case.id.startswith(NAMES) or case.id in WIDE)
    and not case.id.startswith("embedding_frequency")
    and not case.id.endswith("_tracked")
]
ELSEWHERE = {
    *("called_twice", "called_in_loop", "called_twice_other_places", "conv_called_twice", "frozen_bias", "checkpoint"),
    *("frozen_middle_layer", "resnet", "autoencoder", "mixer", "point_set", "folded_time_linear", "folded_twins"),
    *("loss_cross_entropy_ignored_all_options_mean_conv", "loss_cross_entropy_ignored_all_options_sum_mlp"),
    *("loss_bce_logits_weights_mean_conv", "loss_nll_ignored_weight_mean_conv", "loss_poisson_full_sum_conv"),
}
FACTORED = [*LAYERS, *(case for case in small("shared", "models", "losses") if case.id in ELSEWHERE), *EXTRA]
# Matrices of all kinds: one case of every kind of layer, and all losses.
FEW = {
    *("linear", "linear_2_leading", "linear_sum", "mlp", "conv2d_twice", "conv2d_groups", "conv_transpose1d_stride"),
    *("embedding_padding", "embedding_cross_entropy", "layer_norm_places", "group_norm_image", "batch_norm_net"),
    *("prelu_channels_places", "raw_scale_and_shift", "raw_position_table", "raw_low_rank", "raw_erf", "tied_linear"),
    *("called_twice", "weight_norm_linear", "unused_parameter", "frozen_bias", "checkpoint", "input_dict", "gpt"),
    *("custom_function_mixed", "squeeze_excite", "folded_twins", "lstm_plain_batch_first", "attention_latents"),
    "raw_layer_norm_bias_alone",
}
LOSSES = [case for case in small("losses") if "equal_sizes" not in case.id]
DENSE = [*(case for case in small("layers", "raw", "shared", "models", "sequences") if case.id in FEW), *LOSSES, *EXTRA]

FAST = {"conv1d_groups", "conv_transpose1d_mixed", "layer_norm_places", "group_norm_places"}
TOLERANCE = {"loss_poisson_rate": 1e-6}  # the variance of a rate is the rate, up to the 1e-8 that torch adds to it
name_of = lambda case: case.id
named = lambda cases: {case.id: case for case in cases}
CASES = named([*BY_BLOCKS, *FACTORED, *DENSE])


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[pytest.mark.fast] * (name in FAST)) for name, case in CASES.items()]
)
def test_everything(case: Case, monkeypatch: pytest.MonkeyPatch):
    model, loss = case.build()
    data, of = batch_of(case, model), shared_reference(case)
    tolerance = next((value for name, value in TOLERANCE.items() if case.id.startswith(name)), 1e-10)
    if not is_twice_differentiable(of):
        for builder in ("gauss_newton", "fisher"):
            with member(builder), pytest.raises((RuntimeError, ValueError)):
                dense(builder, model, loss, data)
    else:
        with member("fisher_diagonal"):
            matches(diagonal(model, loss, data), of.fisher.diagonal(), tolerance)
        if case.id in named(BY_BLOCKS):
            with member("fisher_blocks"):
                check_blocks(case, model, loss, data, of)
        if case.id in named(FACTORED):
            check_factors(model, loss, data, affine_layers(of), monkeypatch)
    if case.id in named(DENSE):
        check_matrices(case, model, loss, data, of, tolerance)


def check_blocks(case: Case, model: nn.Module, loss: Any, data: Any, of: oracle.Matrices) -> None:
    with unchanged(model, data):
        blocks = curvature.fisher_blocks(model, loss, data)
    groups = [block.space.names for block in blocks.blocks.values()]
    assert sorted(name for group in groups for name in group) == sorted(oracle.trainable(model))
    matches(blocks.to_dense(), oracle.blocks(model, of.fisher, groups))
    if case.id in PLAIN:
        assert {frozenset(group) for group in groups} == layers(model)


def check_factors(model: nn.Module, loss: Any, data: Any, layers: list[Layer], monkeypatch: Any) -> None:
    """Of one sample at a time; and eigenvalues that are exact in the basis of the factors, of all at once."""
    for sharing in ("expand", "reduce"):
        with member(sharing), monkeypatch.context() as patch:
            patch.setattr(factors, "CHUNK_ELEMENTS", 1)
            matches(dense("kfac", model, loss, data, sharing=sharing), kronecker(layers, sharing))
    with member("eigenvalues"):
        exact = layers[0].matrices.fisher
        with unchanged(model, data):
            E = curvature.ekfac(model, loss, data)
        matches(E.to_dense(), torch.stack([layer.rescaled(exact) for layer in layers]).sum(0), 1e-8)
        matches(E.trace(), exact.trace())


def check_matrices(case: Case, model: nn.Module, loss: Any, data: Any, of: oracle.Matrices, tolerance: float) -> None:
    if is_twice_differentiable(of):
        for builder, limit in {"gauss_newton": 1e-10, "fisher": tolerance}.items():
            with member(builder):
                expected = getattr(of, builder)
                matches(dense(builder, model, loss, data), expected, limit)
                with unchanged(model, data):
                    operator = getattr(curvature, builder)(model, loss, data)
                    vectors = operator.space.normal(2)
                    matches(operator @ vectors, expected @ vectors, 10 * limit)
                    matches(operator.diagonal(), expected.diagonal(), limit)
    with member("empirical_fisher"):
        inject = {"inject": curvature.empirical()}
        matches(dense("empirical_fisher", model, loss, data), of.empirical_fisher)
        matches(dense("fisher", model, loss, data, **inject), of.empirical_fisher)
        matches(diagonal(model, loss, data, **inject), of.empirical_fisher.diagonal())
    with member("hessian"):
        if case.id.startswith(("weight_norm", "raw_layer_norm")):  # whose fused form has wrong ones in torch, or none
            matches(dense("hessian", model, loss, data), of.hessian_by_differences, 1e-8)
            return
        try:
            expected = of.hessian
        except (RuntimeError, NotImplementedError):
            with pytest.raises((RuntimeError, ValueError)):
                dense("hessian", model, loss, data)
        else:
            matches(dense("hessian", model, loss, data), expected)


def dense(builder: str, model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    """(P, P) of what `curvature` returns, nothing of the user's being changed."""
    with unchanged(model, data if isinstance(data, tuple) else ()):
        return getattr(curvature, builder)(model, loss, data, **options).to_dense()


def diagonal(model: nn.Module, loss: Any, data: Any, **options: Any) -> Tensor:
    """(P,) of what `curvature.fisher_diagonal` returns."""
    with unchanged(model, data if isinstance(data, tuple) else ()):
        tensors = curvature.fisher_diagonal(model, loss, data, **options)
    assert {k: v.shape for k, v in tensors.items()} == {k: p.shape for k, p in oracle.trainable(model).items()}
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def is_twice_differentiable(of: oracle.Matrices) -> bool:
    try:
        of.gauss_newton  # noqa: B018
    except (RuntimeError, NotImplementedError):
        return False
    return True


def layers(model: nn.Module) -> set[frozenset[str]]:
    """Every weight with the bias of the same name, and what is left alone."""
    names = set(oracle.trainable(model))
    joint = {frozenset({name, name.replace("weight", "bias")}) & names for name in names if "weight" in name}
    return joint | {frozenset({name}) for name in names if not any(name in group for group in joint)}


# Of the same matrix: weighed, ignored and plain places, all of one sample's ignored among them, in rows or not.
CUT = {
    "loss_cross_entropy_ignored_all_options_mean_conv", "loss_cross_entropy_weight_smoothed_mean_mlp",
    "flat_tokens_mean", "loss_cross_entropy_ignored_class_sum_conv", "loss_nll_ignored_weight_mean_conv",
    "flat_tokens_weight_mean", "loss_bce_logits_weights_mean_conv", "loss_mse_mean_conv", "loss_distance_mlp",
    "loss_functional_mlp", "gaussian_heads_mean", "flat_rows_mean", "input_dict",
}  # fmt: skip
CUT_FACTORS = {"linear_2_leading", "mlp", "conv2d_groups", "embedding_padding", "conv_transpose1d_mixed"}
CUT_FACTORS |= {"loss_cross_entropy_ignored_all_options_mean_conv", "flat_tokens_weight_mean", "flat_tokens_sum"}
CUT_FACTORS |= {"batch_norm_net"}
# Reduced factors of a few samples are singular, with any basis of the null space; eigenvectors magnify rounding.
IN_BATCHES = [(name, builder, {}, 1e-12) for name in sorted(CUT) for builder in BUILDERS]
IN_BATCHES += [
    (name, *how)
    for name in sorted(CUT_FACTORS)
    for how in (
        ("kfac", {"sharing": "expand"}, 1e-12),
        ("kfac", {"sharing": "reduce"}, 1e-12),
        ("ekfac", {"sharing": "expand"}, 1e-7),
    )
]


@pytest.mark.parametrize(("name", "builder", "options", "tolerance"), IN_BATCHES)
def test_one_batch_or_many_uneven_ones(name: str, builder: str, options: dict[str, str], tolerance: float):
    model, loss = CASES[name].build()
    data = CASES[name].batch(model, 6)
    build = functools.partial(dense, builder, model, loss, **options)
    whole = build(data)
    for sizes in ((1, 2, 3), (1,) * 6):
        matches(build(batches(data, *sizes)), whole, tolerance)
    if builder == "fisher":
        parts = ((x, y) for x, y in batches(data, 3, 1, 2))
        matches(diagonal(model, loss, parts), whole.diagonal(), 1e-12)
    if builder == "kfac":
        matches(build(iter(batches(data, 2, 4))), whole, tolerance)


# Eigenvectors are the same up to sign where no two eigenvalues are, and where they are zero it does not matter: with
# "expand" always, with "reduce" if there are more samples than inputs.
SPREAD = {"linear", "linear_2_leading", "linear_no_bias", "conv1d_groups", "conv1d_depthwise", "layer_norm_places"}


@pytest.mark.parametrize("name", sorted(SPREAD))
def test_eigenvalues_are_exact_with_reduced_factors(name: str):
    case = CASES[name]
    model, loss = case.build()
    data = case.batch(model, 16)
    of = reference(case, model, loss, data)
    expected = torch.stack([layer.rescaled(of.fisher, "reduce") for layer in affine_layers(of)]).sum(0)
    matches(dense("ekfac", model, loss, data, sharing="reduce"), expected, 1e-8)


@pytest.mark.parametrize("name", ["mlp", "gpt", "loss_mse_sum_mlp"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_operator(name: str, builder: str):
    model, loss = CASES[name].build()
    check_operator(model, getattr(curvature, builder)(model, loss, batch_of(CASES[name], model)))


def test_cases_named_are_all_there():
    """A name that the catalogue has no more would be left out without a word."""
    for names, cases in (
        (FEW, DENSE),
        (WIDE, LAYERS),
        (ELSEWHERE | SPREAD | CUT_FACTORS | FAST, FACTORED),
        (CUT, DENSE),
    ):
        assert not names - named(cases).keys()
