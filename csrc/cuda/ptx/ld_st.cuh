// SPDX-License-Identifier: Apache-2.0
// 16 bytes between global memory and registers; "streaming" for data that nobody reads again soon: not kept in the L1;
// "evict_first": in the L2 only as long as nobody needs its place.
// PTX ISA 9.7.9, ld and st. Volatile, so that the compiler leaves a run of loads where it was written: ahead of the work
// that is meant to hide them. Off the device: plain copies, for the kernels that tests run on the host.
#pragma once

#include <cstdint>
#include <cstring>

#include "evict_first.cuh"

namespace gdn::cuda::ptx {

__device__ __forceinline__ void ld_global_v4(const void* gmem, uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "l"(gmem)
               : "memory");
#else
  std::memcpy(word, gmem, sizeof(word));
#endif
}

__device__ __forceinline__ void st_global_v4(void* gmem, const uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(gmem), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
#else
  std::memcpy(gmem, word, sizeof(word));
#endif
}

__device__ __forceinline__ void ld_global_streaming_v4(const void* gmem, uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "l"(gmem)
               : "memory");
#else
  std::memcpy(word, gmem, sizeof(word));
#endif
}

__device__ __forceinline__ void st_global_streaming_v4(void* gmem, const uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(gmem), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
#else
  std::memcpy(gmem, word, sizeof(word));
#endif
}

__device__ __forceinline__ void st_global_evict_first_v4(void* gmem, const uint32_t (&word)[4]) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
               :
               : "l"(gmem), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "l"(kEvictFirstPolicy)
               : "memory");
#else
  std::memcpy(gmem, word, sizeof(word));
#endif
}

}  // namespace gdn::cuda::ptx
