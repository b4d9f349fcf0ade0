// SPDX-License-Identifier: Apache-2.0
// 64 columns of S between the accumulators of a group and the workspace, where they are fp32 rows of S^T: each thread its own
// elements, 32 bytes of a row for four lanes, nothing through shared memory and nobody to wait for.
#pragma once

#include "range.cuh"

namespace gdn::cuda::chunk_sm90 {

// gmem: [64 columns][kKeyDim]. Loads true values at exponent 0, stores true values.
template <bool kIsLoad, int kKeyDim>
__device__ __forceinline__ void move_columns(float* gmem, State<kKeyDim>& state) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const float factor[2] = {power_of_two(state.exponent[0]), power_of_two(state.exponent[1])};
  float* const mine = gmem + row * kKeyDim + sum_column(lane, 0);
#pragma unroll
  for (int i = 0; i < kKeyDim / 2; i += 2) {
    const int r = i / 2 % 2;
    float2& pair = *reinterpret_cast<float2*>(mine + 8 * r * kKeyDim + 64 * (i / 32) + 8 * (i % 32 / 4));
    float (&s)[32] = state.s[i / 32];
    if constexpr (kIsLoad) {
      const float2 x = pair;
      s[i % 32] = x.x;
      s[i % 32 + 1] = x.y;
    } else {
      pair = make_float2(s[i % 32] * factor[r], s[i % 32 + 1] * factor[r]);
    }
  }
}

}  // namespace gdn::cuda::chunk_sm90
