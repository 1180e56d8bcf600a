"""Models, blocks, functions and steps under ``torch.compile``: numbers as uncompiled, and nothing compiled again."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw
from support.compiled import Net, assert_close, batch, closure_of_loss, draw, net, values


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No code compiled by another test, and no stance left behind."""
    torch._dynamo.reset()
    yield
    gc.collect()
    stance = torch.compiler.set_stance()
    stance.__exit__(None, None, None)
    assert stance.prev.stance == "default"


Made = tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]
How = Callable[[nn.Module, Any, dict[str, Any]], Made]


def given(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    compiled = torch.compile(model, **options)
    return compiled, optimizer(compiled)


def before(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    return torch.compile(model, **options), optimizer(model)


def after(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    opt = optimizer(model)
    return torch.compile(model, **options), opt


def in_place(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    model.compile(**options)
    return model, optimizer(model)


def in_place_after(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    opt = optimizer(model)
    model.compile(**options)
    return model, opt


def warmed_up(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    """Compiled code that knows of no hooks."""
    compiled = torch.compile(model, **options)
    compiled(batch(0)[0])
    return compiled, optimizer(model)


def in_blocks(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(**options)
    return model, optimizer(model)


def in_wrapped_blocks(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    model.blocks = nn.ModuleList([torch.compile(block, **options) for block in model.blocks])  # type: ignore[union-attr]
    return model, optimizer(model)


def in_a_function(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Made:
    return torch.compile(lambda x: model(x) * 1.0, **options), optimizer(model)


WAYS: list[How] = [given, before, after, in_place, in_place_after, warmed_up, in_a_function]
BLOCKWISE: list[How] = [in_blocks, in_wrapped_blocks]


def train(call: Callable[[Tensor], Any], opt: Any, steps: range, evaluate: bool = False) -> None:
    for k in steps:
        closure_of_loss(call, opt, k)
        opt.step()
        if evaluate:
            with torch.no_grad():
                call(batch(k)[0])


CELLS = [
    *((KFAC, how, False) for how in (*WAYS, *BLOCKWISE)),
    *((o, how, False) for o in (EKFAC, NaturalGradient) for how in WAYS[:2]),
    *((NaturalGradient, how, False) for how in (warmed_up, BLOCKWISE[0])),
    *((KFAC, how, True) for how in (given, before, in_place)),
]


@pytest.mark.parametrize("optimizer, how, evaluate", CELLS, ids=lambda part: getattr(part, "__name__", str(part)))
def test_same_numbers_as_uncompiled(optimizer: Any, how: How, evaluate: bool):
    """In one graph; compiled once, or not at all where every step captures; once more to evaluate without gradients."""
    plain, model, backend, steps = net(), net(), CompileCounter(), range(16 if evaluate else 12)
    train(plain, optimizer(plain), steps)
    call, opt = how(model, optimizer, {"backend": backend, "fullgraph": True})
    train(call, opt, steps, evaluate)
    assert_close(values(model), values(plain))
    expected = how is warmed_up if optimizer is NaturalGradient else 1 + evaluate
    assert backend.frame_count == expected, backend.frame_count


@pytest.mark.parametrize("how", [given, before, in_place, in_a_function], ids=lambda how: how.__name__)
def test_graph_breaks_of_the_model_itself(how: How):
    plain, model, backend = net(Net), net(Net), CompileCounter()
    train(plain, KFAC(plain), range(16))
    call, opt = how(model, KFAC, {"backend": backend})
    train(call, opt, range(14))
    count = backend.frame_count
    train(call, opt, range(14, 16))
    assert_close(values(model), values(plain))
    assert 1 < backend.frame_count == count


def test_the_default_backend():
    one, two = (nn.Linear(4, 3).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    call = torch.compile(two, mode="reduce-overhead")
    train(one, KFAC(one), range(12))
    train(call, KFAC(two), range(12))
    assert_close(values(two), values(one))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_and_shapes(backend: str):
    """Batches of other sizes are compiled as dynamic shapes, once."""
    plain, model, counter = net(), net(), CompileCounterWithBackend(backend)
    call = torch.compile(model, backend=counter)
    for run, opt in ((plain, KFAC(plain)), (call, KFAC(call))):
        for k in range(18):
            x, y = batch(k, 12 - (k % 3))
            opt.zero_grad()
            F.cross_entropy(run(x), y).backward()
            opt.step()
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(plain)[name], rtol=1e-6, atol=1e-8)
    assert counter.frame_count <= 2


def test_states_of_compiled_and_uncompiled_runs_go_into_each_other():
    one, two = net(), net()
    compiled = torch.compile(one, backend="eager")
    first = KFAC(compiled)
    train(compiled, first, range(4))
    two.load_state_dict(one.state_dict())
    second = KFAC(two)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(compiled, first, range(4, 8)), train(two, second, range(4, 8))
    assert_close(values(one), values(two))
    assert "_orig_mod" not in first.report() and "head.weight" in first.report()


@pytest.mark.parametrize("how", [given, before, in_place], ids=lambda how: how.__name__)
def test_an_error_in_the_forward_pass_leaves_nothing(how: How):
    model = net()
    call, opt = how(model, KFAC, {"backend": "eager"})
    with pytest.raises(RuntimeError, match="shapes|size"):
        call(draw(3, 7))
    train(call, opt, range(12))
    with pytest.raises(RuntimeError, match="shapes|size"):
        call(draw(3, 7))
    plain = net()
    train(plain, KFAC(plain), range(12))
    assert_close(values(model), values(plain))


def test_two_models_of_which_one_optimizer_is_deleted():
    one, two, plain = net(), net(), net()
    train(plain, KFAC(plain), range(15))
    backends = CompileCounter(), CompileCounter()
    calls = [torch.compile(m, backend=b, fullgraph=True) for m, b in zip((one, two), backends, strict=True)]
    first, second = KFAC(one), NaturalGradient(two)
    for k in range(15):
        train(calls[0], first, range(k, k + 1))
        if k < 12:
            train(calls[1], second, range(k, k + 1))
        if k == 12:
            del second
            gc.collect()
    assert_close(values(one), values(plain))
    assert backends[0].frame_count == 1, "compiled although the other optimizer captured"


def test_a_stance_of_the_user_stays():
    model = net()
    opt = KFAC(model)
    with torch.compiler.set_stance("eager_on_recompile"):
        del opt
        gc.collect()
        stance = torch.compiler.set_stance()
        stance.__exit__(None, None, None)
        assert stance.prev.stance == "eager_on_recompile"
    torch.compiler.set_stance()


def test_what_is_compiled_beside_an_uncompiled_model_stays_so():
    model, backend = net(), CompileCounter()
    opt, double = NaturalGradient(model), torch.compile(lambda x: x + x, backend=backend)
    train(model, opt, range(1))
    double(torch.ones(2))
    assert backend.frame_count == 1


@pytest.mark.parametrize(
    "optimizer", [functools.partial(KFAC, factor_every=10), NaturalGradient], ids=["KFAC", "natural"]
)
def test_compiled_in_the_middle_of_a_run(optimizer: Any):
    """A renewal may come a step later than it would have."""
    model, backend = net(), CompileCounter()
    opt = optimizer(model)
    train(model, opt, range(9))
    model.compile(backend=backend)
    train(model, opt, range(9, 40))
    updates = {block.updates for block in opt.store.blocks}
    other = net()
    same = optimizer(other)
    train(other, same, range(40))
    (expected,) = {block.updates for block in same.store.blocks}
    assert updates <= {expected, expected - 1} and backend.frame_count == 1


def closure_of_residuals(call: Any, opt: Any, k: int) -> Tensor:
    """Their model is differentiated twice, which compiled code is not."""
    points = batch(0)[0].requires_grad_()
    (slope,) = torch.autograd.grad(call(points)[:, 0].sum(), points, create_graph=True)
    return slope[:, 0] - 1


ADAPTIVE = functools.partial(KFAC, adaptive=True)
SEARCH = functools.partial(NaturalGradient, line_search=True)
CLOSURES = [
    *((optimizer, closure_of_loss) for optimizer in (KFAC, ADAPTIVE, SEARCH)),
    *((optimizer, closure_of_residuals) for optimizer in (KFAC, NaturalGradient)),
]


@pytest.mark.parametrize("optimizer, closure", CLOSURES)
def test_closures(optimizer: Any, closure: Callable[[Any, Any, int], Tensor]):
    ends = []
    for backend in (None, "aot_eager"):
        model = net()
        call = model if backend is None else torch.compile(model, backend=backend)
        opt = optimizer(call)
        for k in range(4 if closure is closure_of_residuals else 12):
            opt.step(functools.partial(closure, call, opt, k))
        ends.append(values(model))
    assert_close(*ends)


def test_a_copy_of_compiled_model_and_optimizer():
    model = net()
    call = torch.compile(model, backend="eager")
    opt = KFAC(call)
    train(call, opt, range(3))
    again, resumed = copy.deepcopy((call, opt))
    train(call, opt, range(3, 6)), train(again, resumed, range(3, 6))
    assert_close(values(again), values(model))


def test_dropout_and_a_loss_inside():
    """What a compiled function does with the output is not the model's."""
    model = Raw(lambda m, x: m.head(F.dropout(m.enter(x), 0.0)), enter=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()
    backend = CompileCounter()
    opt = KFAC(model)
    whole = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=backend, fullgraph=True)
    for k in range(14):
        opt.zero_grad()
        whole(*batch(k)).backward()
        opt.step()
    assert backend.frame_count == 1 and opt.skipped == 0


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def compiled_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    return model


loss = nn.CrossEntropyLoss()
FUNCTIONS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "per_sample_gradients": lambda m, x, y: curvature.per_sample_gradients(m, loss, x, y),
    "kfac": lambda m, x, y: {"": curvature.kfac(m, loss, (x, y)).to_dense()},
    "gauss_newton": lambda m, x, y: {"": curvature.gauss_newton(m, loss, (x, y)) @ torch.ones(count(m), 1).to(x)},
    "hessian": lambda m, x, y: {"": curvature.hessian(m, loss, (x, y)) @ torch.ones(count(m), 1).to(x)},
    "laplacian": lambda m, x, y: dict(zip("ugl", curvature.laplacian(m, x), strict=True)),
    "residual_jacobian": lambda m, x, y: curvature.residual_jacobian(m, lambda m, x: m(x)[:, 0], x),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


PAIRS = [(name, wrapped) for name in FUNCTIONS]
PAIRS += [(name, how) for name in ("per_sample_gradients", "laplacian") for how in (compiled_in_place, compiled_blocks)]


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_functions_of_a_compiled_model(name: str, how: Callable[[nn.Module], nn.Module]):
    x, y = batch(1)
    expected = FUNCTIONS[name](net(), x, y)
    model = how(net())
    assert_close(FUNCTIONS[name](model, x, y), expected)
    model(x)  # compiled with nothing of ours
    assert_close(FUNCTIONS[name](model, x, y), expected)


@pytest.mark.parametrize("how", [wrapped, compiled_in_place, compiled_blocks])
def test_capture(how: Callable[[nn.Module], nn.Module]):
    x, _ = batch(1)
    plain, model = net(), how(net())
    with curvature.capture(plain) as one:
        expected = plain(x)
    model(x)
    with curvature.capture(model) as two:
        output = model(x)
    assert [use.names for use in one.uses] == [use.names for use in two.uses]
    vectors = draw(2, *output.shape)
    for b, c in zip(one.backprops(expected, vectors), two.backprops(output, vectors), strict=True):
        torch.testing.assert_close(b, c)


def through_a_function(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x), backend="eager")


@pytest.mark.parametrize("how", [wrapped, compiled_in_place, through_a_function])
def test_what_is_compiled_in_the_context_is_captured(how: Callable[[nn.Module], Callable[[Tensor], Tensor]]):
    x, _ = batch(1)
    plain, model = net(), net()
    with curvature.capture(plain) as one:
        plain(x)
    with curvature.capture(model) as two:
        call = how(model)
        call(x), call(x)
    assert [use.names for use in one.uses] * 2 == [use.names for use in two.uses]
