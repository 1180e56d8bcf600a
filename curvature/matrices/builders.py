"""The public builders of curvature matrices.

Every matrix is the curvature of the loss as passed, over all of ``data`` as one batch, however it is batched.
Conventions and units: docs/conventions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvature.functional import ExactNorms
from curvature.gradients import Batch, differences, either_form, over_samples, tried_by_vmap
from curvature.linalg import full_precision, without_autocast
from curvature.losses import Curved, Injection, Loss, empirical, exact, resolve
from curvature.matrices.blocks import add_up, by_layers, collect, require_injection, seed_of
from curvature.matrices.matrix_free import ThroughGradient, ThroughOutputs
from curvature.matrices.passes import DataSource, RecordedBatch, zeros
from curvature.matrices.products import Repeated
from curvature.matrices.wide_output import diagonal_chunks
from curvature.operators import BlockDiagonal, MatrixFree, Space
from curvature.recording import in_turn, preserve_state, warn_once
from curvature.structures import Choice, DenseStructure, DiagonalStructure
from curvature.terms import gradients

EXACT = exact()
SampleDim = int | tuple[int, int, int]
FLAT = nn.NLLLoss, nn.L1Loss, nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.HingeEmbeddingLoss
LINEAR = (
    "loss: %s is piecewise linear in the model's output, so that this Gauss-Newton matrix is zero; if the output are "
    "log-probabilities, take nn.CrossEntropyLoss, which is the same loss there (or of the logits), or curvature.fisher"
)
PRODUCT_ELEMENTS = 1 << 24  # entries of the rows of all samples' Hessians that are computed together


@either_form
def fisher_diagonal(
    model: nn.Module,
    loss: Loss | None,
    data: Any,
    inject: Injection = EXACT,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> dict[str, Tensor]:
    """The diagonal of the Fisher matrix over all of `data`, or of what else `inject` estimates.

    Args:
        model: any module, but for BatchNorm in training mode. If its samples meet otherwise, `data` must be one batch,
            and count as one sample: this is the diagonal of `gauss_newton`, for likelihoods with the expected Hessian.
        loss: a torch loss module or a callable ``loss(output, target) -> scalar``; None is enough for `isotropic`.
        data: one pair ``(x, y)``, or an iterable of pairs (a DataLoader); x is a tensor, a tuple of positional or a
            dict of keyword arguments. All builders take x and y as two arguments, too.
        inject: `exact`, `sampled`, `propagated`, `isotropic` or `empirical`.
        parameters: names of parameters, or of modules for all that are below them: the others count as frozen, so that
            nothing is backpropagated to them or held for them; None: all that require a gradient.
        sample_dim: the axis of the samples; or one each for input, output and target.
        generator: for the random injections, on any device. None: a new one with a fixed seed, so that every
            call draws the same numbers. For independent estimates pass one generator to all calls. The global random
            state is not touched.
        progress: whether to show a bar over the batches.

    Returns:
        ``{name: tensor like the parameter}`` in the order of ``named_parameters()``, in units of loss / parameter^2.

    Raises:
        ValueError: the model has BatchNorm in training mode; samples meet in the loss, or in the model and there are
            several batches or `inject` is `empirical` (the module is named); the loss has no scalar reduction or, for
            the injection, no likelihood, no term of it counts, or it is not finite; no parameter has one of the names
            (near ones are shown), or there are no data.
        TypeError: an argument of the wrong kind.

    One pass over the data; memory does not grow with the number of vectors. An exact diagonal takes one vector for each
    entry of a sample's output or, if the model ends in a wide linear layer, for each of its inputs at each place.
    Sources: arXiv:1206.6464 (exact columns and curvature propagation), arXiv:1912.10985 (diagonals of layers).
    """
    source = DataSource(model, loss, data, sample_dim, progress, parameters)
    sums = DiagonalStructure(source.space)
    scale = add_up(source, inject, seed_of(generator), sums, diagonal_chunks)
    diagonal = sums.by_name()
    torch._foreach_mul_(list(diagonal.values()), scale)
    return diagonal


@either_form
def fisher_blocks(
    model: nn.Module,
    loss: Loss | None,
    data: Any,
    inject: Injection = EXACT,
    *,
    structure: Mapping[str, Choice] | None = None,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> BlockDiagonal:
    """The exact block of every layer, weight and bias together.

    Args:
        structure: another structure for some layers: by the name of a module for all its parameters together, as
            ``{"embedding": "diagonal"}``; or of one parameter, which then has a block of its own. The other parameters
            of its layer keep their structure: ``{"2.weight": "diagonal"}`` says nothing of ``2.bias``.

    Raises:
        ValueError: a layer has more than 30,000 parameters, and no structure of its own.

    Other arguments and errors as for `fisher_diagonal`. A block of p parameters takes p^2 numbers.
    """
    source = DataSource(model, loss, data, sample_dim, progress, parameters)
    sums = by_layers(source.space, DenseStructure, "expand", structure)
    return collect(source, inject, seed_of(generator), sums)


@either_form
def fisher(
    model: nn.Module,
    loss: Loss | None,
    data: Any,
    inject: Injection = EXACT,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> MatrixFree:
    """The Fisher matrix ``E sum_k u_k u_k^T`` with ``u_k = J^T v_k``, as an operator (P, P) that stores no matrix.

    It is the curvature of exactly the loss you pass over all of ``data``, in units of loss / parameter^2. Each product
    with a vector is a pass over the data, which must give the same batches every time, while the model stays as it is;
    both are checked. Many products in a row are faster inside ``with curvature.kept(operator):``. ``to_dense()``,
    ``diagonal()`` and ``trace()`` take one pass.

    ``compact()`` takes one pass, too, and keeps what any number of solves needs: the dense matrix or, if N samples with
    k vectors each are fewer than the P parameters, their rows ``v^T J`` as activations and backprops, with the
    (N k, N k) matrix of inner products (`SampleSpace`). Here k is the size of a sample's output, or C - 1 for a
    cross-entropy over C classes. ``solve`` calls ``compact()`` by itself where P or N k is at most 2000.

    Arguments and errors are those of `fisher_diagonal`.
    """
    source = DataSource(model, loss, data, sample_dim, progress, parameters)
    require_injection(inject)
    return ThroughOutputs(Repeated(source, inject), inject, seed_of(generator), source.space).operator()


@either_form
def gauss_newton(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    progress: bool = False,
) -> MatrixFree:
    """The (generalised) Gauss-Newton matrix ``J^T H J``, where H is the Hessian of the loss at the output.

    The loss may be any twice differentiable one, also one in which samples meet, if `data` are one batch; if H is
    indefinite, so is the matrix. For cross-entropy, mean squared error and binary cross-entropy with logits it equals
    `fisher`. A loss on log-probabilities (``NLLLoss``) has H = 0, which makes the matrix zero (the log says so): use
    ``CrossEntropyLoss`` on logits, or `fisher`.

    Arguments, errors and the operator that it returns are those of `fisher`. Source: Schraudolph 2002,
    doi:10.1162/08997660260028683.
    """
    if loss is not None and isinstance(resolve(loss), FLAT) and getattr(loss, "p", 1) == 1:  # hinges may be squared
        warn_once(LINEAR, type(resolve(loss)).__name__)
    return fisher(model, loss, data, Curved(), parameters=parameters, sample_dim=sample_dim, progress=progress)


@either_form
def empirical_fisher(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    progress: bool = False,
) -> MatrixFree:
    """``(1/N) sum_n g_n g_n^T`` of the per-sample gradients for a mean loss, their sum for a sum.

    Raises:
        ValueError: the loss reads parameters itself, as a penalty does: the matrix is made of what goes through the
            output. The rows of `per_sample_gradients` have that.

    Arguments, other errors and operator as for `fisher`. Not the Fisher matrix, see arXiv:1905.12558.
    """
    return fisher(model, loss, data, empirical(), parameters=parameters, sample_dim=sample_dim, progress=progress)


@either_form
def hessian(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    progress: bool = False,
) -> MatrixFree:
    """The Hessian of the loss with respect to the parameters, as an operator that holds no matrix.

    May be indefinite. ``to_dense`` and ``diagonal`` take P products. Arguments, errors and operator as for `fisher`.

    Raises:
        RuntimeError: at the first product, if the second derivatives that torch gives are not symmetric.
    """
    resolve(loss)  # refuses None, which other builders take
    source = DataSource(model, loss, data, sample_dim, progress, parameters)
    return ThroughGradient(Repeated(source), source.space).operator()


@either_form
def kfac(
    model: nn.Module,
    loss: Loss | None,
    data: Any,
    inject: Injection = EXACT,
    *,
    sharing: str = "expand",
    structure: Mapping[str, Choice] | None = None,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> BlockDiagonal:
    """K-FAC: one block ``kron(B, A)`` for each layer, in units of loss / parameter^2.

    A (i, i) is made of the layer's inputs, a bias being the last of them, B (o, o) of what comes back to its outputs. A
    grouped convolution has one such pair for each group.

    Args:
        sharing: what to do where a sample uses a weight at several places, such as pixels or tokens (arXiv:2311.00636).
            "expand" counts each place as a sample; "reduce" first averages activations and sums backprops over them.
        structure: another structure for some layers, "kronecker", "dense", "diagonal" or a class of your own
            (`Structure`): by the name of a module for all its parameters together, as ``{"head": "diagonal"}``; or of
            one parameter, which then has a block of its own. The other parameters of its layer then have a block
            without it, a bias alone an exact one.

    Raises:
        ValueError: samples meet in the model; a factor has more than 30,000 rows, and its layer no structure of its
            own.

    A layer without Kronecker factors gets its exact block or, above 1024 parameters, its exact diagonal. Other
    arguments and errors are those of `fisher_diagonal`. Sources: arXiv:1503.05671, arXiv:1602.01407 (convolutions).
    """
    source = DataSource(model, loss, data, sample_dim, progress, parameters)
    sums = by_layers(source.space, "kronecker", sharing, structure)
    return collect(source, inject, seed_of(generator), sums)


@either_form
@in_turn()
def ekfac(
    model: nn.Module,
    loss: Loss | None,
    data: Any,
    inject: Injection = EXACT,
    *,
    sharing: str = "expand",
    structure: Mapping[str, Choice] | None = None,
    factors: BlockDiagonal | None = None,
    parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> BlockDiagonal:
    """EK-FAC: the eigenvectors of `kfac` with exact eigenvalues.

    Of all matrices with these eigenvectors it is the closest to the exact block, in Frobenius norm (George et al. 2018,
    arXiv:1806.03884).

    Args:
        factors: what `kfac` returned for the same parameters, perhaps of more data. There is then only
            one pass over the data, in the eigenbasis of these factors; blocks without factors stay as they are, but
            for zeros: they are of these data.

    Without `factors` it takes two passes over the data. Other arguments, units and errors are those of `kfac`.
    """
    source = DataSource(model, loss, data, sample_dim, progress, parameters)
    passes, seed = Repeated(source, inject), seed_of(generator)
    sums = by_layers(source.space, "kronecker", sharing, structure)
    again = sums.refine(collect(passes, inject, seed, sums) if factors is None else factors)
    return collect(passes, inject, seed, again)


@either_form
def per_sample_fisher_diagonals(
    model: nn.Module,
    loss: Loss | None,
    x: Any,
    y: Any,
    inject: Injection = EXACT,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Diagonal of the Fisher matrix of each sample's own loss, or of whatever else ``inject`` estimates.

    Args:
        model: as for `per_sample_gradients`.
        loss: as for `fisher_diagonal`.
        x: as for `per_sample_gradients`. A batch may be empty.
        y: as for `per_sample_gradients`.
        inject: as for `fisher_diagonal`.
        parameters: as for `per_sample_gradients`.
        sample_dim: as for `per_sample_gradients`.
        generator: as for `fisher_diagonal`.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of loss / parameter^2 and at
        least single precision. Row n is what `fisher_diagonal` gives for sample n alone; with a mean over one term per
        sample the rows average to that of the batch.

    Raises:
        ValueError, TypeError: as for `fisher_diagonal`.

    With `exact` it is the diagonal of the Gauss-Newton matrix for cross-entropy, mean squared error and binary
    cross-entropy with logits. One forward pass, and one backward pass for each vector of the injection.
    """
    source = DataSource(model, loss, (x, y), sample_dim, parameters=parameters)
    require_injection(inject)
    space = source.space
    drawn = torch.Generator(space.device).manual_seed(seed_of(generator))
    totals = zeros(space, 0)

    def visit(run: RecordedBatch) -> None:
        for name, rows in totals.items():
            totals[name] = rows.new_zeros(run.batch.count, *rows.shape[1:])
        for chunk in run.chunks(inject, drawn):
            with without_autocast(space.devices.values()):
                for name, total in totals.items():
                    lefts, rights = chunk.of(name) or ([], [])
                    for left, right in zip(lefts, rights, strict=True):
                        u = gradients(left)
                        total += u * (u if right is left else gradients(right))

    if source.batch(x, y).count:
        source.each(visit)
    return totals


@either_form
@full_precision()
def per_sample_hessian_diagonals(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
) -> dict[str, Tensor]:
    """Diagonal of the Hessian of each sample's own loss with respect to the parameters.

    Args and errors as for `per_sample_gradients`; a model that draws random numbers is refused, too.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of loss / parameter^2 and at
        least single precision.

    One product with every sample's Hessian for each entry of the parameters, by ``torch.func.vmap`` over samples;
    where that cannot follow the model, or is not what `hessian` gives for the last sample, sample by sample.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    space = Space.of(batch.parameters)
    if not batch.count:
        return zeros(space, 0)

    def alone(n: int) -> dict[str, Tensor]:
        sample = batch.sample(n)
        of = hessian(batch.model, loss, (sample.x, sample.y), sample_dim=sample_dim, parameters=list(batch.parameters))
        return of.to_dict(of.diagonal())

    empty = batch.without_terms(range(batch.count))
    counted = [n for n in range(batch.count) if n not in empty]
    if not counted:
        return zeros(space, batch.count)
    last = alone(counted[-1])
    diagonals = None if batch.is_uneven else tried_by_vmap(lambda: _by_vmap(batch, space))
    if diagonals and not differences({name: rows[counted[-1]] for name, rows in diagonals.items()}, last):
        left = torch.tensor(empty, dtype=torch.long, device="cpu")
        return {name: rows.index_fill(0, left.to(rows.device), 0) for name, rows in diagonals.items()}
    diagonals = zeros(space, batch.count)
    for n in counted:
        for name, diagonal in (last if n == counted[-1] else alone(n)).items():
            diagonals[name][n] = diagonal
    return diagonals


def _by_vmap(batch: Batch, space: Space) -> dict[str, Tensor]:
    dtypes = {name: p.dtype for name, p in batch.parameters.items()}
    values = space.flatten({name: p.detach() for name, p in batch.parameters.items()})
    count = max(1, min(batch.count, PRODUCT_ELEMENTS // space.size))
    size = max(1, PRODUCT_ELEMENTS // (space.size * count))

    def diagonal_of(loss: Callable[[dict[str, Tensor], Any, Any], Tensor]) -> Callable[..., Tensor]:
        def diagonal(flat: Tensor, x: Any, y: Any) -> Tensor:
            def value(flat: Tensor) -> Tensor:
                return loss({name: part.to(dtypes[name]) for name, part in space.split(flat).items()}, x, y)

            products = vjp(grad(value), flat)[1]
            numbers = torch.arange(space.size, device=flat.device)

            def entry(number: Tensor) -> Tensor:
                return torch.where(numbers == number, products((numbers == number).to(flat.dtype))[0], 0).sum()

            return vmap(entry, chunk_size=size)(numbers)

        return diagonal

    with preserve_state(batch.model), sdpa_kernel(SDPBackend.MATH), ExactNorms():
        return space.split(over_samples(batch, diagonal_of, values, count).detach())
