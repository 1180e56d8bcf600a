"""The public names of `optimizers`, which imports them when one is first used."""

from optimizers.distributed.processes import Distributed
from optimizers.kfac import EKFAC, KFAC
from optimizers.natural_gradient import NaturalGradient
from optimizers.private import Private
from optimizers.steps.rule import Outcome, StepContext, StepRule

__all__ = ["EKFAC", "KFAC", "Distributed", "NaturalGradient", "Outcome", "Private", "StepContext", "StepRule"]
