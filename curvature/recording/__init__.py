"""What a forward pass read.

In: a model, and hooks or a context around its forward pass. Out: a `Tape` with one `Use` for each torch function that
received a parameter: its arguments, and the gradient edge at its output where the backprop arrives. Models that
`torch.compile` has compiled run eagerly while they are recorded.
"""

from curvature.recording.autograd_graph import graph_leaves, graph_signature, tape_from_graph
from curvature.recording.eager import force_eager, unwrap_compiled
from curvature.recording.listener import Listener, capture
from curvature.recording.model_call import call, logits, map_tensors, preserve_state, tensors
from curvature.recording.recorder import traceable_body
from curvature.recording.tape import ParameterNode, Tape, Use, is_sharded

__all__ = [
    "force_eager",
    "Listener",
    "ParameterNode",
    "Tape",
    "Use",
    "call",
    "capture",
    "graph_signature",
    "is_sharded",
    "graph_leaves",
    "logits",
    "map_tensors",
    "traceable_body",
    "preserve_state",
    "tape_from_graph",
    "tensors",
    "unwrap_compiled",
]
