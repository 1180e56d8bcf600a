"""The processes that train a model together; looked up again when torch.distributed is initialised or ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from curvature.preconditioners import CurvatureStore
from optimizers.distributed.processes import Distributed, Processes
from optimizers.distributed.statistics import Statistics
from optimizers.distributed.workers import Workers
from optimizers.recording.backward_passes import Passes


@dataclass(frozen=True)
class Team:
    """The processes, which of them decomposes which block, and the all-reduce of their statistics."""

    processes: Processes
    workers: Workers
    statistics: Statistics


class Teams:
    """Looks up the team that trains the model now; `passes` has what this process has measured."""

    def __init__(self, config: Distributed, device: torch.device, store: CurvatureStore, passes: Passes) -> None:
        self.config, self.device, self.store, self.passes = config, device, store, passes
        self.known: Team | None = None

    def current(self) -> Team:
        is_alone = not (dist.is_available() and dist.is_initialized())
        if self.known is None or self.known.processes.is_alone != is_alone:
            processes = Processes(self.config, self.device)
            workers = Workers(processes, self.config.gradient_worker_fraction)
            self.known = Team(processes, workers, Statistics(processes, self.passes, self.store))
        return self.known

    def discard(self) -> None:
        """Forget what this process has measured since the last step."""
        if self.known is not None:
            self.known.statistics.discard()

    def move(self, device: torch.device) -> None:
        """The model is on another device now."""
        if device != self.device:
            self.device, self.known = device, None

    def forget_inverses(self) -> None:
        """After a state was loaded: the inverses of other processes are no longer valid."""
        if self.known is not None:
            self.known.workers.made.clear()
