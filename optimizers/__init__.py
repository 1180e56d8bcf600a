"""Second-order optimizers in place of ``torch.optim.SGD``."""

from optimizers.kfac import EKFAC, KFAC
from optimizers.natural_gradient import NaturalGradient

__all__ = ["EKFAC", "KFAC", "NaturalGradient"]
