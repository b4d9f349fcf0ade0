// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/bulk.cuh: bulk copies arrive some turns later.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

inline void bulk_copy_to_shared(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
  if ((smem | reinterpret_cast<uintptr_t>(gmem) | bytes) % 16 != 0) {
    emulated::fail("a bulk copy that is not aligned to 16 bytes");
  }
  char* const target = emulated::shared_at(smem, bytes);
  emulated::Barrier& told = emulated::barrier_at(barrier);
  ++emulated::machine().progress;
  emulated::machine().bulk_copies.push_back([=, &told] {
    std::memcpy(target, gmem, bytes);
    told.bytes -= bytes;
    emulated::end_phase_if_complete(told);
  });
}

}  // namespace gdn::cuda::ptx
