from __future__ import annotations

from .mutant import broken

MUTANTS = [
    *broken(
        "curvature/terms/basic.py",
        "curvature/terms/test_contractions.py curvature/gradients/test_jacobian.py optimizers/steps/test_residuals.py",
        ("a[:, 0, :, None, :])", "a[:, 0, :, None, :] * 1.01)"),
        ("(1, 2, 0, 3).mul_(self.b).sum((2, 3))", "(1, 2, 0, 3).mul_(self.b.abs()).sum((2, 3))"),
        ("b.permute(0, 2, 3, 1) @ a.permute(0, 2, 1, 3)", "b.permute(0, 2, 3, 1) @ a.permute(0, 2, 1, 3).flip(2)"),
        ("(self.index + start).flatten()", "self.index.expand_as(self.index + start).flatten()"),
    ),
    *broken(
        "curvature/terms/contractions.py",
        "curvature/terms/test_contractions.py curvature/terms/test_squared_gradients.py",
        ("values[some] = _by_gradients(terms, some, terms)", "pass"),
        ("out[:, slice(*term.rows)] += g", "out[:, slice(*term.rows)] = g"),
        ("x.storage_offset() == first.storage_offset() + k * size", "x.storage_offset() >= first.storage_offset()"),
    ),
    *broken(
        "curvature/terms/pairs.py",
        "curvature/terms/test_contractions.py",
        ("(1 if u is v else 2, u, v)", "(1, u, v)"),
        ("found < share * added", "found < 0 * added"),
        ("(left * right).sum(-3)", "(left * right).mean(-3)"),
        ("norms[0] * norms[1]", "0 * norms[0]"),
        ("u.index[..., :, None] == v.index[..., None, :]", "u.index[..., :, None] >= v.index[..., None, :]"),
        ("torch.linalg.vector_norm(terms[0].b, dim=3)).square()", "torch.linalg.vector_norm(terms[0].b, dim=3))"),
    ),
    *broken(
        "curvature/terms/squared_gradients.py",
        "curvature/terms/test_squared_gradients.py curvature/terms/test_contractions.py curvature/matrices",
        ("inputs = (a[:, :, None] * a[:, None, :])", "inputs = (a[:, :, None] * a[:, :, None])"),
        ("_numbered((samples[:, None] * rows + first.index)", "_numbered((samples[:, None] * 0 + first.index)"),
        ("total.addcmul_(u.values, w.values)", "total.addcmul_(u.values, w.values, value=2)"),
        ("both.addcmul_(u_places, w_places)", "both.addcmul_(u_places, w_places, value=2)"),
        ("total.sum(2).mT", "total.mean(2).mT"),
        ("x.mul_(_times_patches(right, part, a))", "x.square_()"),
        ("total.addcmul_(*pair)", "total.addcmul_(*pair, value=2)"),
        (".permute(1, 3, 0, 4, 2, 5)", ".permute(1, 3, 0, 4, 2, 5).flip(3)"),
    ),
    *broken(
        "curvature/terms/stacks.py",
        "curvature/layers",
        ("range(self.vectors)[k] * self.samples", "range(self.vectors)[k // 2] * self.samples"),
    ),
    *broken(
        "curvature/terms/convolution.py",
        "curvature/layers curvature/kronecker/test_factors.py curvature/terms/test_contractions.py",
        ("starts = (k * self.dilation[axis]", "starts = (k * self.stride[axis]"),
        (
            "b, x, weight, None, self.stride, padding, self.dilation",
            "b, x, weight, None, self.stride, padding, [1] * dims",
        ),
        ("None, self.dilation, padding, self.stride", "None, self.stride, padding, self.dilation"),
        ("torch.bmm(b, patches.mT", "torch.bmm(b.abs(), patches.mT"),
        ("torch.tensordot(weights.to(dtype), found, 1)", "found.sum(0)"),
        ("start, stop = phase.first - phase.step", "start, stop = phase.first + 0 * phase.step"),
    ),
    *broken(
        "curvature/terms/affine_layout.py",
        "curvature/terms/test_affine_layout.py",
        ("back = [self.order.index(k) for k in", "back = [self.order[k] for k in"),
    ),
    *broken(
        "curvature/terms/projections.py",
        "curvature/uses/projections",
        ("slice(0, count), start * rest", "slice(0, count), (start - part.start) * rest"),
    ),
]
