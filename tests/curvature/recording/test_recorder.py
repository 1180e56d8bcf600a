"""What a capture records, what it sends back, and that it leaves nothing behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvature import Tape, Use, capture
from support.cases.case import Raw, seeded
from support.oracles.brute_force import forward
from support.snapshots import unchanged

pytestmark = pytest.mark.fast


def active_modes() -> int:
    return torch._C._len_torch_function_stack()


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def built(make: Callable[[], nn.Module], device: str = "cpu") -> nn.Module:
    with seeded(0):
        return make().to(device, torch.float64)


def draw(*shape: int, device: str = "cpu", seed: int = 1) -> Tensor:
    with seeded(seed):
        return torch.randn(*shape, dtype=torch.float64).to(device)


def weight_gradient(use: Use, b: Tensor) -> dict[str, Tensor]:
    """{argument: gradient} of one use of a linear layer or an embedding, from its activation and its backprop alone."""
    a = use.activation
    assert a is not None and use.shape == b.shape
    if use.function is F.embedding:
        assert use.call is not None
        table = torch.zeros_like(use.call.args["weight"])
        return {"weight": table.index_add_(0, a.flatten(), b.flatten(0, -2))}
    assert use.function is F.linear
    found = {"weight": b.flatten(0, -2).T @ a.flatten(0, -2), "bias": b.flatten(0, -2).sum(0)}
    return {slot: found[slot] for slot in use.slots}


def assert_explains(model: nn.Module, tape: Tape, output: Tensor, device: str) -> None:
    """The gradient of every parameter, for one vector and for several, is the sum over its uses."""
    for k in (1, 3):
        vectors = draw(k, *output.shape, device=device, seed=2)
        backprops = tape.backprops(output, vectors)
        assert len(backprops) == len(tape.uses)
        for j, v in enumerate(vectors):
            found: dict[str, Tensor] = {}
            for use, b in zip(tape.uses, backprops, strict=True):
                assert b is not None and b.shape == (k, *use.shape) and not b.requires_grad
                for slot, gradient in weight_gradient(use, b[j]).items():
                    (name,) = use.slots[slot].names
                    found[name] = found.get(name, 0) + gradient
            parameters = dict(model.named_parameters())
            assert found.keys() == parameters.keys()
            expected = torch.autograd.grad(output, list(parameters.values()), v, retain_graph=True)
            for name, right in zip(parameters, expected, strict=True):
                torch.testing.assert_close(
                    found[name], right, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )


in_place = lambda: nn.Sequential(
    nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 2)
)


def overwritten(m: nn.Module, x: Tensor) -> Tensor:
    z = m.first(x)
    z.mul_(2).add_(1)
    z[:, 0] = 0
    return m.last(z)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    x = checkpoint(lambda x: m.first(x).tanh(), x, use_reentrant=False)
    return m.last(checkpoint(m.second, x, use_reentrant=False))


def tied(m: Any, x: Tensor) -> Tensor:
    """An embedding, its transpose read outside its module, and a layer that is called twice."""
    return F.linear(m.inner(m.inner(m.words(x)).tanh()), m.words.weight)


plain = lambda device: draw(5, 3, device=device)
second = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
ends = lambda **more: {"first": nn.Linear(3, 4), "last": nn.Linear(4, 2), **more}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Any]]] = {
    "plain": (sequential, plain),
    "leading_dimensions": (sequential, lambda device: draw(5, 2, 6, 3, device=device)),
    "in_place": (in_place, plain),
    "overwritten": (lambda: Raw(overwritten, **ends()), plain),
    "twice": (lambda: Raw(lambda m, x: m.inner(m.inner(x).tanh()), inner=nn.Linear(3, 3)), plain),
    "tied": (
        lambda: Raw(tied, words=nn.Embedding(5, 4), inner=nn.Linear(4, 4)),
        lambda device: torch.arange(6, device=device).reshape(2, 3) % 5,
    ),
    "outside": (
        lambda: Raw(lambda m, x: F.linear(x, m.inner.weight, bias=m.inner.bias).sin(), inner=nn.Linear(3, 2)),
        plain,
    ),
    "checkpoint": (lambda: Raw(checkpointed, **ends(second=second())), plain),
    "tuple": (
        lambda: Raw(lambda m, x, y: m.inner(x) * y, inner=nn.Linear(3, 2)),
        lambda device: (draw(5, 3, device=device), draw(5, 2, device=device)),
    ),
    "dict": (
        lambda: Raw(lambda m, x, *, scale=1: m.inner(x).tanh() * scale, inner=nn.Linear(3, 2)),
        lambda device: {"x": draw(5, 3, device=device), "scale": 3},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_backprops(name: str, device):
    """Outputs are the same as without, and nothing is left behind."""
    make, inputs = MODELS[name]
    model, x = built(make, device), inputs(device)
    expected = forward(model, x)
    with unchanged(model, x):
        with capture(model) as tape:
            output = forward(model, x)
        assert torch.equal(output, expected) and output.requires_grad
        assert_explains(model, tape, output, device)
    assert active_modes() == 0


def test_activations_are_views():
    """Of what the layer received, whatever the layer; also where that is itself a view, and of what it passes on."""
    seen: list[Tensor] = []
    layers = [nn.Linear(4, 4), nn.Conv1d(3, 3, 2), nn.LayerNorm(3), nn.PReLU(), nn.Embedding(6, 2)]
    for layer in layers:
        x = torch.arange(48).reshape(2, 2, 12)[:, :, 3:6].transpose(1, 2) % 6
        x = x if isinstance(layer, nn.Embedding) else x.double().repeat(1, 1, 2)
        x = x[..., :3] if isinstance(layer, nn.LayerNorm) else x
        layer.double().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with capture(layer) as tape:
            layer(x)
        a = tape.uses[0].activation
        assert a is not None and seen[-1] is x
        assert (a.data_ptr(), a.stride(), a.shape) == (x.data_ptr(), x.stride(), x.shape), layer
    model = built(sequential)
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with capture(model) as tape:
        model(draw(5, 3))
    assert tape.uses[1].activation is not None
    assert tape.uses[1].activation.data_ptr() == seen[-1].data_ptr()


def test_frozen_parameters_are_not_recorded():
    model = built(sequential)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    with capture(model) as tape:
        model(draw(5, 3))
    (use,) = tape.uses
    assert use.names == {"2.weight"} and list(tape.parameters) == ["2.weight"]
    assert use.activation is not None and use.activation.shape == (5, 4)


def failing(error: type[BaseException]) -> Any:
    """Until told not to."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.inner(x)
        if m.fails:
            raise error("on purpose")
        return x

    model: Any = Raw(run, inner=nn.Linear(3, 2))
    model.fails = True
    return model


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_leaves_nothing_behind_after_an_exception(error: type[BaseException]):
    """An interrupt is what a notebook's stop button sends."""
    model, x = failing(error), torch.ones(5, 3)
    try:
        with unchanged(model), pytest.raises(error, match="on purpose"), capture(model):
            model(x)
        assert active_modes() == 0
        model.fails = False
        with capture(model) as tape:
            model(x)
        assert len(tape.uses) == 1
    finally:
        while active_modes():  # for the sake of the tests that follow
            torch._C._pop_torch_function_stack()


def test_wrong_arguments():
    with pytest.raises(TypeError, match="model"), capture([torch.zeros(2)]):  # type: ignore[arg-type]
        pass
    model = built(sequential)
    with capture(model) as tape:
        output = model(draw(5, 3))
    for wrong in (draw(5, 2), draw(2, 5, 3), draw(1, 4, 2), draw(0, 5, 2)):
        with pytest.raises(ValueError, match="vectors"):
            tape.backprops(output, wrong)


class DoubledByNumpy(torch.autograd.Function):
    """Its backward pass takes one vector at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(2 * g.numpy())


def test_vectors_go_back_one_by_one_where_torch_cannot_send_them_together():
    model = built(lambda: Raw(lambda m, x: DoubledByNumpy.apply(m.layer(x)), layer=nn.Linear(3, 2)))
    with capture(model) as tape:
        output = model(draw(5, 3))
    vectors = draw(3, 5, 2)
    (backprops,) = tape.backprops(output, vectors)
    torch.testing.assert_close(backprops, 2 * vectors)


KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": partial(nn.RNN, nonlinearity="relu")}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_the_kernel(kind: str, bias: bool):
    """Of every output in every input, of first and second order, and those of several vectors at once."""
    with seeded(0):
        layer = KINDS[kind](3, 4, 2, bidirectional=True, bias=bias).double()
        x = torch.randn(5, 6, 3, dtype=torch.float64, requires_grad=True)
        states = [torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind == "lstm"))]
        inputs = [x, *states, *layer.parameters()]

        def run() -> list[Tensor]:
            output, last = layer(x, tuple(states) if len(states) > 1 else states[0])
            return [output, *(last if isinstance(last, tuple) else [last])]

        with capture(layer):
            found = run()
        expected = run()
        vectors = [torch.randn(2, *out.shape, dtype=out.dtype) for out in found]
        first = [v[0] for v in vectors]
        directions = [torch.randn_like(x) for x in inputs]
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, inputs, first, create_graph=True)
    torch.testing.assert_close(list(torch.autograd.grad(found, inputs, first, retain_graph=True)), list(wanted))
    batched = torch.autograd.grad(found, inputs, vectors, retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close([g[0] for g in batched], list(wanted))
    gradients = torch.autograd.grad(found, inputs, first, create_graph=True)
    torch.testing.assert_close(list(gradients), list(wanted))
    second = partial(torch.autograd.grad, grad_outputs=directions, materialize_grads=True)
    torch.testing.assert_close(list(second(gradients, inputs)), list(second(wanted, inputs)))


def test_a_recurrent_layer_of_constants_is_no_data():
    """Its products are of parameters alone, so that nobody takes one of their axes for that of samples."""
    run = lambda m, x: x @ m.gru(m.constant)[0][-1].T
    model = Raw(run, gru=nn.GRU(3, 4), constant=torch.ones(2, 4, 3))
    with capture(model) as tape:
        model(torch.randn(5, 4))
    assert all(use.results for use in tape.uses[:-1]) and not tape.uses[-1].results
