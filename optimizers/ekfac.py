"""EKFAC: Kronecker factors whose eigenvalues are measured."""

from __future__ import annotations

from optimizers.kfac import KFAC


class EKFAC(KFAC):
    """`KFAC` with the curvature rescaled in the eigenbasis of its factors (arXiv:1806.03884).

    The eigenvalues of each layer are replaced by the mean squares of its per-sample gradients in the eigenbasis, which
    are never built; they are carried over when the basis turns. A layer with a side of more than 2,048 rows has no
    whole eigenbasis and is as in `KFAC`, which `report()` says. Arguments as for `KFAC`.
    """

    block = "eigen"
    whole = "measures in the eigenbasis of every layer on every process"
