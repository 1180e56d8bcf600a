"""Layers without memory: linear, convolution, embedding, normalisation, PReLU, each with its options."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from support.cases.case import (
    Case,
    Raw,
    both,
    classes,
    floats,
    indices,
    lengths,
    mixture,
    named,
    second,
    token_loss,
    tokens,
)

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SIZES = {1: (7,), 2: (5, 6), 3: (4, 3, 5)}

CONV_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "stride_leftover": {"stride": 3, "padding": 1, "kernel_size": 2},
    "pointwise": {"kernel_size": 1, "stride": 2},
    "same": {"padding": "same"},
    "same_even": {"padding": "same", "kernel_size": 2},
    "same_dilated": {"padding": "same", "kernel_size": 2, "dilation": 2},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2, "kernel_size": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "out_channels": 4, "padding": 1},
    "depthwise_multiplier": {"groups": 4, "out_channels": 8, "bias": False},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate"},
    "circular": {"padding": 2, "padding_mode": "circular"},
    "same_circular": {"padding": "same", "padding_mode": "circular", "kernel_size": 2},
    "same_reflect": {"padding": "same", "padding_mode": "reflect"},
    "mixed": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "padding_mode": "circular", "kernel_size": 2},
}
# In three dimensions a few: torch has a kernel of its own for them, the rules have not.
IN_3D = {"plain", "padding", "stride", "same_even", "groups", "replicate", "same_circular", "output_padding", "mixed"}
TRANSPOSED_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: CONV_OPTIONS[name] for name in ("plain", "no_bias", "stride", "padding", "dilation", "groups")},
    "output_padding": {"stride": 2, "output_padding": 1},
    "depthwise": {"groups": 4, "out_channels": 4},
    "mixed": {"stride": 3, "padding": 1, "output_padding": 2, "groups": 2, "kernel_size": 2, "dilation": 2},
}


def cases() -> Iterator[Case]:
    yield from linear_cases()
    yield from convolution_cases()
    yield from embedding_cases()
    yield from bag_cases()
    yield from norm_cases()
    yield from prelu_cases()


def alone(id: str, layer: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    return Case(id, lambda: mixture(layer()), floats(*shape), **options)


def linear_cases() -> Iterator[Case]:
    yield alone("linear", lambda: nn.Linear(5, 3), 5)
    yield alone("linear_no_bias", lambda: nn.Linear(5, 3, bias=False), 5)
    yield alone("linear_1_leading", lambda: nn.Linear(5, 3), 2, 5)
    yield alone("linear_1_leading_no_bias", lambda: nn.Linear(5, 3, bias=False), 2, 5)
    yield alone("linear_2_leading", lambda: nn.Linear(5, 3), 2, 3, 5)
    yield alone("linear_2_leading_no_bias", lambda: nn.Linear(5, 3, bias=False), 2, 3, 5)
    yield alone("linear_equal_sizes", lambda: nn.Linear(4, 4), 4, 4)
    yield alone("linear_equal_sizes_2_leading", lambda: nn.Linear(4, 4), 4, 4, 4)
    yield alone("linear_one_place", lambda: nn.Linear(5, 3), 1, 5)
    yield alone("linear_many_places", lambda: nn.Linear(2, 3), 17, 2)
    yield alone("linear_sum", lambda: nn.Linear(5, 3), 5, loss=nn.MSELoss(reduction="sum"))
    yield alone("linear_cross_entropy", lambda: nn.Linear(5, 3), 5, loss=nn.CrossEntropyLoss(), target=classes)
    yield alone("linear_to_scalar", lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), 5)
    yield Case("linear_samples_second", lambda: nn.Linear(5, 3), second(floats(2, 5)), sample_dim=1)
    yield Case("linear_samples_second_equal_sizes", lambda: nn.Linear(3, 3), second(floats(3, 3)), n=3, sample_dim=1)
    yield Case("mlp", mlp, floats(5), nn.CrossEntropyLoss(), classes)
    yield Case("mlp_sum", mlp, floats(5), nn.CrossEntropyLoss(reduction="sum"), classes)
    inputs = both(floats(3), floats(5))
    yield Case("bilinear", lambda: Raw(lambda m, a, b: m.layer(a, b).tanh(), layer=nn.Bilinear(3, 5, 2)), inputs)
    yield Case("bilinear_no_bias", lambda: nn.Bilinear(3, 5, 2, bias=False), inputs)
    yield Case("bilinear_leading", lambda: nn.Bilinear(3, 4, 2), both(floats(4, 3), floats(4, 4)))
    yield Case("bilinear_equal_sizes", lambda: nn.Bilinear(4, 4, 4), both(floats(4), floats(4)))
    yield Case("bilinear_of_one", lambda: Raw(lambda m, x: m.layer(x, x), layer=nn.Bilinear(3, 3, 2)), floats(2, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3))


def convolution_cases() -> Iterator[Case]:
    for dims in (1, 2, 3):
        kinds = (("conv", CONV, CONV_OPTIONS), ("conv_transpose", TRANSPOSED, TRANSPOSED_OPTIONS))
        for kind, name, options, layer in ((k, n, o, of[dims]) for k, of, every in kinds for n, o in every.items()):
            if dims < 3 or name in IN_3D:
                yield Case(
                    f"{kind}{dims}d_{name}", functools.partial(convolution, layer, options), floats(4, *SIZES[dims])
                )
    yield alone("conv2d_oblong", lambda: nn.Conv2d(2, 3, (3, 1), (1, 2), (2, 0), (2, 1)), 2, 6, 5)
    yield alone("conv2d_circular_oblong", lambda: nn.Conv2d(2, 3, 3, padding=(0, 2), padding_mode="circular"), 2, 5, 6)
    yield alone("conv_transpose2d_oblong", lambda: nn.ConvTranspose2d(2, 3, (3, 2), (1, 2), (2, 0), (0, 1)), 2, 4, 5)
    beyond = {"dilation": (2, 1), "output_padding": (1, 0)}  # by a step of the kernel: for its adjoint too long
    yield alone("conv_transpose2d_padded_beyond", lambda: nn.ConvTranspose2d(2, 3, 2, **beyond), 2, 4, 3)
    yield alone("conv1d_equal_sizes", lambda: nn.Conv1d(4, 4, 3, padding=1), 4, 4)
    yield alone("conv2d_equal_sizes", lambda: nn.Conv2d(3, 3, 3, padding="same"), 3, 3, 3, n=3)
    yield alone("conv2d_whole_image", lambda: nn.Conv2d(3, 5, 4), 3, 4, 4)
    yield Case("conv2d_twice", conv_net, floats(2, 6, 6), nn.CrossEntropyLoss(), classes)
    yield Case("conv2d_channels_last", lambda: conv_net().to(memory_format=torch.channels_last), channels_last)
    yield Case("conv_transpose2d_output_size", sized_transposed, floats(4, 5, 6))


def convolution(layer: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
    return mixture(layer(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}))


def conv_net() -> nn.Module:
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, stride=2)
    return nn.Sequential(first, nn.ReLU(inplace=True), nn.MaxPool2d(2), second, nn.ReLU(inplace=True), nn.Flatten())


def sized_transposed() -> nn.Module:
    return Raw(lambda m, x: m.layer(x, output_size=[12, 14]), layer=nn.ConvTranspose2d(4, 2, 3, stride=2))


def channels_last(n: int) -> Tensor:
    return torch.randn(n, 2, 6, 6).contiguous(memory_format=torch.channels_last)


def embedding_cases() -> Iterator[Case]:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "padding": {"padding_idx": 1},
        "padding_negative": {"padding_idx": -1},
        "frequency": {"scale_grad_by_freq": True},
        "frequency_padding": {"scale_grad_by_freq": True, "padding_idx": 0},
        "max_norm": {"max_norm": 0.7},
        "max_norm_1": {"max_norm": 0.7, "norm_type": 1.0, "padding_idx": 2},
    }
    for name, option in options.items():
        combine = "neither" if option.get("scale_grad_by_freq") else ""
        build = functools.partial(embedding, option)
        yield Case(f"embedding_{name}", build, indices(3, 5), combine=combine)
        yield Case(f"embedding_{name}_single", build, indices(3), combine=combine)
    yield Case("embedding_2_leading", lambda: embedding({}), indices(3, 2, 4))
    yield Case("embedding_equal_sizes", lambda: mixture(nn.Embedding(4, 4)), indices(4, 4))
    yield Case("embedding_cross_entropy", lambda: embedding({}), indices(3, 5), token_loss, tokens)
    yield Case("embedding_linear", lambda: mixture(nn.Embedding(3, 4), nn.Linear(4, 2)), indices(3, 5))


def embedding(options: dict[str, Any]) -> nn.Module:
    return mixture(nn.Embedding(3, 2, **options))


def bag_cases() -> Iterator[Case]:
    for mode in ("sum", "mean", "max"):
        for name, options in {
            "plain": {},
            "padding": {"padding_idx": 1},
            "max_norm": {"max_norm": 0.7},
            "frequency": {"scale_grad_by_freq": True},
        }.items():
            if mode == "max" and "scale_grad_by_freq" in options:
                continue  # torch has no such mode
            combine = "neither" if "scale_grad_by_freq" in options else ""
            rows = functools.partial(bag, mode, options)
            yield Case(f"bag_{mode}_{name}", lambda rows=rows: mixture(rows()), indices(4, 4), combine=combine)
            ragged = both(indices(4, 5), lengths(5))
            yield Case(f"bag_{mode}_{name}_offsets", lambda rows=rows: ragged_bag(rows()), ragged, combine=combine)
        last = functools.partial(bag, mode, {"include_last_offset": True})
        yield Case(f"bag_{mode}_last_offset", lambda last=last: ragged_bag(last()), both(indices(4, 5), lengths(5, 1)))
    weighted = named(input=indices(4, 3), per_sample_weights=floats(3))
    yield Case("bag_weights", lambda: bag("sum", {}), weighted)
    yield Case("bag_weights_padding", lambda: bag("sum", {"padding_idx": 2}), weighted)
    yield Case("bag_weights_offsets", lambda: ragged_bag(bag("sum", {})), both(indices(4, 5), lengths(5), floats(5)))
    yield Case("bag_learned_weights", learned_bag, indices(4, 3))


def bag(mode: str, options: dict[str, Any]) -> nn.Module:
    return nn.EmbeddingBag(4, 3, mode=mode, **options)


def learned_bag() -> nn.Module:
    return Raw(lambda m, x: m.bag(x, per_sample_weights=m.score[x]), bag=bag("sum", {}), score=(4,))


def ragged_bag(bag: nn.EmbeddingBag) -> nn.Module:
    """One row of indices of its own length per sample, as torch wants it: concatenated, with offsets."""

    def run(m: nn.Module, rows: Tensor, length: Tensor, weights: Tensor | None = None) -> Tensor:
        taken = torch.arange(rows.shape[1], device=rows.device) < length[:, None]
        offsets = nn.functional.pad(length.cumsum(0), (1, 0))
        offsets = offsets if bag.include_last_offset else offsets[:-1]
        return m.bag(rows[taken], offsets, None if weights is None else weights[taken]).tanh()

    return Raw(run, bag=bag)


def norm_cases() -> Iterator[Case]:
    yield alone("layer_norm", lambda: nn.LayerNorm(5), 5)
    yield alone("layer_norm_places", lambda: nn.LayerNorm(4), 4, 4)
    yield alone("layer_norm_2_dims", lambda: nn.LayerNorm((3, 5)), 3, 5)
    yield alone("layer_norm_2_dims_places", lambda: nn.LayerNorm((3, 5)), 2, 3, 5)
    yield alone("layer_norm_no_bias", lambda: nn.LayerNorm(5, bias=False), 3, 5)
    fixed = functools.partial(nn.LayerNorm, 5, elementwise_affine=False)
    yield alone("layer_norm_fixed", lambda: nn.Sequential(nn.Linear(4, 5), fixed()), 3, 4)
    yield alone("rms_norm", lambda: nn.RMSNorm(5), 5)
    yield alone("rms_norm_places", lambda: nn.RMSNorm(4, eps=1e-3), 4, 4)
    yield alone("rms_norm_2_dims", lambda: nn.RMSNorm((3, 5)), 2, 3, 5)
    yield alone("group_norm", lambda: nn.GroupNorm(2, 4), 4)
    yield alone("group_norm_places", lambda: nn.GroupNorm(2, 4), 4, 4)
    yield alone("group_norm_image", lambda: nn.GroupNorm(3, 6), 6, 3, 2)
    yield alone("group_norm_one_group", lambda: nn.GroupNorm(1, 6), 6, 3, 2)
    yield from instance_norm_cases()
    yield alone("batch_norm1d", lambda: nn.BatchNorm1d(5).eval(), 5)
    yield alone("batch_norm1d_places", lambda: nn.BatchNorm1d(4).eval(), 4, 4)
    yield alone("batch_norm2d", lambda: nn.BatchNorm2d(3).eval(), 3, 4, 2)
    yield alone("batch_norm3d", lambda: nn.BatchNorm3d(3).eval(), 3, 2, 4, 2)
    yield alone("batch_norm_fixed", lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False).eval()), 4)
    yield Case("batch_norm_net", batch_norm_net, floats(2, 5, 5), nn.CrossEntropyLoss(), classes)


def instance_norm_cases() -> Iterator[Case]:
    for tracked in (False, True):
        options = {"affine": True, "track_running_stats": tracked}
        name = "_tracked" if tracked else ""
        two = functools.partial(nn.InstanceNorm2d, 3, **options)
        yield alone(f"instance_norm1d{name}", functools.partial(nn.InstanceNorm1d, 4, **options), 4, 4)
        yield alone(f"instance_norm2d{name}", two, 3, 4, 2)
        yield alone(f"instance_norm2d{name}_eval", lambda two=two: two().eval(), 3, 4, 2)
        yield alone(f"instance_norm3d{name}", functools.partial(nn.InstanceNorm3d, 3, **options), 3, 2, 4, 2)


def batch_norm_net() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 3)).eval()


def prelu_cases() -> Iterator[Case]:
    yield alone("prelu", lambda: nn.PReLU(), 5)
    yield alone("prelu_places", lambda: nn.PReLU(), 4, 4)
    yield alone("prelu_channels", lambda: nn.PReLU(5), 5)
    yield alone("prelu_channels_places", lambda: nn.PReLU(4), 4, 4)
    yield alone("prelu_channels_image", lambda: nn.PReLU(3), 3, 4, 2)
    yield alone("prelu_after_conv", lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.PReLU(3)), 2, 5)
