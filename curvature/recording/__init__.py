"""What a forward pass read.

In: a model, and hooks or a context around its forward pass. Out: a `Tape` with one `Use` for each torch function that
received a parameter: its arguments, and the gradient edge at its output where the backprop arrives. Models that
`torch.compile` has compiled run eagerly while they are recorded.
"""

from curvature.recording.autograd_graph import identity_of, leaves_of, tape_of
from curvature.recording.eager import Eagerly, unwrapped
from curvature.recording.listener import Listener, capture
from curvature.recording.model_call import call, logits, mapped, preserved, tensors
from curvature.recording.recorder import opened
from curvature.recording.tape import Node, Tape, Use, is_sharded

__all__ = [
    "Eagerly",
    "Listener",
    "Node",
    "Tape",
    "Use",
    "call",
    "capture",
    "identity_of",
    "is_sharded",
    "leaves_of",
    "logits",
    "mapped",
    "opened",
    "preserved",
    "tape_of",
    "tensors",
    "unwrapped",
]
