"""Contexts in which everything compiled runs as it was written."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch.utils import checkpoint

from curvature.recording.model_call import force_eager, force_eager_nonreentrant

pytestmark = pytest.mark.fast


def stance() -> str:
    other = torch.compiler.set_stance()
    other.__exit__(None, None, None)
    return other.prev.stance


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str)
def test_contexts_end_in_any_order(order: tuple[int, ...]) -> None:
    """The garbage collector ends that of an optimizer while another's is on."""
    function = checkpoint.CheckpointFunction
    contexts = [force_eager_nonreentrant(), force_eager(), force_eager_nonreentrant()]
    for context in contexts:
        context.__enter__()
    for k in order:
        assert stance() == "force_eager"
        contexts[k].__exit__(None, None, None)
    assert stance() == "default" and checkpoint.CheckpointFunction is function


def test_a_context_within_another() -> None:
    with force_eager_nonreentrant():
        with force_eager_nonreentrant():
            assert stance() == "force_eager"
        assert stance() == "force_eager"
    assert stance() == "default"


def test_the_stance_of_the_user_stays() -> None:
    context = force_eager()
    context.__enter__()
    with torch.compiler.set_stance("eager_on_recompile"):
        context.__exit__(None, None, None)
        assert stance() == "eager_on_recompile"
    torch.compiler.set_stance()
