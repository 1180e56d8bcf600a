"""What `curvature` gives of models and losses: gradients, matrices, derivatives by the inputs, Jacobians."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from results_models import BY_ID, MODELS, Entries, drawn, tanh_net
from torch import Tensor, nn

import curvature
from support.cases import laplacian
from support.cases.case import Case, classes, floats
from support.cases.catalogue import CATALOGUE
from support.cases.layers import mlp
from support.oracles.brute_force import forward

N, MANY = 6, 40  # samples: enough for factors of full rank
LOSSES = {case.id: case for case in CATALOGUE["losses"] if case.id.endswith("_mlp")}
LOSSES["without"] = Case("without", mlp, floats(5), None, classes)

INJECTIONS: dict[str, Any] = {
    "exact": curvature.exact(),
    "sampled": curvature.sampled(2),
    "propagated": curvature.propagated(2),
    "isotropic": curvature.isotropic(3),
    "empirical": curvature.empirical(),
}
PER_SAMPLE = {
    "gradients": curvature.per_sample_gradients,
    "norms": curvature.per_sample_norms,
    "gram": curvature.per_sample_gram,
    "check": curvature.check_gradients,
}
WHOLE = {
    "gauss_newton": curvature.gauss_newton,
    "empirical_fisher": curvature.empirical_fisher,
    "hessian": curvature.hessian,
}
BUILDERS: dict[str, Callable[..., Any]] = {
    "fisher_diagonal": curvature.fisher_diagonal,
    "fisher": curvature.fisher,
    "fisher_blocks": curvature.fisher_blocks,
    "kfac": curvature.kfac,
    "kfac_reduce": functools.partial(curvature.kfac, sharing="reduce"),
    "ekfac": curvature.ekfac,
    "ekfac_reduce": functools.partial(curvature.ekfac, sharing="reduce"),
}


def cases() -> dict[str, Callable[[], Entries]]:
    found: dict[str, Callable[[], Entries]] = {}
    for name, problem in (BY_ID | MODELS).items():
        found[f"gradients/{name}"] = functools.partial(of_samples, problem)
        found[f"capture/{name}"] = functools.partial(captured, problem)
    for name, problem in MODELS.items():
        found[f"matrices/{name}"] = functools.partial(matrices, problem)
    for name, problem in LOSSES.items():
        found[f"losses/{name}/vectors"] = functools.partial(vectors, problem)
        found[f"losses/{name}/matrices"] = functools.partial(injected, problem)
    for name in laplacian.MODELS:
        found[f"laplacian/{name}"] = functools.partial(laplacians, name)
        found[f"residual_jacobian/{name}"] = functools.partial(residual_rows, name)
    for samples in (4, 90):  # less and more than there are parameters
        found[f"jacobian/{samples}"] = functools.partial(jacobians, samples)
    return found | {"output_changes": output_changes, "matrices of options": options, "laplace": posteriors}


# -- gradients


def of_samples(problem: Case) -> Entries:
    model, loss = problem.build()
    x, y = problem.batch(model, N)
    for name, function in PER_SAMPLE.items():
        yield name, functools.partial(function, model, loss, x, y, sample_dim=problem.sample_dim)


def captured(problem: Case) -> Entries:
    """Activations, backprops and the places of the samples."""
    model, _ = problem.build()
    x, _ = problem.batch(model, N)
    with curvature.capture(model) as tape:
        output = forward(model, x)
    outputs = list(output) if isinstance(output, tuple) else [output]
    backprops = tape.backprops(outputs, [drawn(2, *out.shape) for out in outputs])
    yield "names", [sorted(use.names) for use in tape.uses]
    yield "activations", [use.activation for use in tape.uses]
    yield "backprops", backprops
    dim = problem.sample_dim if isinstance(problem.sample_dim, int) else problem.sample_dim[1]
    layouts = functools.partial(curvature.sample_layouts, tape, outputs[0], dim)
    yield "layouts", lambda: [None if layout is None else tuple(layout) for layout in layouts()]


# -- matrices


def summary(matrix: Any) -> Any:
    """A few numbers that every entry of a matrix counts in; a diagonal as it is."""
    if isinstance(matrix, dict):
        return matrix
    return {
        "repr": repr(matrix),
        "product": matrix @ drawn(matrix.space.size, 2),
        "diagonal": matrix.diagonal(),
        "trace": matrix.trace(),
    }


def matrices(problem: Case) -> Entries:
    """By every builder, without chance."""
    model, loss = problem.build()
    data = problem.batch(model, MANY)
    for name, build in (BUILDERS | WHOLE).items():
        yield name, lambda build=build: summary(build(model, loss, data, sample_dim=problem.sample_dim))


def injected(problem: Case) -> Entries:
    """By every injection, of several batches of unequal size."""
    model, loss = problem.build()
    x, y = problem.batch(model, N)
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    for name, build in WHOLE.items():
        yield name, lambda build=build: summary(build(model, loss, data))
    for injection, inject in INJECTIONS.items():
        for name in ("fisher_diagonal", "fisher", "kfac", "ekfac"):
            seeded = torch.Generator().manual_seed(3)
            build = functools.partial(BUILDERS[name], model, loss, data, inject, generator=seeded)
            yield f"{injection}/{name}", lambda build=build: summary(build())


def vectors(problem: Case) -> Entries:
    """What is sent back."""
    model, loss = problem.build()
    x, y = problem.batch(model, N)
    output = forward(model, x).detach()
    for name, inject in INJECTIONS.items():
        seeded = torch.Generator().manual_seed(3)
        yield name, functools.partial(inject.vectors, output, loss, y, generator=seeded)
        yield f"{name}/repr", repr(inject)


def options() -> Entries:
    """Structures by name, progress, single precision, the seed that is fixed without a generator."""
    problem = MODELS["mlp"]
    model, loss = problem.build()
    data = problem.batch(model, N)
    chosen = {"0": "dense", "2.weight": "diagonal"}
    for name in ("fisher_blocks", "kfac", "ekfac"):
        yield f"structure/{name}", lambda build=BUILDERS[name]: summary(build(model, loss, data, structure=chosen))
    for name, build in BUILDERS.items():
        yield f"sampled/{name}", lambda build=build: summary(build(model, loss, data, curvature.sampled(2)))
    single, loss = problem.build(dtype=torch.float32)
    batch = problem.batch(single, N)
    yield "float32/fisher_diagonal", curvature.fisher_diagonal(single, loss, batch)
    yield "float32/kfac", curvature.kfac(single, loss, batch).diagonal()
    low, loss = problem.build(dtype=torch.bfloat16)
    batch = problem.batch(low, N)
    yield "bfloat16/gradients", curvature.per_sample_gradients(low, loss, *batch)
    yield "bfloat16/ekfac", curvature.ekfac(low, loss, batch).diagonal().bfloat16()


def posteriors() -> Entries:
    model, loss = MODELS["mlp"].build()
    x, y = MODELS["mlp"].batch(model, N)
    for structure in ("kfac", "diagonal", "dense", "last_layer"):
        found = curvature.laplace(model, loss, (x, y), structure, prior=2.0)
        yield f"{structure}/outputs", functools.partial(found.outputs, x)
        yield f"{structure}/predict", functools.partial(found.predict, x)
        yield f"{structure}/drawn", functools.partial(found.predict, x, samples=3)
        yield f"{structure}/sample", functools.partial(found.sample, 2)
        yield f"{structure}/evidence", found.log_marginal_likelihood
        yield f"{structure}/prior", lambda found=found: found.optimize_prior(per_layer=True).prior


# -- derivatives by the inputs, and of what has them


def field(name: str) -> tuple[nn.Module, Tensor]:
    model, x = laplacian.case(name)
    return model, x.requires_grad_()


def laplacians(model: str) -> Entries:
    """With the derivatives of the results by parameters and inputs."""
    net, x = field(model)
    for name, weights in laplacian.FORMS.items():
        yield name, functools.partial(curvature.laplacian, net, x.detach(), weights)
    u, grad, second = curvature.laplacian(net, x)
    total = (second.sin() + u).sum() + grad.square().sum()
    yield "derivatives", torch.autograd.grad(total, [x, *net.parameters()], materialize_grads=True)
    yield "of a function", curvature.laplacian(lambda points: points.prod(1) + points.sin().sum(1), x)


def by_nested_gradients(model: nn.Module, x: Tensor) -> Tensor:
    """Of ``laplacian(u) + u grad_0(u)``."""
    slope = lambda u: torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    u = model(x)[:, 0]
    grad = slope(u)
    return sum(slope(grad[:, k])[:, k] for k in range(x.shape[1])) + u * grad[:, 0]


def by_laplacian(model: nn.Module, x: Tensor) -> Tensor:
    u, grad, second = curvature.laplacian(model, x)
    return second[:, 0] + u[:, 0] * grad[:, 0, 0]


def value(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, 0]


def residual_rows(model: str) -> Entries:
    net, x = field(model)
    for residual in (by_nested_gradients, by_laplacian, value):
        yield residual.__name__, functools.partial(curvature.residual_jacobian, net, residual, x)


def jacobians(samples: int) -> Entries:
    """Of residuals in two pieces: products, solutions, Kronecker factors."""
    problem = Case("field", functools.partial(tanh_net, 2, 8, 1), floats(2))
    net, _ = problem.build()
    x, _ = problem.batch(net, samples)
    values = torch.cat([by_nested_gradients(net, x.requires_grad_()), net(x[:3] + 1)[:, 0]])
    jacobian = curvature.Jacobian.of(values, net)
    rows, size = jacobian.shape
    z, v = drawn(rows), jacobian.split(drawn(size))
    for name, own in {"whole": jacobian, "merged": jacobian.merged(), "centred": jacobian.centred()}.items():
        yield f"{name}/shape", own.shape
        for method in ("rows", "to_dense", "gram", "norms", "squares"):
            yield f"{name}/{method}", getattr(own, method)
        yield f"{name}/transposed", own.transposed(z)
        yield f"{name}/times", own.times(v)
        yield f"{name}/columns", own.columns(v, [["0.weight", "0.bias"], ["2.weight"]])
        problem = curvature.LeastSquares(own)
        yield f"{name}/solution", problem.solve(z, 1e-2)
        yield f"{name}/solution without damping", problem.solve(z, cut=1e-6)
        yield f"{name}/precondition", problem.precondition(v, 0.1)
        yield f"{name}/largest", problem.largest
        yield f"{name}/blocks", functools.partial(residual_blocks, own, v)


def residual_blocks(jacobian: Any, v: dict[str, Tensor]) -> dict[str, Any]:
    found = curvature.preconditioners.residual_blocks(jacobian)
    return {
        ", ".join(block.names): {
            "described": f"{block.describe()} {block.reason}",
            "pairs": block.pairs,
            "diagonal": block.diagonal,
            "solution": block.solve(block.inverse(0.1), v),
        }
        for block in found
    }


def output_changes() -> Entries:
    for name in ("mlp", "two_outputs"):
        model, _ = MODELS[name].build()
        output = forward(model, MODELS[name].batch(model, N)[0])
        parameters = dict(model.named_parameters())
        whole = {key: drawn(*p.shape) for key, p in parameters.items()}
        directions = [whole, dict(list(whole.items())[:1]), {}]
        outputs = list(output) if isinstance(output, tuple) else [output]
        yield name, functools.partial(curvature.output_changes, outputs, parameters, directions)
