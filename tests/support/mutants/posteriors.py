from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/uses/posteriors/outputs.py",
        "curvature/uses/posteriors/test_laplace.py",
        ("a.square(), block.values)", "a.abs(), block.values)"),
        ("found.append(matmul(rows, spread.mT))", "found.append(matmul(rows, rows.mT))"),
    ),
    *broken(
        "curvature/uses/posteriors/layered.py",
        "curvature/uses/posteriors/test_laplace.py",
        ("(factor * self._spectra[number] + own).log()", "(self._spectra[number] + own).log()"),
        ("factor * self._semidefinite[number] + own.diag()", "self._semidefinite[number] + own.diag()"),
    ),
    *broken(
        "curvature/uses/posteriors/labels.py",
        "curvature/uses/posteriors/test_laplace.py",
        ("return 0.5 / noise.square()", "return 1 / noise.square()"),
        ("math.pi / 8 * variance", "math.pi / 4 * variance"),
    ),
    *broken(
        "curvature/uses/posteriors/posterior.py",
        "curvature/uses/posteriors/test_laplace.py",
        ("variance.mean(0) + mean.var(0, correction=0)", "variance.mean(0)"),
        ("(prior * squares - sizes * prior.log())", "(prior * squares - prior.log())"),
    ),
]
