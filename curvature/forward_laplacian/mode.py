"""The mode that sends functions of jets to their rules."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from curvature.forward_laplacian.function_kinds import METADATA
from curvature.forward_laplacian.jet import RULES, Form, NoRule, jets_in, name_of
from curvature.functional import FORMULAS
from curvature.recording import traceable_body


class Taylor(TorchFunctionMode):
    """Functions of jets run by their rules, others as they are.

    Raises:
        NoRule: where there is none.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        jets = list(jets_in(args))
        if kwargs:
            jets += jets_in(tuple(kwargs.values()))
        if not jets:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() and func not in METADATA:
            raise NoRule(f"{name_of(func)} with gradients off, as in a custom autograd function")
        if kwargs.get("out") is not None:
            raise NoRule(f"{name_of(func)} with out=")
        rule = RULES.get(func)
        if rule is not None:
            return rule(self.form, func, jets, args, kwargs)
        written = FORMULAS.get(func) or traceable_body(func)
        if written is None:
            raise NoRule(name_of(func))
        with self:
            return written(*args, **kwargs)
