"""Contexts in which torch functions run in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from curvature.functional.attention import attention
from curvature.functional.bags import embedding_bag
from curvature.functional.plain_forms import traceable_body


class Formulas(TorchFunctionMode):
    """A context in which the functions in `formulas` run as what stands for them there."""

    formulas: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.formulas.get(func, func)(*args, **(kwargs or {}))


class AttentionInBlocks(Formulas):
    """A context in which attention holds no scores, that of ``nn.MultiheadAttention`` among it."""

    formulas: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {F.scaled_dot_product_attention: attention}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = traceable_body(func) if func is F.multi_head_attention_forward else None
        if body is None:
            return super().__torch_function__(func, types, args, kwargs)
        with self:
            return body(*args, **(kwargs or {}))


class TwiceDifferentiable(AttentionInBlocks):
    """A context in which bags of embeddings have second derivatives, and attention has them block by block."""

    formulas: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {
        **AttentionInBlocks.formulas,
        F.embedding_bag: embedding_bag,
    }
