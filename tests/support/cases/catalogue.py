"""The catalogue: every case by its id. What a case is says case.py."""

from support.cases import layers, losses, models, raw, refused, sequences, shared
from support.cases.case import Case

PARTS = {"layers": layers, "sequences": sequences, "raw": raw, "shared": shared, "models": models, "losses": losses}
CATALOGUE: dict[str, list[Case]] = {name: list(part.cases()) for name, part in PARTS.items()}
CASES: list[Case] = [case for part in CATALOGUE.values() for case in part]

# Models of which a sample's gradient depends on the others, each with the name of the module that couples them.
REFUSED: list[tuple[Case, str]] = list(refused.batch_statistics())

# Here either the right rows or an exception will do; wrong rows never.
EXACT_OR_REFUSED: list[Case] = list(refused.exact_or_refused())

# Those of which no layer rule explains some parameter: computed exactly all the same, one sample after the other.
WITHOUT_RULE: set[str] = {
    *("bag_sum_frequency", "bag_sum_frequency_offsets", "bag_mean_frequency", "bag_mean_frequency_offsets"),
    *("bag_learned_weights", "instance_norm1d_tracked", "instance_norm2d_tracked", "instance_norm3d_tracked"),
    *("rnn_tanh_learned_state", "rnn_relu_learned_state", "lstm_learned_state", "lstm_projected_learned_state"),
    *("gru_learned_state", "attention_latents", "raw_index", "raw_index_vector", "raw_index_single"),
    *("raw_index_select", "raw_outer", "raw_tensordot", "raw_xlog1py", "raw_distance", "raw_solve"),
    *("custom_function", "custom_function_mixed", "custom_function_on_weight", "conv_transpose2d_padded_beyond"),
}
