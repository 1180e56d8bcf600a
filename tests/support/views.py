"""Terms of the parameters of small models, and the definitions of second moments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvature import capture, sample_layouts
from curvature.gradients.parameter_terms import joint_bias, terms_by_parameter
from curvature.kronecker.factors import Scheme
from curvature.terms import Term
from support.cases.case import randomise, seeded

N = 3
WEIGHTS = torch.tensor([0.5, 2.0, 1.5]).double()


def built(make: Callable[[], nn.Module]) -> nn.Module:
    with seeded(0):
        model = make()
        randomise(model)
    return model.double()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def terms_of(model: nn.Module, *x: Any, seed: int = 7) -> tuple[dict[str, list[Term]], dict[str, str | None], Tensor]:
    """Terms of every parameter, the bias that goes with it, and the vectors sent back."""
    with capture(model) as tape:
        output = model(*x)
    v = drawn(*output.shape, seed=seed)
    layouts = [[] if found is None else [found] for found in sample_layouts(tape, output)]
    terms, failed = terms_by_parameter(tape, tape.gradients([output], [v]), layouts, set())
    assert not failed
    return terms, {name: joint_bias(tape, name) for name in terms}, v


def scheme_of(model: nn.Module, name: str, terms: dict[str, list[Term]], bias: str | None, sharing: str) -> Scheme:
    shapes = [tuple(model.get_parameter(k).shape) for k in (name, bias) if k is not None]
    found = Scheme.of(terms[name], shapes, torch.float64, sharing)
    assert found is not None
    return found


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item())


def means(a: Tensor, b: Tensor, sharing: str) -> tuple[Tensor, Tensor]:
    """The definitions: a (N, t, g, i) and b (N, t, g, o) to A and B."""
    if sharing == "reduce":
        a, b = a.mean(1, keepdim=True), b.sum(1, keepdim=True)
    weighted = b * WEIGHTS[:, None, None, None]
    return torch.einsum("ntgi,ntgj->gij", a, a) / a[..., 0, 0].numel(), torch.einsum("ntgo,ntgp->gop", weighted, b)
