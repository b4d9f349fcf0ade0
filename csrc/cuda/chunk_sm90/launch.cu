// SPDX-License-Identifier: Apache-2.0
// Which calls the Hopper chunk kernel takes, and its launch.
#include <algorithm>

#include "../launch.cuh"
#include "../rule_kernels.h"
#include "kernel.cuh"

namespace gdn::cuda {
namespace {

using namespace chunk_sm90;

// Rows of 16-byte pieces: unit stride in the head dim, every other stride that is used a multiple of 8 elements, an aligned
// base. A dim of one element may have any stride.
bool has_aligned_rows(const View& view, const Dims& dims, int64_t heads) {
  return view.stride[3] == 1 && (view.stride[0] % 8 == 0 || dims.B == 1) && (view.stride[1] % 8 == 0 || dims.T == 1) &&
         (view.stride[2] % 8 == 0 || heads == 1) && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

template <class io_t, class out_t, int kKeyDim>
const char* launch_chunk(const RuleParams& params, void* stream) {
  // A block takes a multiprocessor, so those that find nothing to do are not free: with a least length, few rows have it.
  const int64_t rows = params.rows.min_length < 1
                           ? num_rows(params)
                           : std::min(num_rows(params), params.dims.B * params.dims.T / params.rows.min_length);
  const int64_t blocks = rows * params.dims.Hv * (params.dims.V / kValueTile);
  if (blocks > kMaxBlocks) return "more than 2^31 - 1 blocks";
  return launch_clusters(chunk_kernel<io_t, out_t, kKeyDim, NoObserver>, kCluster, blocks, kThreads,
                         sizeof(SharedMemory<kKeyDim>), stream, params, NoObserver{});
}

template <class io_t>
const char* launch_dtype(const RuleParams& params, void* stream) {
  if (params.out.dtype == DType::kFloat32) return launch_chunk<io_t, float, 128>(params, stream);
  return launch_chunk<io_t, io_t, 128>(params, stream);
}

}  // namespace

bool chunk_sm90_supports(const RuleParams& params) {
  const Dims& dims = params.dims;
  const DType io = params.q.dtype, out = params.out.dtype;
  if (io == DType::kFloat32 || params.k.dtype != io || params.v.dtype != io) return false;
  if (out != io && out != DType::kFloat32) return false;
  if (dims.K != 128 || dims.V % (kCluster * kValueTile) != 0 || dims.T >= (int64_t{1} << 31) - kChunk) return false;
  const bool out_rows = out == DType::kFloat32 ? params.out.stride[3] == 1 : has_aligned_rows(params.out, dims, dims.Hv);
  return out_rows && has_aligned_rows(params.q, dims, dims.Hk) && has_aligned_rows(params.k, dims, dims.Hk) &&
         has_aligned_rows(params.v, dims, dims.Hv);
}

const char* chunk_sm90_gated_delta_rule(const RuleParams& params, void* stream) {
  if (!chunk_sm90_supports(params)) return "the Hopper chunk kernel does not take these dtypes, dims or strides";
  return params.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(params, stream) : launch_dtype<fp16_t>(params, stream);
}

}  // namespace gdn::cuda
