// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that do not pass through registers (sm_80 on).
#pragma once

#include <cstdint>

#include "evict_first.cuh"

namespace gdn::cuda::ptx {

// PTX ISA, "cp.async", .cg with 16 bytes: bypasses L1. Reads the first `bytes` (0 or 16) of gmem, zeros for the rest.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(bytes) : "memory");
}

// The same, by lines that make room first.
__device__ __forceinline__ void cp_async_16_evict_first(uint32_t smem, const void* gmem, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem), "l"(gmem), "r"(bytes),
               "l"(kEvictFirstPolicy)
               : "memory");
}

// The same, .ca: 4, 8 or 16 bytes, through the L1.
template <int kBytes>
__device__ __forceinline__ void cp_async_ca(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(smem), "l"(gmem), "n"(kBytes) : "memory");
}

// PTX ISA, "cp.async.commit_group".
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// PTX ISA, "cp.async.mbarrier.arrive", .noinc: one of the barrier's arrivals, when all earlier copies of this thread are done.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// PTX ISA, "cp.async.wait_group": at most kPending of this thread's groups are still under way; what the others copied is
// visible to this thread, and to others after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// PTX ISA, "prefetch": the 128 bytes around gmem are fetched to L2. (The bulk prefetch takes uniform registers: lanes that
// differ go one after the other.)
__device__ __forceinline__ void prefetch_l2(const void* gmem) { asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem)); }

}  // namespace gdn::cuda::ptx
