"""Second-order optimizers in place of ``torch.optim.SGD``."""

from optimizers.kfac import KFAC

__all__ = ["KFAC"]
