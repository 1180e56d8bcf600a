"""Brute-force references: a loop of batch size one, torch only. Nothing of the packages under test is imported here.

Matrices are (P, P) on the flat parameters that require a gradient, in `named_parameters()` order. Every sample's whole
output is differentiated entry by entry, and the sample's own loss twice; how the samples weigh in the loss of all data
is read off that loss.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` (a tensor, or tuples, lists and dicts of them) with every tensor replaced; anything else stays."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, item) for key, item in tree.items()}
    return tree


def forward(model: nn.Module, x: Any) -> Any:
    """The output of `model`, or its `.logits`, for a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(x, dict):
        output = model(**x)
    elif isinstance(x, tuple):
        output = model(*x)
    else:
        output = model(x)
    return output.logits if hasattr(output, "logits") else output


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def per_sample_gradients(model, loss, x, y, sample_dim: int | tuple[int, int, int] = 0) -> dict[str, Tensor]:
    """{name: (N, *shape)}: the gradient of the loss on each sample alone."""
    input_dim, _, target_dim = (sample_dim,) * 3 if isinstance(sample_dim, int) else sample_dim
    count = _count(y, target_dim)
    parameters = trainable(model)
    rows = []
    with _undisturbed(model), torch.enable_grad():
        for n in range(count):
            output = forward(model, _take(x, n, count, input_dim))
            value = loss(output, _take(y, n, count, target_dim))
            rows.append(_gradient(value, list(parameters.values())))
    columns = zip(*rows, strict=True)
    return {name: torch.stack(column) for name, column in zip(parameters, columns, strict=True)}


def per_sample_norms(model, loss, x, y, sample_dim: int | tuple[int, int, int] = 0) -> Tensor:
    """(N,): the norm of each sample's gradient over all parameters together."""
    return norms(per_sample_gradients(model, loss, x, y, sample_dim))


def per_sample_gram(model, loss, x, y, sample_dim: int | tuple[int, int, int] = 0) -> Tensor:
    """(N, N): inner products of the samples' gradients over all parameters together."""
    return gram(per_sample_gradients(model, loss, x, y, sample_dim))


def norms(gradients: dict[str, Tensor]) -> Tensor:
    return _flat(gradients).norm(dim=1)


def gram(gradients: dict[str, Tensor]) -> Tensor:
    rows = _flat(gradients)
    return rows @ rows.T


def jacobian(model: nn.Module, x: Any) -> tuple[Tensor, Tensor]:
    """Output (1, ...) of the batch of one sample `x`, and the gradients (D, P) of its D entries."""
    parameters = list(trainable(model).values())
    with _undisturbed(model), torch.enable_grad():
        output = forward(model, x)
        rows = [_gradient(entry, parameters, retain_graph=True) for entry in output.flatten()]
    return output.detach(), torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def of_two(loss: Any) -> Any:
    """The loss as a function of (output, target): the halves of dim 1 are mean and variance of `GaussianNLLLoss`."""
    if not isinstance(loss, nn.GaussianNLLLoss):
        return loss

    def call(output: Tensor, target: Tensor) -> Tensor:
        mean, variance = output.chunk(2, 1)
        return loss(mean, target, variance)

    return call


def loss_gradient(loss, output: Tensor, target: Any) -> Tensor:
    """Shape of `output`; zero where all terms are ignored, as torch has it."""
    loss = of_two(loss)
    point = output.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(point, target), point, allow_unused=True, materialize_grads=True)
    return gradient


def loss_hessian(loss, output: Tensor, target: Any) -> Tensor:
    """(D, D), of the loss on one sample with D entries in its output; zero where it is 0/0, all being ignored."""
    alone = lambda flat: of_two(loss)(flat.view(output.shape), target)
    return torch.autograd.functional.hessian(alone, output.detach().flatten()).nan_to_num(0.0)


def output_fisher(loss, output: Tensor, target: Any) -> Tensor:
    """(D, D): the Hessian of one sample's loss at its output, in expectation over labels drawn from the model.

    For cross-entropy, squares and Poisson of the log rate the Hessian is the same for all labels.
    """
    rule = _EXPECTED.get(type(loss), loss_hessian)
    return rule(loss, output, target)


def output_masses(loss, output: Tensor, target: Any) -> Tensor:
    """(D,): what the term at each entry of one sample's output counts for; 1 for a callable, that is for one term.

    It is the curvature of the sample's loss, over what a term of mass 1 has at that place.
    """
    unit = _UNIT_CURVATURE.get(type(loss))
    if unit is None:
        return torch.ones_like(output).flatten()
    curvature = loss_hessian(loss, output, target).diagonal().view(output.shape)
    if isinstance(loss, nn.CrossEntropyLoss):
        curvature = curvature.sum(1, keepdim=True)
    return (curvature / unit(output)).expand(output.shape).flatten()


def sample_weights(loss, outputs: Sequence[Tensor], targets: Sequence[Any]) -> Tensor:
    """(N,): w with loss(all outputs, all targets) = sum_n w_n loss(output n, target n), up to a constant.

    Quotients of the two sides' gradients; the outputs are moved where a sample happens to have none.
    """
    found = torch.zeros(len(outputs), dtype=outputs[0].dtype)
    for shrink in (1.0, 0.9, 0.5):
        points = [shrink * output for output in outputs]
        whole = loss_gradient(loss, torch.cat(points), joined(targets))
        parts = whole.split([len(point) for point in points])
        for n, (part, point, target) in enumerate(zip(parts, points, targets, strict=True)):
            own = loss_gradient(loss, point, target).nan_to_num(0.0)  # 0/0: no term of the sample counts
            if found[n] == 0 and own.any():
                found[n] = (part * own).sum() / own.square().sum()
            torch.testing.assert_close(part, found[n] * own, rtol=1e-8, atol=1e-12, msg="the loss is no weighted sum")
    return found


def joined(trees: Sequence[Any]) -> Any:
    """Batches, each a tensor or a tuple or dict of tensors, as one; a tensor that is the same in all is taken once."""
    first = trees[0]
    if isinstance(first, Tensor):
        same = all(tree is first or (tree.shape == first.shape and torch.equal(tree, first)) for tree in trees)
        return first if same and len(trees) > 1 and first.shape[0] != 1 else torch.cat(list(trees))
    if isinstance(first, dict):
        return {key: joined([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(joined(parts) for parts in zip(*trees, strict=True))
    return first


@dataclass
class Matrices:
    """References of every matrix: `data` is one (x, y), or a list of these.

    `weights` are the samples' own in the loss of all data; left out, they are found from the loss. A callable that is
    no mean over samples needs them said.
    """

    model: nn.Module
    loss: Any
    data: Any
    weights: Tensor | None = None

    @cached_property
    def samples(self) -> list[tuple[Any, Any]]:
        batches = [self.data] if isinstance(self.data, tuple) else list(self.data)
        return [sample for x, y in batches for sample in _samples(x, y)]

    @cached_property
    def jacobians(self) -> list[tuple[Tensor, Tensor]]:
        return [jacobian(self.model, x) for x, _ in self.samples]

    @cached_property
    def sample_weights(self) -> Tensor:
        if self.weights is not None:
            return self.weights
        return sample_weights(self.loss, [output for output, _ in self.jacobians], [y for _, y in self.samples])

    def _quadratic(self, curvature: Callable[[Any, Tensor, Any], Tensor]) -> Tensor:
        parts = [
            weight * jacobian.T @ curvature(self.loss, output, y) @ jacobian
            for weight, (output, jacobian), (_, y) in zip(
                self.sample_weights, self.jacobians, self.samples, strict=True
            )
        ]
        return torch.stack(parts).sum(0)

    @cached_property
    def gauss_newton(self) -> Tensor:
        return self._quadratic(loss_hessian)

    @cached_property
    def fisher(self) -> Tensor:
        return self._quadratic(output_fisher)

    @cached_property
    def isotropic(self) -> Tensor:
        return self._quadratic(lambda *sample: output_masses(*sample).diag())

    @cached_property
    def empirical_fisher(self) -> Tensor:
        rows = torch.stack(
            [
                loss_gradient(self.loss, output, y).flatten() @ jacobian
                for (output, jacobian), (_, y) in zip(self.jacobians, self.samples, strict=True)
            ]
        )
        weights = self.sample_weights
        is_sum = float(weights.sum()) > 1.5 and torch.allclose(weights, (weights != 0).to(weights))
        return rows.T @ rows / (1 if is_sum else len(rows))

    @cached_property
    def hessian(self) -> Tensor:
        """Of the loss of all samples as one batch, or of the samples' weighed as said, differentiated twice."""
        parameters = list(trainable(self.model).values())
        # the fused kernels of attention have no second derivative
        with _undisturbed(self.model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            value = self._value()
            first = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
            entries = torch.cat([g.flatten() for g in first])
            if not entries.requires_grad:
                return torch.zeros(len(entries), len(entries), dtype=entries.dtype)
            rows = [_gradient(entry, parameters, retain_graph=True) for entry in entries]
        matrix = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        assert torch.allclose(matrix, matrix.T, rtol=1e-8, atol=1e-10), "a second derivative of torch is wrong"
        return matrix

    @cached_property
    def hessian_by_differences(self) -> Tensor:
        """Of the gradient, central and of fourth order: right to eight digits or so, whatever torch makes of it."""
        parameters = list(trainable(self.model).values())
        rows = []
        for p in parameters:
            for k in range(p.numel()):
                slopes = [self._gradient_at(p, k, step) for step in (-2e-3, -1e-3, 1e-3, 2e-3)]
                rows.append(torch.stack(slopes).T @ torch.tensor([1.0, -8.0, 8.0, -1.0], dtype=p.dtype) / 12e-3)
        return torch.stack(rows)

    def _gradient_at(self, p: nn.Parameter, k: int, step: float) -> Tensor:
        """Flat gradient of the loss with entry k of `p` moved."""
        entries, parameters = p.data.view(-1), list(trainable(self.model).values())
        before = entries[k].clone()
        with _undisturbed(self.model), torch.enable_grad():
            entries[k] += step
            found = _gradient(self._value(), parameters)
            entries[k] = before
        return torch.cat([g.flatten() for g in found])

    def _value(self) -> Tensor:
        loss = of_two(self.loss)
        if self.weights is not None:
            own = [loss(forward(self.model, x), y) for x, y in self.samples]
            return (self.weights * torch.stack(own))[self.weights != 0].sum()
        x, y = (joined(parts) for parts in zip(*self.samples, strict=True))
        return loss(forward(self.model, x), y)


def of_the_batch(model: nn.Module, loss: Any, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """The Gauss-Newton matrix and the Hessian of the loss of all samples as one batch, in which they may meet."""
    flat = torch.cat([p.detach().flatten() for p in trainable(model).values()])
    run = lambda v: torch.func.functional_call(model, split(model, v), (x,))
    J, output = torch.autograd.functional.jacobian(run, flat).flatten(0, -2), run(flat)
    H = torch.autograd.functional.hessian(lambda o: loss(o, y), output).reshape(output.numel(), -1)
    return J.T @ H @ J, torch.autograd.functional.hessian(lambda v: loss(run(v), y), flat)


def split(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """A flat vector as {name: shape of the parameter}."""
    parameters = trainable(model)
    parts = vector.split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}


def positions(model: nn.Module) -> dict[str, Tensor]:
    """{name: where the entries of the parameter are in a flat vector}"""
    return split(model, torch.arange(sum(p.numel() for p in trainable(model).values())))


def blocks(model: nn.Module, matrix: Tensor, groups: Iterable[Sequence[str]]) -> Tensor:
    """The matrix with zeros between parameters of different groups, given by their names."""
    where, kept = positions(model), torch.zeros_like(matrix)
    for names in groups:
        index = torch.cat([where[name].flatten() for name in names])
        kept[index[:, None], index] = matrix[index[:, None], index]
    return kept


def _nll_fisher(loss: nn.NLLLoss, output: Tensor, target: Tensor) -> Tensor:
    """Of log-probabilities: each label y drawn has the gradient -1 at y, times the mass that the target's place has."""
    mass = loss_gradient(loss, output, target).abs().sum(1, keepdim=True)
    return (mass * output.exp()).flatten().diag()


def _bernoulli_fisher(loss: nn.BCELoss, output: Tensor, target: Tensor) -> Tensor:
    """Of probabilities: the Hessian at either label, each as often as it is drawn; an entry's depends on its own."""
    ones, zeros = (loss_hessian(loss, output, torch.full_like(target, label)) for label in (1.0, 0.0))
    p = output.flatten()
    return p * ones + (1 - p) * zeros


def _poisson_fisher(loss: nn.PoissonNLLLoss, output: Tensor, target: Tensor) -> Tensor:
    """The Hessian is linear in the label, whose mean is the rate."""
    return loss_hessian(loss, output, output.exp() if loss.log_input else output)


def _gaussian_fisher(loss: nn.GaussianNLLLoss, output: Tensor, target: Tensor) -> Tensor:
    """Diagonal: 1 / v at the mean and 1 / (2 v^2) at the variance v of a label."""
    variance = output.chunk(2, 1)[1]
    terms = 1 if loss.reduction == "sum" else target.numel()
    return torch.cat([1 / variance, 0.5 / variance.square()], 1).flatten().diag() / terms


_EXPECTED: dict[type, Callable[[Any, Tensor, Any], Tensor]] = {
    nn.NLLLoss: _nll_fisher,
    nn.BCELoss: _bernoulli_fisher,
    nn.GaussianNLLLoss: _gaussian_fisher,
    nn.PoissonNLLLoss: _poisson_fisher,
}
_UNIT_CURVATURE: dict[type, Callable[[Tensor], Tensor]] = {
    nn.CrossEntropyLoss: lambda output: 1 - output.softmax(1).square().sum(1, keepdim=True),
    nn.BCEWithLogitsLoss: lambda output: output.sigmoid() * (-output).sigmoid(),
    nn.MSELoss: lambda output: torch.full_like(output, 2.0),
    nn.PoissonNLLLoss: torch.exp,
}


def _samples(x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Every sample as a batch of one: x along dim 0, y along dim 0 with as many rows per sample as there are."""
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.shape[0]), x)
    count = sizes[0]
    for n in range(count):
        rows = lambda tensor, n=n: tensor.view(count, -1, *tensor.shape[1:])[n]
        yield _take(x, n, count, 0), map_tensors(rows, y)


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], dim=1)


def _gradient(value: Tensor, parameters: list[nn.Parameter], retain_graph: bool = False) -> list[Tensor]:
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=retain_graph)
    dense = (None if g is None else g.to_dense() if g.is_sparse else g for g in gradients)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, dense, strict=True)]


def _count(y: Any, dim: int) -> int:
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.shape[dim]), y)
    return sizes[0]


def _take(tree: Any, n: int, count: int, dim: int) -> Any:
    def one(tensor: Tensor) -> Tensor:
        has_samples = tensor.dim() > dim and tensor.shape[dim] == count
        return tensor.narrow(dim, n, 1) if has_samples else tensor

    return map_tensors(one, tree)


def forked() -> contextlib.AbstractContextManager[None]:
    """What is drawn inside leaves the random state of the CPU and of all accelerators as it was."""
    kind = torch.accelerator.current_accelerator()
    devices = range(torch.accelerator.device_count())
    return torch.random.fork_rng(devices, device_type="cuda" if kind is None else kind.type)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Forward passes inside leave the random state and the buffers (running statistics) as they were."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with forked():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
