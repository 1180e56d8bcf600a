from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/projections/projection.py",
        "curvature/projections",
        ("values[:, part.start - start : part.stop - start]", "values[:, : part.stop - part.start]"),
    ),
]
