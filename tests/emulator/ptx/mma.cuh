// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/mma.cuh: products of one warp, summed in float64.
#pragma once

#include "../../common/dtypes.h"
#include "../machine.h"

namespace gdn::cuda::ptx {

inline float half_of(uint32_t word, int half) {
  const uint16_t bits = static_cast<uint16_t>(word >> (16 * half));
  return to_float(fp16_t{bits});
}

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Argument {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } argument{d, a, {b0, b1}};
  emulated::with_warp(&argument, [](void** lanes) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < emulated::kWarp; ++lane) {
      const Argument& own = *static_cast<Argument*>(lanes[lane]);
      const int row = lane / 4, column = 2 * (lane % 4);
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) a[row + 8 * (i % 2)][column + 8 * (i / 2) + half] = half_of(own.a[i], half);
        for (int i = 0; i < 2; ++i) b[column + 8 * i + half][row] = half_of(own.b[i], half);
      }
    }
    for (int lane = 0; lane < emulated::kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float& sum = static_cast<Argument*>(lanes[lane])->d[i];
        double wide = sum;
        for (int k = 0; k < 16; ++k) wide += double(a[lane / 4 + 8 * (i / 2)][k]) * b[k][2 * (lane % 4) + i % 2];
        sum = static_cast<float>(wide);
      }
    }
  });
}

}  // namespace gdn::cuda::ptx
