from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/uses/posteriors/outputs.py",
        "curvature/uses/posteriors/test_laplace.py",
        ("a.square(), block.values)", "a.abs(), block.values)"),
        ("covariances.append(matmul(rows, spread.mT))", "covariances.append(matmul(rows, rows.mT))"),
    ),
    *broken(
        "curvature/uses/posteriors/layered.py",
        "curvature/uses/posteriors/test_laplace.py",
        ("(factor * self._spectra[number] + block_prior).log()", "(self._spectra[number] + block_prior).log()"),
        ("factor * self._semidefinite[number] + block_prior.diag()", "self._semidefinite[number] + block_prior.diag()"),
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
