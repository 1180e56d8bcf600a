"""What all optimizers of a model share: its parameters by name, the course of the run, checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from curvature.recording import unwrap_compiled
from optimizers.arguments import check_numbers
from optimizers.monitor import EVENTS, Health


class ModelOptimizer(torch.optim.Optimizer):
    """Trains every parameter of a model that requires a gradient; `options` are those of a parameter group.

    Raises:
        TypeError: `model` is no module.
        ValueError: none of its parameters requires a gradient, or one is complex.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("model: no parameter requires a gradient")
        for name, p in model.named_parameters():
            if p.is_complex():
                raise ValueError(f"{name}: complex parameters are not supported, found {p.dtype}; keep two real ones")
        self.model = unwrap_compiled(model)
        self._names: dict[int, str] = {}
        super().__init__(list(model.parameters()), options)  # frozen ones too: they may be thawed
        self.health = Health()
        self._steps = self._skipped = 0
        # of a last step that the host does not know of whether it was taken: how to ask, and what was before
        self._open: tuple[Callable[[], bool], Any] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimizer; all parameters are to be the model's.

        Raises:
            TypeError: not a dict with parameters; an option of the wrong type.
            ValueError: a parameter is none of the model's: there is no curvature for it; an option is out of range.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f'param_group: expected a dict with "params", found {param_group!r:.80}')
        check_numbers(param_group)
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        for entry in given:
            p = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(p, Tensor) and id(p) not in self._names:
                raise ValueError(
                    f"params: a parameter of shape {tuple(p.shape)} is none of the model's that the optimizer was "
                    "given; give the optimizer a module that holds them all"
                )
        super().add_param_group(param_group | {"params": given})

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(p.shape) for name, p in self.model.named_parameters()}

    def _check_shapes(self, found: dict[str, list[int]]) -> None:
        """Refuse the state of an optimizer of another model."""
        own = self._shapes()
        for name in [*own, *found]:
            there, here = (shapes.get(name, "nowhere") for shapes in (found, own))
            if there != here:
                raise ValueError(f"state_dict: of another model; {name} has shape {there} there and {here} here")

    def _trained(self) -> dict[str, Tensor]:
        """Parameters by name that require a gradient now."""
        return {self._names[id(p)]: p for group in self.param_groups for p in group["params"] if p.requires_grad}

    def _there(self) -> dict[str, nn.Parameter]:
        """Parameters of the model that are trained, by the names that they have now.

        Others stand in for them during `torch.func.functional_call`.
        """
        now = dict(self.model.named_parameters())
        self._names |= {id(p): name for name, p in now.items() if id(p) in self._names}
        given = {self._names[id(p)] for group in self.param_groups for p in group["params"]}
        return {name: p for name, p in now.items() if name in given and p.requires_grad}

    def _options(self) -> dict[str, dict[str, Any]]:
        """Groups by name of their parameters; what a scheduler keeps as a tensor is a number here."""
        found: dict[str, dict[str, Any]] = {}
        for group in self.param_groups:
            plain = {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            found |= dict.fromkeys([self._names[id(p)] for p in group["params"]], plain)
        return found

    def _shared(self, name: str) -> Any:
        """An option of which there can be one only."""
        options = [group[name] for group in self.param_groups]
        found = list(dict.fromkeys(float(value) if isinstance(value, Tensor) else value for value in options))
        if len(found) > 1:
            raise ValueError(f"{name}: all parameters are solved for together, found {found} in the parameter groups")
        return found[0]

    def _check_trained(self, names: Iterable[str]) -> None:
        left = sorted(set(names) - self._trained().keys())
        if left:
            raise ValueError(
                f"{left[0]} requires a gradient but is in no parameter group of the optimizer; use add_param_group"
            )

    @property
    def steps(self) -> int:
        """Taken so far."""
        self._settle()
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value

    @property
    def skipped(self) -> int:
        """Batches that were left out."""
        self._settle()
        return self._skipped

    @skipped.setter
    def skipped(self, value: int) -> None:
        self._skipped = value

    def _settle(self) -> None:
        """Ask whether the last step was one, and if not, count it as skipped."""
        if self._open is None:
            return
        (was_taken, before), self._open = self._open, None
        if not was_taken():
            self._take_back(before)
            self._steps -= 1
            self._skipped += 1
            self.health.entries[-1] = {"step": self._steps, "accepted": False}

    def _take_back(self, before: Any) -> None:
        """Restore what the host keeps beside the tensors, which the device has left as they were."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """One dict of plain numbers for each of the last 10,000 steps, for `curvature.plots.training`."""
        self._settle()
        return self.health.history()

    def stats(self) -> dict[str, Any]:
        """How the run goes: the last step's numbers, counts of events, seconds by part."""
        last = self.history[-1] if self.health.entries else {}
        counts = {name: self.health.counts[name] for name in ("rollbacks", "failures", *EVENTS)}
        own = {"steps": self.steps, "skipped": self.skipped, **counts}
        return own | last | {"seconds_in": dict(self.health.seconds)}

    def summary(self) -> str:
        """One line on the last step and the run, to print while training."""
        last = self.history[-1] if self.health.entries else {}
        shown = [f"{k} {last[k]:.3g}" for k in ("loss", "damping", "ratio", "step_size") if last.get(k) is not None]
        own = [f"step {self.steps}", *shown, f"{self.health.counts['rollbacks']} rollbacks", f"{self.skipped} skipped"]
        parts = " ".join(f"{k} {v:.1f} s" for k, v in self.health.seconds.items())
        return ", ".join([*own, parts] if parts else own)
