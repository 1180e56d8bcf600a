"""Models without per-sample gradients, and models so unusual that an exception is as good as the right rows."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from support.cases.case import Case, Raw, both, classes, floats, indices, lengths, token_loss


def batch_statistics() -> Iterator[tuple[Case, str]]:
    """Models whose samples see each other through a normalisation, and the name of the module that does it."""
    untracked = lambda **options: nn.BatchNorm1d(5, track_running_stats=False, **options)
    yield Case("refused_batch_norm1d", lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), floats(4)), "1"
    yield Case("refused_batch_norm2d", lambda: named_norm(nn.BatchNorm2d(3)), floats(2, 4, 4)), "norm"
    yield Case("refused_batch_norm_first", lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), floats(4)), "0"
    yield Case("refused_batch_norm_fixed", lambda: named_norm(nn.BatchNorm2d(3, affine=False)), floats(2, 4, 4)), "norm"
    yield (
        Case("refused_batch_norm_frozen", lambda: named_norm(nn.BatchNorm2d(3).requires_grad_(False)), floats(2, 4, 4)),
        "norm",
    )
    yield Case("refused_batch_norm_untracked", lambda: nn.Sequential(nn.Linear(4, 5), untracked()), floats(4)), "1"
    yield (
        Case(
            "refused_batch_norm_untracked_eval", lambda: nn.Sequential(nn.Linear(4, 5), untracked()).eval(), floats(4)
        ),
        "1",
    )
    yield Case("refused_batch_norm_nested", nested, floats(4)), "0.1"


def named_norm(norm: nn.Module) -> nn.Module:
    return Raw(lambda m, x: m.norm(m.conv(x)).relu().flatten(1), conv=nn.Conv2d(2, 3, 3), norm=norm)


def nested() -> nn.Module:
    """Only the inner normalisation is in training mode."""
    return nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), nn.ReLU(), nn.BatchNorm1d(5).eval())


def exact_or_refused() -> Iterator[Case]:
    yield from mixing_cases()
    yield from beside_cases()
    yield from reordering_cases()
    yield from opaque_cases()


def mixing_cases() -> Iterator[Case]:
    """Samples that see each other."""
    for name, run in {
        "centred": lambda m, x: m.layer(x - x.mean(0)).tanh(),
        "centred_after": lambda m, x: (m.layer(x) - m.layer(x).mean(0) / 2).tanh(),
        "neighbours": lambda m, x: m.layer(x + x.roll(1, 0)).tanh(),
        "count": lambda m, x: m.layer(x).tanh() / len(x),
        "row_each": lambda m, x: m.layer(x) + m.layer.weight.T[: len(x)].sum(1, keepdim=True),
    }.items():
        build = functools.partial(mixing, run)
        yield Case(f"mixed_{name}", build, floats(4), combine="neither")
    attention = lambda: Raw(across, layer=nn.MultiheadAttention(4, 2))
    yield Case("mixed_attention", attention, floats(5, 4), combine="neither")


def mixing(run: Callable[..., Tensor]) -> nn.Module:
    return Raw(run, layer=nn.Linear(4, 3))


def across(m: nn.Module, x: Tensor) -> Tensor:
    """A batch-first input given to a time-first attention: each place attends to other samples."""
    return m.layer(x, x, x)[0].tanh()


def beside_cases() -> Iterator[Case]:
    """Rows that are no samples beside theirs in a layer, or other rows than samples in the output."""
    yield Case("prototypes_beside", lambda: Raw(beside, layer=nn.Linear(4, 3), prototypes=(5, 4)), floats(4))
    folded = lambda: Raw(lambda m, x: m.layer(x.flatten(0, 1)), layer=nn.Linear(4, 3))
    yield Case("output_folded", folded, floats(5, 4), token_loss, folded_classes)


def folded_classes(output: Tensor) -> Tensor:
    """(N, T) for an output (N T, classes) with T = 5"""
    return classes(output).view(-1, 5)


def beside(m: nn.Module, x: Tensor) -> Tensor:
    """Learned rows go through the layer below those of the samples."""
    rows = m.layer(torch.cat([x, m.prototypes])).tanh()
    return rows[: len(x)] @ rows[len(x) :].T


def reordering_cases() -> Iterator[Case]:
    """Samples in another order inside."""
    yield Case("reordered_flip", lambda: Raw(flipped, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)), floats(4))
    yield Case("reordered_sorted", lambda: Raw(ordered, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)), floats(4))
    yield Case("reordered_windows", lambda: Raw(windows, layer=nn.Linear(4, 3), head=nn.Linear(3, 2)), floats(4, 4))
    yield Case("packed_lstm", lambda: packed(nn.LSTM(3, 4, batch_first=True)), both(floats(5, 3), lengths(5, 1)))
    yield Case(
        "packed_gru",
        lambda: packed(nn.GRU(3, 4, 2, bidirectional=True, batch_first=True)),
        both(floats(5, 3), lengths(5, 1)),
    )


def flipped(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(m.layer(x.flip(0)).tanh().flip(0))


def ordered(m: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.head(m.layer(x[order]).tanh()[order.argsort()])


def windows(m: nn.Module, x: Tensor) -> Tensor:
    """(N, T, d) folded with samples second, and by no name that says so."""
    rows = m.layer(x.permute(1, 0, 2).reshape(-1, x.shape[2])).tanh()
    return m.head(rows).view(x.shape[1], len(x), -1).permute(1, 0, 2)


def packed(recurrent: nn.Module) -> nn.Module:
    def run(m: nn.Module, x: Tensor, length: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, length.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m.recurrent(rows)[0], batch_first=True, total_length=x.shape[1])[0]

    return Raw(run, recurrent=recurrent)


class Opaque(torch.autograd.Function):
    """Of the old kind, which torch.func cannot transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return w * gradient, (x * gradient).sum_to_size(w.shape)


def opaque_cases() -> Iterator[Case]:
    """What torch.func cannot look through."""
    yield Case("old_function", lambda: Raw(lambda m, x: Opaque.apply(x, m.p).tanh(), p=(5,)), floats(3, 5))
    yield Case("old_function_between", between, floats(4))
    yield Case("branch_on_value", lambda: Raw(guarded, layer=nn.Linear(4, 3), p=(3,)), floats(4))
    yield Case("experts", router, floats(5, 4))
    yield Case("sparse_embedding", lambda: nn.Embedding(6, 3, sparse=True), indices(6, 4))
    yield Case("unfolded", lambda: Raw(unfolded, w=(3, 18)), floats(2, 5, 5))
    yield Case("data_read", lambda: Raw(lambda m, x: m.layer(x) + m.p.data, layer=nn.Linear(4, 3), p=(3,)), floats(4))
    yield Case("loop_over_samples", lambda: Raw(one_by_one, layer=nn.Linear(4, 3)), floats(4))


def between() -> nn.Module:
    return Raw(lambda m, x: m.two(Opaque.apply(m.one(x), m.p)), one=nn.Linear(4, 3), p=(3,), two=nn.Linear(3, 2))


def guarded(m: nn.Module, x: Tensor) -> Tensor:
    """Python looks at a value of the input, and a parameter has no rule."""
    if not x.isfinite().all():
        x = x.nan_to_num()
    return m.layer(x).tanh() * torch.special.erf(m.p)


def router() -> nn.Module:
    return Raw(experts, route=nn.Linear(4, 2), a=nn.Linear(4, 3), b=nn.Linear(4, 3))


def experts(m: nn.Module, x: Tensor) -> Tensor:
    """Each token goes to the expert that its router prefers."""
    tokens = x.flatten(0, 1)
    score, choice = m.route(tokens).softmax(-1).max(-1)
    output = torch.zeros(len(tokens), 3).to(x)
    for i, expert in enumerate((m.a, m.b)):
        taken = (choice == i).nonzero().squeeze(1)
        output = output.index_add(0, taken, expert(tokens[taken]).tanh() * score[taken, None])
    return output.view(*x.shape[:2], -1)


def unfolded(m: nn.Module, x: Tensor) -> Tensor:
    return (m.w @ F.unfold(x, 3)).tanh()


def one_by_one(m: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([m.layer(x[n : n + 1]).tanh() for n in range(len(x))])
