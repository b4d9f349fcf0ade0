// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/global_sync.cuh: grids run one after the other, and no thread while another one does.
#pragma once

#include "../launch.cuh"

namespace gdn::cuda::ptx {

inline uint32_t ld_acquire_gpu(const uint32_t* word) {
  if (*word == 0) emulated::fail("a wait for a word that no grid before has written");
  return *word;
}
inline void st_release_gpu(uint32_t* word, uint32_t x) { *word = x; }
inline uint32_t atomic_add_relaxed_gpu(uint32_t* word, uint32_t x) {
  *word += x;
  return *word - x;
}
inline void fence_proxy_async_global() {}
inline uint32_t multiprocessor_id() {
  const emulated::Machine& machine = emulated::machine();
  return static_cast<uint32_t>((machine.first_block + machine.current->block) % num_multiprocessors());
}

}  // namespace gdn::cuda::ptx
