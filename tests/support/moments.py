"""Second moments of vectors, and what they should be: the Hessian of the loss of one sample, by torch alone."""

import math

import torch

MANY = 8_000
C, PLACES = 3, 2
WEIGHT = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)
source = lambda seed=0: torch.Generator().manual_seed(seed)
randn = lambda *shape, seed=0: torch.randn(*shape, dtype=torch.float64, generator=source(seed))
rand = lambda *shape, seed=1: torch.rand(*shape, dtype=torch.float64, generator=source(seed))
binary = lambda output: rand(*output.shape).round()
normal = lambda output: randn(*output.shape, seed=2)
counts = lambda output: (rand(*output.shape) * 5).round()
classes = lambda output: torch.randint(C, (len(output), *output.shape[2:]), generator=source(3))
soft = lambda output: rand(*output.shape) + 0.1  # rows that do not add up to one, which torch allows


def ignoring(output):
    """The first sample ignores everything where there is one term for each, else its first place."""
    target = classes(output)
    target.view(len(target), -1)[0, 0] = -100
    return target


def mixing(output, target):
    """Convex; every entry of a sample meets every other; a mean over samples."""
    return (output.flatten(1) - target.flatten(1)).logsumexp(1).mean() + 0.1 * (output - target).square().mean()


def cut(target, rows):
    if isinstance(target, dict):
        return {key: value[rows] for key, value in target.items()}
    return target[rows]


def hessian(loss, output, target, n, rows=1):
    """The oracle: (D, D), of the loss on sample n alone, of so many rows; 0 where that is 0/0, all being ignored."""
    of_sample = slice(n * rows, (n + 1) * rows)
    alone = lambda o: loss(o.reshape(rows, *output.shape[1:]), cut(target, of_sample))
    return torch.autograd.functional.hessian(alone, output[of_sample].flatten()).nan_to_num(0.0)


def second_moment(vectors):
    """(k, N, ...) to sum_k v v^T, (N, D, D)."""
    flat = vectors.reshape(*vectors.shape[:2], -1)
    return torch.einsum("kni,knj->nij", flat, flat)


def within_five_errors(moments, expected):
    """The mean of (draws, D, D) independent matrices is `expected`, up to its own standard error."""
    error = moments.std(0) / math.sqrt(len(moments))
    distance = (moments.mean(0) - expected).abs()
    assert (distance <= 5 * error + 1e-10 * (1 + expected.abs())).all(), (distance / error.clamp(min=1e-300)).max()


def repeated(tree, n, count=MANY):
    """Sample n of a tensor or dict, `count` times."""
    if isinstance(tree, dict):
        return {key: repeated(value, n, count) for key, value in tree.items()}
    return tree[n : n + 1].repeat(count, *[1] * (tree.ndim - 1))


def joined_moment(pairs, count):
    """Chunks of (left, right) to sum_k left right^T, (N, D, D), D all entries of a sample's rows."""
    total = 0
    for left, right in pairs:
        one, two = (t.reshape(len(t), count, -1) for t in (left, left if right is None else right))
        total = total + torch.einsum("kni,knj->nij", one, two)
    return total
