"""Second-order optimizers in place of ``torch.optim.SGD``.

In: a model, and a training loop that calls ``step``. Out: updated parameters. Each optimizer is composed of a recorder
(`recording`), a store of curvature (`curvature.preconditioners`), a `preconditioner` and a step rule (`steps`).
"""

from optimizers.distributed.processes import Distributed
from optimizers.kfac import EKFAC, KFAC
from optimizers.natural_gradient import NaturalGradient
from optimizers.steps.rule import Outcome, StepContext, StepRule

__all__ = ["EKFAC", "KFAC", "Distributed", "NaturalGradient", "Outcome", "StepContext", "StepRule"]
