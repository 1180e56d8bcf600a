from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/functional/recurrent.py",
        "curvature/gradients/test_per_sample.py",
        ("f.sigmoid() * state[1] + i.sigmoid() * g.tanh()", "i.sigmoid() * state[1] + f.sigmoid() * g.tanh()"),
        ("return ((state[0] - new) * z + new,)", "return ((state[0] - new) * (1 - z) + new,)"),
    ),
    *broken(
        "curvature/functional/scan.py",
        "curvature/recording/test_recurrent.py optimizers/recording/test_differentiated_gradients.py",
        ("before[1] * f * (1 - f)", "after[1] * f * (1 - f)"),
        ("(before[0] - new) * z", "(after[0] - new) * z"),
        ("h = gradients[-1] @ weight\n", "h = gradients[-1] @ weight.mT\n"),
        ("if not torch.is_grad_enabled():", "if True:"),
        ("return None, by_loop[0], to_products, *others", "return None, by_loop[0], None, *by_loop[1:3]"),
    ),
    *broken(
        "curvature/functional/formulas.py",
        "curvature/forward_laplacian curvature/gradients",
        (
            "return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()",
            "return centred * centred.square().mean(dims, keepdim=True).rsqrt()",
        ),
        ("scores = query @ key.mT * (1 / math.sqrt(query.shape[-1])", "scores = query @ key.mT * (1 / query.shape[-1]"),
    ),
    *broken(
        "curvature/functional/attention.py",
        "curvature/functional/test_attention.py",
        (".tril(start)", ".tril()"),
        ("_cut(totals[k], block, by_query).add_(x)", "_cut(totals[k], block, by_query).copy_(x)"),
        ("values))[1](changes)", "values))[1](tensors)"),
    ),
    *broken(
        "curvature/functional/plain_forms.py",
        "curvature/gradients/test_per_sample.py curvature/matrices/test_builders.py",
        ("torch.norm_except_dim(v, 2, dim)", "torch.norm_except_dim(v, 1, dim)"),
    ),
]
