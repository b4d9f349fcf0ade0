// SPDX-License-Identifier: Apache-2.0
// The sixteen barriers of a block; 0 is __syncthreads.
#pragma once

namespace gdn::cuda::ptx {

// PTX ISA, "bar / barrier": waits until `threads` threads have come to barrier `id`.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace gdn::cuda::ptx
