// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/ex2.cuh: subnormal results are 0.
#pragma once

#include <cmath>

namespace gdn::cuda::ptx {

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}

}  // namespace gdn::cuda::ptx
