"""Second-order optimizers in place of ``torch.optim.SGD``."""

from optimizers.distributed.processes import Distributed
from optimizers.ekfac import EKFAC
from optimizers.kfac import KFAC
from optimizers.natural_gradient import NaturalGradient

__all__ = ["EKFAC", "KFAC", "Distributed", "NaturalGradient"]
