// SPDX-License-Identifier: Apache-2.0
// Running sums inside a warp.
#pragma once

namespace gdn::cuda {

// Inclusive sums of the 64 values that lane l holds two of, 2 l and 2 l + 1. NaN stays in the sums from its place on.
template <class T>
__device__ __forceinline__ void inclusive_sum_64(T& x0, T& x1, int lane) {
  T before = x0 + x1;   // becomes the sum of this lane's and all lower lanes' values
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, before, distance);
    if (lane >= distance) before += other;
  }
  const T lower = __shfl_up_sync(0xffffffffu, before, 1);
  x0 = (lane > 0 ? lower : T(0)) + x0;
  x1 = x0 + x1;
}

}  // namespace gdn::cuda
