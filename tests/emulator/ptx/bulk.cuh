// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/bulk.cuh: bulk copies arrive some turns later.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

template <bool kEvictsFirst = false>
void bulk_copy_to_shared(uint32_t smem, const void* gmem, uint32_t bytes, uint32_t barrier) {
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

// A late one reads when that is waited for, and writes when that is.
inline void bulk_copy_to_global(void* gmem, uint32_t smem, uint32_t bytes) {
  if ((smem | reinterpret_cast<uintptr_t>(gmem) | bytes) % 16 != 0) {
    emulated::fail("a bulk copy that is not aligned to 16 bytes");
  }
  const char* const source = emulated::shared_at(smem, bytes);
  if (!emulated::machine().is_late) {
    std::memcpy(gmem, source, bytes);
    return;
  }
  std::memset(gmem, 0xff, bytes);
  emulated::machine().current->copies_out.push_back({gmem, source, bytes, {}});
}

inline void bulk_wait_until_read() {
  for (emulated::CopyOut& copy : emulated::machine().current->copies_out) {
    if (copy.read.empty()) copy.read.assign(copy.source, copy.source + copy.bytes);
  }
}

inline void bulk_wait_until_written() {
  bulk_wait_until_read();
  auto& copies = emulated::machine().current->copies_out;
  for (const emulated::CopyOut& copy : copies) std::memcpy(copy.gmem, copy.read.data(), copy.bytes);
  copies.clear();
}

}  // namespace gdn::cuda::ptx
