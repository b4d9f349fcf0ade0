// SPDX-License-Identifier: Apache-2.0
// Which calls the mma.sync chunk kernel takes, and its launch.
#include "../chunk_sm90/takes.h"
#include "../launch.cuh"
#include "../rule_kernels.h"
#include "kernel.cuh"
#include "prepare_high.cuh"

#include <algorithm>

namespace gdn::cuda {
namespace {

using namespace chunk_mma;

constexpr int64_t kColumnsOfWarp = 16;

// The preparation of chunk_sm90 as this file's section of the build compiles it, a kernel of its own.
struct Portable {
  static constexpr int kBlocks = 3;
  static constexpr bool kHasQueue = false;
  static constexpr bool kHasWgmma = false;
};

template <class io_t, int kKeyDim, class Solved>
const char* launch_prepare(const RuleParams& params, void* stream) {
  const int64_t items = num_chunk_rows(params) * params.dims.Hk;
  if constexpr (kParts<Solved> == 2) {
    const int64_t blocks = std::min<int64_t>(items, kHighBlocks * num_multiprocessors());
    return launch(prepare_high_kernel<io_t, kKeyDim>, blocks, kPrepareThreads, sizeof(HighPrepareMemory<kKeyDim>), stream,
                  params);
  } else {
    const int64_t blocks = std::min<int64_t>(items, Portable::kBlocks * num_multiprocessors());
    return launch(chunk_sm90::prepare_kernel<io_t, kKeyDim, Portable>, blocks, kPrepareThreads,
                  sizeof(chunk_sm90::PrepareMemory<kKeyDim>), stream, params);
  }
}

template <class io_t, class out_t, int kKeyDim, class Solved>
const char* launch_carry(const RuleParams& params, void* stream) {
  const int64_t blocks = chunk_sm90::rows_to_launch(params) * params.dims.Hv * ceil_div(params.dims.V, kValueTile);
  if (blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  // Not early: blocks of both kernels fit on one multiprocessor, and side by side they take longer than one after the other.
  return launch(carry_kernel<io_t, out_t, kKeyDim, Solved>, blocks, kThreads, sizeof(SharedMemory<kKeyDim, Solved>), stream,
                params);
}

template <class io_t, int kKeyDim, class Solved>
const char* launch_chunks(const RuleParams& params, void* stream) {
  if (const char* error = launch_prepare<io_t, kKeyDim, Solved>(params, stream)) return error;
  if (params.out.dtype == DType::kFloat32) return launch_carry<io_t, float, kKeyDim, Solved>(params, stream);
  return launch_carry<io_t, io_t, kKeyDim, Solved>(params, stream);
}

template <class io_t, int kKeyDim>
const char* launch_precision(const RuleParams& params, void* stream) {
  return params.is_high_precision ? launch_chunks<io_t, kKeyDim, HighSolved>(params, stream)
                                  : launch_chunks<io_t, kKeyDim, Solved>(params, stream);
}

template <class io_t>
const char* launch_dtype(const RuleParams& params, void* stream) {
  return params.dims.K == 64 ? launch_precision<io_t, 64>(params, stream) : launch_precision<io_t, 128>(params, stream);
}

template <int kKeyDim>
int64_t bytes_of(const RuleParams& params) {
  return params.is_high_precision ? prepared_bytes<kKeyDim, HighSolved>(params) : prepared_bytes<kKeyDim>(params);
}

}  // namespace

bool chunk_mma_supports(const RuleParams& params) {
  return chunk_sm90::takes_call(params) && params.dims.V % kColumnsOfWarp == 0;
}

int64_t chunk_mma_workspace_bytes(const RuleParams& params) {
  return params.dims.K == 64 ? bytes_of<64>(params) : bytes_of<128>(params);
}

const char* chunk_mma_gated_delta_rule(const RuleParams& params, void* stream) {
  if (!chunk_mma_supports(params)) return "the mma.sync chunk kernel does not take these dtypes, dims or strides";
  return params.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(params, stream) : launch_dtype<fp16_t>(params, stream);
}

}  // namespace gdn::cuda
