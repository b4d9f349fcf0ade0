# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of Qwen3.5-class hybrid models, exact and fast, on CPU and CUDA.

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

The state S lives in a tensor of the caller and is updated in place: [N, Hv, K, V], or a pool of slots. Around the rule
stand the causal convolution, the gates and the gated norm of a layer, and `layers` holds the modules that
`kernels.kernelize` puts into transformers models. `reference` has a plain torch version of every op.
"""

from . import layers
from .attention import output_gate, qk_norm_rope
from .conv import causal_conv1d, causal_conv1d_update, conv_state_write
from .emit import emit_step_program
from .gates import gated_delta_gates
from .norm import rms_norm_gated
from .pool import cast_state, copy_slots, zero_slots
from .rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, gated_delta_rule, new_state
from .speculative import fold_ring, gated_delta_verify, new_ring, ring_record_elements
from .step import gated_delta_step

__all__ = [
    "gated_delta_rule",
    "gated_delta_step",
    "new_state",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d",
    "causal_conv1d_update",
    "conv_state_write",
    "gated_delta_gates",
    "rms_norm_gated",
    "qk_norm_rope",
    "output_gate",
    "gated_delta_verify",
    "fold_ring",
    "new_ring",
    "ring_record_elements",
    "copy_slots",
    "zero_slots",
    "cast_state",
    "emit_step_program",
    "layers",
]
