// SPDX-License-Identifier: Apache-2.0
// Copies of contiguous bytes by the copy engine of Hopper, which tell an mbarrier when they are done.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "cp.async.bulk": from global to this block's shared memory. By one thread. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_copy_to_shared(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem), "l"(gmem),
               "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace gdn::cuda::ptx
