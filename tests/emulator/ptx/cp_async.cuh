// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/cp_async.cuh: until a late copy is waited for, its target holds NaN.
#pragma once

#include "../machine.h"

namespace gdn::cuda::ptx {

// Reads `bytes` of gmem, zeros for the rest of the kBytes that it writes.
template <int kBytes>
void cp_async(uint32_t smem, const void* gmem, int bytes) {
  if (smem % kBytes != 0 || reinterpret_cast<uintptr_t>(gmem) % kBytes != 0) emulated::fail("a cp.async that is not aligned");
  char* const target = emulated::shared_at(smem, kBytes);
  const auto copy = [=] {
    char piece[kBytes] = {};
    if (bytes > 0) std::memcpy(piece, gmem, bytes);
    std::memcpy(target, piece, kBytes);
  };
  if (!emulated::machine().is_late) return copy();
  std::memset(target, 0xff, kBytes);
  emulated::machine().current->open_copies.push_back(copy);
}
inline void cp_async_16(uint32_t smem, const void* gmem, int bytes) { cp_async<16>(smem, gmem, bytes); }
inline void cp_async_16_evict_first(uint32_t smem, const void* gmem, int bytes) { cp_async<16>(smem, gmem, bytes); }
template <int kBytes>
void cp_async_ca(uint32_t smem, const void* gmem) {
  cp_async<kBytes>(smem, gmem, kBytes);
}

inline void cp_async_commit_group() {
  emulated::Thread& self = *emulated::machine().current;
  self.copies.push_back(std::move(self.open_copies));
  self.open_copies.clear();
}

inline void cp_async_mbarrier_arrive(uint32_t barrier) {
  emulated::Thread& self = *emulated::machine().current;
  emulated::Barrier& told = emulated::barrier_at(barrier);
  ++emulated::machine().progress;
  emulated::machine().bulk_copies.push_back([copies = std::move(self.open_copies), &told] {
    for (const auto& copy : copies) copy();
    emulated::arrive(told, 0);
  });
  self.open_copies.clear();
}

template <int kPending>
void cp_async_wait_group() {
  auto& groups = emulated::machine().current->copies;
  while (static_cast<int>(groups.size()) > kPending) {
    for (const auto& copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

// Reads what is prefetched: an address outside the tensor shows under a memory checker.
inline void prefetch_l2(const void* gmem) { (void)*static_cast<const volatile char*>(gmem); }

}  // namespace gdn::cuda::ptx
