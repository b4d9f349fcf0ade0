// SPDX-License-Identifier: Apache-2.0
// Matrix multiply of one warp, operands in registers (sm_80 on).
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "mma", m16n8k16, fp16 in, fp32 sums: d += a b. Lane l, with r = l / 4 and c = 2 (l % 4), holds
//     a  rows r, r + 8, r, r + 8; columns c, c, c + 8, c + 8 (and the next one in the high half)
//     b  rows c, c + 8 (and the next one), column r
//     d  (r, c), (r, c + 1), (r + 8, c), (r + 8, c + 1)
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace gdn::cuda::ptx
