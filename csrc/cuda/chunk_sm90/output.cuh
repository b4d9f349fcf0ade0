// SPDX-License-Identifier: Apache-2.0
// O^T of a chunk on its way out of a tile group's registers.
#pragma once

#include "exchange.cuh"

namespace gdn::cuda::chunk_sm90 {

// 16-bit o goes to the transfer group through shared memory, fp32 o straight to where it belongs.
template <class out_t>
struct Writer {
  out_t* gmem;          // token 0 of the sequence, the warp's first column
  int64_t token_stride;
  int warp, lane;

  // Tokens from `count` on are left out of fp32 o.
  __device__ __forceinline__ void write(const float (&o)[32], uint16_t* smem_o, int first, int count) const {
    if constexpr (sizeof(out_t) == 2) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = round_pair(o[8 * b + 2 * i], o[8 * b + 2 * i + 1], out_t{});
        ptx::stmatrix_x4_trans(transposed_block_address(ptx::shared_address(smem_o), b, warp, lane), pairs);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int t = sum_column(lane, i);
        if (t < count) gmem[static_cast<int64_t>(first + t) * token_stride + sum_row(lane, i)] = o[i];
      }
    }
  }
};

}  // namespace gdn::cuda::chunk_sm90
