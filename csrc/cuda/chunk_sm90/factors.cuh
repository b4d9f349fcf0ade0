// SPDX-License-Identifier: Apache-2.0
// Factors of tokens from where the preparation put them (prepared.h, token_place) to the lanes that use them.
#pragma once

#include "../ptx/arch.cuh"

namespace gdn::cuda::chunk_sm90 {

// The factors of the tokens of this thread's columns of sums.
__device__ __forceinline__ void read_factors(const float* factors, int lane, float2 (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 piece = reinterpret_cast<const float4*>(factors)[4 * i + lane % 4];
    x[2 * i] = make_float2(piece.x, piece.y);
    x[2 * i + 1] = make_float2(piece.z, piece.w);
  }
}

}  // namespace gdn::cuda::chunk_sm90
