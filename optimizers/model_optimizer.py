"""Parameter groups, names and history: what all optimizers of a whole model share."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from curvature.arguments import check_range
from curvature.recording import unwrap_compiled
from optimizers.monitor import Monitor

LOG = logging.getLogger(__name__)
Made = TypeVar("Made", bound="ModelOptimizer")
RANGES = (  # of options and arguments: the end is not in the range where it is infinite, or so marked
    ("lr", 0.0, math.inf, False),
    ("momentum", 0.0, 1.0, True),
    ("weight_decay", 0.0, math.inf, False),
    ("damping", 0.0, math.inf, False),
    ("factor_decay", 0.0, 1.0, True),
)
OPTIONAL = "damping", "momentum", "weight_decay"  # may be None
ELSEWHERE = {  # arguments of torch's optimizers, and what has their place here
    "betas": "see momentum", "nesterov": "see momentum", "dampening": "see momentum", "eps": "see damping",
    "params": "pass the model", "alpha": "see factor_decay", "etas": "step sizes are found", "rho": "see momentum",
    "learning_rate": "see lr",
} | dict.fromkeys(
    ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "centered",
     "lr_decay", "momentum_decay", "step_sizes", "initial_accumulator_value"), "leave it out",
)  # fmt: skip


class ModelOptimizer(torch.optim.Optimizer):
    """Trains all parameters of a model that require a gradient; frozen ones are taken too, for they may be thawed."""

    def __new__(cls: type[Made], *args: Any, **options: Any) -> Made:
        """Refuse arguments that there are not, in the name of this class, saying what has the place of torch's."""
        signature = inspect.signature(cls.__init__)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for name in options.keys() - signature.parameters.keys():
            if takes_any and name not in ELSEWHERE:
                continue
            near = difflib.get_close_matches(name, signature.parameters, n=1) or [f"help({cls.__name__})"]
            raise TypeError(f"{name}: {cls.__name__} has no {name}: {ELSEWHERE.get(name, f'see {near[0]}')}")
        try:
            signature.bind(None, *args, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None
        return super().__new__(cls)

    def __init__(self, model: nn.Module, options: dict[str, Any], groups: Iterable[dict[str, Any]] = ()) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("model: no parameter requires a gradient")
        for name, p in model.named_parameters():
            if p.is_complex():
                raise ValueError(f"{name}: complex parameters are not supported, found {p.dtype}; keep two real ones")
        self.model = unwrap_compiled(model)
        self.monitor = Monitor()
        self._names: dict[int, str] = {}
        self._unknown: set[str] = set()  # names that a warning was given for
        groups = [parameter_group(group) for group in groups]
        chosen = {id(p) for group in groups for p in group["params"]}
        others = [p for p in model.parameters() if id(p) not in chosen]
        super().__init__([{"params": others}, *groups] if others else groups, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model, as for any optimizer of torch.

        Raises:
            TypeError: not a dict with parameters; an option of the wrong type.
            ValueError: a parameter does not belong to the model; an option is out of range.
        """
        param_group = parameter_group(param_group)
        self._find_names([p for p in param_group["params"] if isinstance(p, Tensor)])
        super().add_param_group(param_group)

    # -- parameters by name

    def trained(self) -> dict[str, Tensor]:
        """Parameters of the groups that require a gradient now, by name."""
        names = self.names()
        every = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        trained = {names[id(p)]: p for p in every}
        if len(trained) < len(every):  # those that have left the model, and their names to others
            ids = {id(p) for p in every}
            trained |= {name: p for name, p in self.model.named_parameters() if id(p) in ids}
        return trained

    def names(self) -> dict[int, str]:
        """Names by id; ValueError where the loop has put a parameter into a group that is none of the model's."""
        every = [p for group in self.param_groups for p in group["params"]]
        if not self._names.keys() >= set(map(id, every)):
            self._find_names(every)
        return self._names

    def _find_names(self, parameters: Iterable[Tensor]) -> None:
        """Learn the names that parameters of the model have now; ValueError where one of these is none of them."""
        self._names |= {id(p): name for name, p in self.model.named_parameters()}
        for p in parameters:
            if id(p) not in self._names:
                raise ValueError(
                    f"params: a parameter of shape {tuple(p.shape)} is none of the model's that the optimizer was "
                    "given; give the optimizer a module that holds them all"
                )

    def warn_of_unknown_parameters(self) -> None:
        """Log parameters of the model that have a gradient and are in no group, such as those of a replaced head."""
        known = {id(p) for group in self.param_groups for p in group["params"]}
        unknown = {name for name, p in self.model.named_parameters() if p.grad is not None and id(p) not in known}
        if new := sorted(unknown - self._unknown):
            LOG.warning(
                "%s: not trained, since the optimizer was made before they were in the model: %s; make it after the "
                "last change of the model, or use add_param_group", type(self).__name__, ", ".join(new),
            )  # fmt: skip
            self._unknown |= unknown

    def name_of(self, p: Tensor) -> str:
        return self._names.get(id(p)) or self.names()[id(p)]

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in self.model.named_parameters()}

    # -- the run

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.monitor.steps

    @property
    def skipped(self) -> int:
        """Batches left out so far, because the loss or a gradient was not finite."""
        return self.monitor.skipped

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict of plain numbers for each of the last 10,000 steps, for `curvature.plots.training`."""
        return self.monitor.history()

    def summary(self) -> str:
        """One line on the last step and the run, to print while training."""
        return self.monitor.summary()


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Refuse numbers out of their range, those in a parameter group as well as arguments."""
    for name, low, high, open_end in RANGES:
        if type(value := arguments.get(name)) is float and low <= value < high:
            continue
        if name in arguments and not (arguments[name] is None and name in OPTIONAL):
            check_range(name, arguments[name], low, high, open_end)


def parameter_group(group: Any) -> dict[str, Any]:
    """The group, checked, with a list of its parameters without their names: these are the model's."""
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f'param_group: expected a dict with "params", found {group!r:.80}')
    check_numbers(group)
    given = group["params"]
    given = [given] if isinstance(given, Tensor) else list(given)
    return group | {"params": [entry[1] if isinstance(entry, tuple) else entry for entry in given]}


def shared_option(options: Mapping[str, Mapping[str, Any]], name: str, who: str = "all parameters") -> Any:
    """The value of an option that these parameters must share; raises where the parameter groups differ in it."""
    values = list(dict.fromkeys(group[name] for group in options.values()))
    if len(values) > 1:
        raise ValueError(f"{name}: {who} are solved for together, found {values} in the parameter groups")
    return values[0]


def check_trained(names: Iterable[str], trained: Mapping[str, Tensor]) -> None:
    """Refuse a parameter that has a gradient and is in no parameter group; by name."""
    left = sorted(set(names) - trained.keys())
    if left:
        raise ValueError(
            f"{left[0]} requires a gradient but is in no parameter group of the optimizer; use add_param_group"
        )


def require_one_device(owner: str, trained: Mapping[str, Tensor]) -> None:
    """Refuse parameters on several devices; names one of each."""
    name_by_device = {p.device: name for name, p in trained.items()}
    if len(name_by_device) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in name_by_device.items())
        raise NotImplementedError(
            f"{owner}.step: parameters are on several devices ({places}), which several processes do not take; move "
            "the model of each process to one device, or train it in a single process"
        )
