// SPDX-License-Identifier: Apache-2.0
#include "../../torch-ext/torch_binding.h"
#include "../cuda/ops.h"
#include "rule_inputs.h"

namespace gdn::api {
namespace {

constexpr int64_t kCheckpointUnit = 64;   // the chunk of mode "chunk", which has states nowhere else

void add_checkpoints(const Checker& check, const Tensor& checkpoints, int64_t every, const OptionalTensor& starts,
                     RuleParams& params) {
  if (every < kCheckpointUnit || every % kCheckpointUnit != 0) {
    check.require(false, "checkpoint_every must be a multiple of 64, got " + std::to_string(every));
  }
  check.require(starts || !params.cu_seqlens.given(), "checkpoint_starts is needed with cu_seqlens, it is not given");
  params.checkpoints = state_view(check, "checkpoints", checkpoints, true, params.dims);
  params.total_checkpoints = checkpoints.size(0);
  params.checkpoint_every = every;
  params.checkpoint_starts = check.index("checkpoint_starts", starts, params.dims.N);
}

// What turns a and b into the gates of the rule.
void add_raw_gates(const Checker& check, const OptionalTensor& A_log, const OptionalTensor& dt_bias, RuleParams& params) {
  const bool is_raw = params.gate_domain == GateDomain::kRaw;
  check.require(is_raw || !A_log, "A_log is for raw gates, g holds decays");
  check.require(is_raw || !dt_bias, "dt_bias is for raw gates, g holds decays");
  check.require(!is_raw || A_log, "A_log must be given with raw gates, got None");
  check.require(!is_raw || params.g.given(), "g must be given with raw gates, got None");
  check.require(params.beta_is_raw || !params.allow_neg_eigval, "allow_neg_eigval is for raw gates, beta has had its sigmoid");
  params.A_log = check.view("A_log", A_log, {params.dims.Hv}, "[Hv]");
  params.dt_bias = check.view("dt_bias", dt_bias, {params.dims.Hv}, "[Hv]");
}

GateDomain gate_domain_of(const Checker& check, int64_t domain) {
  const bool is_known = domain >= 0 && domain <= 2;
  check.require(is_known, "gate_domain must be 0 (log), 1 (linear) or 2 (raw), got " + std::to_string(domain));
  return static_cast<GateDomain>(domain);
}

}  // namespace

void gated_delta_rule(Tensor q, Tensor k, Tensor v, OptionalTensor g, OptionalTensor beta, OptionalTensor initial_state,
                      OptionalTensor state, bool in_place, Tensor out, double scale, bool use_qk_l2norm, int64_t gate_domain,
                      OptionalTensor A_log, OptionalTensor dt_bias, bool beta_is_raw, bool allow_neg_eigval, int64_t mode,
                      bool is_high_precision, bool may_scan, OptionalTensor cu_seqlens, OptionalTensor slots,
                      OptionalTensor out_slots, OptionalTensor has_initial_state, OptionalTensor checkpoints,
                      int64_t checkpoint_every, OptionalTensor checkpoint_starts) {
  const Checker check("gated_delta_rule", "q", q);
  const GateDomain domain = gate_domain_of(check, gate_domain);
  RuleParams params = rule_params(check, {q, k, v, g, beta, cu_seqlens, out, scale, use_qk_l2norm, domain});
  params.beta_is_raw = beta_is_raw;
  params.allow_neg_eigval = allow_neg_eigval;
  add_raw_gates(check, A_log, dt_bias, params);
  const Dims& dims = params.dims;
  params.slots = check.index("slots", slots, dims.N);
  params.out_slots = check.index("out_slots", out_slots, dims.N);
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
  check.require(checkpoints || !checkpoint_starts, "checkpoint_starts needs checkpoints, which is not given");
  if (checkpoints) add_checkpoints(check, *checkpoints, checkpoint_every, checkpoint_starts, params);
  check.require(mode >= 0 && mode <= 2, "mode must be 0 (recurrent), 1 (chunk) or 2 (auto), got " + std::to_string(mode));
  params.mode = static_cast<RuleMode>(mode);
  params.is_high_precision = is_high_precision;
  params.may_scan = may_scan;
  const OptionalTensor workspace = add_workspace<RuleParams, cuda::gated_delta_rule_workspace>(check, q, params);
  run<RuleParams, cpu::gated_delta_rule, cuda::gated_delta_rule>(check, params);
}

}  // namespace gdn::api
