// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on a GPU: which kernel takes the call. They agree bit for bit.
#include "ops.h"
#include "rule_kernels.h"

namespace gdn::cuda {

const char* gated_delta_rule(const RuleParams& params, void* stream) {
  return decode_supports(params) ? decode_gated_delta_rule(params, stream) : recurrent_gated_delta_rule(params, stream);
}

}  // namespace gdn::cuda
