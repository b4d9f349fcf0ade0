// SPDX-License-Identifier: Apache-2.0
//
// Second pass of the two-level scan: the state at the start of each segment, from segment to segment,
//     S_(j+1) = A_j S_j + B_j
// in fp32 (fma, sums in a fixed order). starts[j + 1] holds B_j before and S_(j+1) afterwards; starts[1] is right already.
// Grid    x: sequence (slowest), value head, 8 columns of V (fastest).
// Block   4 kKeyDim threads: thread (k, part) sums a quarter of the columns of A for row k of S and all 8 columns.
// Reads   transitions, starts once for each block.   Writes   starts.
#pragma once

#include "places.cuh"

namespace gdn::cuda::chunk_sm90 {

constexpr int kCombineColumns = 8, kCombineParts = 4;

template <int kKeyDim>
struct CombineMemory {
  float s[kKeyDim][kCombineColumns];                        // S_j, of the block's columns
  float sums[kCombineParts][kCombineColumns][kKeyDim];
};

// A thread's part of A^T of a segment: row k of A, kKeyDim / 4 columns from `first` on.
template <int kKeyDim>
__device__ __forceinline__ void load_transition(const float* gmem, int first, int k, float (&a)[kKeyDim / kCombineParts]) {
#pragma unroll
  for (int i = 0; i < kKeyDim / kCombineParts; ++i) a[i] = gmem[(first + i) * kKeyDim + k];
}

template <int kKeyDim>
__global__ void __launch_bounds__(kCombineParts * kKeyDim) combine_kernel(const __grid_constant__ RuleParams p) {
  constexpr int kPart = kKeyDim / kCombineParts, kOwn = kCombineColumns / kCombineParts;
  extern __shared__ __align__(1024) char smem_bytes[];
  CombineMemory<kKeyDim>& smem = *reinterpret_cast<CombineMemory<kKeyDim>*>(smem_bytes);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const uint32_t tiles = static_cast<uint32_t>(p.dims.V) / kCombineColumns, heads = static_cast<uint32_t>(p.dims.Hv);
  const uint32_t rest = blockIdx.x / tiles;
  const int64_t column = static_cast<int64_t>(blockIdx.x - rest * tiles) * kCombineColumns;
  const int64_t n = rest / heads, head = rest % heads;
  if (!takes_row(p, n)) return;
  const Span span = sequence_span(p.cu_seqlens, n, p.dims.T);
  const int64_t count = segments_of_length(p, span.length), first_row = first_segment_row(p, n, span.first);
  if (count < 3) return;
  const int k = threadIdx.x % kKeyDim, part = threadIdx.x / kKeyDim;
  auto start = [&](int64_t j, int c) { return start_of<kKeyDim>(p, first_row + j, head) + (column + c) * kKeyDim + k; };
  float a[kPart], own[kOwn];   // own: columns kOwn part .. of row k of B_j, then of S_(j+1)
  load_transition<kKeyDim>(transition_of<kKeyDim>(p, first_row + 1, head), part * kPart, k, a);
#pragma unroll
  for (int c = 0; c < kOwn; ++c) own[c] = *start(1, kOwn * part + c);
#pragma unroll 1
  for (int64_t j = 1; j + 1 < count; ++j) {
#pragma unroll
    for (int c = 0; c < kOwn; ++c) smem.s[k][kOwn * part + c] = own[c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kOwn; ++c) own[c] = *start(j + 1, kOwn * part + c);
    float sums[kCombineColumns] = {};
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
#pragma unroll
      for (int c = 0; c < kCombineColumns; ++c) sums[c] = fmaf(a[i], smem.s[part * kPart + i][c], sums[c]);
    }
    if (j + 2 < count) load_transition<kKeyDim>(transition_of<kKeyDim>(p, first_row + j + 1, head), part * kPart, k, a);
#pragma unroll
    for (int c = 0; c < kCombineColumns; ++c) smem.sums[part][c][k] = sums[c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
#pragma unroll
      for (int other = 0; other < kCombineParts; ++other) own[c] += smem.sums[other][kOwn * part + c][k];
      *start(j + 1, kOwn * part + c) = own[c];
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
