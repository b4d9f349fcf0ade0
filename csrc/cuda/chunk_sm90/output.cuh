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
      const int t = sum_column(lane, 0), left = count - t;
      // The address walks: those of all tokens, kept over the loop of chunks, would be too many registers.
      out_t* to = gmem + (first + t) * token_stride + sum_row(lane, 0);
#pragma unroll
      for (int i = 0; i < 32; i += i % 2 == 0 ? 1 : 3) {
        if (sum_column(0, i) < left) {
          to[0] = o[i];
          to[8] = o[i + 2];
        }
        to += i % 2 == 0 ? token_stride : 7 * token_stride;
      }
    }
  }
};

}  // namespace gdn::cuda::chunk_sm90
