// SPDX-License-Identifier: Apache-2.0
// Which calls the Hopper chunk kernel takes, and its launch.
#include "prepare.cuh"
#include "../launch.cuh"
#include "../rule_kernels.h"
#include "kernel.cuh"
#include "takes.h"

#include <algorithm>

namespace gdn::cuda {
namespace {

using namespace chunk_sm90;

// Blocks of the preparation: as many as run side by side.
constexpr int kPrepareBlocks = 4;   // of a multiprocessor

template <class io_t, int kKeyDim>
const char* launch_prepare(const RuleParams& params, void* stream) {
  const int64_t items = num_chunk_rows(params) * params.dims.Hk;
  const int64_t blocks = std::min<int64_t>(items, kPrepareBlocks * num_multiprocessors());
  return launch(prepare_kernel<io_t, kKeyDim>, blocks, kPrepareThreads, sizeof(PrepareMemory<kKeyDim>),
                stream, params);
}

template <class io_t, class out_t, int kKeyDim>
const char* launch_chunk(const RuleParams& params, void* stream) {
  if (const char* error = launch_prepare<io_t, kKeyDim>(params, stream)) return error;
  const int64_t blocks = num_row_blocks(params);
  if (blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  return launch_early(chunk_kernel<io_t, out_t, kKeyDim, NoObserver>, blocks, kThreads, sizeof(SharedMemory<kKeyDim>), stream,
                      params, NoObserver{});
}

template <class io_t, int kKeyDim>
const char* launch_key_dim(const RuleParams& params, void* stream) {
  if (params.out.dtype == DType::kFloat32) return launch_chunk<io_t, float, kKeyDim>(params, stream);
  return launch_chunk<io_t, io_t, kKeyDim>(params, stream);
}

template <class io_t>
const char* launch_dtype(const RuleParams& params, void* stream) {
  return params.dims.K == 64 ? launch_key_dim<io_t, 64>(params, stream) : launch_key_dim<io_t, 128>(params, stream);
}

}  // namespace

bool chunk_sm90_supports(const RuleParams& params) { return takes_call(params) && params.dims.V % kValueTile == 0; }

int64_t chunk_sm90_workspace_bytes(const RuleParams& params) {
  return params.dims.K == 64 ? workspace_bytes<64>(params) : workspace_bytes<128>(params);
}

const char* chunk_sm90_gated_delta_rule(const RuleParams& params, void* stream) {
  if (!chunk_sm90_supports(params)) return "the Hopper chunk kernel does not take these dtypes, dims or strides";
  return params.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(params, stream) : launch_dtype<fp16_t>(params, stream);
}

}  // namespace gdn::cuda
