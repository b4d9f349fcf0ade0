// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on a GPU: which kernel computes which rows.
//     recurrent   exact, all of them: the decode kernel where the rows are short on average, else the recurrence; the
//                 two agree bit for bit
//     chunk       a chunk kernel, all of them: Hopper's where it takes the call, else that by mma.sync, which alone has high
//                 precision
//     auto        each row by its own length, so that its bits do not depend on its batch: kFewestChunkTokens and more by
//                 that chunk kernel, shorter ones exactly; of high precision kFewestHighTokens
// A call that no chunk kernel takes (dtype, head dims, strides, device) is exact in every mode.
#include "launch.cuh"
#include "ops.h"
#include "rule_kernels.h"

namespace gdn::cuda {
namespace {

// The crossover of auto; the docstring of gated_delta_rule names it too, and a test holds the two together. One row of 16/48
// heads on an H200: up to 64 tokens take the chunk kernels 14.7 us, 16 tokens the recurrence 12.4 and 32 tokens 15.7. 8 rows of
// 32 tokens: 40 and 86 us; of 16 tokens 38.7 and 56.7, but a row's length alone decides.
constexpr int64_t kFewestChunkTokens = 32;
// The same of high precision: of 256 tokens 54 us by the chunk kernel and 56 by the recurrence.
constexpr int64_t kFewestHighTokens = 256;

int64_t fewest_chunk_tokens(const RuleParams& params) {
  return params.is_high_precision ? kFewestHighTokens : kFewestChunkTokens;
}

enum class ChunkKernel { kNone, kHopper, kPortable };

// Which chunk kernel computes rows of this call.
ChunkKernel pick(const RuleParams& params) {
  const bool has_long_rows = params.mode == RuleMode::kChunk || params.dims.T >= fewest_chunk_tokens(params);
  if (params.mode == RuleMode::kRecurrent || !has_long_rows) return ChunkKernel::kNone;
  if (params.dims.T == 0 || params.dims.N == 0) return ChunkKernel::kNone;   // nothing to prepare, and so to wait for
  if (is_hopper() && !params.is_high_precision && chunk_sm90_supports(params)) return ChunkKernel::kHopper;
  return chunk_mma_supports(params) ? ChunkKernel::kPortable : ChunkKernel::kNone;
}

const char* launch_chunks(ChunkKernel kernel, const RuleParams& params, void* stream) {
  return kernel == ChunkKernel::kHopper ? chunk_sm90_gated_delta_rule(params, stream)
                                        : chunk_mma_gated_delta_rule(params, stream);
}

const char* launch_exact(const RuleParams& params, void* stream) {
  return decode_supports(params) ? decode_gated_delta_rule(params, stream) : recurrent_gated_delta_rule(params, stream);
}

// Lengths on the device: both kernels, each leaves the other's rows alone.
bool takes_both(const RuleParams& params) { return params.mode == RuleMode::kAuto && params.cu_seqlens.given(); }

// The call as a chunk kernel gets it; its workspace too is of this one, since rows decide how the call is done.
RuleParams call_of_chunks(RuleParams params) {
  if (takes_both(params)) params.rows = {fewest_chunk_tokens(params), INT64_MAX};
  return params;
}
RuleParams call_of_others(RuleParams params) {
  params.rows = {0, fewest_chunk_tokens(params) - 1};
  return params;
}

}  // namespace

int64_t gated_delta_rule_workspace(const RuleParams& params) {
  const ChunkKernel kernel = pick(params);
  if (kernel == ChunkKernel::kNone) return 0;
  const RuleParams call = call_of_chunks(params);
  return kernel == ChunkKernel::kHopper ? chunk_sm90_workspace_bytes(call) : chunk_mma_workspace_bytes(call);
}

const char* gated_delta_rule(const RuleParams& params, void* stream) {
  const ChunkKernel kernel = pick(params);
  if (kernel == ChunkKernel::kNone) return launch_exact(params, stream);
  if (const char* error = launch_chunks(kernel, call_of_chunks(params), stream)) return error;
  return takes_both(params) ? launch_exact(call_of_others(params), stream) : nullptr;
}

}  // namespace gdn::cuda
