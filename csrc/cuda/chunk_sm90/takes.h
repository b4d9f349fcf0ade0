// SPDX-License-Identifier: Apache-2.0
// Which calls a chunk kernel can take, whatever its columns of V, and how many of their rows a launch has tasks for.
#pragma once

#include <algorithm>

#include "prepared.h"

namespace gdn::cuda::chunk_sm90 {

// Rows of 16-byte pieces: unit stride in the head dim, every other stride that is used a multiple of 8 elements, an aligned
// base. A dim of one element may have any stride.
inline bool has_aligned_rows(const View& view, const Dims& dims, int64_t heads) {
  return view.stride[3] == 1 && (view.stride[0] % 8 == 0 || dims.B == 1) && (view.stride[1] % 8 == 0 || dims.T == 1) &&
         (view.stride[2] % 8 == 0 || heads == 1) && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
}

// Rows that a launch has blocks or tasks for. What finds nothing to do is not free: with a least length, few rows have it.
inline int64_t rows_to_launch(const RuleParams& p) {
  return p.rows.min_length < 1 ? num_rows(p) : std::min(num_rows(p), p.dims.B * p.dims.T / p.rows.min_length);
}

// The kernels count tokens in 32 bits, those of chunks of the tasks before (kChunkCycle) and of the chunks that they look ahead
// to (transfer.cuh) as well.
constexpr int64_t kTokensAhead = 16 * kChunk;

inline bool takes_call(const RuleParams& params) {
  const Dims& dims = params.dims;
  const DType io = params.q.dtype, out = params.out.dtype;
  if (io == DType::kFloat32 || params.k.dtype != io || params.v.dtype != io) return false;
  if (out != io && out != DType::kFloat32) return false;
  if ((dims.K != 64 && dims.K != 128) || dims.T >= (int64_t{1} << 31) - kTokensAhead) return false;
  if (num_chunk_rows(params) * dims.Hk >= int64_t{1} << 31) return false;
  const bool out_rows = out == DType::kFloat32 ? params.out.stride[3] == 1 : has_aligned_rows(params.out, dims, dims.Hv);
  return out_rows && has_aligned_rows(params.q, dims, dims.Hk) && has_aligned_rows(params.k, dims, dims.Hk) &&
         has_aligned_rows(params.v, dims, dims.Hv);
}

}  // namespace gdn::cuda::chunk_sm90
