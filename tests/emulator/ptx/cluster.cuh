// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/cluster.cuh: words that are sent arrive some turns later.
#pragma once

#include <array>

#include "../machine.h"

namespace gdn::cuda::ptx {

inline uint32_t cluster_rank() { return emulated::machine().current->block; }

inline uint32_t cluster_id() {
  const emulated::Machine& m = emulated::machine();
  return static_cast<uint32_t>(m.first_block / m.cluster_blocks);
}

inline uint32_t map_shared(uint32_t smem, uint32_t rank) {
  return (smem & ((1u << emulated::kBlockShift) - 1)) | (rank + 1) << emulated::kBlockShift;
}

inline void cluster_arrive_relaxed() { emulated::arrive_at_cluster(); }
inline void cluster_wait() { emulated::wait_for_cluster(); }

// Words on their way: they arrive with the bulk copies.
inline void send_words(uint32_t to, const uint32_t* words, uint32_t count, uint32_t barrier) {
  if (to % (4 * count) != 0) emulated::fail("an st.async that is not aligned");
  emulated::Machine& m = emulated::machine();
  char* const target = emulated::shared_at(to, 4 * count);
  emulated::Barrier& told = emulated::barrier_at(barrier);
  if ((to >> emulated::kBlockShift) != (barrier >> emulated::kBlockShift)) emulated::fail("an st.async to two blocks");
  std::array<uint32_t, 4> sent{};
  std::copy(words, words + count, sent.begin());
  ++m.progress;
  m.bulk_copies.push_back([=, &told] {
    std::memcpy(target, sent.data(), 4 * count);
    told.bytes -= 4 * count;
    emulated::end_phase_if_complete(told);
  });
}
inline void st_async(uint32_t to, uint32_t word, uint32_t barrier) { send_words(to, &word, 1, barrier); }
inline void st_async_v4(uint32_t to, const uint32_t (&word)[4], uint32_t barrier) { send_words(to, word, 4, barrier); }

}  // namespace gdn::cuda::ptx
