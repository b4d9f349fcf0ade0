// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx/cluster.cuh: bulk copies arrive some turns later.
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

inline void cluster_sync() {
  emulated::Machine& m = emulated::machine();
  emulated::meet(-1, m.cluster_blocks * static_cast<int>(m.block_dim.x));
}

inline void cluster_arrive_relaxed() { emulated::arrive_at_cluster(); }
inline void cluster_wait() { emulated::wait_for_cluster(); }

inline void fence_mbarrier_init() {}

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
