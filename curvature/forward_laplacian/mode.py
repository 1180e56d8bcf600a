"""The mode that sends torch functions of jets to their rules."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from curvature.forward_laplacian.function_kinds import METADATA
from curvature.forward_laplacian.jet import RULES, NoRule, QuadraticForm, jets_in, name_of
from curvature.functional import FORMULAS, traceable_body


class Taylor(TorchFunctionMode):
    """Functions of jets run by their rule, or as their formula; all others run as they are.

    Raises:
        NoRule: a function of jets has neither.
    """

    def __init__(self, form: QuadraticForm) -> None:
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
        formula = FORMULAS.get(func) or traceable_body(func)
        if formula is None:
            raise NoRule(name_of(func))
        with self:
            return formula(*args, **kwargs)
