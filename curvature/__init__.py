"""Second-order information for PyTorch: activations and backprops of every layer, and what follows from them."""

from typing import TYPE_CHECKING

from curvature.lazy import VERSION, on_first_use

if TYPE_CHECKING:
    from curvature.public import *  # noqa: F403

__version__ = VERSION
__getattr__, __dir__ = on_first_use(__name__)
