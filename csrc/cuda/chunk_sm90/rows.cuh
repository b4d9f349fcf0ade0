// SPDX-License-Identifier: Apache-2.0
// Which rows the blocks of a chunk kernel compute, one value head's 64 columns of V each, and the zeros where no sequence is.
#pragma once

#include <algorithm>

#include "config.h"

namespace gdn::cuda::chunk_sm90 {

// The index-th of the rows that this launch computes, counted from 0; N + 1 if there are fewer. By each warp for itself.
__device__ __forceinline__ int64_t find_row(const RuleParams& p, int64_t index) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t first = 0; first <= p.dims.N; first += 32) {
    const bool is_ours = first + lane <= p.dims.N && takes_row(p, first + lane);
    const unsigned ours = __ballot_sync(0xffffffffu, is_ours);
    if (index < __popc(ours)) {
      const bool is_it = is_ours && __popc(ours & ((1u << lane) - 1)) == index;
      return first + __ffs(static_cast<int>(__ballot_sync(0xffffffffu, is_it))) - 1;
    }
    index -= __popc(ours);
  }
  return p.dims.N + 1;
}

// Sequences are those of the grid in order, or, where the grid has fewer than there are, those that the launch computes.
__device__ __forceinline__ Work work_of_block(const RuleParams& p) {
  const int64_t tiles = ceil_div(p.dims.V, kValueTile), rest = blockIdx.x / tiles, head = rest % p.dims.Hv;
  const int64_t rows = gridDim.x / (tiles * p.dims.Hv), index = rest / p.dims.Hv;
  const int64_t n = rows < num_rows(p) ? find_row(p, index) : index;
  return {n, key_head(head, p.dims.Hk, p.dims.Hv), head, blockIdx.x % tiles * kValueTile};
}

// Writes zero for tokens [first, last) of batch row `batch`, the block's head and columns.
__device__ __forceinline__ void write_zeros(const RuleParams& p, const Work& work, int64_t batch, int64_t first,
                                            int64_t last) {
  for (int64_t idx = threadIdx.x; idx < (last - first) * kValueTile; idx += blockDim.x) {
    const int64_t column = work.column + idx % kValueTile;
    if (column < p.dims.V) p.out.store(p.out.offset(batch, first + idx / kValueTile, work.head, column), 0.0f);
  }
}

// Zeros where no sequence is: the row behind the last one, and rows whose slot is padding. Whether the block's row is such.
__device__ __forceinline__ bool write_padding(const RuleParams& p, const Work& work) {
  if (work.n == p.dims.N) {   // tokens outside all sequences
    write_zeros(p, work, 0, 0, sequence_span(p.cu_seqlens, 0, p.dims.T).first);
    const int64_t end = p.cu_seqlens.at(p.dims.N);
    write_zeros(p, work, 0, end < 0 ? 0 : end, p.dims.T);
    return true;
  }
  const int64_t pool = p.initial_state.given() ? p.pool_in : p.pool_out;
  if (!p.slots.given() || slot_of_row(p.slots, work.n, pool) >= 0) return false;
  const Span span = sequence_span(p.cu_seqlens, work.n, p.dims.T);
  write_zeros(p, work, span.batch, span.first, span.first + span.length);
  return true;
}

// Blocks of a launch. Those that find nothing to do are not free: with a least length, few rows have it.
inline int64_t num_row_blocks(const RuleParams& p) {
  const int64_t rows =
      p.rows.min_length < 1 ? num_rows(p) : std::min(num_rows(p), p.dims.B * p.dims.T / p.rows.min_length);
  return rows * p.dims.Hv * ceil_div(p.dims.V, kValueTile);
}

}  // namespace gdn::cuda::chunk_sm90
