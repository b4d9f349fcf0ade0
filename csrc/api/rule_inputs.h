// SPDX-License-Identifier: Apache-2.0
// What the ops that run the rule over tokens check alike: q, k, v, gates, out, and states.
#pragma once

#include "checks.h"

namespace gdn::api {

// The part of a call that gated_delta_rule and gated_delta_verify share.
struct RuleInputs {
  const Tensor &q, &k, &v;
  const OptionalTensor &g, &beta, &cu_seqlens;
  const Tensor& out;
  double scale;
  bool use_qk_l2norm;
  GateDomain gate_domain;
};

// Dims, inputs, out, cu_seqlens and the numbers of the params, checked; the caller adds the states.
RuleParams rule_params(const Checker& check, const RuleInputs& inputs);

// A pool of states [slots, Hv, K, V]; the layout is in the strides, so one of the last two dims has to be contiguous.
View state_view(const Checker& check, const char* name, const Tensor& state, bool is_written, const Dims& dims);

// The last part of it, for a view [.., Hv, K, V] that was made otherwise.
void require_state_layout(const Checker& check, const char* name, const Tensor& state, const View& view, const Dims& dims);

}  // namespace gdn::api
