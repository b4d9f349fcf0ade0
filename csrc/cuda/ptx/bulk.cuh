// SPDX-License-Identifier: Apache-2.0
// Copies of contiguous bytes by the copy engine of Hopper, which tell an mbarrier, or the thread that asked for them, when they
// are done.
#pragma once

#include <cstdint>

#include "evict_first.cuh"

namespace gdn::cuda::ptx {

// PTX ISA, "cp.async.bulk": from global to this block's shared memory. By one thread. Addresses and bytes are multiples of 16.
// kEvictsFirst: by lines of the L2 that make room first.
template <bool kEvictsFirst = false>
__device__ __forceinline__ void bulk_copy_to_shared(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  if constexpr (kEvictsFirst) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :
                 : "r"(smem), "l"(gmem), "r"(bytes), "r"(barrier), "l"(kEvictFirstPolicy)
                 : "memory");
  } else {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(smem), "l"(gmem), "r"(bytes), "r"(barrier)
                 : "memory");
  }
}

// "cp.async.bulk" and, so that it can be waited for, "cp.async.bulk.commit_group": from this block's shared memory, as fenced
// (fence.proxy.async), to global. By one thread. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_copy_to_global(void* gmem, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// "cp.async.bulk.wait_group": until what this thread's copies to global memory read may be written again; until what they wrote
// is seen by it and by whom it tells.
__device__ __forceinline__ void bulk_wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace gdn::cuda::ptx
