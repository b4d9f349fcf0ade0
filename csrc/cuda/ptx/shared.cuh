// SPDX-License-Identifier: Apache-2.0
// Shared memory addresses, and the fence between ordinary accesses and those of the tensor cores and the copy engine.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// The address that instructions of the .shared space take.
__device__ __forceinline__ uint32_t shared_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// PTX ISA, "membar / fence": fence.proxy.async. This thread's stores to shared memory become visible to what the async
// proxy (wgmma, bulk copies) reads after a barrier.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace gdn::cuda::ptx
