"""Brute-force KFAC for residuals of a tanh network: samples one by one, dense algebra. Torch only.

The residual of a sample is its Laplacian plus a source ("interior") or its value ("boundary"). A layer multiplies the
value, the d derivatives and the Laplacian of a sample by its weight, and adds its bias to the value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Channels = list[tuple[Tensor, Tensor]]  # of one layer: [a; 1 or 0] (i + 1,) and b (o,) at every place


def channels(model: nn.Sequential, x: Tensor, is_interior: bool) -> tuple[Tensor, list[Channels]]:
    """The Laplacian or the value at one point x (d,), and the activations and backprops of every layer."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    value, slopes, bend = x, list(torch.eye(len(x), dtype=x.dtype)), torch.zeros_like(x)
    taps: list[tuple[list[Tensor], list[Tensor]]] = []
    for n, layer in enumerate(layers):
        read = [value, *slopes, bend] if is_interior else [value]
        last = n + 1 == len(layers)
        shown = [a.detach() for a in read]
        sent = [torch.zeros(layer.out_features, dtype=x.dtype, requires_grad=True) for _ in read]
        z = [layer.weight @ a + s for a, s in zip(read, sent, strict=True)]
        z[0] = z[0] + layer.bias
        taps.append((shown, sent))
        value = z[0] if last else z[0].tanh()
        if is_interior:
            first, second = (1, 0) if last else (1 - value**2, -2 * value * (1 - value**2))
            bend = first * z[-1] + second * sum(s**2 for s in z[1:-1])
            slopes = [first * s for s in z[1:-1]]
    (result,) = bend if is_interior else value
    flat = [s for _, sent in taps for s in sent]
    found = iter(torch.autograd.grad(result, flat, materialize_grads=True))
    one = lambda k: torch.full((1,), float(k == 0), dtype=x.dtype)
    return result.detach(), [[(torch.cat([a, one(k)]), next(found)) for k, a in enumerate(shown)] for shown, _ in taps]


def pairs(samples: Sequence[Channels]) -> tuple[Tensor, Tensor]:
    """B and A of one layer: ``sum_t beta_t A_t / c`` and ``sum_t alpha_t B_t / c`` with A_t a mean, B_t a sum."""
    places = range(len(samples[0]))
    second = lambda k, side: sum(torch.outer(s[k][side], s[k][side]) for s in samples)
    moments = [(second(k, 0) / len(samples), second(k, 1)) for k in places]
    traces = [(float(a.trace()), float(b.trace())) for a, b in moments]
    size = sum(alpha * beta for alpha, beta in traces) ** 0.5
    columns = sum(a * beta / size for (a, _), (_, beta) in zip(moments, traces, strict=True))
    rows = sum(b * alpha / size for (_, b), (alpha, _) in zip(moments, traces, strict=True))
    return rows, columns


def damped_sum(products: Sequence[tuple[Tensor, Tensor]], damping: float) -> Tensor:
    """``sum_k kron(B + e / c I, A + e c I)`` with ``e^2 = damping / K``, c^2 = ratio of mean eigenvalues."""
    total = 0
    for rows, columns in products:
        c = float((columns.trace() / len(columns)) / (rows.trace() / len(rows))) ** 0.5
        e = (damping / len(products)) ** 0.5
        eye = lambda side: torch.eye(len(side), dtype=side.dtype)
        total = total + torch.kron(rows + e / c * eye(rows), columns + e * c * eye(columns))
    return total


class DenseSteps:
    """Steps for ``1/2 |r|^2`` with a fixed damping, all matrices written out; parameters are (o, i + 1) by layer."""

    def __init__(self, directions: int, memory: int, damping: float) -> None:
        self.directions, self.memory, self.damping = directions, memory, damping
        self.moves: list[Tensor] = []

    def step(self, r: Tensor, jacobian: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """The step (P,), for r (M,), J (M, P) and the damped blocks."""
        sizes = [len(block) for block in blocks]
        cut = lambda v: list(torch.block_diag(*(part[:, None] for part in v.split(sizes))).unbind(1))
        columns = [d for move in self.moves for d in cut(move)]
        step = torch.zeros_like(jacobian[0])
        for _ in range(self.directions):
            gradient = jacobian.T @ (r + jacobian @ step) + self.damping * step
            parts = zip(blocks, gradient.split(sizes), strict=True)
            columns += cut(torch.cat([torch.linalg.solve(block, g) for block, g in parts]))
            spanned = torch.stack([d / d.norm() for d in columns], 1)
            stacked = torch.cat([jacobian @ spanned, self.damping**0.5 * spanned])
            right = torch.cat([-r, torch.zeros_like(step)])
            step = spanned @ torch.linalg.lstsq(stacked, right[:, None], driver="gelsd").solution[:, 0]
        self.moves = [*self.moves, step][-self.memory :]
        return step
