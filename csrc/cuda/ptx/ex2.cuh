// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gdn::cuda::ptx {

// PTX ISA, "ex2": 2^x within 2^-22, subnormal results are 0; 2^-inf = 0, NaN stays.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace gdn::cuda::ptx
