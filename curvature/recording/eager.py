"""Models under ``torch.compile``: the module that the user wrote, and forward passes that have to run uncompiled.

What is recorded is seen by a mode that compiled code does not enter. By ``torch.compiler.set_stance("force_eager")``
compiled modules and functions run as they were written; they stay compiled meanwhile.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch.utils import checkpoint

FORCED = "force_eager"
FUNCTION = "CheckpointFunction"  # what makes a checkpoint reentrant
WRAPPER = "compile_wrapper"  # the function in which torch calls what it has compiled


def unwrap_compiled(model: Any) -> Any:
    """The module that ``torch.compile(module)`` was given; anything else as it is."""
    dynamo = sys.modules.get("torch._dynamo")
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = model._orig_mod
    return model


# Stances that were set here and not undone yet. Contexts need not end in the reverse order of their start: the garbage
# collector may end one of them while another is on.
ACTIVE_STANCES: list[Any] = []


class force_eager:
    """A context in which everything compiled runs as it was written; may be entered again while it is on.

    Where nothing was compiled in the process so far, nothing is done.
    """

    def __init__(self) -> None:
        self.forced: list[Any] = []

    def __enter__(self) -> force_eager:
        if "torch._dynamo" in sys.modules:
            self.forced.append(torch.compiler.set_stance(FORCED))
            ACTIVE_STANCES.append(self.forced[-1])
        else:
            self.forced.append(None)
        return self

    def __exit__(self, *exception: object) -> None:
        forced = self.forced.pop()
        if forced is None:
            return
        ACTIVE_STANCES.remove(forced)
        if forced.stance is _stance():  # somebody else's is not ours to end
            forced.__exit__(None, None, None)
        for later in ACTIVE_STANCES:
            if later.prev is forced.stance:
                later.prev = forced.prev


class force_eager_nonreentrant(force_eager):
    """`force_eager` with non-reentrant checkpointing: the reentrant form runs the forward pass without gradients."""

    replaced: ClassVar[list[Any]] = []  # by each context that is on; the first is torch's

    def __enter__(self) -> force_eager_nonreentrant:
        super().__enter__()
        self.replaced.append(getattr(checkpoint, FUNCTION))
        setattr(checkpoint, FUNCTION, NotReentrant)
        return self

    def __exit__(self, *exception: object) -> None:
        function = self.replaced.pop()
        if not self.replaced:
            setattr(checkpoint, FUNCTION, function)
        super().__exit__(*exception)


class NotReentrant:
    """In place of ``torch.utils.checkpoint.CheckpointFunction``."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _stance() -> Any:
    """What is set now; torch tells only whoever sets another."""
    other = torch.compiler.set_stance()
    other.__exit__(None, None, None)
    return other.prev


class EagerRequests:
    """Those that need the next forward pass to run uncompiled. As long as there are any, all of them do.

    Models call themselves, or are called by functions that are compiled as a whole: there is no place to decide it
    call by call.
    """

    def __init__(self) -> None:
        self.owners: set[int] = set()
        self.eagerly = force_eager()

    def put(self, owner: object, wanted: bool) -> None:
        was = bool(self.owners)
        (self.owners.add if wanted else self.owners.discard)(id(owner))
        if self.owners and not was:
            self.eagerly.__enter__()
        elif was and not self.owners:
            self.eagerly.__exit__()


EAGER_REQUESTS = EagerRequests()


def is_within_compiled() -> bool:
    """Whether something compiled is on the stack, be it forced to run as it was written."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != WRAPPER:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
