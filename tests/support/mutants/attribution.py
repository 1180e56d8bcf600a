from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/attribution/scores.py",
        "curvature/attribution",
        ("flat @ row.to(flat).mT", "flat @ row.to(flat).mT.abs()"),
        ("DAMPING * mean if", "mean if"),
        (
            "term.place_products(vector).to(vector) for term in parts]",
            "term.place_products(vector).to(vector) for term in parts[::-1]]",
        ),
        ("min(start + step, count)", "min(start + 1, count)"),
    ),
    *broken(
        "curvature/attribution/eigenbases.py",
        "curvature/attribution",
        ("None, None, eigen.values, eigen.rounding)", "None, None, eigen.values, 0 * eigen.rounding)"),
        ("rows = None if basis.rows is None else basis.rows.mT", "rows = basis.rows"),
    ),
    *broken(
        "curvature/attribution/queries.py",
        "curvature/attribution",
        ("[1][:, :, -rank:]", "[1][:, :, :rank]"),
        ("yield queries[start : start + step]", "yield queries[start : start + step].abs()"),
    ),
]
