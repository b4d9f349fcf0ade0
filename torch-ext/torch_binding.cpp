// SPDX-License-Identifier: Apache-2.0
// The schemas, with what each op writes, and one line per op that ties it to csrc/api. The functions themselves look at
// the device, so both backends register the same ones. (No argument may be called `mode`: torch.compile passes one of its own.)
#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, "
      "Tensor(a!)? state, bool in_place, Tensor(b!) out, float scale, bool use_qk_l2norm, int gate_domain, Tensor? A_log, "
      "Tensor? dt_bias, bool beta_is_raw, bool allow_neg_eigval, int rule_mode, bool is_high_precision, bool may_scan, "
      "Tensor? cu_seqlens, Tensor? slots, Tensor? out_slots, Tensor? has_initial_state, Tensor(c!)? checkpoints, "
      "int checkpoint_every, Tensor? checkpoint_starts) -> ()");
  ops.def(
      "gated_delta_verify(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, Tensor(b!)? ring, "
      "Tensor(c!)? states_out, Tensor(d!) out, float scale, bool use_qk_l2norm, bool gate_is_linear, Tensor? cu_seqlens, "
      "Tensor? slots, Tensor? ring_slots, Tensor? state_table, Tensor? num_accepted) -> ()");
  ops.def(
      "gated_delta_step(Tensor mixed_qkv, Tensor? z, Tensor? a, Tensor b, Tensor(a!) conv_state, Tensor(b!) state, "
      "Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor dt_bias, Tensor norm_weight, Tensor(c!) out, float eps, "
      "float scale, int num_key_heads, bool is_interleaved, bool use_silu, bool norm_before_gate, bool allow_neg_eigval, "
      "Tensor? slots) -> ()");
  ops.def("fold_ring(Tensor(a!) state, Tensor ring, Tensor slots, Tensor ring_slots, Tensor num_accepted) -> ()");
  ops.def("copy_slots(Tensor(a!) pool, Tensor src, Tensor dst) -> ()");
  ops.def("zero_slots(Tensor(a!) pool, Tensor slots) -> ()");
  ops.def("cast_state(Tensor src, Tensor(a!) dst) -> ()");
  ops.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? conv_state, Tensor(b!) out, bool use_silu, "
      "bool write_state, Tensor? cu_seqlens, Tensor? seq_idx, Tensor? slots, Tensor? has_initial_state) -> ()");
  ops.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor(b!) out, "
      "bool use_silu, Tensor? slots) -> ()");
  ops.def(
      "conv_state_write(Tensor x, Tensor(a!) conv_state, Tensor num_accepted, Tensor? slots, Tensor? cu_seqlens, "
      "Tensor? has_initial_state) -> ()");
  ops.def(
      "gated_delta_gates(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) g, Tensor(b!) beta, "
      "bool allow_neg_eigval) -> ()");
  ops.def(
      "rms_norm_gated(Tensor x, Tensor z, Tensor weight, Tensor(a!) out, float eps, bool use_silu, "
      "bool norm_before_gate, int group_size) -> ()");
  ops.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor(a!) q_out, "
      "Tensor(b!) k_out, float eps, bool zero_centered) -> ()");
  ops.def("output_gate(Tensor x, Tensor gate, Tensor(a!) out) -> ()");
}

namespace {

void register_ops(torch::stable::detail::StableLibrary& ops) {
  ops.impl("gated_delta_rule", TORCH_BOX(&gdn::api::gated_delta_rule));
  ops.impl("gated_delta_verify", TORCH_BOX(&gdn::api::gated_delta_verify));
  ops.impl("gated_delta_step", TORCH_BOX(&gdn::api::gated_delta_step));
  ops.impl("fold_ring", TORCH_BOX(&gdn::api::fold_ring));
  ops.impl("copy_slots", TORCH_BOX(&gdn::api::copy_slots));
  ops.impl("zero_slots", TORCH_BOX(&gdn::api::zero_slots));
  ops.impl("cast_state", TORCH_BOX(&gdn::api::cast_state));
  ops.impl("conv_state_write", TORCH_BOX(&gdn::api::conv_state_write));
  ops.impl("causal_conv1d", TORCH_BOX(&gdn::api::causal_conv1d));
  ops.impl("causal_conv1d_update", TORCH_BOX(&gdn::api::causal_conv1d_update));
  ops.impl("gated_delta_gates", TORCH_BOX(&gdn::api::gated_delta_gates));
  ops.impl("rms_norm_gated", TORCH_BOX(&gdn::api::rms_norm_gated));
  ops.impl("qk_norm_rope", TORCH_BOX(&gdn::api::qk_norm_rope));
  ops.impl("output_gate", TORCH_BOX(&gdn::api::output_gate));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { register_ops(ops); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { register_ops(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
