// SPDX-License-Identifier: Apache-2.0
// Blocks of a cluster (sm_90), where they are, and words sent to one another's shared memory.
#pragma once

#include <cstdint>

namespace gdn::cuda::ptx {

// PTX ISA, "%cluster_ctarank".
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA, "%clusterid".
__device__ __forceinline__ uint32_t cluster_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

// PTX ISA, "mapa": the address, in the cluster's window, of what lies at the shared address `smem` in block `rank`.
__device__ __forceinline__ uint32_t map_shared(uint32_t smem, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

// PTX ISA, "barrier.cluster", in two halves, all threads of all blocks; the first without release: for who has made barriers
// and nothing else.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// PTX ISA, "st.async": words to the shared memory of a block of the cluster; counts their bytes at the barrier beside them.
// Addresses from map_shared. No fence: who waits for the barrier sees the words.
__device__ __forceinline__ void st_async(uint32_t to, uint32_t word, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(word), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void st_async_v4(uint32_t to, const uint32_t (&word)[4], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(barrier)
               : "memory");
}

}  // namespace gdn::cuda::ptx
