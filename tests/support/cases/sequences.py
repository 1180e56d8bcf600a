"""Layers over sequences: recurrent modules and cells, attention, Transformer modules."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from support.cases.case import Case, Raw, both, classes, floats, indices, masks, named, second, token_loss, tokens

RECURRENT: dict[str, Callable[..., nn.Module]] = {
    "rnn_tanh": nn.RNN,
    "rnn_relu": functools.partial(nn.RNN, nonlinearity="relu"),
    "lstm": nn.LSTM,
    "lstm_projected": functools.partial(nn.LSTM, proj_size=2),
    "gru": nn.GRU,
}
RECURRENT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True},
    "all": {"num_layers": 2, "bidirectional": True, "bias": False},
}
CELLS: dict[str, Callable[..., nn.Module]] = {
    "rnn_cell_tanh": nn.RNNCell,
    "rnn_cell_relu": functools.partial(nn.RNNCell, nonlinearity="relu"),
    "lstm_cell": nn.LSTMCell,
    "gru_cell": nn.GRUCell,
}


def cases() -> Iterator[Case]:
    yield from recurrent_cases()
    yield from cell_cases()
    yield from attention_cases()
    yield from transformer_cases()


class Sequence(nn.Module):
    """Takes (N, T, d), and states with N first, whatever the layout of the recurrent module inside.

    With `raw`, inputs and output have the recurrent module's own layout.
    """

    def __init__(self, recurrent: nn.Module, raw: bool = False):
        super().__init__()
        self.recurrent, self.raw = recurrent, raw

    def forward(self, x: Tensor, *state: Tensor) -> Tensor:
        turned = not (self.raw or self.recurrent.batch_first)
        if not self.raw:
            state = tuple(s.transpose(0, 1).contiguous() for s in state)
        initial = state if len(state) > 1 else state[0] if state else None
        output, _ = self.recurrent(x.transpose(0, 1) if turned else x, initial)
        return output.transpose(0, 1) if turned else output


def recurrent_cases() -> Iterator[Case]:
    """Each option in each layout, with a state in one of them."""
    for kind, layer in RECURRENT.items():
        for number, (name, options) in enumerate(RECURRENT_OPTIONS.items()):
            states = recurrent_states(kind, options)
            build = functools.partial(layer, 3, 4, **options)
            for first in (True, False):
                id = f"{kind}_{name}_{'batch_first' if first else 'time_first'}"
                wrapped = functools.partial(wrapped_sequence, build, first)
                if first == (number % 2 == 0):
                    yield Case(id, wrapped, floats(5, 3))
                else:
                    yield Case(f"{id}_state", wrapped, both(floats(5, 3), *states))
            if name not in ("plain", "all"):
                continue
            raw = functools.partial(wrapped_sequence, build, False, raw=True)
            yield Case(f"{kind}_{name}_samples_second", raw, both(second(floats(5, 3))), sample_dim=1)
        plain = functools.partial(wrapped_sequence, functools.partial(layer, 3, 4), False)
        seconds = both(second(floats(5, 3)), *(second(state) for state in recurrent_states(kind, {})))
        yield Case(f"{kind}_state_samples_second", functools.partial(plain, raw=True), seconds, sample_dim=1)
        yield Case(f"{kind}_equal_sizes", plain, floats(3, 3), n=3)
        yield Case(f"{kind}_one_step", plain, floats(1, 3))
        yield Case(f"{kind}_token_loss", plain, floats(5, 3), token_loss, tokens)
        learned = functools.partial(learned_state, layer, kind.startswith("lstm"))
        yield Case(f"{kind}_learned_state", learned, floats(5, 3))
        yield Case(f"{kind}_final_state", functools.partial(final_state, layer), floats(5, 3))


def wrapped_sequence(build: Callable[..., nn.Module], batch_first: bool, raw: bool = False) -> nn.Module:
    return Sequence(build(batch_first=batch_first), raw)


def recurrent_states(kind: str, options: dict[str, Any]) -> list[Callable[[int], Tensor]]:
    """Draws of the initial states, samples first."""
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    if kind == "lstm_projected":
        return [floats(rows, 2), floats(rows, 4)]
    return [floats(rows, 4)] * (2 if kind == "lstm" else 1)


def learned_state(layer: Callable[..., nn.Module], has_cell: bool) -> nn.Module:
    recurrent = layer(3, 4, batch_first=True)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        hidden = m.hidden.expand(-1, x.shape[0], -1).contiguous()
        cell = m.cell.expand(-1, x.shape[0], -1).contiguous() if has_cell else None
        return m.recurrent(x, (hidden, cell) if has_cell else hidden)[0]

    parts = {"cell": (1, 1, 4)} if has_cell else {}
    return Raw(run, recurrent=recurrent, hidden=(1, 1, recurrent.proj_size or 4), **parts)


def final_state(layer: Callable[..., nn.Module]) -> nn.Module:
    """Both directions' last states side by side, after the loss has seen nothing of the outputs between."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        state = m.recurrent(x)[1]
        parts = state if isinstance(state, tuple) else (state,)
        return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)

    return Raw(run, recurrent=layer(3, 4, batch_first=True, bidirectional=True, num_layers=2))


def cell_cases() -> Iterator[Case]:
    for kind, cell in CELLS.items():
        for bias in (True, False):
            build = functools.partial(unrolled, cell, bias)
            id = kind if bias else f"{kind}_no_bias"
            yield Case(f"{id}_once", build, floats(1, 3))
            yield Case(f"{id}_unrolled", build, floats(5, 3))
            states = [floats(4)] * (2 if kind == "lstm_cell" else 1)
            yield Case(f"{id}_state", build, both(floats(2, 3), *states))
        yield Case(f"{kind}_equal_sizes", functools.partial(unrolled, cell, True), floats(3, 3), n=3)


def unrolled(cell: Callable[..., nn.Module], bias: bool) -> nn.Module:
    def run(m: nn.Module, x: Tensor, *state: Tensor) -> Tensor:
        current = state if len(state) > 1 else state[0] if state else None
        outputs = []
        for step in x.unbind(1):
            current = m.cell(step, current)
            outputs.append(current[0] if isinstance(current, tuple) else current)
        return torch.stack(outputs, dim=1)

    return Raw(run, cell=cell(3, 4, bias=bias))


class Attention(nn.Module):
    """Takes samples first, whatever the layout inside; with `weights`, the attention weights are part of the output."""

    def __init__(self, mask: Tensor | None = None, weights: bool = False, call: dict | None = None, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.register_buffer("mask", mask)
        self.weights, self.call = weights, call or {}

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        key = query if key is None else key
        value = key if value is None else value
        turned = not self.attention.batch_first
        arguments = [x.transpose(0, 1) if turned else x for x in (query, key, value)]
        options = {"key_padding_mask": padding, "attn_mask": self.mask, "need_weights": self.weights, **self.call}
        output, weights = self.attention(*arguments, **options)
        output = output.transpose(0, 1) if turned else output
        return torch.cat([output, weights], dim=-1) if self.weights else output


def attention_cases() -> Iterator[Case]:
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    added = torch.arange(25.0).view(5, 5).cos()
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "weights": {"weights": True},
        "weights_unused": {"call": {"need_weights": True}},
        "mask": {"mask": causal},
        "causal": {"mask": causal, "call": {"is_causal": True}},
        "mask_added": {"mask": added, "weights": True},
        "bias_kv": {"add_bias_kv": True},
        "zero_attn": {"add_zero_attn": True},
        "no_bias": {"bias": False},
        "no_bias_weights": {"bias": False, "weights": True, "add_bias_kv": True},
    }
    for number, (name, options) in enumerate(variants.items()):  # the layouts in turn
        build = functools.partial(Attention, batch_first=number % 2 == 0, **options)
        yield Case(f"attention_self_{name}", build, floats(5, 4))
    for first in (True, False):
        layout = "batch_first" if first else "time_first"
        padded = named(query=floats(5, 4), padding=masks(5))
        cross = both(floats(3, 4), floats(5, 4))
        three = both(floats(3, 4), floats(5, 3), floats(5, 6))
        with_weights, without = (functools.partial(Attention, batch_first=first, weights=w) for w in (first, not first))
        yield Case(f"attention_padding_{layout}", with_weights, padded)
        yield Case(f"attention_padding_mask_{layout}", functools.partial(without, mask=causal), padded)
        yield Case(f"attention_cross_{layout}", without, cross)
        yield Case(f"attention_sizes_{layout}", functools.partial(with_weights, kdim=3, vdim=6), three)
        yield Case(f"attention_sizes_no_bias_{layout}", functools.partial(without, kdim=3, vdim=6, bias=False), three)
        yield Case(f"attention_equal_sizes_{layout}", functools.partial(Attention, batch_first=first), floats(4, 4))
    yield Case("attention_latents", latents, floats(5, 4))


def latents() -> nn.Module:
    """Learned queries, the same for every sample."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return m.attention(m.latents[:, None].expand(-1, x.shape[1], -1), x, x)[0].transpose(0, 1)

    return Raw(run, attention=nn.MultiheadAttention(4, 2), latents=(3, 4))


def transformer_cases() -> Iterator[Case]:
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "norm_first": {"norm_first": True},
        "gelu": {"activation": "gelu", "norm_first": True},
        "no_bias": {"bias": False},
    }
    for first in (True, False):
        layout = "batch_first" if first else "time_first"
        dim = 0 if first else 1
        along = floats if first else floats_second
        source, target = along(5, 4), along(3, 4)
        for name, options in list(variants.items())[dim::2]:  # the layouts in turn
            build = functools.partial(transformer, nn.TransformerEncoderLayer, batch_first=first, **options)
            yield Case(f"encoder_layer_{name}_{layout}", build, source, sample_dim=dim)
            build = functools.partial(transformer, nn.TransformerDecoderLayer, batch_first=first, **options)
            yield Case(f"decoder_layer_{name}_{layout}", build, both(target, source), sample_dim=dim)
            build = functools.partial(whole_transformer, batch_first=first, **options)
            yield Case(f"transformer_{name}_{layout}", build, both(source, target), sample_dim=dim)
        yield Case(f"encoder_eval_{layout}", functools.partial(encoder, first), source, sample_dim=dim)
        yield Case(f"decoder_stack_{layout}", functools.partial(decoder, first), both(target, source), sample_dim=dim)
        layer = functools.partial(transformer, nn.TransformerEncoderLayer, batch_first=first)
        yield Case(f"encoder_layer_equal_sizes_{layout}", layer, along(4, 4), sample_dim=dim)
    yield Case("encoder_masked", masked_encoder, named(x=floats(5, 4), padding=masks(5)))
    last = both(second(floats(5, 4)))
    yield Case("encoder_mixed_dims", classifier, last, nn.CrossEntropyLoss(), classes, sample_dim=(1, 0, 0))
    for id, places in (("encoder_tokens", 5), ("encoder_tokens_equal_sizes", 4)):
        yield Case(id, tied_encoder, second(indices(7, places)), time_first_loss, time_first_tokens, 4, (1, 1, 0))


def floats_second(*shape: int) -> Callable[[int], Tensor]:
    return second(floats(*shape))


def transformer(layer: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return layer(4, 2, 6, dropout=0.0, **options)


def whole_transformer(**options: Any) -> nn.Module:
    def run(m: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        return m.inner(source, target, tgt_mask=m.mask, tgt_is_causal=True)

    inner = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, **options)
    return Raw(run, inner=inner, mask=inner.generate_square_subsequent_mask(3))


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=batch_first).eval()


def decoder(batch_first: bool) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 6, batch_first=batch_first), 2).eval()


def masked_encoder() -> nn.Module:
    def run(m: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
        return m.layers(x, mask=m.mask, src_key_padding_mask=padding)

    return Raw(run, layers=encoder(True), mask=torch.ones(5, 5, dtype=torch.bool).triu(1)).eval()


def classifier() -> nn.Module:
    """(T, N, d) to (N, classes)."""
    return Raw(lambda m, x: m.head(m.layers(x)[-1]), layers=encoder(False), head=nn.Linear(4, 3))


def tied_encoder() -> nn.Module:
    """(T, N) to (T, N, tokens), decoded by the embedding."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        return m.layers(m.embedding(x)) @ m.embedding.weight.T

    return Raw(run, layers=encoder(False), embedding=nn.Embedding(7, 4))


def time_first_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.permute(1, 2, 0), target)


def time_first_tokens(output: Tensor) -> Tensor:
    """(N, T)"""
    return tokens(output).T.contiguous()
