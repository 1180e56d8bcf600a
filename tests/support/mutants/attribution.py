from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/uses/attribution/scores.py",
        "curvature/uses/attribution",
        ("flat @ row.to(flat).mT", "flat @ row.to(flat).mT.abs()"),
        ("DAMPING * mean if", "mean if"),
        (
            "term.place_products(vector).to(vector) for term in parts]",
            "term.place_products(vector).to(vector) for term in parts[::-1]]",
        ),
        ("min(start + step, count)", "min(start + 1, count)"),
    ),
    *broken(
        "curvature/uses/attribution/eigenbases.py",
        "curvature/uses/attribution",
        ("None, None, eigen.values, eigen.rounding)", "None, None, eigen.values, 0 * eigen.rounding)"),
        ("rows = None if basis.rows is None else basis.rows.mT", "rows = basis.rows"),
    ),
    *broken(
        "curvature/uses/attribution/queries.py",
        "curvature/uses/attribution",
        ("[1][:, :, -rank:]", "[1][:, :, :rank]"),
        ("yield queries[start : start + step]", "yield queries[start : start + step].abs()"),
    ),
]
