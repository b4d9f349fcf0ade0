// SPDX-License-Identifier: Apache-2.0
// Arithmetic on pairs of fp16.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "max" and "abs" with .f16x2: the larger of `largest` and |x| in each half; NaN gives way to a number.
__device__ __forceinline__ uint32_t max_abs_fp16x2(uint32_t largest, uint32_t x) {
  uint32_t y;
  asm("{\n"
      ".reg .b32 t;\n"
      "abs.f16x2 t, %2;\n"
      "max.f16x2 %0, %1, t;\n"
      "}\n"
      : "=r"(y)
      : "r"(largest), "r"(x));
  return y;
}

// PTX ISA, "cvt" with .rn.satfinite.f16x2: both rounded to fp16, low in the lower half; what is beyond its range, inf too,
// becomes the largest finite number. NaN stays.
__device__ __forceinline__ uint32_t round_pair_fp16_finite(float low, float high) {
  uint32_t y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

}  // namespace gdn::cuda::ptx
