"""Second-order optimizers in place of ``torch.optim.SGD``.

In: a model, and a training loop that calls ``step``. Out: updated parameters. Each optimizer is composed of a recorder
(`recording`), a store of curvature (`curvature.preconditioners`), a `preconditioner` and a step rule (`steps`).
"""

from typing import TYPE_CHECKING

from curvature.lazy import VERSION, on_first_use

if TYPE_CHECKING:
    from optimizers.public import *  # noqa: F403

__version__ = VERSION
__getattr__, __dir__ = on_first_use(__name__)
