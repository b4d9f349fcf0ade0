// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/cluster.cuh: bulk copies arrive some turns later.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

inline uint32_t cluster_rank() { return emulated::machine().current->block; }

inline uint32_t map_shared(uint32_t smem, uint32_t rank) {
  return (smem & ((1u << emulated::kBlockShift) - 1)) | (rank + 1) << emulated::kBlockShift;
}

inline void cluster_sync() {
  emulated::Machine& m = emulated::machine();
  emulated::meet(-1, m.cluster_blocks * static_cast<int>(m.block_dim.x));
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_cluster(uint32_t barrier) { emulated::arrive(emulated::barrier_at(barrier), 0); }

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulated::arrive(emulated::barrier_at(barrier), bytes);
}

inline void bulk_copy_to_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  if ((to | from | bytes) % 16 != 0) emulated::fail("a bulk copy that is not aligned to 16 bytes");
  char* const target = emulated::shared_at(to, bytes);
  const char* const source = emulated::shared_at(from, bytes);
  emulated::Barrier& told = emulated::barrier_at(barrier);
  ++emulated::machine().progress;
  emulated::machine().bulk_copies.push_back([=, &told] {
    std::memcpy(target, source, bytes);
    told.bytes -= bytes;
    emulated::end_phase_if_complete(told);
  });
}

}  // namespace gdn::cuda::ptx
