// SPDX-License-Identifier: Apache-2.0
// Which rows the blocks compute, one value head's 64 columns of V each.
#pragma once

#include "../chunk_sm90/padding.cuh"

namespace gdn::cuda::chunk_mma {

using chunk_sm90::kValueTile;

// What a block works on: one value head's columns column .. column + 63 of sequence n; N: the tokens outside all sequences.
struct Work {
  int64_t n, key_head, head, column;
};

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

}  // namespace gdn::cuda::chunk_mma
