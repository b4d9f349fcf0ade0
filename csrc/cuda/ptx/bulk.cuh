// SPDX-License-Identifier: Apache-2.0
// Copies of contiguous bytes by the copy engine of Hopper, which tell an mbarrier when they are done.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "mbarrier.arrive.expect_tx": an arrival, and the phase does not end before `bytes` have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// PTX ISA, "cp.async.bulk": from global to this block's shared memory. By one thread. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_copy_to_shared(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem), "l"(gmem),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// PTX ISA, "fence.mbarrier_init": the barriers this thread made exist for the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace gdn::cuda::ptx
