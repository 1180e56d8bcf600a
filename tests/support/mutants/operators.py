from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/operators/kronecker.py",
        "curvature/operators/test_storage.py",
        ("return self.eigen.to(torch.bfloat16)", "return super()._in_16_bits()"),
    ),
    *broken(
        "curvature/operators/storage.py",
        "curvature/operators/test_storage.py",
        ('del state["rounding"]  # that', 'state["rounding"] = state["rounding"] + 1e3  # that'),
        ('state["dtype"] = space', "pass"),
    ),
    *broken(
        "curvature/operators/sample_space.py",
        "curvature/matrices/test_sample_rows.py",
        ("(V - self._transposed(inner)) / damping", "(V + self._transposed(inner)) / damping"),
        ("- len(self.gram)) * math.log", "- 0) * math.log"),
        ("(root * roots * (root + roots))", "(root * roots * root)"),
    ),
    *broken(
        "curvature/operators/quadratic.py",
        "curvature/operators/test_quadratic.py",
        ("return x @ image / 2", "return x @ image"),
        ("(_Product.apply(ctx.K, x) if torch.is_grad_enabled() else image)", "image"),
        ("K @ theta + damping * theta", "K @ theta"),
        ("K.solve(v, damping)", "K.solve(v)"),
        ('name.removeprefix("_orig_mod.")', "name"),
    ),
    *broken(
        "curvature/operators/kronecker.py",
        "curvature/operators",
        (
            "two_sided(self.rows, self._to_matrices(V), self.columns)",
            "two_sided(None, self._to_matrices(V), self.columns)",
        ),
        ("None if columns is None else columns.square().mT", "None if columns is None else columns.mT"),
        ("all(look([ok, (worst < 1).all()]))", "all(look([ok]))"),
        ("means[0] / means[1]", "means[1] / means[0]"),
        ("noise / self._damped(damping).sqrt()", "noise / self._damped(damping)"),
        ("values = 1 / self._damped(float(damping))", "values = 1 / self._damped(0.0)"),
    ),
    *broken(
        "curvature/operators/base.py",
        "curvature/operators",
        (
            "return 2 * self._cholesky(float(damping)).diagonal().log().sum()",
            "return self._cholesky(float(damping)).diagonal().log().sum()",
        ),
        (
            "self.factor * self.inner.trace() + self.shift * self.space.size",
            "self.factor * self.inner.trace() + self.shift",
        ),
        ("self.shift * (2 * self.factor * self.inner.trace()", "self.shift * (self.factor * self.inner.trace()"),
        (
            "solve_triangular(self._cholesky(damping).mT, Z, upper=True)",
            "solve_triangular(self._cholesky(damping), Z, upper=False)",
        ),
    ),
]
