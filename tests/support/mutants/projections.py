from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/uses/projections/projection.py",
        "curvature/uses/projections",
        ("values[:, part.start - start : part.stop - start]", "values[:, : part.stop - part.start]"),
    ),
]
