from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/operators/estimators.py",
        "curvature/operators",
        ("return mean_estimate((z * (op @ z)).sum(0))", "return mean_estimate((z * (op @ z)).mean(0))"),
        ("z = z - basis @ (basis.mT @ z)", "z = z - 0.5 * basis @ (basis.mT @ z)"),
        ("rest = (size - half + 1) *", "rest = (size - half) *"),
        ("return mean_estimate((z * (op @ z)).T)", "return mean_estimate((op @ z).T)"),
        ("full[:, None] - (basis @ leaves) *", "full[:, None] + (basis @ leaves) *"),
    ),
    *broken(
        "curvature/operators/spectra.py",
        "curvature/operators",
        (
            "alphas[:, step] = (basis[:, step] * image).sum(1)",
            "alphas[:, step] = (basis[:, step] * image).abs().sum(1)",
        ),
    ),
    *broken(
        "curvature/operators/spectra.py",
        "curvature/operators",
        ("return values, rotations[:, 0].square()", "return values, rotations[:, 0].abs()"),
        ("/ (width * math.sqrt(2 * math.pi))", "/ (width * math.sqrt(math.pi))"),
    ),
]
