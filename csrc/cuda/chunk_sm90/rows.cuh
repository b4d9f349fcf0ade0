// SPDX-License-Identifier: Apache-2.0
// Which row, or which segment of a row, a block carries the state through.
#pragma once

#include "../ptx/pdl.cuh"
#include "config.h"
#include "segments.h"

namespace gdn::cuda::chunk_sm90 {

// T fits 32 bits (takes.h).
__device__ __forceinline__ int length_of_row(const RuleParams& p, int64_t n) {
  return n < p.dims.N ? static_cast<int>(sequence_span(p.cu_seqlens, n, p.dims.T).length) : 0;
}

// The segment at a segment row of ragged input. By each warp for itself.
__device__ __forceinline__ Segment find_ragged_segment(const RuleParams& p, int64_t row) {
  const int lane = threadIdx.x % 32;
  auto first_row = [&](int64_t n) {
    const int64_t first = n < p.dims.N ? sequence_span(p.cu_seqlens, n, p.dims.T).first : p.dims.T;
    return first_segment_row(p, n, first);
  };
  int64_t n = -1;   // the last row that starts here or before
#pragma unroll 1
  for (int64_t base = 0; base <= p.dims.N; base += 32) {
    n += __popc(__ballot_sync(0xffffffffu, base + lane <= p.dims.N && first_row(base + lane) <= row));
  }
  const Segment none = {p.dims.N + 1, 0, 1, row};
  if (n < 0) return none;
  const int64_t cuts = segments_of_length(p, length_of_row(p, n)), idx = row - first_row(n);
  const Segment found = {n, idx, cuts > 1 ? cuts : 1, row};
  return idx >= 0 && idx < found.count ? found : none;
}

// The index-th segment of a pass (segments.h). Ragged input has places for more than there are; what lies there is none.
template <bool kIsLater>
__device__ __forceinline__ Segment find_segment_of_pass(const RuleParams& p, int64_t index) {
  if (!p.cu_seqlens.given()) {
    const uint32_t count = static_cast<uint32_t>(segments_of_length(p, p.dims.T)), of_row = count > 1 ? count - 1 : 1;
    const uint32_t n = static_cast<uint32_t>(index) / of_row, idx = static_cast<uint32_t>(index) - n * of_row + kIsLater;
    return {n, idx, count, static_cast<int64_t>(n) * count + idx};
  }
  Segment segment = find_ragged_segment(p, index);
  if (kIsLater ? segment.idx == 0 : segment.idx > 0 && segment.idx + 1 == segment.count) segment.n = p.dims.N + 1;
  return segment;
}
__device__ __forceinline__ Segment find_earlier_segment(const RuleParams& p, int64_t index) {
  return find_segment_of_pass<false>(p, index);
}
__device__ __forceinline__ Segment find_later_segment(const RuleParams& p, int64_t index) {
  return find_segment_of_pass<true>(p, index);
}

// Whether row a comes before row b: the longer one, of equal ones the first.
template <class Row>
__device__ __forceinline__ bool comes_before(int length_a, Row a, int length_b, Row b) {
  return length_a > length_b || (length_a == length_b && a < b);
}

// The index-th longest row, of at most 32. By each warp for itself.
__device__ __forceinline__ int64_t find_longest(const RuleParams& p, int64_t index) {
  const int lane = threadIdx.x % 32, rows = static_cast<int>(num_rows(p));
  const int length = lane < rows ? length_of_row(p, lane) : -1;
  int before = 0;
#pragma unroll 4
  for (int other = 0; other < rows; ++other) {
    before += comes_before(__shfl_sync(0xffffffffu, length, other), other, length, lane);
  }
  const unsigned found = __ballot_sync(0xffffffffu, lane < rows && before == index);
  return found == 0 ? p.dims.N + 1 : __ffs(static_cast<int>(found)) - 1;
}

// Writes the order of rows to the workspace: each warp of the grid places every so many rows.
template <int kKeyDim>
__device__ __forceinline__ void order_rows(const RuleParams& p) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = num_rows(p), warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  int32_t* const order = queue_of<kKeyDim>(p)->order;
#pragma unroll 1
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; n < rows; n += warps) {
    const int length = length_of_row(p, n);
    int before = 0;
#pragma unroll 4
    for (int64_t other = lane; other < rows; other += 32) before += comes_before(length_of_row(p, other), other, length, n);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) before += __shfl_xor_sync(0xffffffffu, before, distance);
    if (lane == 0) order[before] = static_cast<int32_t>(n);
  }
}

// Tokens of the longest row of a ragged call. By each warp for itself, a row a lane where they are not in order.
template <int kKeyDim>
__device__ __forceinline__ int longest_length(const RuleParams& p) {
  int64_t n = threadIdx.x % 32;
  if (has_order(p)) {
    ptx::griddepcontrol_wait();   // the preparation wrote the order
    n = queue_of<kKeyDim>(p)->order[0];
  }
  int longest = length_of_row(p, n);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, distance));
  }
  return longest;
}

// The row that the index-th group of blocks takes, whole; above N: none.
template <int kKeyDim>
__device__ __forceinline__ int64_t find_row(const RuleParams& p, int64_t index) {
  if (!sorts_rows(p) || index >= num_rows(p)) return index;
  if (!has_order(p)) return find_longest(p, index);
  ptx::griddepcontrol_wait();   // the preparation wrote the order
  return queue_of<kKeyDim>(p)->order[index];
}

// The tokens of a segment of a row, which has those of `row`.
__device__ __forceinline__ Span segment_span(const RuleParams& p, const Segment& segment, const Span& row) {
  if (!is_scanned(p)) return row;
  const int64_t before = segment.idx * p.segment_tokens, left = row.length - before;
  return {row.batch, row.first + before, left < p.segment_tokens ? left : p.segment_tokens};
}
__device__ __forceinline__ Span segment_span(const RuleParams& p, const Segment& segment) {
  return segment_span(p, segment, sequence_span(p.cu_seqlens, segment.n, p.dims.T));
}

}  // namespace gdn::cuda::chunk_sm90
