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
        ("scale_moment(activations, 1 / at_least_one(number, activations)))", "activations)"),
        ("b.sum(1, keepdim=True) for b in same", "b.mean(1, keepdim=True) for b in same"),
        ("moment[:, some, -1] += total", "moment[:, some, -1] -= total"),
        ("second_moment_with_constant(rows, bias) if", "second_moment_with_constant(rows, 2.0) if"),
    ),
    *broken(
        "curvature/kronecker/statistics.py",
        "curvature/kronecker/test_factors.py",
        ("pair[k] * t[1 - k].reshape", "pair[k] * t[k].reshape"),
    ),
    *broken(
        "curvature/kronecker/inverses.py",
        "curvature/kronecker/test_inverses.py curvature/linalg curvature/preconditioners",
        ("right, 1 / (values + damping), cuts", "right, 1 / (values + 2 * damping), cuts"),
        ("torch.where(values > least, 1 / values, 0.0)", "torch.where(values > 0 * least, 1 / values, 1.0)"),
        ("root = (1 - (rest + damping) / (values + damping))", "root = ((rest + damping) / (values + damping))"),
        ("values[:, :-1, :-1] - row - column + outside", "values[:, :-1, :-1] - row - column"),
        ("(n.mT @ o).square()", "(n.mT @ o).abs()"),
        ("side.clone() if side.untyped", "side if side.untyped"),
    ),
    *broken(
        "curvature/kronecker/packing.py",
        "curvature/kronecker/test_packing.py",
        ("side[:, left:, left:].mT, corner", "side[:, left:, left:], corner"),
        ("torch.where(_upper(left, entries), lower.mT, lower,", "torch.where(_upper(left, entries), lower, lower.mT,"),
        ("side[:, end - n : end, end - n : end]) for", "side[:, :n, :n]) for"),
    ),
    *broken(
        "curvature/kronecker/waiting.py",
        "curvature/kronecker/test_waiting.py",
        ("_with(t, _inputs(t).clone())", "_with(t, _inputs(t))"),
        ("number < LEAST_SAVED * size", "number < 0 * size"),
    ),
    *broken(
        "curvature/kronecker/diagonal_blocks.py",
        "curvature/preconditioners/test_diagonal_blocks.py",
        ("return *others, last + bias", "return *others, last, bias"),
        ("whole[:, start:end, start:end] = part", "whole[:, start:end, start:end] = part.mean((1, 2))[:, None, None]"),
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
