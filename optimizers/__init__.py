"""Second-order optimizers in place of ``torch.optim.SGD``."""

from optimizers.kfac import EKFAC, KFAC

__all__ = ["EKFAC", "KFAC"]
