// SPDX-License-Identifier: Apache-2.0
// Register fragments of the tensor cores: positions, rounding of sums to operands.
#pragma once

#include <cstdint>

#include "pack.cuh"

namespace gdn::cuda {

// The sums of a warp's 16 rows: element i of a lane is in row sum_row(lane, i) and column sum_column(lane, i).
__host__ __device__ __forceinline__ int sum_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
__host__ __device__ __forceinline__ int sum_column(int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

__device__ __forceinline__ uint32_t round_pair_fp16(float low, float high) { return round_pair(low, high, fp16_t{}); }

// Two 16-bit elements of a word, the lower one first.
template <class io_t>
__device__ __forceinline__ void widen_pair(uint32_t word, float& low, float& high) {
  low = to_float(io_t{static_cast<uint16_t>(word & 0xffffu)});
  high = to_float(io_t{static_cast<uint16_t>(word >> 16)});
}

// Sums of 16 columns (8 a lane, from x on) as the A operand of one k step.
__device__ __forceinline__ void round_to_operand(const float* x, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = round_pair_fp16(x[2 * i], x[2 * i + 1]);
}

}  // namespace gdn::cuda
