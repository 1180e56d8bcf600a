"""Forms of arguments: pairs, bags with offsets, packed sequences, dicts, logits with the classes last; and mistakes in
them say what to do."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

import curvature
from curvature.recording import warn_once
from support.cases.case import Raw, seeded
from support.combinations import in_turn
from support.comparisons import matches
from support.oracles import brute_force
from support.rows import all_of_rows, real, rows_of

pytestmark = pytest.mark.fast

LOSS = nn.CrossEntropyLoss()
Call = Callable[..., Any]

PER_SAMPLE: dict[str, tuple[Call, dict[str, Any]]] = {
    "gradients": (curvature.per_sample_gradients, {}),
    "norms": (curvature.per_sample_norms, {}),
    "norms by parameter": (curvature.per_sample_norms_by_parameter, {}),
    "gram": (curvature.per_sample_gram, {}),
    "check": (curvature.check_gradients, {}),
    "clipped": (curvature.clipped_gradient, {"max_norm": 0.3}),
    "projections": (curvature.per_sample_projections, {"projection": curvature.SignProjection(5)}),
    "fisher diagonals": (curvature.per_sample_fisher_diagonals, {}),
    "empirical diagonals": (curvature.per_sample_fisher_diagonals, {"inject": curvature.empirical()}),
    "hessian diagonals": (curvature.per_sample_hessian_diagonals, {}),
}
BUILDERS: dict[str, tuple[Call, tuple[Any, ...]]] = {
    "fisher_diagonal": (curvature.fisher_diagonal, ()),
    "fisher_diagonal, empirical": (curvature.fisher_diagonal, (curvature.empirical(),)),
    "fisher_blocks": (curvature.fisher_blocks, ()),
    "fisher": (curvature.fisher, ()),
    "fisher, empirical": (curvature.fisher, (curvature.empirical(),)),
    "gauss_newton": (curvature.gauss_newton, ()),
    "empirical_fisher": (curvature.empirical_fisher, ()),
    "hessian": (curvature.hessian, ()),
    "kfac": (curvature.kfac, ()),
    "kfac, empirical": (curvature.kfac, (curvature.empirical(),)),
    "ekfac": (curvature.ekfac, ()),
    "laplace": (curvature.laplace, ("diagonal",)),
    "noise scale": (curvature.gradient_noise_scale, ()),
}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        return model, torch.randn(2, 3).double(), torch.arange(2)


def plain(found: Any) -> Any:
    if isinstance(found, curvature.LaplacePosterior):
        return plain(found.precision)
    return found.to_dense() if isinstance(found, curvature.Operator) else found


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_functions_of_samples_take_a_pair(name: str) -> None:
    function, named = PER_SAMPLE[name]
    (model, x, y), rest = problem(), named.values()
    expected = function(model, LOSS, x, y, *rest)
    for pair in ((x, y), [x, y], ((x,), y)):
        torch.testing.assert_close(function(model, LOSS, pair, *rest), expected)
    torch.testing.assert_close(function(model, LOSS, (x,), y, *rest), expected)
    torch.testing.assert_close(function(model, LOSS, x=(x, y), **named), expected)
    torch.testing.assert_close(function(model, LOSS, data=(x, y), **named), expected)


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_take_inputs_and_targets(name: str) -> None:
    function, rest = BUILDERS[name]
    model, x, y = problem()
    expected = plain(function(model, LOSS, (x, y), *rest))
    for given in ((x, y, *rest), ((x,), y, *rest)):
        torch.testing.assert_close(plain(function(model, LOSS, *given)), expected)
    torch.testing.assert_close(plain(function(model, LOSS, x, *rest, y=y)), expected)


def test_inputs_that_are_tuples_are_not_taken_for_pairs() -> None:
    """Of two arguments of the model, and of a pair of one with the target."""
    with seeded(0):
        model = Raw(lambda m, a, b: m.head(a * b), head=nn.Linear(3, 3)).double()
        a, b = torch.randn(2, 2, 3).double()
    y = torch.arange(2)
    expected = curvature.per_sample_gradients(model, LOSS, (a, b), y)
    torch.testing.assert_close(curvature.per_sample_gradients(model, LOSS, ((a, b), y)), expected)
    matrix = curvature.fisher_diagonal(model, LOSS, ((a, b), y))
    torch.testing.assert_close(curvature.fisher_diagonal(model, LOSS, (a, b), y), matrix)
    torch.testing.assert_close(curvature.fisher_diagonal(model, LOSS, {"a": a, "b": b}, y), matrix)
    nested = [(problem()[1], problem()[2])] * 2  # two batches, where one is asked for
    with pytest.raises(TypeError, match="y: it is missing, and x is no pair"):
        curvature.per_sample_gradients(problem()[0], LOSS, nested)  # type: ignore[call-arg]


def test_no_target_and_loaders_beside_a_target() -> None:
    model, x, y = problem()
    for wrong in (x, (x,), (x, y, y), {"input": x}):
        with pytest.raises(TypeError, match=r"y: it is missing, and x is no pair \(x, y\)"):
            curvature.per_sample_norms(model, LOSS, wrong)  # type: ignore[call-arg]
    loader = DataLoader(TensorDataset(x, y))
    with pytest.raises(TypeError, match="leave y out"):
        curvature.kfac(model, LOSS, loader, y)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inject"):
        curvature.kfac(model, LOSS, (x, y), "empirical")  # type: ignore[arg-type]


MISTAKES: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], tuple[Any, ...]], str]] = {
    "model and loss swapped": (
        lambda m, x, y: (LOSS, m, x, y),
        r"first argument is a CrossEntropyLoss, .*order is model, loss, data",
    ),
    "a function first": (
        lambda m, x, y: (lambda o, t: o.sum(), m, x, y),
        "found function: curvature.FunctionModel .*order is model, loss",
    ),
    "numpy input": (lambda m, x, y: (m, LOSS, x.numpy(), y), "x: .*found a numpy.ndarray: pass torch.as_tensor"),
    "numpy inputs": (lambda m, x, y: (m, LOSS, (x.numpy(),), y), "x: .*found .*numpy.ndarray: pass torch.as_tensor"),
    "numpy target": (lambda m, x, y: (m, LOSS, x, y.numpy()), "y: .*found a numpy.ndarray: pass torch.as_tensor"),
    "one sample": (lambda m, x, y: (m, LOSS, x[0], y[0]), r"single sample needs x\[None\] and y\[None\]"),
    "one number": (lambda m, x, y: (m, LOSS, x[0, 0], y[:1]), r"single sample needs x\[None\] and y\[None\]"),
    "a short target": (lambda m, x, y: (m, LOSS, x, y[:1]), r"y: 2 samples in x, but the shape of y is \(1,\)"),
}


LABELS: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], str]] = {
    "of floats": (LOSS, Tensor.float, r"^y: CrossEntropyLoss .* class indices as whole numbers, .*pass y.long\(\)"),
    "in columns": (LOSS, lambda y: y[:, None], r"^y: .* class indices \(2,\), found \(2, 1\); pass y.squeeze\(-1\)"),
    "one-hot": (LOSS, lambda y: F.one_hot(y, 3), r"^y: .*found torch.int64 one-hot; pass y.argmax\(1\) or y.float\(\)"),
    "one-hot, NLLLoss": (nn.NLLLoss(), lambda y: F.one_hot(y, 3), r"^y: NLLLoss .* one-hot; pass y.argmax\(1\)$"),
    "too large": (
        LOSS,
        lambda y: y + 5,
        r"^y: Target 5 is out of bounds. The output \(\d, 3\) has 3 classes, from 0 to 2",
    ),
    "flags": (nn.BCEWithLogitsLoss(), lambda y: F.one_hot(y, 3).bool(), r"^y: .*found torch.bool; pass y.float\(\)"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_torch_refuses_are_told_what_to_pass(name: str) -> None:
    """Where each function calls the loss first; what is advised is taken."""
    model, x, _ = problem()
    loss, given, message = LABELS[name]
    calls: list[Call] = [curvature.kfac, curvature.per_sample_norms, curvature.fisher_diagonal]
    calls += [lambda *args: curvature.hessian(*args).trace(), lambda *args: curvature.empirical_fisher(*args).trace()]
    calls += [curvature.laplace] if type(loss) is not nn.NLLLoss else []
    for call in calls:
        with pytest.raises((ValueError, IndexError), match=message):
            call(model, loss, (x, given(torch.tensor([0, 2]))))


def test_inputs_that_the_model_cannot_read_are_told_what_to_pass() -> None:
    model, x, y = problem()
    wrong: dict[str, tuple[Any, Any]] = {
        r"dtype.*\. x: it is torch.float32, the parameters torch.float64; pass x.to\(torch.float64\)$": (x.float(), y),
        r"x: it is torch.int64, .*unless x and y are exchanged \(the order is model, loss, x, y\)$": (y, x),
        r"multiplied.*\. x: it has the shape \(2, 4\), where axis 0 is that of the samples": (
            torch.ones(2, 4).double(),
            y,
        ),
        r"\. x: it is on meta, the model on cpu; pass x.to\('cpu'\)": (x.to("meta"), y.to("meta")),
    }
    for message, batch in wrong.items():
        for call in (curvature.kfac, curvature.per_sample_norms):
            with pytest.raises(RuntimeError, match=message):
                call(model, LOSS, batch)
    two = Raw(lambda m, a, b: m.head(a * b), head=nn.Linear(3, 3)).double()
    for call in (curvature.kfac, curvature.per_sample_norms):
        with pytest.raises(
            TypeError, match=r"argument: 'b'\. x: all inputs of the model are a tuple, as in \(\(a, b\), y\)"
        ):
            call(two, LOSS, (x, y))
    words = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3).double())  # whose own fault it is
    with pytest.raises(RuntimeError, match="dtype") as told:
        curvature.kfac(words, LOSS, (y, y))
    assert "x:" not in str(told.value)


def test_models_without_numbers_are_refused() -> None:
    model, x, y = problem()
    with pytest.raises(ValueError, match=r"model: 0.weight is on the meta device"):
        curvature.kfac(model.to("meta"), LOSS, (x, y))
    with pytest.raises(ValueError, match=r"model: weight has no shape yet; call model\(x\) once"):
        curvature.kfac(nn.LazyLinear(3), LOSS, (x, y))
    with torch.inference_mode():
        unusable = nn.Linear(3, 3).double()
        with pytest.raises(ValueError, match=r"model: weight was made in torch.inference_mode\(\).* make it outside"):
            curvature.kfac(unusable, LOSS, (x, y))


def test_what_stands_in_the_place_of_something_else_is_named() -> None:
    model, x, y = problem()
    for call in (curvature.kfac, curvature.per_sample_norms, curvature.laplace):
        with pytest.raises(TypeError, match=r"^loss: .*found a tuple of 2 \(the order is model, loss, data\)"):
            call(model, (x, y))
    K = curvature.kfac(model, LOSS, (x, y))
    with pytest.raises(
        TypeError, match=r"^vector: expected a tensor for 0.weight, found NoneType; .*loss.backward\(\)"
    ):
        K.solve({name: p.grad for name, p in model.named_parameters()}, damping=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^structure: expected a dict .*found 'diagonal'"):
        curvature.kfac(model, LOSS, (x, y), structure="diagonal")  # type: ignore[arg-type]
    for inject in (curvature.sampled, curvature.Injection):
        with pytest.raises(
            TypeError, match=rf"^inject: .*found {inject.__name__} itself: call it, {inject.__name__}\(\)"
        ):
            curvature.kfac(model, LOSS, (x, y), inject)  # type: ignore[arg-type]


def test_a_dict_for_a_model_that_says_nothing_of_its_arguments() -> None:
    """Around one that takes a dict."""
    taken = lambda m, batch: m.inner(batch["image"])
    model = Raw(lambda m, *args, **kwargs: taken(m, *args, **kwargs), inner=nn.Linear(3, 3))
    x, y = torch.randn(2, 3), torch.tensor([0, 2])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'image'.*pass x=\(that dict,\)"):
        curvature.per_sample_norms(model, LOSS, {"image": x}, y)
    found = curvature.per_sample_norms(model, LOSS, ({"image": x},), y)
    assert torch.equal(found, curvature.per_sample_norms(model.inner, LOSS, x, y))


@pytest.mark.parametrize("as_pair", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_to_do(mistake: str, as_pair: bool) -> None:
    arguments, message = MISTAKES[mistake]
    model, loss, x, y = arguments(*problem())
    function: Call = curvature.kfac if as_pair else curvature.per_sample_gradients
    with pytest.raises((TypeError, ValueError), match=message) as told:
        function(model, loss, *([(x, y)] if as_pair else [x, y]))
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("count", [1, 2, 3])  # two look like a pair
@pytest.mark.parametrize("key", ["labels", "label", "y"])
def test_batches_that_are_dicts_get_a_recipe_that_works(key: str, count: int) -> None:
    model, x, y = problem()
    loader = [{"input": x, key: y} for _ in range(count)]
    with pytest.raises(TypeError, match=r"found a dict of 2.*\[\(batch, batch.pop\('" + key) as told:
        curvature.kfac(model, LOSS, loader)
    recipe = "[" + str(told.value).split(": [")[1]
    found = curvature.kfac(model, LOSS, eval(recipe, {"loader": loader}))
    torch.testing.assert_close(found.to_dense(), curvature.kfac(model, LOSS, (x, y)).to_dense())
    with pytest.raises(TypeError, match=r"batch.pop"):
        curvature.fisher(model, LOSS, {"input": x, key: y})


@pytest.mark.parametrize("loss", [nn.NLLLoss(reduction="sum"), torch.nn.functional.nll_loss, nn.L1Loss()])
def test_the_log_says_that_a_matrix_is_zero(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    model, x, y = problem()
    model = nn.Sequential(model, nn.LogSoftmax(1))
    target = torch.randn(2, 3).double() if isinstance(loss, nn.L1Loss) else y
    with caplog.at_level(logging.WARNING, "curvature"):
        assert not curvature.gauss_newton(model, loss, (x, target)).to_dense().any()
    assert "Gauss-Newton matrix is zero" in caplog.text
    caplog.clear()
    curvature.gauss_newton(model, LOSS, (x, y))
    assert "zero" not in caplog.text
    assert np.isfinite(float(curvature.gauss_newton(model, LOSS, (x, y)).trace()))


WORDS = torch.tensor([1, 2, 2, 4, 3, 3, 1, 5, 2])


def plain_gradients(model: nn.Module, *pairs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Rows of the gradients of (output, target) of one sample each."""
    return rows_of(model, [LOSS(output, y) for output, y in pairs])


def agrees(model: nn.Module, x: Any, y: Tensor, expected: dict[str, Tensor]) -> None:
    all_of_rows(model, LOSS, x, y, expected)
    fisher, flat = curvature.empirical_fisher(model, LOSS, (x, y)), real(expected)
    matches(fisher.to_dense(), flat.T @ flat / len(y))
    matches(fisher @ flat[0], flat.T @ (flat @ flat[0]) / len(y))


# Uneven, empty first and last, as many words as bags, fewer words than bags, one word each
@pytest.mark.parametrize("ends", [(3, 3, 5, 9), (0, 4, 9, 9), (0, 1, 1, 3, 3, 5, 9, 9, 9), (0, 2, 2, 2), (1, 2, 3)])
@pytest.mark.parametrize("options", [{"mode": "mean"}, {"mode": "sum", "include_last_offset": True}, {"mode": "max"}])
def test_bags(ends: tuple[int, ...], options: dict[str, Any]):
    with seeded(0):
        bag, head = nn.EmbeddingBag(6, 3, **options), nn.Linear(3, 4)
        model = Raw(lambda m, *x: m.head(m.bag(*x).tanh()), bag=bag, head=head).double()
    y, words = torch.arange(len(ends)) % 4, WORDS[: ends[-1]]
    starts = [0, *ends[:-1]]
    last = "include_last_offset" in options
    x = (words, torch.tensor([*starts, ends[-1]] if last else starts))
    one = lambda s, e: (words[s:e], torch.tensor([0, e - s] if last else [0]))
    pairs = [(model(*one(s, e)), y[n : n + 1]) for n, (s, e) in enumerate(zip(starts, ends, strict=True))]
    agrees(model, x, y, plain_gradients(model, *pairs))
    curvature.check_gradients(model, LOSS, x, y)


def test_weights_of_words():
    with seeded(0):
        model = nn.EmbeddingBag(6, 4, mode="sum").double()
        weights = torch.rand(9).double()
    y = torch.tensor([0, 1, 3])
    parts = [(0, 2), (2, 2), (2, 9)]
    one = lambda s, e: model(WORDS[s:e], torch.tensor([0]), weights[s:e])
    pairs = [(one(*part), y[n : n + 1]) for n, part in enumerate(parts)]
    agrees(model, (WORDS, torch.tensor([0, 2, 2]), weights), y, plain_gradients(model, *pairs))


@pytest.mark.parametrize(
    "names", [("words", "starts", "dense"), ("starts", "words", "dense"), ("dense", "starts", "words")]
)
@pytest.mark.parametrize("by_name", [False, True])
def test_bags_do_not_depend_on_the_order_of_the_inputs(names: tuple[str, ...], by_name: bool):
    def run(m: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        given = kwargs or dict(zip(names, args, strict=True))
        return m.head(m.bag(given["words"], given["starts"]).tanh() + given["dense"])

    with seeded(0):
        model = Raw(run, bag=nn.EmbeddingBag(6, 3), head=nn.Linear(3, 4)).double()
        dense = torch.randn(4, 3).double()
    starts, ends, y = [0, 2, 2, 5], [2, 2, 5, 9], torch.tensor([0, 1, 3, 2])
    whole = {"words": WORDS, "starts": torch.tensor(starts), "dense": dense}

    def one(n: int) -> dict[str, Tensor]:
        return {"words": WORDS[starts[n] : ends[n]], "starts": torch.tensor([0]), "dense": dense[n : n + 1]}

    form = lambda given: {k: given[k] for k in names} if by_name else tuple(given[k] for k in names)
    pairs = [(model(**one(n)), y[n : n + 1]) for n in range(4)]
    agrees(model, form(whole), y, plain_gradients(model, *pairs))


@pytest.mark.parametrize("sizes", [(9, 7), (9, 9)])
def test_several_fields_with_offsets_of_their_own(sizes: tuple[int, int]):
    def run(m: Any, a: Tensor, a_starts: Tensor, b: Tensor, b_starts: Tensor) -> Tensor:
        return m.head(m.first(a, a_starts) * m.second(b, b_starts))

    with seeded(0):
        tables = {"first": nn.EmbeddingBag(6, 3), "second": nn.EmbeddingBag(6, 3)}
        model = Raw(run, **tables, head=nn.Linear(3, 4)).double()
    a, b, y = WORDS[: sizes[0]], WORDS.flip(0)[: sizes[1]], torch.tensor([0, 1, 3])
    ends = [[0, 2, 5, sizes[0]], [0, 4, 6, sizes[1]]]
    starts = [torch.tensor(own[:-1]) for own in ends]

    def one(n: int) -> Tensor:
        (s, e), (t, f) = (own[n : n + 2] for own in ends)
        return model(a[s:e], torch.tensor([0]), b[t:f], torch.tensor([0]))

    pairs = [(one(n), y[n : n + 1]) for n in range(3)]
    agrees(model, (a, starts[0], b, starts[1]), y, plain_gradients(model, *pairs))


# As many items as users, and a table shared by all samples
@pytest.mark.parametrize("items", [6, 3])
def test_identifiers_that_look_like_offsets(items: int):
    """A bag reads them in rows of one, or makes the same offsets itself: they are inputs like any others."""

    def run(m: Any, users: Tensor, items: Tensor) -> Tensor:
        own = m.own(users, torch.arange(len(users), device=users.device))
        read = m.items(items[:, None])
        return m.head((m.users(users) + own).tanh() * (read if len(read) == len(users) else read.sum(0)))

    with seeded(0):
        layers = {"users": nn.Embedding(6, 3), "own": nn.EmbeddingBag(6, 3), "items": nn.EmbeddingBag(6, 3)}
        model = Raw(run, **layers, head=nn.Linear(3, 4)).double()
    users, table, y = WORDS[:6], torch.arange(items), torch.arange(6) % 4
    some = lambda n: table[n : n + 1] if items == 6 else table
    pairs = [(model(users[n : n + 1], some(n)), y[n : n + 1]) for n in range(6)]
    agrees(model, (users, table), y, plain_gradients(model, *pairs))


def test_packed_sequences():
    """As one argument, in the order of the batch, which packing sorts."""

    def run(m: Any, x: PackedSequence) -> Tensor:
        out, lengths = pad_packed_sequence(m.lstm(x)[0], batch_first=True)
        return m.head(out.sum(1) / lengths[:, None])

    with seeded(0):
        model = Raw(run, lstm=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 4)).double()
        rows = [torch.randn(t, 3).double() for t in (2, 5, 1, 5)]
    y = torch.tensor([0, 3, 1, 2])
    expected = plain_gradients(model, *((model(pack_sequence([row])), y[n : n + 1]) for n, row in enumerate(rows)))
    agrees(model, pack_sequence(rows, enforce_sorted=False), y, expected)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    packed = pack_padded_sequence(padded, torch.tensor([2, 5, 1, 5]), batch_first=True, enforce_sorted=False)
    agrees(model, (packed,), y, expected)


def test_sizes_that_disagree_are_refused_all_the_same():
    model = Raw(lambda m, a, b: m.head(a), head=nn.Linear(3, 4))
    for x in ((torch.randn(9, 3), torch.tensor([0, 3, 4, 5])), (WORDS, torch.tensor([0, 5, 4, 6]))):
        with pytest.raises(ValueError, match="9 samples in x"):
            curvature.per_sample_gradients(model, LOSS, x, torch.arange(4))


class TakesTwo(nn.Module):
    """A model that says what it takes, around a function of its head and both."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.head = function, nn.Linear(3, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function(self.head, a, b)


def test_type_errors_from_within_the_model_are_raised_as_they_are() -> None:
    """What is said of x is no hint where the model takes it, and its own code makes a wrong call."""
    (a, b), y = torch.randn(2, 2, 3), torch.tensor([0, 2])
    for call in (lambda head, a, b: head(a, b), lambda head, a, b: head(a, places=b)):
        for x in ((a, b), [a, b], {"a": a, "b": b}):
            with pytest.raises(TypeError, match="positional arguments but|unexpected keyword argument") as error:
                curvature.per_sample_gradients(TakesTwo(call), LOSS, x, y)
            assert "x: " not in str(error.value)
    for wrong, hint in (((a, b, a), "x: its 3 entries are"), ({"a": a, "c": b}, r"pass x=\(that dict,\)")):
        with pytest.raises(TypeError, match=hint):
            curvature.per_sample_gradients(TakesTwo(lambda head, a, b: head(a + b)), LOSS, wrong, y)


@pytest.mark.parametrize("count", [2, 3, 4])  # three images have as many channels as there are labels
@pytest.mark.parametrize("name", ["gradients", "norms", "check"])
def test_a_list_of_images_is_told_what_to_pass(name: str, count: int) -> None:
    images = [torch.randn(3, 8 + size, 9) for size in range(count)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    call, options = PER_SAMPLE[name]
    with pytest.raises(
        (TypeError, ValueError), match="x(:| is).* (list|entries) .*pad what differs in size and stack it"
    ):
        call(model, LOSS, images, torch.zeros(count, dtype=torch.long), **options)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_are_refused(layout: torch.layout) -> None:
    model, x, y = problem()
    for name, batch in (("x", (x.to_sparse(layout=layout), y)), ("y", (x, F.one_hot(y, 3).to_sparse(layout=layout)))):
        with pytest.raises(TypeError, match=rf"{name}: found a sparse tensor .*pass {name}\.to_dense\(\)"):
            curvature.per_sample_gradients(model, LOSS, *batch)


@pytest.mark.parametrize("p", [1, 2])
def test_only_a_hinge_that_is_not_squared_is_called_linear(p: int, caplog: pytest.LogCaptureFixture) -> None:
    model, x, y = problem()
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        curvature.gauss_newton(model, nn.MultiMarginLoss(p=p), (x, y))
    assert ("piecewise linear" in caplog.text) == (p == 1)


OF_CLASSES = {
    "per_sample_gradients": curvature.per_sample_gradients,
    "kfac": curvature.kfac,
    "hessian": lambda *setting: curvature.hessian(*setting).trace(),
}


def words() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
        x, y = torch.randint(7, (3, 5)), torch.randint(7, (3, 5))
    y[0, 2] = -100
    return model, x, y


@in_turn(call=OF_CLASSES, loss=[nn.CrossEntropyLoss(), F.cross_entropy])
def test_classes_on_the_last_axis_are_refused_with_the_loss_to_pass(call: str, loss: Any) -> None:
    model, x, y = words()
    with pytest.raises(ValueError, match=r"classes are on the last axis of the output \(3, 5, 7\).*: pass lambda o, t"):
        OF_CLASSES[call](model, loss, x, y)


OF_WORDS = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "options": nn.CrossEntropyLoss(torch.arange(1.0, 8.0).double(), ignore_index=1, label_smoothing=0.1),
    "log-likelihoods": nn.NLLLoss(ignore_index=2, reduction="sum"),
    "images": nn.CrossEntropyLoss(),
}


@pytest.mark.parametrize("name", OF_WORDS)
def test_the_loss_in_the_message_is_the_same_with_classes_on_axis_one(name: str) -> None:
    model, x, y = words()
    loss = OF_WORDS[name]
    y = y.clamp(min=0) if getattr(loss, "ignore_index", -100) >= 0 else y
    x, y = (x[:, None], y[:, None]) if name == "images" else (x, y)
    with pytest.raises(ValueError, match="classes are on the last axis") as refused:
        curvature.per_sample_gradients(model, loss, x, y)
    code = str(refused.value).split(": pass ")[1].split(" or, for sampled()")[0]
    offered = eval(code, {"F": F, "weight": loss.weight})
    rows = curvature.per_sample_gradients(ClassesLast(model), offered, x, y)
    torch.testing.assert_close(rows, brute_force.per_sample_gradients(ClassesFirst(model), loss, x, y))


class ClassesLast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class ClassesFirst(ClassesLast):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).movedim(-1, 1)


def test_the_loss_and_the_module_that_the_message_names_give_the_rows_of_a_loop() -> None:
    model, x, y = words()
    loss = lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum")
    expected = brute_force.per_sample_gradients(model, loss, x, y)
    torch.testing.assert_close(curvature.per_sample_gradients(model, loss, x, y), expected)
    first, total = ClassesFirst(model), nn.CrossEntropyLoss(reduction="sum")
    rows = curvature.per_sample_gradients(first, total, x, y)
    torch.testing.assert_close({name.removeprefix("model."): row for name, row in rows.items()}, expected)
    assert curvature.kfac(first, total, (x, y), inject=curvature.sampled()).trace() > 0


def test_classes_on_axis_one_are_taken_as_they_were() -> None:
    model, x, y = words()
    first = nn.Sequential(model, nn.Flatten(1), nn.Unflatten(1, (5, 7)))
    curvature.kfac(first, nn.CrossEntropyLoss(), (x, torch.randint(5, (3, 7))))  # of five classes at seven places
