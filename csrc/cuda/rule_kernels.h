// SPDX-License-Identifier: Apache-2.0
// The kernels of gated_delta_rule, a launcher each. Returns nullptr, or what went wrong.
#pragma once

#include "../common/params.h"

namespace gdn::cuda {

// The exact recurrence, token by token: any call, any arch.
const char* recurrent_gated_delta_rule(const RuleParams& params, void* stream);

// The same for few tokens a sequence, at the speed of reading and writing the state: any arch.
const char* decode_gated_delta_rule(const RuleParams& params, void* stream);
// Whether that kernel takes these lengths, head dims and strides.
bool decode_supports(const RuleParams& params);

}  // namespace gdn::cuda
