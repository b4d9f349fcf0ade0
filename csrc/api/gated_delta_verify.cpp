// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "ring_inputs.h"
#include "rule_inputs.h"

namespace gdn::api {
namespace {

void add_ring(const Checker& check, const Tensor& ring, const OptionalTensor& ring_slots, VerifyParams& params) {
  const Dims& d = params.rule.dims;
  params.ring = ring_view(check, ring, true, d.Hk, d.Hv, d.K, d.V);
  params.ring_rows = ring.size(0);
  params.ring_length = ring.size(2);
  require_pool(check, "ring", ring, ring_slots.has_value(), d.N);
  params.ring_slots = check.index("ring_slots", ring_slots, d.N);
}

// [N, states_length, Hv, K, V]: a view of [token, Hv, K, V] and the stride between sequences.
void add_states_out(const Checker& check, const Tensor& states, VerifyParams& params) {
  const Dims& d = params.rule.dims;
  check.require_dim("states_out", states, 5, "[N, T, Hv, K, V]");
  params.states_length = states.size(1);
  params.states_out = check.written("states_out", states, {d.N, params.states_length, d.Hv, d.K, d.V}, "[N, T, Hv, K, V]");
  params.states_row_stride = states.stride(0);
  require_state_layout(check, "states_out", states, params.states_out, d);
}

}  // namespace

void gated_delta_verify(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, Tensor state,
                        OptionalTensor ring, OptionalTensor states_out, Tensor out, double scale, bool use_qk_l2norm,
                        bool gate_is_linear, OptionalTensor cu_seqlens, OptionalTensor slots, OptionalTensor ring_slots,
                        OptionalTensor state_table, OptionalTensor num_accepted) {
  const Checker check("gated_delta_verify", "q", q);
  VerifyParams params{};
  const GateDomain domain = gate_is_linear ? GateDomain::kLinear : GateDomain::kLog;
  params.rule = rule_params(check, {q, k, v, g, beta, cu_seqlens, out, scale, use_qk_l2norm, domain});
  const Dims& dims = params.rule.dims;
  check.require((ring ? 1 : 0) + (state_table ? 1 : 0) + (states_out ? 1 : 0) == 1,
                "takes one of ring, state_table and states_out");
  check.require(!(slots && num_accepted), "slots and num_accepted both say where a sequence starts, give one of them");
  check.require(state_table || !num_accepted, "num_accepted needs state_table, which is not given");
  check.require(ring || !ring_slots, "ring_slots needs ring, which is not given");
  params.rule.slots = check.index("slots", slots, dims.N);
  params.rule.initial_state = state_view(check, "state", state, !states_out, dims);
  params.rule.pool_in = state.size(0);
  require_pool(check, "state", state, slots || num_accepted, dims.N);
  if (!states_out) {
    params.rule.state = params.rule.initial_state;
    params.rule.pool_out = params.rule.pool_in;
  }
  if (ring) add_ring(check, *ring, ring_slots, params);
  if (state_table) {
    params.state_table = check.table("state_table", *state_table, dims.N);
    params.table_length = state_table->size(1);
    params.num_accepted = check.index("num_accepted", num_accepted, dims.N);
  }
  if (states_out) add_states_out(check, *states_out, params);
  run<VerifyParams, cpu::gated_delta_verify, cuda::gated_delta_verify>(check, params);
}

}  // namespace gdn::api
