// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory, 8 bytes each: a phase ends when all expected arrivals (and bytes) are in.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "mbarrier.init". By one thread, before a barrier of the block or cluster.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// PTX ISA, "mbarrier.arrive", release: what this thread did before is seen by who waits.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same for so many arrivals at once.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// PTX ISA, "mbarrier.try_wait", acquire, until the phase of this parity has ended. The loop is written here because the
// compiler puts a loop of its own behind the kernel, from where the way back misses the instruction cache.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// PTX ISA, "fence.mbarrier_init": the barriers this thread made exist for the copy engine, and, after the next
// cluster_arrive_relaxed and cluster_wait, for the whole cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// PTX ISA, "mbarrier.arrive.expect_tx": an arrival, and the phase does not end before `bytes` have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

}  // namespace gdn::cuda::ptx
