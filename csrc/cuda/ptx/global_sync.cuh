// SPDX-License-Identifier: Apache-2.0
// Words of global memory by which blocks of running grids tell one another what is there.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "ld.acquire": who sees the word sees what was written before it was released.
__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* word) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
  return x;
}

// PTX ISA, "st.release": also what other threads of the block wrote before a barrier that this thread has passed.
__device__ __forceinline__ void st_release_gpu(uint32_t* word, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(x) : "memory");
}

// PTX ISA, "atom.add": the word before. Orders nothing.
__device__ __forceinline__ uint32_t atomic_add_relaxed_gpu(uint32_t* word, uint32_t x) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(x) : "memory");
  return before;
}

// PTX ISA, "fence.proxy.async": what this thread has acquired can be read by the copy engine for it.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// PTX ISA, "%smid": the multiprocessor this thread runs on, from 0 on.
__device__ __forceinline__ uint32_t multiprocessor_id() {
  uint32_t x;
  asm("mov.u32 %0, %%smid;" : "=r"(x));
  return x;
}

}  // namespace gdn::cuda::ptx
