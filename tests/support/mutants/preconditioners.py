from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/preconditioners/block.py",
        "curvature/preconditioners",
        ("(1 - decay) / (1 - decay ** (", "(1 - decay) / (1 + decay ** ("),
    ),
    *broken(
        "curvature/preconditioners/kronecker.py",
        "curvature/preconditioners curvature/linalg/test_low_rank.py",
        ("b.updates >= 2 * b.tried", "b.updates == 2 * b.tried"),
    ),
    *broken(
        "curvature/preconditioners/diagonal.py",
        "curvature/preconditioners",
        ("1 / (1 + self.updates / 2)", "1.0"),
    ),
    *broken(
        "curvature/preconditioners/eigen.py",
        "curvature/preconditioners",
        ("+ share**2 * mean_a * mean_b", "+ share * mean_a * mean_b"),
        ("each = total /", "each = 1.0 + 0 *"),
        ("slice(-rank * count % stride", "slice(0"),
    ),
    *broken(
        "curvature/preconditioners/least_squares.py",
        "optimizers/test_natural_gradient.py optimizers/test_natural_gradient_training.py",
        ("(gradient[name] - own) / at(damping", "gradient[name] / at(damping"),
        ("1 / (values.clamp(min=0) + damping)", "1 / values"),
        ("eigenvalue_rounding(values[-1]), cut * values[-1]", "eigenvalue_rounding(values[-1]), 0 * values[-1]"),
    ),
    *broken(
        "curvature/preconditioners/residual_blocks.py",
        "curvature/preconditioners optimizers/steps/test_residuals.py",
        ("left = (a * (beta / (len(a) * size)).sqrt()", "left = (a * (alpha / (len(a) * size)).sqrt()"),
    ),
    *broken(
        "curvature/preconditioners/full_curvature.py",
        "optimizers/test_layerwise.py",
        ("return kept + layers_of(tape, new)", "return [*kept, *((name,) for name in new)]"),
    ),
    *broken(
        "curvature/preconditioners/woodbury.py",
        "optimizers/test_natural_gradient_training.py",
        ("damping * b.count) for b", "damping) for b"),
    ),
    *broken(
        "curvature/preconditioners/full.py",
        "optimizers/test_natural_gradient_training.py",
        ("new = new / self.count", "new = new / self.count**2"),
        ("to(g.device) + at(damping, g))", "to(g.device) + 2 * at(damping, g))"),
    ),
    *broken(
        "curvature/preconditioners/truncated_cg.py",
        "optimizers/test_natural_gradient_training.py",
        (")) / count + damping * v", ")) + damping * v"),
        ("WARM_START_FACTOR * self.last.to(right)", "0.0 * self.last.to(right)"),
    ),
    *broken(
        "curvature/preconditioners/outliers.py",
        "optimizers/steps/test_nonfinite_batches.py curvature/preconditioners",
        ("return far & ~torch.stack(", "return far | ~torch.stack("),
    ),
]
