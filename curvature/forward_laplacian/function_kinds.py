"""Which torch functions are linear, bilinear, act entry by entry, or have no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Functions = frozenset[Callable[..., Any]]


def functions_named(text: str) -> Functions:
    """The functions of these names in all of torch's namespaces."""
    members = (getattr(space, name, None) for name in text.split() for space in SPACES)
    return frozenset(f for f in members if callable(f) and not isinstance(f, type))


def properties(text: str) -> Functions:
    return frozenset(getattr(Tensor, name).__get__ for name in text.split())


SPACES = (torch, Tensor, torch.special, torch._C._nn)

# Known without looking at the values.
METADATA = properties(
    "shape dtype device ndim layout is_cuda is_cpu is_sparse is_quantized is_nested is_meta"
) | functions_named(
    "size dim numel nelement stride is_floating_point is_complex __len__ ndimension element_size is_contiguous "
    "get_device is_pinned is_shared is_same_size is_inference is_conj is_neg result_type is_tensor storage_offset "
    "new_empty new_zeros new_ones new_full new_tensor zeros_like ones_like empty_like "
    "full_like rand_like randn_like randint_like"
)
# Without derivative: the result is that of the value.
VALUES = properties("data") | functions_named(
    "detach eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ not_equal less less_equal greater "
    "greater_equal isnan isinf isfinite isclose allclose equal argmax argmin argsort sign signbit floor ceil round "
    "trunc fix heaviside floor_divide __floordiv__ logical_and logical_or logical_not logical_xor any all "
    "count_nonzero nonzero argwhere searchsorted bucketize __bool__ __float__ __int__ __index__ item tolist "
    "__contains__ bincount long int bool short histc"
)
# Linear in the first argument, with the others fixed.
LINEAR = properties("T mT H mH real") | functions_named(
    "reshape view flatten unflatten squeeze unsqueeze ravel transpose t permute movedim moveaxis swapaxes swapdims "
    "adjoint expand broadcast_to repeat tile repeat_interleave __getitem__ select narrow index_select gather "
    "take_along_dim take masked_select diagonal diag_embed diag tril triu flip fliplr flipud rot90 roll unfold "
    "split split_with_sizes tensor_split chunk unbind hsplit vsplit dsplit unsafe_chunk unsafe_split "
    "sum mean cumsum trace contiguous clone alias double float half bfloat16 cpu cuda positive __pos__ neg "
    "negative __neg__ pixel_shuffle pixel_unshuffle channel_shuffle view_as_real im2col col2im avg_pool1d avg_pool2d "
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d"
)
# The same with a bias as third argument.
AFFINE = functions_named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
# The same; only shape and dtype of the other arguments matter.
SHAPED = functions_named("expand_as view_as reshape_as type_as to type")
# Jointly linear in all tensors; those that do not depend on the inputs have zero derivatives.
JOINED = functions_named("cat concat concatenate stack hstack vstack dstack column_stack row_stack")
BILINEAR = functions_named("bmm einsum outer ger inner dot vdot tensordot kron cross linalg_cross vecdot mv") | {
    torch.linalg.cross,
    torch.linalg.vecdot,
    torch.functional.einsum,
}
MATMUL = functions_named("matmul __matmul__ mm") | {torch.linalg.matmul}
# Entry by entry, in any number of tensors that are broadcast.
POINTWISE = functions_named(
    "tanh sin cos exp sigmoid square expit sgn "
    "tan sinh cosh asin acos atan asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh exp2 expm1 log log1p "
    "log2 log10 sqrt rsqrt reciprocal abs absolute __abs__ erf erfc erfinv lgamma digamma sinc logit log_sigmoid "
    "entr ndtr softplus elu selu celu gelu silu mish hardtanh relu relu6 leaky_relu softshrink hardshrink threshold "
    "hardswish clamp clip clamp_min clamp_max deg2rad rad2deg frac nan_to_num "
    "pow __pow__ float_power __rpow__ atan2 arctan2 hypot maximum minimum fmax fmin lerp addcmul addcdiv xlogy xlog1py "
    "logaddexp logaddexp2 fmod remainder __mod__ copysign i0 i0e i1 i1e bessel_j0 bessel_j1"
) | {F.logsigmoid, F.hardtanh, F.relu6, F.hardswish, F.leaky_relu}
