// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on a GPU: which kernel computes which rows.
//     recurrent   exact, all of them: the decode kernel where the rows are short on average, else the recurrence; the
//                 two agree bit for bit
//     chunk       the chunk kernel, all of them
//     auto        each row by its own length, so that its bits do not depend on its batch: kFewestChunkTokens and more by
//                 the chunk kernel, shorter ones exactly
// A call that no chunk kernel takes (dtype, head dims, strides, device, high precision) is exact in every mode.
#include "launch.cuh"
#include "ops.h"
#include "rule_kernels.h"

namespace gdn::cuda {
namespace {

// The crossover of auto; the docstring of gated_delta_rule names it too, and a test holds the two together. One row of 16/48
// heads on an H200: of 32 tokens 15.6 us by the recurrence and 16.4 by the chunk kernel, of 48 tokens 18.8 and 16.7.
constexpr int64_t kFewestChunkTokens = 48;

// Whether the chunk kernel computes rows of this call.
bool takes_chunks(const RuleParams& params) {
  const bool has_long_rows = params.mode == RuleMode::kChunk || params.dims.T >= kFewestChunkTokens;
  return params.mode != RuleMode::kRecurrent && has_long_rows && is_hopper() && chunk_sm90_supports(params) &&
         !params.is_high_precision;
}

const char* launch_exact(const RuleParams& params, void* stream) {
  return decode_supports(params) ? decode_gated_delta_rule(params, stream) : recurrent_gated_delta_rule(params, stream);
}

// Lengths on the device: both kernels, each leaves the other's rows alone.
const char* launch_both(RuleParams params, void* stream) {
  params.rows = {kFewestChunkTokens, INT64_MAX};
  if (const char* error = chunk_sm90_gated_delta_rule(params, stream)) return error;
  params.rows = {0, kFewestChunkTokens - 1};
  return launch_exact(params, stream);
}

}  // namespace

int64_t gated_delta_rule_workspace(const RuleParams& params) {
  return takes_chunks(params) ? chunk_sm90_workspace_bytes(params) : 0;
}

const char* gated_delta_rule(const RuleParams& params, void* stream) {
  if (!takes_chunks(params)) return launch_exact(params, stream);
  if (params.mode == RuleMode::kAuto && params.cu_seqlens.given()) return launch_both(params, stream);
  return chunk_sm90_gated_delta_rule(params, stream);
}

}  // namespace gdn::cuda
