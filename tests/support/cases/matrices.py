"""The cases of the catalogue that matrices are checked on, and some that it has no place for."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support.cases.case import Case, Raw, classes, floats, indices
from support.cases.catalogue import CATALOGUE
from support.cases.losses import counts
from support.oracles.brute_force import Matrices

# Many parameters, or many entries in one sample's output: their references take long. Of the options of convolutions
# each is among the others in one or two dimensions.
LARGE = {
    *("conv_transpose2d_plain", "conv_transpose2d_no_bias", "conv_transpose2d_stride", "conv_transpose2d_dilation"),
    *("conv_transpose2d_output_padding", "conv_transpose2d_mixed", "conv2d_replicate", "conv2d_circular"),
    *("conv_transpose3d_stride", "conv_transpose3d_plain", "conv_transpose3d_output_padding"),
    *("conv_transpose3d_groups", "conv_transpose3d_mixed", "conv3d_replicate", "conv3d_padding", "conv3d_same_even"),
    "conv3d_same_circular",
    *("lstm_final_state", "unet", "unet_pixels", "unet_with_time", "hf_gpt2", "hf_gpt2_masked", "hf_bert"),
    *("hf_llama", "hf_llama_tied", "hf_vit"),
}


def small(*parts: str) -> list[Case]:
    """Those whose output has its samples first, as matrices want it, and of which a reference is quick."""
    return [case for part in parts for case in CATALOGUE[part] if case.sample_dim == 0 and case.id not in LARGE]


def reference(case: Case, model: nn.Module, loss: Any, data: Any) -> Matrices:
    return Matrices(model, loss, data)


@functools.cache
def shared_reference(case: Case) -> Matrices:
    """The reference of a case on its `batch_of`, computed once for all tests of a process."""
    model, loss = case.build()
    return reference(case, model, loss, batch_of(case, model))


def batch_of(case: Case, model: nn.Module) -> tuple[Any, Tensor]:
    """Of convolutions two samples: their outputs have many entries."""
    return case.batch(model, 2 if case.id.startswith("conv") else None)


def batches(data: tuple[Any, Tensor], *sizes: int) -> list[tuple[Any, Tensor]]:
    """The samples in batches of the sizes given; a target may have several rows for each."""
    x, y = data
    rows = len(y) // sum(sizes)
    return list(zip(_split(x, sizes), y.split([rows * size for size in sizes]), strict=True))


def _split(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Along dim 0 of what has all samples there."""
    if isinstance(tree, Tensor):
        return list(tree.split(sizes)) if len(tree) == sum(sizes) else [tree] * len(sizes)
    if isinstance(tree, tuple):
        return list(zip(*(_split(part, sizes) for part in tree), strict=True))
    if isinstance(tree, dict):
        parts = {key: _split(part, sizes) for key, part in tree.items()}
        return [{key: part[k] for key, part in parts.items()} for k in range(len(sizes))]
    return [tree] * len(sizes)


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.5, 0.1])


def flat_tokens() -> nn.Module:
    """(N, T) to (N T, 5): all tokens in one dim, as language models are often trained."""
    run = lambda m, x: m.head(m.layer(m.words(x)).tanh()).flatten(0, 1)
    return Raw(run, words=nn.Embedding(5, 3, padding_idx=1), layer=nn.Linear(3, 4), head=nn.Linear(4, 5))


def flat_ignoring(output: Tensor) -> Tensor:
    """Of 3 tokens of a sample: none is ignored, or one, two, all, and so on."""
    target = classes(output)
    rows = target.view(-1, 3)
    for n, row in enumerate(rows):
        row[: n % 4] = -100
    return target


def deep_linear(*shape: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(i, o) for i, o in zip(shape[:-1], shape[1:], strict=True)))


def gaussian_heads() -> nn.Module:
    """(N, 2) means and as many variances."""
    run = lambda m, x: torch.cat([m.mean(x), nn.functional.softplus(m.spread(x).tanh())], 1)
    return Raw(run, mean=nn.Linear(3, 2), spread=nn.Linear(3, 2))


def half(output: Tensor) -> Tensor:
    return torch.randn_like(output.chunk(2, 1)[0])


def extra() -> Iterator[Case]:
    for reduction in ("mean", "sum"):
        for name, options in {"": {}, "_weight": {"weight": WEIGHT}}.items():
            loss = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=0.1, **options)
            yield Case(f"flat_tokens{name}_{reduction}", flat_tokens, indices(5, 3), loss, flat_ignoring)
        loss = nn.GaussianNLLLoss(reduction=reduction)
        yield Case(f"gaussian_heads_{reduction}", gaussian_heads, floats(3), loss, half)
        loss = nn.PoissonNLLLoss(reduction=reduction)
        yield Case(f"flat_rows_{reduction}", flat_rows, floats(3, 2), loss, counts)


def flat_rows() -> nn.Module:
    return Raw(lambda m, x: m.layer(x.flatten(0, 1)), layer=nn.Linear(2, 3))
