// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/mbarrier.cuh: barriers in shared memory.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  emulated::machine().barriers[emulated::cluster_address(barrier)] = {count, count, 0, 0};
}

inline void mbarrier_arrive(uint32_t barrier) { emulated::arrive(emulated::barrier_at(barrier), 0); }

inline void mbarrier_arrive(uint32_t barrier, uint32_t arrivals) {
  for (uint32_t i = 0; i < arrivals; ++i) mbarrier_arrive(barrier);
}

inline void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  const emulated::Barrier& waited = emulated::barrier_at(barrier);
  emulated::wait_until([&] { return waited.phase % 2 != parity; });
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulated::arrive(emulated::barrier_at(barrier), bytes);
}

}  // namespace gdn::cuda::ptx
