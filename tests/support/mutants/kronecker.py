from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/kronecker/factors.py",
        "curvature/matrices/test_experts.py",
        ("arrived.sum((0, 1)).to", "arrived.sum((0, 1)).clamp(min=len(term)).to"),
        ('b * cast("OuterProduct", term).arrived[..., None] if', "b if"),
    ),
    *broken(
        "curvature/kronecker/factors.py",
        "curvature/kronecker/test_factors.py curvature/linalg/test_sketch.py",
        ("return len(term) * term.places", "return len(term)"),
        ("corner.fill_(number)", "corner.fill_(1)"),
        ("return total / sum(term.places for term in terms)", "return total"),
        ("for term in whole if term.has_bias)", "for term in whole)"),
        ("b.sum(1, keepdim=True) for b in same", "b.mean(1, keepdim=True) for b in same"),
        ("moment[:, some, -1] += total", "moment[:, some, -1] -= total"),
        ("second_moment_with_constant(rows, bias) if", "second_moment_with_constant(rows, 2.0) if"),
    ),
    *broken(
        "curvature/kronecker/inverses.py",
        "curvature/kronecker/test_inverses.py curvature/linalg curvature/preconditioners",
        ("torch.where(values > least, 1 / values, 0.0)", "torch.where(values > 0 * least, 1 / values, 1.0)"),
        ("root = (1 - (rest + damping) / (values + damping))", "root = ((rest + damping) / (values + damping))"),
    ),
    *broken(
        "curvature/kronecker/second_moments.py",
        "curvature/kronecker/test_factors.py",
        ("value * rows.sum(0)", "rows.sum(0)"),
        ("out=own[:, start : start + size])", "out=own[:, :size])"),
    ),
    *broken(
        "curvature/kronecker/sums.py",
        "curvature/preconditioners/test_residual_blocks.py",
        ("damping**0.5 / ratio, damping**0.5 * ratio", "damping**0.5 * ratio, damping**0.5 / ratio"),
        ("(1 - t)[:, None] * (1 - s)", "(1 - t)[:, None] * s"),
    ),
    *broken(
        "curvature/kronecker/eigenbasis.py",
        "curvature/preconditioners/test_eigen.py curvature/matrices/test_every_builder.py",
        (
            "_rotate(_backprops(term).to(self.scheme.dtype), self.rows), self.sides)",
            "_rotate(_backprops(term).to(self.scheme.dtype), None), self.sides)",
        ),
        ("F.pad(a, (0, 1), value=float(whole.has_bias))", "F.pad(a, (0, 1))"),
    ),
]
