"""What constructors check before anything is made of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from curvature.losses import Injection, empirical, isotropic
from optimizers.arguments import check_arguments, check_whole
from optimizers.distributed.processes import Distributed, unwrap_data_parallel
from optimizers.steps.rule import StepRule


def checked_model(
    owner: str, model: Any, arguments: Mapping[str, Any], why_replicated: str
) -> tuple[nn.Module, Distributed]:
    """Check all arguments; returns the user's own module and the processes that train it.

    Args:
        owner: name of the optimizer.
        why_replicated: why every process needs all inverses; "" if it does not.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; names it.
    """
    check_arguments(model, dict(arguments))
    for name in ("factor_every", "decompose_every"):
        if arguments[name] is not None:
            check_whole(name, arguments[name], 1, 10**9)
    check_whole("seed", arguments["seed"], -(2**63), 2**64 - 1)
    inject, loss, rule = arguments["inject"], arguments["loss"], arguments["step_rule"]
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise TypeError(f"loss: expected a loss module as in nn.CrossEntropyLoss(), or a function, found {loss!r:.80}")
    if not isinstance(inject, Injection):
        raise TypeError(f"inject: expected curvature.isotropic() or another injection, found {inject!r:.80}")
    if loss is None and not isinstance(inject, type(isotropic()) | type(empirical())):
        raise ValueError(f"loss: {inject!r} needs the loss module, as in KFAC(model, loss=nn.CrossEntropyLoss())")
    if rule is not None and not isinstance(rule, StepRule):
        raise TypeError(f"step_rule: expected an optimizers.StepRule, found {rule!r:.80}")
    if rule is not None and arguments["adaptive"]:
        raise ValueError("step_rule: adaptive=True is a step rule, too; choose one of the two")
    model, config = unwrap_data_parallel(model, arguments["distributed"])
    if why_replicated and config.gradient_worker_fraction < 1:
        raise ValueError(f"gradient_worker_fraction: expected 1, {owner} {why_replicated}")
    return model, config


def rebuild(kind: Any, model: nn.Module, arguments: Any, groups: Any, defaults: Any, state: dict[str, Any]) -> Any:
    """An optimizer from what a copy or pickle of it holds."""
    new = kind(model, **arguments)
    new.param_groups, new.defaults = groups, defaults
    new.load_state_dict(state)
    return new
