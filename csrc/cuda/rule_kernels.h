// SPDX-License-Identifier: Apache-2.0
// The kernels of gated_delta_rule and gated_delta_verify, a launcher each. A launch computes the rows that params.rows names,
// writes their o and states, and leaves all else as it is. Returns nullptr, or what went wrong.
#pragma once

#include "../common/params.h"

namespace gdn::cuda {

// The exact recurrence, token by token: any call, any arch.
const char* recurrent_gated_delta_rule(const RuleParams& params, void* stream);

// The same for few tokens a sequence, at the speed of reading and writing the state: any arch.
const char* decode_gated_delta_rule(const RuleParams& params, void* stream);
// Whether that kernel takes these lengths, head dims and strides.
bool decode_supports(const RuleParams& params);

// The same with what the call keeps of the tokens instead of the state; a row longer than the ring writes its state, slowly.
const char* decode_gated_delta_verify(const VerifyParams& params, void* stream);
// Whether that kernel takes these head dims, strides and dtypes, whatever the lengths.
bool decode_supports(const VerifyParams& params);

// Chunks of 64 tokens on the tensor cores of compute capability 9.0, and only there; params.workspace holds the bytes below.
const char* chunk_sm90_gated_delta_rule(const RuleParams& params, void* stream);
int64_t chunk_sm90_workspace_bytes(const RuleParams& params);
// Whether that kernel takes these dtypes, head dims and strides.
bool chunk_sm90_supports(const RuleParams& params);

// The same by mma.sync, at both precisions: compute capability 8.0 and later.
const char* chunk_mma_gated_delta_rule(const RuleParams& params, void* stream);
int64_t chunk_mma_workspace_bytes(const RuleParams& params);
bool chunk_mma_supports(const RuleParams& params);

}  // namespace gdn::cuda
