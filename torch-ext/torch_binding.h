// SPDX-License-Identifier: Apache-2.0
// What the binding registers: one function per op, defined in csrc/api. Each writes into tensors that it is given.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

namespace gdn::api {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// in_place: the sequences start from what `state` holds. Otherwise they start from initial_state (zero without one) and
// `state` is only written. mode: 0 recurrent, 1 chunk, 2 auto, as RuleMode in csrc/common/params.h. is_high_precision,
// may_scan: of the chunk kernels, precision="high" and scan="auto". gate_domain: what g holds, 0 the log decay, 1 the decay,
// 2 a of gated_delta_gates with A_log and dt_bias, as GateDomain in csrc/common/gates.h; beta_is_raw: beta holds its b.
void gated_delta_rule(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor initial_state,
                      OptionalTensor state, bool in_place, Tensor out, double scale, bool use_qk_l2norm, int64_t gate_domain,
                      OptionalTensor A_log, OptionalTensor dt_bias, bool beta_is_raw, bool allow_neg_eigval, int64_t mode,
                      bool is_high_precision, bool may_scan, OptionalTensor cu_seqlens, OptionalTensor slots,
                      OptionalTensor out_slots, OptionalTensor has_initial_state, OptionalTensor checkpoints,
                      int64_t checkpoint_every, OptionalTensor checkpoint_starts);

void gated_delta_verify(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, Tensor state,
                        OptionalTensor ring, OptionalTensor states_out, Tensor out, double scale, bool use_qk_l2norm,
                        bool gate_is_linear, OptionalTensor cu_seqlens, OptionalTensor slots, OptionalTensor ring_slots,
                        OptionalTensor state_table, OptionalTensor num_accepted);

void gated_delta_step(Tensor mixed_qkv, OptionalTensor z, OptionalTensor a, Tensor b, Tensor conv_state, Tensor state,
                      Tensor conv_weight, OptionalTensor conv_bias, Tensor A_log, Tensor dt_bias, Tensor norm_weight,
                      Tensor out, double eps, double scale, int64_t num_key_heads, bool is_interleaved, bool use_silu,
                      bool norm_before_gate, bool allow_neg_eigval, OptionalTensor slots);

void fold_ring(Tensor state, Tensor ring, Tensor slots, Tensor ring_slots, Tensor num_accepted);

void copy_slots(Tensor pool, Tensor src, Tensor dst);

void zero_slots(Tensor pool, Tensor slots);

void cast_state(Tensor src, Tensor dst);

void causal_conv1d(Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor conv_state, Tensor out, bool use_silu,
                   bool write_state, OptionalTensor cu_seqlens, OptionalTensor seq_idx, OptionalTensor slots,
                   OptionalTensor has_initial_state);

void causal_conv1d_update(Tensor x, Tensor conv_state, Tensor weight, OptionalTensor bias, Tensor out, bool use_silu,
                          OptionalTensor slots);

void conv_state_write(Tensor x, Tensor conv_state, Tensor num_accepted, OptionalTensor slots, OptionalTensor cu_seqlens,
                      OptionalTensor has_initial_state);

void gated_delta_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor g, Tensor beta, bool allow_neg_eigval);

void rms_norm_gated(Tensor x, Tensor z, Tensor weight, Tensor out, double eps, bool use_silu, bool norm_before_gate,
                    int64_t group_size);

void qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor q_out, Tensor k_out,
                  double eps, bool zero_centered);

void output_gate(Tensor x, Tensor gate, Tensor out);

}  // namespace gdn::api
