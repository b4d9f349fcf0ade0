// SPDX-License-Identifier: Apache-2.0
// What the device code of this pass may use. The only place that asks for the target.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// wgmma and setmaxnreg need the arch-specific target of Hopper, sm_90a. A kernel that uses them is empty elsewhere.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

// Clusters of blocks and what reaches from one to another: sm_90 on. A kernel that uses them is empty elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasClusters = false;
#else
constexpr bool kHasClusters = true;
#endif

// No instruction: x, of which the compiler knows nothing more. What is made from it is made anew here and not kept in
// registers from before a loop.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

__device__ __forceinline__ int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
template <class T>
__device__ __forceinline__ T* opaque(T* x) {
  return reinterpret_cast<T*>(opaque(reinterpret_cast<int64_t>(x)));
}

// PTX ISA, "trap": ends the grid with an error.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

}  // namespace gdn::cuda::ptx
