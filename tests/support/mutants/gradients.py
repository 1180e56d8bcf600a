from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/gradients/verification.py",
        "curvature/gradients",
        (
            "flags = [sums_to(name, contractions.least_norms_squared) for name in summed]",
            "flags = [losses.norm() >= 0 for name in summed]",
        ),
        ("flags += agreements(rows, alone, low)", "flags += [flag | True for flag in agreements(rows, alone, low)]"),
        ("<= 10 * max(torch.finfo(g.dtype).eps ** 0.5, low)", "<= 10**9 * max(torch.finfo(g.dtype).eps ** 0.5, low)"),
        (
            "raise ValueError(\n            f\"{', '.join(dict.fromkeys(tape.mixing))}",
            "print(\n            f\"{', '.join(dict.fromkeys(tape.mixing))}",
        ),
    ),
    *broken(
        "curvature/gradients/sample_axes.py",
        "curvature/gradients",
        ("return expected.sub_(layout.front(weighted)).norm()", "return 0 * weights.norm()"),
        ("for limit in clear, within_noise:", "for limit in (within_noise,):"),
        ("asked.append(size > allowed)", "asked.append(size >= 0)"),
    ),
    *broken(
        "curvature/recording/autograd_graph.py",
        "curvature/gradients/test_moving_samples.py",
        ("return isinstance(node, BackwardCFunction) and", "return False and"),
        ("if name in DATA_DEPENDENT", "if False"),
        ("edges = tuple((numbers[step], output) for", "edges = tuple(numbers[step] for"),
        (
            "found.append((kind, edges, *(_setting(node, name) for name in SETTINGS[kind])))",
            "found.append((kind, edges))",
        ),
    ),
    *broken(
        "curvature/gradients/plans.py",
        "curvature/gradients/test_moving_samples.py",
        ("if plan is not None and tape.graph is not None:", "if plan is not None:"),
        ("return [tape.graph, *(", "return [tape.graph is None, *("),
    ),
    *broken(
        "curvature/gradients/general_path.py",
        "curvature/gradients",
        ("return each(values, batch.x, y)", "return each(values, batch.x, y.flip(0))"),
        ("found = batch.sample(n).gradients()", "found = batch.sample(0).gradients()"),
        ("if differences({k: g[-1] for k, g in found.items()}, alone)", "if False"),
    ),
    *broken(
        "curvature/gradients/jacobian.py",
        "curvature/gradients/test_jacobian.py curvature/gradients optimizers/test_natural_gradient.py",
        ("found[k][j], found[j][k] = block, block.mT", "found[k][j], found[j][k] = block, -block.mT"),
        ("return gram - gram.mean(1, keepdim=True)", "return gram"),
    ),
    *broken(
        "curvature/gradients/noise_scale.py",
        "curvature/gradients/test_norms_and_noise.py",
        ("norm = mean - trace / count", "norm = mean"),
        ("(squares - count * mean) / (count - 1)", "(squares - count * mean) / count"),
    ),
    *broken(
        "curvature/gradients/clipping.py",
        "curvature/gradients/test_clipping.py",
        ("max_norm / norms, 1)", "max_norm / norms, max_norm / norms)"),
        ("own[: turn - part.start] = False", "pass"),
        ("alpha=noise * max_norm", "alpha=noise"),
        (".where(counted.to(norms.device), 0)", ""),
    ),
]
