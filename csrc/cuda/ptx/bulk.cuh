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

// The same to the same place in several blocks of the cluster, a bit of `ranks` each, telling the barrier at that place in each.
__device__ __forceinline__ void bulk_copy_to_cluster(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier,
                                                     uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
          smem),
      "l"(gmem), "r"(bytes), "r"(barrier), "h"(ranks)
      : "memory");
}

}  // namespace gdn::cuda::ptx
