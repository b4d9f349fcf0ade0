// SPDX-License-Identifier: Apache-2.0
// The sixteen barriers of a block; 0 is __syncthreads.
#pragma once

namespace gdn::cuda::ptx {

// PTX ISA, "bar / barrier": waits until `threads` threads have come to barrier `id`, all at this instruction of the program.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same without waiting: `threads` counts who comes and who waits. What came before it is seen by who waits.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace gdn::cuda::ptx
