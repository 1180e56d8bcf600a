from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/losses/masses.py",
        "curvature/losses/test_masses.py curvature/matrices/test_the_loss_as_passed.py",
        ("wrong = left >", "wrong = left > 1e9 +"),
        ("if not found[1:].any():", "if False:"),
        ("found[1:] / found[0] * mass", "found[1:]"),
    ),
    *broken(
        "curvature/losses/per_sample.py",
        "curvature/losses",
        ("terms.numel() // count if mass is None", "terms.numel() if mass is None"),
        (
            "weight[target.masked_fill(ignored, 0).long()].masked_fill(ignored, 0)",
            "weight[target.masked_fill(ignored, 0).long()]",
        ),
        (
            "(variance.log() + (mean - target).square() / variance)",
            "(variance.log() + (mean - target).square() * variance)",
        ),
    ),
    *broken(
        "curvature/losses/likelihoods.py",
        "curvature/losses curvature/matrices/test_wide_output.py",
        (
            "mixed = self.p.sqrt() * eps\n        return mixed - self.p * ",
            "mixed = self.p.sqrt() * eps\n        return mixed - self.p.sqrt() * ",
        ),
        ("return self.p * (1 - self.p)", "return self.p * (1 + self.p)"),
        ("before = along.cumsum(2) - along", "before = along.cumsum(2)"),
        ("(output.sigmoid() * (-output).sigmoid()).sqrt()", "output.sigmoid()"),
        ("output.new_full((), math.sqrt(2))", "output.new_full((), 2.0)"),
        (
            "torch.cat([-z, math.sqrt(0.5) * (1 - z.square())], 2)",
            "torch.cat([-z, math.sqrt(0.5) * (1 + z.square())], 2)",
        ),
        (
            "times * common.square() + (k - times) * rare.square()",
            "times * rare.square() + (k - times) * rare.square()",
        ),
        ("left = left - counts[-1]", "left = left - 0 * counts[-1]"),
        ("draw_class_counts(self.p, k, generator).sqrt()", "draw_class_counts(self.p, k, generator)"),
        ("return times.log_().neg_().add_(output)", "return times.log_().add_(output)"),
    ),
    *broken(
        "curvature/losses/output_hessian.py",
        "curvature/losses",
        ("masses / (terms.numel() // count)", "masses / terms.numel()"),
        ("values.clamp(min=0).sqrt()[:, None, :]", "values.clamp(min=0)[:, None, :]"),
        ("scale = masses.sqrt()", "scale = masses"),
    ),
    *broken(
        "curvature/losses/injections.py",
        "curvature/losses",
        ("draw(stop - start, source) / self.k**0.5", "draw(stop - start, source) / self.k"),
        ("root(batch.basis(start, stop)) / self.k**0.5", "root(batch.basis(start, stop)) / self.k"),
        ("generator=source, **options) * 2 - 1)", "generator=source, **options))"),
        ("strict=False, count=batch.count).sqrt()", "strict=False, count=batch.count)"),
        ("return left, product(left)", "return left, product(left).abs()"),
        (
            "torch.autograd.grad(losses.sum(), point, materialize_grads=True)",
            "torch.autograd.grad(losses.mean(), point, materialize_grads=True)",
        ),
        ("return 1, lambda start, stop: gradient[None]", "return 1, lambda start, stop: gradient.abs()[None]"),
    ),
]
