"""The package `optimizers` by a name that nothing hides, for projects with a file or folder `optimizers` of their own.

In: nothing. Out: the public names of `optimizers`, the same objects as there.
"""

from typing import TYPE_CHECKING, Any

from curvature.lazy import VERSION, import_beside

if TYPE_CHECKING:
    from optimizers import EKFAC as EKFAC
    from optimizers import KFAC as KFAC
    from optimizers import Distributed as Distributed
    from optimizers import NaturalGradient as NaturalGradient
    from optimizers import Outcome as Outcome
    from optimizers import Private as Private
    from optimizers import StepContext as StepContext
    from optimizers import StepRule as StepRule

__version__ = VERSION
_package = import_beside("optimizers")


def __getattr__(name: str) -> Any:
    if name == "__all__" or name in _package.__all__:
        return getattr(_package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_package.__all__})
