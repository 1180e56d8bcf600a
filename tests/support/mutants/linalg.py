from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/linalg/low_rank.py",
        "curvature/linalg/test_low_rank.py",
        ("rest = (mean + damping).gather(0, rank[None])", "rest = (mean + damping)[:1]"),
        ("x.new_full((size,), -1.0)", "x.new_full((size,), 1.0)"),
    ),
    *broken(
        "curvature/linalg/outcomes.py",
        "curvature/linalg/test_outcomes.py",
        ("[flag.to(place) for flag in flags]", "[flag.to(place) for flag in flags[::-1]]"),
    ),
    *broken(
        "curvature/linalg/sketch.py",
        "curvature/linalg/test_sketch.py",
        ("/ MAX_SKETCH_ROWS**0.5", "/ MAX_SKETCH_ROWS"),
        (
            "rest = rest + (rows.square().sum() - kept.square().sum())",
            "rest = rest + 0 * (rows.square().sum() - kept.square().sum())",
        ),
    ),
    *broken(
        "curvature/linalg/decompositions.py",
        "optimizers/test_failed_decompositions.py curvature/operators",
        ("unsure = values.abs() <= rounding", "unsure = values.abs() < 0"),
        ("for share in (0.0, *RELATIVE_JITTERS))", "for share in (0.0,))"),
    ),
    *broken(
        "curvature/linalg/block_lanczos.py",
        "curvature/operators",
        ("core = _append_border(core, basis.mT @", "core = _append_border(core, 1.01 * basis.mT @"),
    ),
]
