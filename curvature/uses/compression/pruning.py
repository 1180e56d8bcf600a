"""Optimal brain damage and optimal brain surgeon: weights that can be spared, and the others without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvature.linalg import cat, cholesky, full_precision
from curvature.operators import (
    Dense,
    Diagonal,
    MatrixFree,
    Operator,
    Parameters,
    Space,
    blocks_of,
    conjugate_gradient,
    flat_parameters,
)

DAMPING = 0.01  # of the mean eigenvalue, as Frantar et al. 2022, arXiv:2210.17323, section 3.3
ROUGHLY = 1e-2  # tolerance of systems that a later round solves again
Sparsity = float | Mapping[str, float]


def saliencies(K: Operator, model: Parameters, damping: float | None = None) -> dict[str, Tensor]:
    """What each weight is worth: by how much the loss rises, to second order, if it is set to zero.

    With a `Diagonal` this is ``1/2 (K_qq + damping) w_q^2``, optimal brain damage (LeCun, Denker and Solla 1989). With
    any other matrix, after the best adjustment of all other weights of its block:
    ``1/2 w_q^2 / [(K + damping I)^-1]_qq``, optimal brain surgeon (Hassibi and Stork 1992). Kronecker factors give
    that diagonal from their eigenvectors, without the matrix.

    Args:
        K: any operator, at the model's parameters, in units of loss / parameter^2: `kfac`, `ekfac`, `fisher_blocks`,
            ``fisher(...).compact()``, ``Diagonal(Space.of(d), Space.of(d).flatten(d))`` of a `fisher_diagonal` d.
        model: a model, or tensors by name; it stays as it is. Parameters that K does not have are left out.
        damping: in the units of K. By default none for a diagonal, and 0.01 times the mean eigenvalue of any other K.

    Returns:
        ``{name: tensor like the parameter}``, in units of the loss.

    Raises:
        ValueError: a block is singular or indefinite with this damping, parameters have another shape or device, or
            are not finite.
        KeyError: a parameter of K is missing.
    """
    w = checked_parameters(K.space, model)
    damping = usual_damping(K) if damping is None else float(damping)
    parts = [QuadraticBlock(block, damping, flat_parameters(block.space, w)) for block in blocks_of(K)]
    scores = {name: s for part in parts for name, s in part.scores().items()}
    return {name: scores[name] for name in w}


def prune(
    K: Operator, model: Parameters, sparsity: Sparsity, damping: float | None = None, *, rounds: int = 10
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Set the weights with the least `saliencies` to zero, and adjust all others to compensate.

    The others are where the quadratic model ``1/2 (w - theta)^T (K + damping I) (w - theta)`` of the loss has its
    minimum: what optimal brain surgeon reaches, one weight after the other, by steps
    ``-w_q / [H^-1]_qq H^-1 e_q`` (Hassibi and Stork 1992), is here one system for all. It is solved block by block:
    dense ones by Cholesky decomposition, all others by conjugate gradients, for which products are enough. Every round
    measures the saliencies again, at the weights as they are then: those of a `Dense` block by the inverse for the
    weights that are left (with many rounds this is the original algorithm), others by that of the whole block.

    Args:
        K: as for `saliencies`. With a `Diagonal` the others stay, and one of ones is magnitude pruning.
        model: as for `saliencies`.
        damping: likewise.
        sparsity: the share of zeros, 0 to 1, of all weights of K together: parameters with at least two dimensions.
            Or ``{name: share}``, which prunes these parameters alone, each for itself.
        rounds: in each, the same share of the weights that are left is removed.

    Returns:
        New parameters ``{name: tensor}`` for all of K, biases among them, as for ``model.load_state_dict(...,
        strict=False)``; and masks ``{name: tensor}`` for what was pruned, True where a weight is left, as for
        ``torch.nn.utils.prune.custom_from_mask``.

    Raises:
        ValueError, KeyError: as for `saliencies`; a sparsity is not between 0 and 1, or K has no such parameter.
        RuntimeError: conjugate gradients do not converge; more damping helps.

    The quadratic model holds near the parameters. To prune much, do it in steps: load the result, train on if you like,
    measure K again and prune further (weights that are zero go first). The gradient is taken to be zero.
    """
    space, groups = K.space, _groups(K.space, sparsity)
    if rounds < 1:
        raise ValueError(f"rounds: expected at least one, found {rounds}")
    theta = checked_parameters(space, model)
    damping = usual_damping(K) if damping is None else float(damping)
    kind = lambda block: DenseBlock if isinstance(block, Dense) else QuadraticBlock
    parts = [kind(block)(block, damping, flat_parameters(block.space, theta)) for block in blocks_of(K)]
    free = {name: torch.ones_like(p, dtype=torch.bool) for name, p in theta.items()}
    for done in range(1, rounds + 1):
        scores = {name: s for part in parts for name, s in part.scores().items()}
        for names, share in groups:
            removed = 1 - (1 - share) ** (done / rounds)
            free |= _without_least({name: scores[name] for name in names}, removed)
        for part in parts:
            part.remove(flat_parameters(part.block.space, free).bool(), None if done == rounds else ROUGHLY)
    pruned = {name: p for part in parts for name, p in part.block.space.split(part.w).items()}
    return {name: pruned[name] for name in space.names}, {name: free[name] for names, _ in groups for name in names}


def checked_parameters(space: Space, model: Parameters) -> dict[str, Tensor]:
    return space.split(space.kept(flat_parameters(space, model), (space.size,), "the vector"))


def usual_damping(K: Operator) -> float:
    """None for diagonals, which need no inverse."""
    if all(isinstance(block, Diagonal) for block in blocks_of(K)):
        return 0.0
    mean = float(K.trace()) / K.space.size
    return DAMPING * mean if mean > 0 else 1.0


class QuadraticBlock:
    """``1/2 (w - start)^T (block + damping I) (w - start)``, and its minimum w (P,) over the weights that are left."""

    def __init__(self, block: Operator, damping: float, start: Tensor) -> None:
        self.block, self.damping, self.start, self.w = block, damping, start, start
        self.prepare(torch.ones_like(start, dtype=torch.bool))

    def prepare(self, free: Tensor) -> None:
        block, damping = self.block, self.damping
        if not isinstance(block, Diagonal):
            self.alone = 1 / block.inverse(damping).diagonal()  # along each weight while all others follow
            return
        self.alone = block.values + damping
        if (self.alone < 0).any():
            least = self.alone.min()
            raise ValueError(f"{block!r} is indefinite with damping {damping:.3g}: its least entry is {least:.3g}")

    def scores(self) -> dict[str, Tensor]:
        """How much the model rises if a weight goes and all others follow: here also those that were removed."""
        return self.block.space.split(self.w.square() * self.alone / 2)

    def remove(self, free: Tensor, rtol: float | None = None) -> None:
        """Leave these weights alone, and let them make up for the others, to a tolerance of `conjugate_gradient`."""
        self.w = self.w * free
        lost = free * self._product((self.w - self.start)[:, None])[:, 0]
        scale = (self.block.diagonal() + self.damping)[:, None]
        within = MatrixFree(self.block.space, lambda V: torch.where(free[:, None], self._product(free[:, None] * V), V))
        self.w = self.w - conjugate_gradient(within, lost, preconditioner=lambda V: V / scale, rtol=rtol)

    def _product(self, V: Tensor) -> Tensor:
        return self.block @ V + self.damping * V


class DenseBlock(QuadraticBlock):
    """The same with the inverse of the part of the matrix for the weights that are left, which makes scores exact."""

    @full_precision()
    def prepare(self, free: Tensor) -> None:
        root = cholesky(self.block.to_dense()[free][:, free], self.damping, repr(self.block))
        self.free, self.inverse = free, torch.cholesky_inverse(root)

    def scores(self) -> dict[str, Tensor]:
        scores = torch.zeros_like(self.w)
        scores[self.free] = self.w[self.free].square() / self.inverse.diagonal() / 2
        return self.block.space.split(scores)

    @full_precision()
    def remove(self, free: Tensor, rtol: float | None = None) -> None:
        self.w = self.w * free
        self.prepare(free)
        self.w[free] -= self.inverse @ self._product((self.w - self.start)[:, None])[free, 0]


def _groups(space: Space, sparsity: Sparsity) -> list[tuple[Sequence[str], float]]:
    """Names of parameters whose weights compete, each with its share of zeros."""
    groups: list[tuple[Sequence[str], float]]
    if isinstance(sparsity, Mapping):
        groups = [([name], share) for name, share in sparsity.items()]
    else:
        groups = [([n for n, shape in zip(space.names, space.shapes, strict=True) if len(shape) > 1], sparsity)]
    for names, share in groups:
        if not 0 <= share <= 1:
            raise ValueError(f"sparsity: expected a share of zeros between 0 and 1, found {share}")
        if not names or not set(names) <= set(space.names):
            raise ValueError(f"sparsity: no weights {', '.join(names)} among {', '.join(space.names)}")
    return groups


def _without_least(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Which entries are left without this share of them, those with the least scores."""
    flat = cat(s.flatten() for s in scores.values())
    left = torch.ones_like(flat, dtype=torch.bool)
    left[flat.argsort(stable=True)[: round(share * len(flat))]] = False
    parts = left.split([s.numel() for s in scores.values()])
    return {name: part.reshape(s.shape).to(s.device) for (name, s), part in zip(scores.items(), parts, strict=True)}
