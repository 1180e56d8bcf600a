from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/uses/compression/quadratic_blocks.py",
        "curvature/uses/compression/test_pruning.py",
        ("return 1 / block.inverse(damping).diagonal()", "return block.damped(damping).diagonal()"),
        ("return self.w.square() * self.alone / 2", "return self.start.square() * self.alone / 2"),
        ("lost = free * self._product((self.w - self.start)[:, None])[:, 0]", "lost = 0 * self.w"),
        ("self.prepare()\n            self.w", "self.w"),
        ("return DAMPING * mean", "return DAMPING"),
    ),
    *broken(
        "curvature/uses/compression/pruning.py",
        "curvature/uses/compression/test_pruning.py",
        ("1 - (1 - share) ** (done / rounds)", "share"),
        ("None if done == rounds else ROUGHLY", "ROUGHLY"),
    ),
    *broken(
        "curvature/uses/compression/rounding.py",
        "curvature/uses/compression/test_rounding.py",
        ("carried[at] = error[at] + through", "carried[at] = error[at]"),
        (".nearest(w[at] - through - across)", ".nearest(w[at] - through)"),
        ("torch.where(is_free.amin(0) > 0, -1, diagonal.mean(0))", "diagonal.mean(0)"),
        ("torch.where(is_zero[at], 0, ", "torch.where(is_zero[at] & False, 0, "),
    ),
]
