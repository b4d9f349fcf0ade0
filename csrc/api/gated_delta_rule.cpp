// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "checks.h"

namespace gdn::api {
namespace {

// [slots, Hv, K, V]; the layout is in the strides, so one of the last two dims has to be contiguous.
View state_view(const Checker& check, const char* name, const Tensor& state, bool is_written, const Dims& dims) {
  check.require_dim(name, state, 4, "[slots, Hv, K, V]");
  const auto sizes = {state.size(0), dims.Hv, dims.K, dims.V};
  const View view = is_written ? check.written(name, state, sizes, "[slots, Hv, K, V]")
                               : check.view(name, state, sizes, "[slots, Hv, K, V]");
  const bool k_first = view.stride[3] == 1 || dims.V == 1, v_first = view.stride[2] == 1 || dims.K == 1;
  check.require(k_first || v_first, name, "contiguous in K or in V (stride 1)", state);
  return view;
}

Dims rule_dims(const Checker& check, const Tensor& q, const Tensor& v, const OptionalTensor& cu_seqlens) {
  check.require_dim("q", q, 4, "[B, T, Hk, K]");
  check.require_dim("v", v, 4, "[B, T, Hv, V]");
  Dims dims{q.size(0), q.size(1), 0, q.size(2), v.size(2), q.size(3), v.size(3)};
  dims.N = num_sequences(check, cu_seqlens, dims.B);
  if (dims.Hk < 1 || dims.Hv < 1 || dims.Hv % dims.Hk != 0) {
    check.require(false, "v must have a multiple of q's heads (Hv % Hk == 0), got " + std::to_string(dims.Hv) +
                             " value heads over " + std::to_string(dims.Hk) + " key heads");
  }
  check.require(dims.K >= 1 && dims.K <= kMaxHeadDim, "q", "of head dim 1 to 256", q);
  check.require(dims.V >= 1 && dims.V <= kMaxHeadDim, "v", "of head dim 1 to 256", v);
  return dims;
}

}  // namespace

void gated_delta_rule(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor initial_state,
                      OptionalTensor state, bool in_place, Tensor out, double scale, bool use_qk_l2norm, bool gate_is_linear,
                      int64_t mode, OptionalTensor cu_seqlens, OptionalTensor slots, OptionalTensor out_slots,
                      OptionalTensor has_initial_state) {
  const Checker check("gated_delta_rule", "q", q);
  const Dims dims = rule_dims(check, q, v, cu_seqlens);
  RuleParams params{};
  params.dims = dims;
  params.q = check.view("q", q, {dims.B, dims.T, dims.Hk, dims.K}, "[B, T, Hk, K]");
  params.k = check.view("k", k, {dims.B, dims.T, dims.Hk, dims.K}, "[B, T, Hk, K]");
  params.v = check.view("v", v, {dims.B, dims.T, dims.Hv, dims.V}, "[B, T, Hv, V]");
  check.require_same_dtype("k", k, "q", q);
  check.require_same_dtype("v", v, "q", q);
  params.g = check.view("g", g, {dims.B, dims.T, dims.Hv}, "[B, T, Hv]");
  params.beta = check.view("beta", beta, {dims.B, dims.T, dims.Hv}, "[B, T, Hv]");
  params.out = check.written("out", out, {dims.B, dims.T, dims.Hv, dims.V}, "[B, T, Hv, V]");
  check.require_apart("out", out, "v", v);

  params.slots = check.index("slots", slots, dims.N);
  params.out_slots = check.index("out_slots", out_slots, dims.N);
  params.cu_seqlens = check.offsets(cu_seqlens, dims.T);
  params.has_initial_state = check.flags("has_initial_state", has_initial_state, dims.N);
  check.require(!in_place || (state && !initial_state), "in_place needs state and no initial_state");
  check.require(!(slots || out_slots) || state || initial_state, "slots needs a state pool, which is not given");
  if (state) {
    params.state = state_view(check, "state", *state, true, dims);
    params.pool_out = state->size(0);
    require_pool(check, "state", *state, slots || out_slots, dims.N);
  }
  if (initial_state) {
    params.initial_state = state_view(check, "initial_state", *initial_state, false, dims);
    params.pool_in = initial_state->size(0);
    require_pool(check, "initial_state", *initial_state, slots.has_value(), dims.N);
  } else if (in_place) {
    params.initial_state = params.state;
    params.pool_in = params.pool_out;
  }
  params.scale = static_cast<float>(scale);
  params.use_qk_l2norm = use_qk_l2norm;
  params.gate_is_linear = gate_is_linear;
  check.require(mode >= 0 && mode <= 2, "mode must be 0 (recurrent), 1 (chunk) or 2 (auto), got " + std::to_string(mode));
  params.mode = static_cast<RuleMode>(mode);
  run<RuleParams, cpu::gated_delta_rule, cuda::gated_delta_rule>(check, params);
}

}  // namespace gdn::api
