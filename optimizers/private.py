"""Private training: a torch optimizer that steps with clipped, noisy gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from curvature.arguments import check_range
from curvature.gradients import Batch, clipped_gradient
from curvature.losses import resolve
from curvature.recording import warn_once
from optimizers.second_order import SecondOrderOptimizer

WEIGHED = (
    "Private: %s has class weights; a sample counts with its own, over the number of its terms: not divided by the "
    "weights of the whole batch, as in the loss, which would tell who is there"
)


class Private:
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133, algorithm 1) with any torch optimizer: ``step(x, y)``.

    A step puts `curvature.clipped_gradient` of the batch, divided by the expected batch size, into ``.grad`` and lets
    the optimizer step. A batch may be empty, as Poisson sampling makes them: then the step is one of noise. What is
    private about it, and how much, is counted by an accountant, see docs/guides/privacy.md.

    Args:
        optimizer: over all parameters of the model that require a gradient, and no others. Schedulers take this one.
        model: its samples must be independent: BatchNorm in training mode is refused by name at a step.
        loss: a torch loss module or ``loss(output, target) -> scalar``; steps are for its mean over samples, whatever
            its reduction. Under class weights, and where tokens are ignored, a sample counts with ``(1/T) sum_t w_t
            l_t`` over its T terms: as much beside the others as in the loss of the batch, but not divided by the
            weights of all, which would reveal who is in it. Other losses that divide by such weights are logged: make
            them ``(w * l).mean()``.
        max_norm: to which each sample's gradient is clipped, in units of loss / parameter.
        noise: the noise multiplier of the accountants: standard deviation of the noise on the clipped sum, in units of
            ``max_norm``.
        expected_batch_size: the sampling rate times the number of training samples. The number drawn would reveal
            who is in the batch.
        microbatch: samples at a time, which bounds memory; the result is the same.
        generator: for the noise; its state is saved. By default torch's own.
        sample_dim: as for `curvature.per_sample_gradients`.

    Attributes:
        steps: how many were made, for the accountant.

    Raises:
        TypeError: an argument of the wrong kind; the optimizer needs a closure, or looks at the batch itself (`KFAC`).
        ValueError: a number out of its range, or the optimizer has other parameters than the model (one is named).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, loss: Any, *, max_norm: float, noise: float,
        expected_batch_size: float, microbatch: int | None = None, generator: torch.Generator | None = None,
        sample_dim: int | tuple[int, int, int] = 0,
    ) -> None:  # fmt: skip
        _require_optimizer(optimizer)
        _require_same_parameters(optimizer, model)
        for name, value in (("max_norm", max_norm), ("noise", noise), ("expected_batch_size", expected_batch_size)):
            check_range(name, value, 0.0, float("inf"))
            if not value and name != "noise":
                raise ValueError(f"{name}: expected a positive number, found {value}")
        self.optimizer, self.model, self.loss = optimizer, model, loss
        self.max_norm, self.noise, self.expected_batch_size = max_norm, noise, expected_batch_size
        self.microbatch, self.generator, self.sample_dim = microbatch, generator, sample_dim
        self.steps = 0
        self._summed: tuple[Any, Any] | None = None  # a loss over classes, and the same as a sum

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    def step(self, x: Any, y: Any, mask: Tensor | None = None) -> None:
        """One step with a batch; ``mask`` (N,) of bool says which of its samples count.

        The private gradient stays in ``.grad`` until the next step overwrites it.

        Raises:
            ValueError: as for `curvature.clipped_gradient`; nothing is changed then.
        """
        loss, terms = self._own_loss(x, y)
        sums = clipped_gradient(
            self.model, loss, x, y, self.max_norm * terms, noise=self.noise, mask=mask, microbatch=self.microbatch,
            generator=self.generator, sample_dim=self.sample_dim,
        )  # fmt: skip
        named = dict(self.model.named_parameters())
        for name, total in sums.items():
            named[name].grad = total / (self.expected_batch_size * terms)
        self.optimizer.step()
        self.steps += 1

    def _own_loss(self, x: Any, y: Any) -> tuple[Any, float]:
        """A loss that knows nothing of the other samples, and how many times it is what a sample counts."""
        loss = self.loss if isinstance(self.loss, nn.Module) else resolve(self.loss)
        has_classes = isinstance(y, Tensor) and not y.is_floating_point()
        if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss.reduction != "mean" or not has_classes:
            return self.loss, 1.0
        if loss.weight is not None:
            warn_once(WEIGHED, type(loss).__name__, logger="optimizers")
        if self._summed is None or self._summed[0] is not loss:  # one for all steps: what is learnt of it is kept
            self._summed = loss, copy.copy(loss)
            self._summed[1].reduction = "sum"
        count = Batch.of(self.model, loss, x, y, self.sample_dim).count
        return self._summed[1], y.numel() / count if count else 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """For loops that call it; no step needs it."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, the number of steps and the generator's state, if there is a generator.

        Without one, noise comes from torch's random state: to go on exactly, save that too.
        """
        state = None if self.generator is None else self.generator.get_state()
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is of something else, or has a generator's state and this optimizer no generator, or
                the other way round.
        """
        if set(state) != {"optimizer", "steps", "generator"}:
            raise ValueError(f"state_dict: not one of Private, it has {', '.join(map(str, state))}")
        if (state["generator"] is None) != (self.generator is None):
            has = "no generator" if state["generator"] is None else "a generator"
            raise ValueError(f"state_dict: it was saved with {has}; make Private with {has}, too")
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
        if self.generator is not None:
            self.generator.set_state(state["generator"].cpu())

    def __repr__(self) -> str:
        return f"Private({self.optimizer!r}, max_norm={self.max_norm}, noise={self.noise})"


def _require_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, found a {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if isinstance(optimizer, SecondOrderOptimizer):
        raise TypeError(f"optimizer: {name} looks at the batch itself, without noise: its steps are not private")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(f"optimizer: {name} asks for the loss several times in a step; take one that uses .grad alone")


def _require_same_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found a {type(model).__name__}")
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = [name for p, name in trained.items() if all(p is not other for other in given)]
    if missing:
        raise ValueError(
            f"optimizer: it lacks {missing[0]}, which requires a gradient and would count in the norms; give it to the "
            f"optimizer, or freeze it (requires_grad_(False))"
        )
    foreign = [p for p in given if p not in trained]
    if foreign:
        raise ValueError(
            f"optimizer: it has a parameter of shape {tuple(foreign[0].shape)} that is not the model's: its gradient "
            f"would not be private"
        )
