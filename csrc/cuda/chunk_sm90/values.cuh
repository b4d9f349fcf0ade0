// SPDX-License-Identifier: Apache-2.0
// V of a chunk from shared memory to where X is made.
#pragma once

#include "exchange.cuh"
#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

// V^T as pairs of tokens in the order of operands; of_v: exponents of the largest |v| that this thread has of its two rows.
template <class io_t>
__device__ __forceinline__ void read_values(const uint16_t* smem_v, int warp, int lane, uint32_t (&v)[4][4], int (&of_v)[2]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    ptx::ldmatrix_x4_trans(transposed_block_address(ptx::shared_address(smem_v), b, warp, lane), v[b]);
  }
  uint32_t largest[2] = {0, 0};   // magnitudes order as integers
#pragma unroll
  for (int i = 0; i < 16; ++i) largest[i % 2] = __vmaxu2(largest[i % 2], v[i / 4][i % 4] & 0x7fff7fffu);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    of_v[r] = exponent_of(to_float(io_t{static_cast<uint16_t>(max(largest[r] & 0xffffu, largest[r] >> 16))}));
  }
}

// V^T at the chunk's scale.
template <class io_t, int kKeyDim>
__device__ __forceinline__ void scale_values(const uint32_t (&v)[4][4], const State<kKeyDim>& state, float (&scaled)[32]) {
  const float factor[2] = {power_of_two(-state.exponent[0]), power_of_two(-state.exponent[1])};
#pragma unroll
  for (int i = 0; i < 16; ++i) {   // pairs of tokens
    float low, high;
    widen_pair<io_t>(v[i / 4][i % 4], low, high);
    scaled[2 * i] = low * factor[i % 2];
    scaled[2 * i + 1] = high * factor[i % 2];
  }
}

}  // namespace gdn::cuda::chunk_sm90
