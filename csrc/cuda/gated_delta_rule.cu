// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule on a GPU: which kernel computes which rows.
//     recurrent   exact, all of them: the decode kernel where the rows are short on average, else the recurrence; the
//                 two agree bit for bit
//     chunk       a chunk kernel, all of them: Hopper's where it takes the call, else that by mma.sync, which alone has high
//                 precision
//     auto        each row by its own length, so that its bits do not depend on its batch: kFewestChunkTokens and more by
//                 that chunk kernel, shorter ones exactly; of high precision kFewestHighTokens
// A call that no chunk kernel takes (dtype, head dims, strides, device) is exact in every mode.
// Raw gates are made in the kernels, or, where the decode kernel is to have them, by that of gated_delta_gates before.
#include "launch.cuh"
#include "ops.h"
#include "rule_kernels.h"

namespace gdn::cuda {
namespace {

// The crossover of auto; the docstring of gated_delta_rule names it too, and a test holds the two together. One row of 16/48
// heads on an H200 (sources 99c49a7): up to 64 tokens take the chunk kernels 15.0 to 15.5 us, 16 tokens the recurrence 12.4 and
// 32 tokens 15.9. 8 rows of 32 tokens: 42 and 86 us; of 16 tokens 41 and 57, but a row's length alone decides.
constexpr int64_t kFewestChunkTokens = 32;
// The same of high precision: of 256 tokens 54 us by the chunk kernel (an earlier run) and 63 by the recurrence.
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

int64_t bytes_of_chunks(const RuleParams& params) {
  const ChunkKernel kernel = pick(params);
  if (kernel == ChunkKernel::kNone) return 0;
  const RuleParams call = call_of_chunks(params);
  return kernel == ChunkKernel::kHopper ? chunk_sm90_workspace_bytes(call) : chunk_mma_workspace_bytes(call);
}

// The call with the gates that are made of its raw ones, [B, T, Hv] each, in the workspace behind what the chunk kernel has.
int64_t elements_of_gates(const RuleParams& params) { return params.dims.B * params.dims.T * params.dims.Hv; }
int64_t place_of_gates(const RuleParams& params) { return ceil_div(bytes_of_chunks(params), 16) * 16; }
RuleParams with_gates(RuleParams params) {
  const Dims& dims = params.dims;
  float* const g = reinterpret_cast<float*>(static_cast<char*>(params.workspace) + place_of_gates(params));
  params.g = {g, DType::kFloat32, {dims.T * dims.Hv, dims.Hv, 1, 0}};
  params.beta = params.g;
  params.beta.data = g + elements_of_gates(params);
  params.gate_domain = GateDomain::kLog;
  params.beta_is_raw = false;
  return params;
}

// Whether gates are made before anything else: for the decode kernel, which takes no raw ones.
bool makes_gates(const RuleParams& params) {
  const bool has_all = params.dt_bias.given() && params.beta.given();   // which gated_delta_gates needs
  if (params.gate_domain != GateDomain::kRaw || !params.beta_is_raw || !has_all) return false;
  const bool has_exact_rows = pick(params) == ChunkKernel::kNone || takes_both(params);
  return has_exact_rows && decode_supports(with_gates(params));
}
const char* make_gates(const RuleParams& raw, const RuleParams& made, void* stream) {
  const Dims& dims = raw.dims;
  const GatesParams gates = {dims.B,    dims.T,      dims.Hv, raw.g,     raw.beta,
                             raw.A_log, raw.dt_bias, made.g,  made.beta, raw.allow_neg_eigval};
  return gated_delta_gates(gates, stream);
}

}  // namespace

int64_t gated_delta_rule_workspace(const RuleParams& params) {
  if (!makes_gates(params)) return bytes_of_chunks(params);
  return place_of_gates(params) + 2 * elements_of_gates(params) * static_cast<int64_t>(sizeof(float));
}

const char* gated_delta_rule(const RuleParams& call, void* stream) {
  RuleParams params = call;
  if (makes_gates(call)) {
    params = with_gates(call);
    if (const char* error = make_gates(call, params, stream)) return error;
  }
  const ChunkKernel kernel = pick(params);
  if (kernel == ChunkKernel::kNone) return launch_exact(params, stream);
  if (const char* error = launch_chunks(kernel, call_of_chunks(params), stream)) return error;
  return takes_both(params) ? launch_exact(call_of_others(params), stream) : nullptr;
}

}  // namespace gdn::cuda
