"""Parameters read by plain torch functions: added, multiplied, concatenated, expanded, contracted, without any rule."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import Case, Raw, both, classes, floats, indices, positive, token_loss, tokens


def cases() -> Iterator[Case]:
    yield from elementwise_cases()
    yield from coincidence_cases()
    yield from scale_cases()
    yield from token_cases()
    yield from selection_cases()
    yield from matmul_cases()
    yield from einsum_cases()
    yield from functional_cases()
    yield from no_rule_cases()


def raw(id: str, function: Callable[..., Tensor], draw: Callable[[int], Any], *, n: int = 4, **parts: Any) -> Case:
    """Of `parts`, a shape is a parameter, a tensor a buffer, a callable builds a module."""

    def build() -> nn.Module:
        return Raw(function, **{name: part() if callable(part) else part for name, part in parts.items()})

    return Case(f"raw_{id}", build, draw, n=n)


def elementwise_cases() -> Iterator[Case]:
    yield raw("add", lambda m, x: (x + m.p).tanh(), floats(5), p=(5,))
    yield raw("add_places", lambda m, x: (x + m.p).tanh(), floats(3, 5), p=(5,))
    yield raw("add_function", lambda m, x: torch.add(x, m.p, alpha=2).tanh(), floats(3, 5), p=(5,))
    yield raw("add_first", lambda m, x: (m.p + x).tanh(), floats(3, 5), p=(3, 5))
    yield raw("add_inner", lambda m, x: (x + m.p).tanh(), floats(3, 5), p=(3, 1))
    yield raw("add_scalar", lambda m, x: (x + m.p).tanh(), floats(3, 5), p=())
    yield raw("add_leading_one", lambda m, x: (x + m.p).tanh(), floats(3, 5), p=(1, 1, 5))
    yield raw("add_inplace", lambda m, x: x.clone().add_(m.p).tanh(), floats(3, 5), p=(5,))
    yield raw("add_assign", add_assign, floats(3, 5), p=(5,))
    yield raw("add_number", lambda m, x: x * (m.p + 1), floats(3, 5), p=(5,))
    yield raw("sub", lambda m, x: (x - m.p).tanh(), floats(3, 5), p=(5,))
    yield raw("sub_from", lambda m, x: (m.p - x).tanh(), floats(3, 5), p=(3, 1))
    yield raw("rsub", lambda m, x: torch.rsub(x, m.p).tanh(), floats(5), p=(5,))
    yield raw("div", lambda m, x: x / m.p.exp(), floats(3, 5), p=(5,))
    yield raw("div_by", lambda m, x: x / m.p, floats(3, 5), p=(5,))
    yield raw("div_into", lambda m, x: m.p / x, positive(3, 5), p=(3, 1))
    yield raw("negated", lambda m, x: (x + -m.p).tanh(), floats(3, 5), p=(5,))
    yield raw("addcmul", lambda m, x: torch.addcmul(m.b, x, m.w, value=0.5).tanh(), floats(3, 5), w=(5,), b=(5,))
    yield raw("addcmul_input", lambda m, x: torch.addcmul(x, x, m.w).tanh(), floats(3, 5), w=(3, 5))
    yield raw("addcdiv", lambda m, x: torch.addcdiv(m.b, x, m.w, value=0.5), floats(3, 5), w=(5,), b=(3, 1))
    yield raw("lerp", lambda m, a, b: torch.lerp(a, b, m.p), both(floats(3, 5), floats(3, 5)), p=(5,))
    yield raw("lerp_to", lambda m, x: torch.lerp(x, m.p, 0.3).tanh(), floats(3, 5), p=(5,))
    yield raw("twice", lambda m, x: ((x + m.p).tanh() * m.p).tanh(), floats(3, 5), p=(5,))
    yield raw("square", lambda m, x: x * m.p * m.p, floats(3, 5), p=(5,))


def add_assign(m: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    y += m.p
    return y.tanh()


def coincidence_cases() -> Iterator[Case]:
    """Parameters whose leading size equals the number of samples."""
    yield raw("add_equal_sizes", lambda m, x: (x + m.p).tanh(), floats(4), p=(4,))
    yield raw("add_equal_sizes_table", lambda m, x: (x + m.p).tanh(), floats(4, 4), p=(4, 4))
    yield raw("add_equal_sizes_column", lambda m, x: (x + m.p[:, None]).tanh(), floats(4, 4), p=(4,))
    yield raw("mul_equal_sizes", lambda m, x: x * m.p, floats(4, 4), p=(4, 1))
    yield raw("mul_equal_sizes_all", lambda m, x: x * m.p, floats(4, 4, 4), p=(4, 4, 4))
    yield raw("matmul_equal_sizes", lambda m, x: (m.p @ x @ m.q).tanh(), floats(4, 4), p=(4, 4), q=(4, 4))
    yield raw("bmm_equal_sizes", per_place, floats(4, 4), p=(4, 4, 4))
    yield raw("matmul_stack_equal_sizes", lambda m, x: m.p @ x, floats(4, 4, 4), p=(4, 4, 4))
    yield raw("einsum_equal_sizes", lambda m, x: torch.einsum("nti,tio->nto", x, m.p), floats(4, 4), p=(4, 4, 4))
    yield raw("transposed_equal_sizes", over_places, floats(4, 4), w=(4, 4), b=(4,))


def per_place(m: nn.Module, x: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), m.p).transpose(0, 1)


def over_places(m: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x.transpose(1, 2), m.w, m.b).tanh()


def scale_cases() -> Iterator[Case]:
    yield raw("mul", lambda m, x: (x * m.p).tanh(), floats(3, 5), p=(5,))
    yield raw("mul_first", lambda m, x: (m.p * x).tanh(), floats(5), p=(5,))
    yield raw("mul_function", lambda m, x: torch.mul(m.p, x), floats(3, 5), p=(3, 5))
    yield raw("mul_inplace", lambda m, x: x.tanh().mul_(m.p), floats(3, 5), p=(5,))
    yield raw("mul_scalar", lambda m, x: (x * m.p).tanh(), floats(3, 5), p=())
    yield raw("mul_channels", lambda m, x: x * m.p.view(1, -1, 1, 1), floats(3, 2, 5), p=(3,))
    yield raw("mul_unsqueezed", lambda m, x: x * m.p[:, None, None], floats(3, 2, 5), p=(3,))
    yield raw("layer_scale", layer_scale, floats(3, 4), layer=lambda: nn.Linear(4, 4), gamma=(4,))
    yield raw("gate", lambda m, x: x + m.gate.tanh() * m.layer(x), floats(3, 4), layer=lambda: nn.Linear(4, 4), gate=())
    yield raw("temperature", lambda m, x: (x * m.p.exp()).tanh(), floats(5), p=())
    yield raw("mixing", lambda m, x: (x * m.p.softmax(0)).sum(1), floats(5), p=(5,))
    yield raw("scale_and_shift", lambda m, x: (x * (1 + m.s) + m.b).tanh(), floats(3, 5), s=(5,), b=(5,))
    yield raw("relu_inplace", lambda m, x: F.relu((x * m.w + m.b), inplace=True), floats(3, 5), w=(5,), b=(5,))


def layer_scale(m: nn.Module, x: Tensor) -> Tensor:
    return x + m.gamma * m.layer(x).tanh()


def token_cases() -> Iterator[Case]:
    yield raw("class_token", class_token, floats(3, 4), token=(1, 1, 4), layer=attention)
    yield raw("class_token_repeated", repeated_token, floats(3, 4), token=(1, 1, 4), layer=attention)
    yield raw("class_token_plain", lambda m, x: torch.cat([m.t.expand(len(x), -1), x], 1).tanh(), floats(3), t=(2,))
    yield raw("class_token_stack", lambda m, x: torch.stack([x, m.p.expand_as(x)], 1).tanh(), floats(5), p=(5,))
    yield raw("class_token_hstack", lambda m, x: torch.hstack([m.p.expand(len(x), 2), x]).tanh(), floats(5), p=(2,))
    yield raw("position_table", lambda m, x: m.layer(x + m.table), floats(3, 4), table=(1, 3, 4), layer=attention)
    yield raw("position_slice", position_slice, floats(3, 4), table=(6, 4), layer=attention)
    yield raw("position_slice_batch", lambda m, x: (x + m.table[:, :3]).tanh(), floats(3, 4), table=(1, 6, 4))
    yield raw("position_embedding", position_embedding, indices(6, 3), words=words, table=lambda: nn.Embedding(5, 4))
    yield raw("position_expanded", position_expanded, indices(6, 3), words=words, table=lambda: nn.Embedding(5, 4))
    yield raw("position_equal_sizes", position_embedding, indices(6, 4), words=words, table=lambda: nn.Embedding(4, 4))
    yield raw("repeat", lambda m, x: (x + m.p.repeat(len(x), 3, 1)).tanh(), floats(3, 4), p=(4,))
    yield raw("expand_as", lambda m, x: (x + m.p.expand_as(x)).tanh(), floats(3, 4), p=(3, 1))
    yield raw("broadcast_to", lambda m, x: (x + torch.broadcast_to(m.p, x.shape)).tanh(), floats(3, 4), p=(4,))
    yield raw("padded", lambda m, x: (x + F.pad(m.p, (1, 1))).tanh(), floats(3, 5), p=(3,))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)


def words() -> nn.Module:
    return nn.Embedding(6, 4)


def class_token(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1))[:, 0]


def repeated_token(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(torch.cat([x, m.token.repeat(x.shape[0], 1, 1)], dim=1))[:, -1]


def position_slice(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(x + m.table[: x.shape[1]])


def position_embedding(m: nn.Module, x: Tensor) -> Tensor:
    return (m.words(x) + m.table(torch.arange(x.shape[1], device=x.device))).tanh()


def position_expanded(m: nn.Module, x: Tensor) -> Tensor:
    return (m.words(x) + m.table(torch.arange(x.shape[1], device=x.device).expand_as(x))).tanh()


def selection_cases() -> Iterator[Case]:
    yield raw("where", lambda m, x: torch.where(x > 0, x, m.p), floats(3, 5), p=(5,))
    yield raw("where_negated", lambda m, x: torch.where(x > 0, m.p, x * 2), floats(3, 5), p=(3, 1))
    yield raw("where_both", lambda m, x: torch.where(x > 0, m.p, m.q).tanh(), floats(3, 5), p=(3, 1), q=())
    yield raw("mask_token", mask_token, floats(3, 4), token=(4,), layer=attention)
    yield raw("index", lambda m, x: m.p[x].tanh(), indices(3, 5), p=(3, 2))
    yield raw("index_vector", lambda m, x: m.p[x].tanh(), indices(3, 5), p=(3,))
    yield raw("index_single", lambda m, x: m.p[x].tanh(), indices(3), p=(3, 2))
    yield raw("index_select", lambda m, x: m.p.index_select(0, x).tanh(), indices(3), p=(3, 2))
    yield raw("gather", lambda m, x: m.p.expand(len(x), -1).gather(1, x).tanh(), indices(3, 5), p=(3,))
    yield raw("rows", lambda m, x: (x @ m.p[1] + m.p[0, 0]).tanh(), floats(4), p=(2, 4, 3))
    yield raw("unbind", lambda m, x: (x * m.p.unbind(0)[0] + m.p.unbind(0)[1]).tanh(), floats(3, 4), p=(2, 4))
    yield raw("chunk", chunked, floats(3, 4), w=(6, 4), b=(6,))


def mask_token(m: nn.Module, x: Tensor) -> Tensor:
    return m.layer(torch.where(x[..., :1] > 0, x, m.token))


def chunked(m: nn.Module, x: Tensor) -> Tensor:
    query, key, value = (F.linear(x, w, b) for w, b in zip(m.w.chunk(3), m.b.chunk(3), strict=True))
    return (query @ key.transpose(1, 2)).softmax(-1) @ value


def matmul_cases() -> Iterator[Case]:
    yield raw("matmul", lambda m, x: torch.matmul(x, m.w).tanh(), floats(4), w=(4, 3))
    yield raw("matmul_reversed", lambda m, x: m.w.__rmatmul__(x).tanh(), floats(4), w=(4, 3))
    yield raw("matmul_places", lambda m, x: (x @ m.w).tanh(), floats(5, 4), w=(4, 3))
    yield raw("matmul_2_leading", lambda m, x: (x @ m.w).tanh(), floats(2, 5, 4), w=(4, 3))
    yield raw("matmul_left", lambda m, x: (m.w @ x).tanh(), floats(4, 3), w=(5, 4))
    yield raw("matmul_left_leading", lambda m, x: (m.w @ x).tanh(), floats(2, 4, 3), w=(5, 4))
    yield raw("matmul_heads", lambda m, x: (x[:, None] @ m.w).tanh(), floats(5, 4), w=(2, 4, 3))
    yield raw("matmul_vector", lambda m, x: (x @ m.w).tanh(), floats(5, 4), w=(4,))
    yield raw("matmul_vector_left", lambda m, x: (m.w @ x).tanh(), floats(4, 3), w=(4,))
    yield raw("mv", lambda m, x: x.mv(m.w).tanh(), floats(4), w=(4,))
    yield raw("mm", lambda m, x: torch.mm(x, m.w).tanh(), floats(4), w=(4, 3))
    yield raw("mm_transposed", lambda m, x: torch.mm(m.w, x.t()).t().tanh(), floats(4), w=(3, 4))
    yield raw("addmm", lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2).tanh(), floats(4), w=(4, 3), b=(3,))
    yield raw("addmm_input", lambda m, x: torch.addmm(x, x, m.w).tanh(), floats(4), w=(4, 4))
    yield raw("bmm", lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)).tanh(), floats(5, 4), w=(4, 3))
    yield raw("bmm_left", lambda m, x: torch.bmm(m.w.expand(len(x), -1, -1), x).tanh(), floats(4, 3), w=(1, 5, 4))
    yield raw("baddbmm", baddbmm, floats(5, 4), w=(4, 3), b=(3,))
    yield raw("baddbmm_heads", grouped, floats(5, 4), w=(5, 4, 3), b=(5, 1, 3))
    yield raw("linear", lambda m, x: F.linear(x, m.w, m.b).tanh(), floats(5, 4), w=(3, 4), b=(3,))
    yield raw("linear_transposed", lambda m, x: F.linear(x, m.w.T).tanh(), floats(5, 4), w=(4, 3))
    yield raw("linear_and_back", lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w.t()), floats(5, 4), w=(3, 4))
    yield raw("linear_vector", lambda m, x: F.linear(x, m.w).tanh(), floats(5, 4), w=(4,))
    yield raw("low_rank", lambda m, x: F.linear(x, m.a @ m.b).tanh(), floats(5, 4), a=(3, 2), b=(2, 4))
    yield raw("lora", lora, floats(5, 4), base=lambda: nn.Linear(4, 3).requires_grad_(False), down=(2, 4), up=(3, 2))
    yield raw("outer", lambda m, x: torch.outer(x.sum(1), m.p).tanh(), floats(5), p=(3,))
    yield raw("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=2).tanh(), floats(3, 4), w=(3, 4, 5))


def baddbmm(m: nn.Module, x: Tensor) -> Tensor:
    return torch.baddbmm(m.b, x, m.w.expand(len(x), -1, -1), beta=0.5, alpha=2).tanh()


def grouped(m: nn.Module, x: Tensor) -> Tensor:
    """One matrix per place: (T, N, i) x (T, i, o)."""
    return torch.baddbmm(m.b, x.transpose(0, 1), m.w).transpose(0, 1).tanh()


def lora(m: nn.Module, x: Tensor) -> Tensor:
    return (m.base(x) + x @ m.down.T @ m.up.T).tanh()


def einsum_cases() -> Iterator[Case]:
    for id, equation, weight in (
        ("plain", "nti,io->nto", (4, 3)),
        ("left", "nti,oi->nto", (3, 4)),
        ("ellipsis", "...i,oi->...o", (3, 4)),
        ("heads", "ntd,hdk->nhtk", (2, 4, 3)),
        ("places", "ntd,sd->nst", (6, 4)),
        ("mixed_places", "ntd,st->nsd", (6, 5)),
        ("per_place", "ntd,tde->nte", (5, 4, 3)),
        ("elementwise", "ntd,d->ntd", (4,)),
        ("summed", "ntd,td->n", (5, 4)),
    ):
        run = einsum_with(equation)
        yield raw(f"einsum_{id}", run, floats(5, 4), w=weight)
    yield raw("einsum_first", lambda m, x: torch.einsum("oi,nti->nto", m.w, x).tanh(), floats(5, 4), w=(3, 4))
    yield raw("einsum_three", three, floats(5, 4), a=(4, 2), b=(2, 3))
    yield raw("einsum_tensors", tensors, both(floats(3), floats(4)), w=(3, 4, 2))


def einsum_with(equation: str) -> Callable[..., Tensor]:
    return lambda m, x: torch.einsum(equation, x, m.w).tanh()


def three(m: nn.Module, x: Tensor) -> Tensor:
    return torch.einsum("nti,ir,ro->nto", x, m.a, m.b).tanh()


def tensors(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("ni,nj,ijo->no", a, b, m.w)


def functional_cases() -> Iterator[Case]:
    yield raw("conv1d", lambda m, x: F.conv1d(x, m.w, m.b, padding=1).tanh(), floats(2, 5), w=(3, 2, 3), b=(3,))
    yield raw("conv2d_flipped", lambda m, x: F.conv2d(x, m.w.flip(2, 3)).tanh(), floats(2, 5, 4), w=(3, 2, 3, 3))
    yield raw("conv_standardised", standardised, floats(2, 5), w=(3, 2, 3))
    yield raw("conv_standardised_by_batch_norm", by_batch_norm, floats(2, 5), w=(3, 2, 3), gain=(3,))
    yield raw("layer_norm", lambda m, x: F.layer_norm(x, (4,), m.w, m.b), floats(3, 4), w=(4,), b=(4,))
    bias_alone = lambda m, x: F.layer_norm(x @ m.w, (4,), bias=m.b).tanh()
    yield raw("layer_norm_bias_alone", bias_alone, floats(3, 5), w=(5, 4), b=(4,))
    yield raw("embedding", lambda m, x: F.embedding(x, m.w).tanh(), indices(5, 3), w=(5, 2))
    negative = lambda m, x: F.embedding(x, m.w, padding_idx=-2).tanh()  # the module would have made it positive
    yield raw("embedding_padding_negative", negative, indices(5, 3), w=(5, 2))
    yield raw("cosine", lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w, dim=1)), floats(4), w=(3, 4))
    yield raw("pooled", lambda m, x: F.linear(x, F.max_pool1d(m.w, 2)).tanh(), floats(3), w=(5, 6))
    yield raw("attention", attend, floats(5, 4), query=(3, 4), key=(2, 4))
    yield raw("grid", lambda m, x: m.p.expand(len(x), -1, -1).cumsum(1) * x, floats(3, 2), p=(3, 1))
    yield Case("raw_tied", lambda: Raw(tied, w=(5, 4)), indices(5, 3), token_loss, tokens)
    bias = lambda m, x: x + m.b
    yield Case("raw_bias_cross_entropy", lambda: Raw(bias, b=(3,)), floats(3), nn.CrossEntropyLoss(), classes)


def standardised(m: nn.Module, x: Tensor) -> Tensor:
    mean, deviation = m.w.mean((1, 2), keepdim=True), m.w.std((1, 2), keepdim=True)
    return F.conv1d(x, (m.w - mean) / deviation).tanh()


def by_batch_norm(m: nn.Module, x: Tensor) -> Tensor:
    """The rows of the weight are the channels of one sample: no samples meet."""
    rows = F.batch_norm(m.w.flatten(1)[None], None, None, m.gain, training=True)
    return F.conv1d(x, rows.view_as(m.w)).tanh()


def attend(m: nn.Module, x: Tensor) -> Tensor:
    """Learned queries, and learned keys and values beside those of the input."""
    memory = torch.cat([x, m.key.expand(len(x), -1, -1)], dim=1)
    return F.scaled_dot_product_attention(m.query.expand(len(x), -1, -1), memory, memory)


def tied(m: nn.Module, x: Tensor) -> Tensor:
    return F.embedding(x, m.w).tanh() @ m.w.T


def no_rule_cases() -> Iterator[Case]:
    """Torch functions that no table of rules is likely to hold."""
    yield raw("power", lambda m, x: x**m.p, positive(3, 5), p=(5,))
    yield raw("power_base", lambda m, x: m.p.abs() ** x, floats(3, 5), p=(5,))
    yield raw("logaddexp", lambda m, x: torch.logaddexp(x, m.p), floats(3, 5), p=(5,))
    yield raw("maximum", lambda m, x: torch.maximum(x, m.p), floats(3, 5), p=(5,))
    yield raw("atan2", lambda m, x: torch.atan2(m.p, x), floats(3, 5), p=(5,))
    yield raw("hypot", lambda m, x: torch.hypot(m.p, x), floats(3, 5), p=(3, 1))
    yield raw("xlog1py", lambda m, x: torch.special.xlog1py(x, m.p.exp()), floats(3, 5), p=(5,))
    yield raw("erf", lambda m, x: torch.special.erf(x * m.p), floats(3, 5), p=(5,))
    yield raw("clamp", lambda m, x: torch.clamp(x, m.p - 1, m.p + 1), floats(3, 5), p=(5,))
    yield raw("distance", lambda m, x: torch.cdist(x, m.p).tanh(), floats(3, 4), p=(5, 4))
    yield raw("centres", lambda m, x: (-(x[:, None] - m.c).square().sum(-1)).exp(), floats(4), c=(5, 4))
    yield raw("kronecker", lambda m, x: x @ torch.kron(m.a, m.b), floats(3, 4), a=(2, 3), b=(2, 1))
    yield raw("matrix_exponential", lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.T), floats(5, 3), w=(3, 3))
    yield raw("solve", lambda m, x: torch.linalg.solve(m.w @ m.w.T + torch.eye(3).to(x), x), floats(3, 2), w=(3, 3))
    yield raw("polynomial", lambda m, x: (m.c[0] * x + m.c[1]) * x + m.c[2], floats(3, 5), c=(3,))
    yield raw("grid_sample", sample_grid, floats(4, 2), image=(1, 2, 5, 5))


def sample_grid(m: nn.Module, x: Tensor) -> Tensor:
    image = m.image.expand(len(x), -1, -1, -1)
    return F.grid_sample(image, x[:, None].tanh(), align_corners=True).flatten(1)
