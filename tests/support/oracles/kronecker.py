"""Brute-force Kronecker factors: what a layer makes of its parameters, differentiated entry by entry. Torch only.

A layer is a grouped affine map at t places, ``z[t, g, o] = sum_i W[g, o, i] a[t, g, i]``, the bias the last input. So
a[t, g] is the gradient of any z[t, g, o] with respect to row (g, o) of the parameters, and b[t, g, o] the gradient of
the output, in the direction sent back, with respect to z[t, g, o]. Nothing here knows how a layer unfolds its input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from support.oracles.brute_force import Matrices, forward, map_tensors, output_fisher, positions, trainable

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d)
NORMS += (nn.InstanceNorm2d, nn.InstanceNorm3d)
AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, *NORMS)
AFFINE += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class Layer:
    """One layer of the model of `matrices`, whose curvature at the outputs is `curvature` (as `output_fisher`)."""

    matrices: Matrices
    name: str
    curvature: Callable[..., Tensor] = output_fisher

    @property
    def module(self) -> nn.Module:
        return self.matrices.model.get_submodule(self.name)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def index(self) -> Tensor:
        """(g, o, i): where the entries are in the layer's own flat parameters, the weight's and then the bias's."""
        weight = self.module.weight
        rows = _rows(self.module, torch.arange(weight.numel()).view(weight.shape))
        if "bias" not in self.parameters:
            return rows
        bias = weight.numel() + torch.arange(self.module.bias.numel())
        return torch.cat([rows, bias.view(*rows.shape[:2], 1)], dim=2)

    @cached_property
    def where(self) -> Tensor:
        """(g, o, i): the same in the flat parameters of the model."""
        names = positions(self.matrices.model)
        prefix = f"{self.name}." if self.name else ""
        own = torch.cat([names[prefix + name].flatten() for name in self.parameters])
        return own[self.index]

    @cached_property
    def records(self) -> list[tuple[Tensor, Tensor]]:
        """For each sample, a (t, g, i) and b (k, t, g, o); the places of several calls after each other."""
        found = []
        for (x, y), (output, _) in zip(self.matrices.samples, self.matrices.jacobians, strict=True):
            values, vectors = torch.linalg.eigh(self.curvature(self.matrices.loss, output, y))
            root = (vectors * values.clamp(min=0).sqrt()).T
            found.append(self._record(x, root[values > 1e-14 * values.max()]))
        return found

    def _record(self, x, vectors: Tensor) -> tuple[Tensor, Tensor]:
        calls = []

        def hook(module: nn.Module, inputs: tuple, options: dict, z: Tensor) -> Tensor:
            calls.append((map_tensors(lambda t: t.detach().clone(), (inputs, options)), z))
            return z.clone()  # what works in place on the output then leaves z alone

        handle = self.module.register_forward_hook(hook, with_kwargs=True)
        try:
            output = forward(self.matrices.model, x).flatten()
        finally:
            handle.remove()
        outputs = [z for _, z in calls]
        sent = [torch.autograd.grad(output, outputs, v, retain_graph=True, materialize_grads=True) for v in vectors]
        views = [torch.cat([self._view(b) for b in bs]) for bs in sent]
        a = torch.cat([self._activations(*arguments) for arguments, _ in calls])
        b = torch.stack(views) if views else a.new_zeros(0, len(a), *self.index.shape[:2])
        # padding is no place: nothing is looked up there
        used = a.flatten(1).any(1) if isinstance(self.module, nn.Embedding) else torch.ones(len(a), dtype=torch.bool)
        return a[used], b[:, used]

    def _activations(self, inputs: tuple, options: dict) -> Tensor:
        """(t, g, i), from the first output of every place and group."""
        z = self.module(*inputs, **options)
        number = self._view(torch.arange(z.numel()).view(z.shape))
        flat_z, parameters = z.flatten(), list(self.parameters.values())
        places = []
        for entries in number[:, :, 0]:
            rows = []
            for g, entry in enumerate(entries):
                gradient = torch.autograd.grad(flat_z[entry], parameters, retain_graph=True, materialize_grads=True)
                flat = torch.cat([part.flatten() for part in gradient])
                row = flat[self.index[g, 0]]
                assert row.count_nonzero() == flat.count_nonzero(), "an output of more than its own row"
                rows.append(row)
            places.append(torch.stack(rows))
        return torch.stack(places)

    def _view(self, z: Tensor) -> Tensor:
        """An output of the layer as (t, g, o)."""
        groups, outputs = self.index.shape[:2]
        if isinstance(self.module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)):
            return z.reshape(-1, groups, outputs)
        return z.movedim(1, -1).reshape(-1, groups, outputs)

    def factors(self, sharing: str = "expand") -> tuple[Tensor, Tensor]:
        """A (g, i, i), a mean over samples (and places), and B (g, o, o), summed in the weights of the samples."""
        seen, sent = [], []
        for weight, (a, b) in zip(self.matrices.sample_weights, self.records, strict=True):
            if sharing == "reduce":
                a, b = a.sum(0, keepdim=True) / max(len(a), 1), b.sum(1, keepdim=True)
            seen.append(a)
            sent.append(weight * torch.einsum("ktgo,ktgp->gop", b, b))
        a = torch.cat(seen)
        inputs = torch.einsum("tgi,tgj->gij", a, a) / len(a)
        if isinstance(self.module, nn.Embedding):  # of one-hot inputs no more is kept, also of their mean
            inputs = inputs * torch.eye(inputs.shape[1], dtype=a.dtype)
        return inputs, torch.stack(sent).sum(0)

    def dense(self, sharing: str = "expand") -> Tensor:
        """(P, P), zero outside the layer: kron(B, A) for every group."""
        a, b = self.factors(sharing)
        return self._placed([torch.kron(b[g], a[g]) for g in range(len(a))])

    def rescaled(self, exact: Tensor, sharing: str = "expand") -> Tensor:
        """The same in the eigenbasis of kron(B, A), with the diagonal that the matrix `exact` (P, P) has in it."""
        a, b = self.factors(sharing)
        parts = []
        for g, where in enumerate(self.where.flatten(1)):
            vectors = torch.linalg.eigh(b[g])[1].contiguous()  # torch.kron takes no other
            basis = torch.kron(vectors, self._basis(a[g]))
            block = exact[where[:, None], where]
            parts.append(basis * torch.einsum("pi,pq,qi->i", basis, block, basis) @ basis.T)
        return self._placed(parts)

    def _basis(self, a: Tensor) -> Tensor:
        """The eigenvectors of a diagonal side are the unit vectors, also where eigenvalues are equal."""
        return (
            torch.eye(len(a), dtype=a.dtype)
            if torch.equal(a, a.diag().diag())
            else torch.linalg.eigh(a)[1].contiguous()
        )

    def _placed(self, parts: Sequence[Tensor]) -> Tensor:
        count = sum(p.numel() for p in positions(self.matrices.model).values())
        matrix = parts[0].new_zeros(count, count)
        for where, part in zip(self.where.flatten(1), parts, strict=True):
            matrix[where[:, None], where] = part
        return matrix


def affine_layers(of: Matrices, **options: Any) -> list[Layer]:
    """Those that hold the model's parameters, all of them."""
    found = [Layer(of, name, **options) for name, m in of.model.named_modules() if isinstance(m, AFFINE)]
    found = [layer for layer in found if layer.parameters]
    assert sum(len(layer.parameters) for layer in found) == len(trainable(of.model))
    return found


def kronecker(layers: list[Layer], sharing: str = "expand") -> Tensor:
    return torch.stack([layer.dense(sharing) for layer in layers]).sum(0)


def _rows(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight of a layer as (g, o, i)."""
    if isinstance(module, NORMS):
        return weight.reshape(-1, 1, 1)
    if isinstance(module, nn.Embedding):
        return weight.T[None]
    groups = getattr(module, "groups", 1)
    if getattr(module, "transposed", False):  # (g * i, o, ...)
        return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
    return weight.reshape(groups, len(weight) // groups, -1)
