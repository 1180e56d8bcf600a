"""What a forward pass read.

A call of a model under a `RecordingMode` gives its `Tape` one `Use` for each torch function that received a parameter:
the function, its arguments, and the gradient edge at its output, where the backprop arrives. `capture` does so by hooks
on the model; `tape_from_graph` makes the same of a graph that exists already. Models under ``torch.compile`` run
eagerly while they are recorded, and `preserve_state` leaves buffers and random state as they were.
"""

from curvature.recording.autograd_graph import (
    graph_bytes,
    graph_dtypes,
    graph_leaves,
    require_exact_derivatives,
    tape_from_graph,
)
from curvature.recording.listener import Listener, capture
from curvature.recording.model_call import (
    FunctionModel,
    ModelState,
    RandomState,
    as_arguments,
    call_model,
    call_with,
    facts_of,
    force_eager,
    fresh_random_numbers,
    in_turn,
    is_within,
    logits,
    map_tensors,
    moved,
    preserve_state,
    trained_parameters,
    unwrap_compiled,
    warn_once,
)
from curvature.recording.tape import ParameterNode, RecordingMode, Tape, Use, is_sharded, stream_backprops, tensors_in

__all__ = [
    "FunctionModel", "Listener", "ModelState", "ParameterNode", "RandomState", "RecordingMode", "Tape", "Use",
    "as_arguments", "call_model", "call_with", "capture", "facts_of", "force_eager", "fresh_random_numbers",
    "graph_bytes", "graph_dtypes", "graph_leaves", "in_turn", "is_sharded", "is_within", "logits", "map_tensors",
    "moved", "preserve_state", "require_exact_derivatives", "stream_backprops", "tape_from_graph", "tensors_in",
    "trained_parameters", "unwrap_compiled", "warn_once",
]  # fmt: skip
