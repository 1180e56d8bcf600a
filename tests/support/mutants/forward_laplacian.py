from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/forward_laplacian/pointwise.py",
        "curvature/forward_laplacian",
        ("torch.addcmul(L, f, q, value=-2)", "torch.addcmul(L, f, q, value=-1)"),
        ("(s - s * s) * (2 + x - 2 * f)", "(s - s * s) * (2 + x - f)"),
        ("mixed = 2 * form.of(", "mixed = form.of("),
        ("_second(slope, -2 * f * slope)", "_second(slope, -f * slope)"),
        ("seconds += [entry * form.of(h, other)", "seconds += [entry * form.of(h, h)"),
        ("lambda L, q: f * (q if L is None else L + q)", "lambda L, q: f * (q if L is None else L)"),
    ),
    *broken(
        "curvature/forward_laplacian/linear.py",
        "curvature/forward_laplacian",
        (
            "second = 2 * vmap(run)(a.first, form.times(b.first)).sum(0)",
            "second = vmap(run)(a.first, form.times(b.first)).sum(0)",
        ),
        ("x, lambda t: F.linear(t, weight))", "x, lambda t: F.linear(t, weight, bias))"),
    ),
    *broken(
        "curvature/forward_laplacian/jet.py",
        "curvature/forward_laplacian",
        (
            "return (self.weights @ b.reshape(len(b), -1)).reshape(b.shape)",
            "return (self.weights.diagonal().diag() @ b.reshape(len(b), -1)).reshape(b.shape)",
        ),
    ),
]
